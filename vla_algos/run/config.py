"""The configuration of a run: each section is the keyword arguments of one callable, and is checked before any work."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, Literal, get_args

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from vla_algos import distributed
from vla_algos.demonstrations import DemonstrationSettings
from vla_algos.imitation import BehaviourCloning
from vla_algos.run.arguments import find_setting, unknown_setting
from vla_algos.run.environments import check_evaluated
from vla_algos.run.evaluator import Evaluator
from vla_algos.run.launcher_settings import check_job, count_processes, launcher_types
from vla_algos.run.loggers import LOGGERS, check_loggers
from vla_algos.run.sharding import Sharding
from vla_algos.run.train_videos import TrainVideos
from vla_common.errors import unknown_name
from vla_common.settings import Count, Seed, Whole, check_settings, setting_types
from vla_envs.make import env_types
from vla_policies.registry import policy_types

Types = Mapping[str, Any]  # of settings by name, or of a section's settings
RESUME = Literal["auto", "force", "never"]
RESUME_SHARED = Literal["auto", "elastic", "force", "never"]  # of recipes that run in several processes

EVALUATION: Types = {
    "seed": Seed,
    "env": env_types,  # of its id
    "policy": policy_types,  # of its family
    "eval": setting_types(Evaluator),
    "launcher": launcher_types,  # of its name
}
CLONING: Types = {
    **EVALUATION,
    "demonstrations": setting_types(DemonstrationSettings),
    "cloning": setting_types(BehaviourCloning, without=["policy", "demonstrations"]),
    "checkpoint_every": Count,
    "resume": RESUME,
    "logger": dict.fromkeys(LOGGERS, dict[str, Any]),  # check_loggers says what they may have
}
TRAINING: Types = {
    **CLONING,
    "iterations": Count,
    "evaluate_every": Whole,
    "gpu": str | Count | None,  # fit_gpu says which
    "episode_order": Literal["random", "balanced", "learnable", "ordered", "fixed"],
    "resume": RESUME_SHARED,
    "sharding": setting_types(Sharding),
    "offload": {"optimizer": bool},
    "train_videos": setting_types(TrainVideos, without=["run", "spec"]),
}
_TABLES = ("suites", "evaluation")  # of an experiment: what interpolations read, and evaluate.py
# Shared by the processes of a job:
_SHARED = (("env", "num_envs"), *(("collector", name) for name in ("groups", "max_groups", "episodes")))
_CHOSEN_BY = {"env": "id", "policy": "family", "launcher": "name"}  # the setting that says which others there are


class Section(dict[str, Any]):
    """Settings of a section; one that is missing is named as it is typed."""

    def __init__(self, name: str, settings: Mapping[str, Any]):
        super().__init__(settings)
        self.name = name

    def __missing__(self, setting: str) -> Any:
        raise ValueError(f"{self.name}.{setting} is missing; type {self.name}.{setting}=VALUE")


def read_config(config: DictConfig, types: Types) -> SimpleNamespace:
    """Read the settings of a recipe; each is read by some part of it.

    Args:
        config: the composed configuration.
        types: of each setting outside of a section, and of the settings of each section.

    Returns:
        Settings and sections (dictionaries) as attributes.

    Raises:
        ValueError: a setting that is unknown, missing, of a wrong type or out of range; the message names it as it is
            typed, and the nearest name.
    """
    settings = _plain(config)
    for name in _TABLES:
        settings.pop(name, None)
    typed, own = settings.get("recipe"), get_args(types.get("recipe"))
    if isinstance(typed, str) and typed.isidentifier() and typed not in own:
        said = f"this experiment is for {typed}.py, not for {own[0]}.py"
        raise ValueError(f"recipe={typed}: {said}; run {typed}.py with it")
    for name in settings:
        if name not in types:
            raise unknown_setting(str(name), types)
    for name in types:
        if name not in settings:
            raise ValueError(f"{name} is missing; type {name}=VALUE")
    types = {name: _chosen(settings[name], name, expected) for name, expected in types.items()}
    found = {name: _read(name, settings[name], types) for name in types}
    if other := found["eval"].get("env"):
        check_evaluated(found["env"], other)
    if (group := found["env"].get("group_size", 1)) != 1 and "group_size" in found:
        raise ValueError(f"env.group_size={group}: the size of a group is group_size alone; type group_size={group}")
    if group != 1 and "episode_order" not in found:
        raise ValueError(f"env.group_size={group}: {found['recipe']}.py has no groups; leave it out")
    check_loggers(found.get("logger", {}))
    launcher = found["launcher"]
    if launcher["name"] == "slurm":
        shared = {f"{section}.{name}": found.get(section, {}).get(name) for section, name in _SHARED}
        shared["eval.env.num_envs"] = (found["eval"].get("env") or {}).get("num_envs")
        processes = count_processes(launcher)
        numbers = {name: number for name, number in shared.items() if number is not None}
        apart = any(each != "all" for role, each in found.get("placement", {}).items() if role != "env")
        check_job(launcher, {} if apart else numbers)  # those that collect share them, which Roles checks
        distributed.check_shards("all" if apart else found.get("sharding", {}).get("shards", "all"), processes)
    if found.get("sharding", {}).get("cpu_offload") and found.get("offload", {}).get("optimizer"):
        raise ValueError(
            "offload.optimizer=true: with sharding.cpu_offload=true Adam is in host memory already; leave one of them "
            "out"
        )
    return SimpleNamespace(**found)


def _read(name: str, value: Any, types: Types) -> Any:
    expected = types[name]
    if not isinstance(expected, Mapping):
        check_settings("", {name: value}, {name: expected})
        return value
    if not isinstance(value, dict):
        raise ValueError(f"{name}={value}: is a section; type one of its settings: {name}.NAME=VALUE")
    for setting in value:
        if setting not in expected and find_setting(str(setting), types):
            raise unknown_setting(f"{name}.{setting}", types)
    check_settings(name, value, expected)
    return Section(name, value)


def _plain(config: DictConfig) -> dict[str, Any]:
    try:
        settings: Any = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        suite = OmegaConf.select(config, "env.id")
        if "'suites." in str(error) and suite not in config.suites:
            raise unknown_name("env.id of this experiment", str(suite), config.suites) from error
        why = str(error).partition("\n")[0]
        raise ValueError(f"{error.full_key}: {why[:1].lower()}{why[1:]}; write a value") from error
    return settings


def _chosen(section: Any, name: str, types_of: Any) -> Any:
    if name not in _CHOSEN_BY or isinstance(types_of, Mapping):
        return types_of
    choice = _CHOSEN_BY[name]
    if not isinstance(section, dict) or not isinstance(section.get(choice), str):
        raise ValueError(f"{name}.{choice} is missing; type {name}.{choice}=NAME, or choose a file: {name}=NAME")
    check_settings(name, {choice: section[choice]}, {choice: str})
    try:
        return {choice: str, **types_of(section[choice])}
    except ValueError as error:
        raise ValueError(f"{name}.{choice}={section[choice] or repr('')}: {error}") from error
