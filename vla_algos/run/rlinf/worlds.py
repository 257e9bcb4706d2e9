"""The section ``env`` of what RLinf's ``env.train`` says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import PurePath
from typing import Any

from vla_algos.run.rlinf.keys import Keys, NotGiven
from vla_algos.run.rlinf.untranslated import DIFFERS, NONE, NOTHING, SAME
from vla_common.errors import unknown_name

TRAIN, EVAL = "env.train.", "env.eval."
_TASK = f"{TRAIN}task_config."
SUITES = {
    "libero": {f"libero_{name}": f"libero/{name}" for name in ("spatial", "object", "goal", "10", "90", "130")},
    "metaworld": {
        "metaworld_50": "metaworld/MT50",
        "metaworld_45_ind": "metaworld/ML45-train",
        "metaworld_45_ood": "metaworld/ML45-test",
    },
    "calvin": {"calvin_d": "calvin/D", "calvin_abc": "calvin/ABC", "calvin_abcd": "calvin/ABCD"},
}
_HORIZON = ("eval.env.max_episode_steps", "max_episode_steps", None)
PLATE25 = "PutOnPlateInScene25Main-v3"
_OF_SUITES: Mapping[str, Sequence[tuple[str, str, Mapping[Any, Any] | None]]] = {  # what an evaluation may have else
    **{kind: (("eval.env.id", "task_suite_name", suites), _HORIZON) for kind, suites in SUITES.items()},
    "maniskill": (
        ("eval.env.id", "init_params.id", {PLATE25: f"maniskill/{PLATE25}"}),
        ("eval.env.object_set", "init_params.obj_set", {each: each for each in ("train", "test", "all")}),
        _HORIZON,
    ),
    "robotwin": (("eval.env.step_lim", "task_config.step_lim", None),),
}
_CLEAN: Mapping[str, Any] = {  # RoboTwin's task_config/demo_clean.yml
    "random_background": False,
    "cluttered_table": False,
    "clean_background_rate": 1,
    "random_head_camera_dis": 0,
    "random_table_height": 0,
    "random_light": False,
    "crazy_random_light_rate": 0,
}
_RANDOMIZED: Mapping[str, Any] = {  # its demo_randomized.yml
    "random_background": True,
    "cluttered_table": True,
    "clean_background_rate": 0.02,
    "random_head_camera_dis": 0,
    "random_table_height": 0.03,
    "random_light": True,
    "crazy_random_light_rate": 0.02,
}


def benchmark(keys: Keys) -> str:
    """Return which benchmark the file trains on.

    Raises:
        ValueError: none of ours.
    """
    return keys.choice("env.train.env_type", _themselves("calvin", "libero", "maniskill", "metaworld", "robotwin"))


def read_env(keys: Keys, *, groups: bool) -> None:
    """Set the section ``env``.

    Args:
        keys: of the file.
        groups: the algorithm is GRPO.
    """
    kind = benchmark(keys)
    keys.account("env.train.env_type", "env")
    {"robotwin": _read_robotwin, "maniskill": _read_maniskill}.get(kind, _read_suite)(keys, kind)
    if kind == "libero":
        _read_libero(keys)
    if kind == "calvin":
        keys.settings["env.chains"] = "published"  # its calvin_gym_env.py knows these alone
    keys.put("env.num_envs", lambda: keys.whole(f"{TRAIN}total_num_envs"))
    if kind != "robotwin":
        keys.put("env.max_episode_steps", lambda: keys.whole(f"{TRAIN}max_episode_steps"))
    keys.put("env.ignore_terminations", lambda: keys.flag(f"{TRAIN}ignore_terminations"))
    _read_rewards(keys, kind, groups=groups)
    if keys.configuration.values.get(f"{TRAIN}is_eval"):
        text = "training draws from the initial states of training; evaluations have their own"
        keys.remark(NONE, [f"{TRAIN}is_eval"], text)


def read_other_suite(keys: Keys) -> None:
    """Set ``eval.env`` where ``env.eval`` says another task, objects or horizon than ``env.train``.

    How many environments run at a time, and for how long after a success, is translated beside these alone: for that
    only, simulators of their own would be started.
    """
    values, kind = keys.configuration.values, benchmark(keys)
    keys.settings["eval.env"] = None  # but for what follows
    if values.get(f"{EVAL}env_type", kind) != kind:
        keys.remark(NONE, [f"{EVAL}env_type"], "evaluations of a run are in the benchmark of its training")
        return
    found: dict[str, Callable[[], Any]] = {}
    for setting, name, suites in _OF_SUITES.get(kind, ()):
        key = EVAL + name
        if not keys.has(key) or values[key] == values.get(TRAIN + name):
            continue
        if suites is not None and values[key] not in suites:
            keys.remark(NONE, [key], f"there is no such suite; evaluations are in env.id={keys.settings['env.id']}")
            continue
        found[setting] = _of(keys.get, key) if suites is None else partial(keys.choice, key, suites)
    if not found:
        return
    beside: dict[str, tuple[str, Callable[[str], Any]]] = {
        "num_envs": ("total_num_envs", keys.whole),
        "ignore_terminations": ("ignore_terminations", keys.flag),
    }
    if kind != "robotwin":
        beside["max_episode_steps"] = ("max_episode_steps", keys.whole)
    for name, (theirs, read) in beside.items():
        if keys.has(EVAL + theirs):
            found.setdefault(f"eval.env.{name}", _of(read, EVAL + theirs))
    for setting, value in found.items():
        keys.put(setting, value)


def _read_suite(keys: Keys, kind: str) -> None:
    keys.put("env.id", lambda: keys.choice(f"{TRAIN}task_suite_name", SUITES[kind]))
    height, width = f"{TRAIN}init_params.camera_heights", f"{TRAIN}init_params.camera_widths"

    def size() -> int:
        if keys.whole(height) != keys.whole(width, keys.get(height)):
            raise keys.error(height, f"and camera_widths={keys.get(width)}: frames here are as wide as high")
        return keys.whole(height)

    keys.put("env.image_size", size)


def _read_libero(keys: Keys) -> None:
    variant = keys.configuration.values.get(f"{TRAIN}libero_variant", "standard")
    if variant != "standard":
        raise keys.error(f"{TRAIN}libero_variant", "LIBERO itself is the only variant here; write standard")
    keys.settings["env.protocol"] = "rlinf"
    keys.put("env.reset_gripper_open", lambda: keys.flag(f"{TRAIN}reset_gripper_open", True))
    if keys.has(f"{TRAIN}task_id_filter"):
        keys.put("env.task_ids", lambda: keys.get(f"{TRAIN}task_id_filter"))
    if keys.has(f"{TRAIN}specific_reset_id"):
        text = "no setting for one initial state that is named; env.task_ids and episode_order=fixed come near it"
        keys.remark(NONE, [f"{TRAIN}specific_reset_id"], text)


def _read_maniskill(keys: Keys, kind: str) -> None:
    keys.put("env.id", lambda: f"maniskill/{keys.choice(f'{TRAIN}init_params.id', {PLATE25: PLATE25})}")
    keys.put("env.object_set", lambda: keys.choice(f"{TRAIN}init_params.obj_set", _themselves("train", "test", "all")))
    setup = "actor.model.policy_setup"
    try:
        if "widowx" not in keys.text(setup, "widowx_bridge"):
            raise keys.error(setup, "plate-25 has a WidowX arm: widowx_bridge")
        keys.account(setup, "env.id")
    except NotGiven as error:
        keys.not_given[error.key] = ["env.id"]
    rewards = {"default": None, "only_success": "success"}
    if keys.configuration.values.get(f"{TRAIN}reward_mode", "default") in rewards:
        keys.put("env.reward_type", lambda: keys.choice(f"{TRAIN}reward_mode", rewards, "default"))
    else:
        keys.remark(NONE, [f"{TRAIN}reward_mode"], "rewards are staged or of success: env.reward_type")
    key = f"{TRAIN}init_params.use_multiple_plates"
    text = "another task here: env.id=maniskill/PutOnPlateInScene25MultiPlate-v1"
    if keys.configuration.values.get(key):
        keys.remark(NONE, [key], text)
    else:
        keys.account(key, "env.id")
    own, counts = f"{TRAIN}max_episode_steps", f"{TRAIN}init_params.max_episode_steps"
    if keys.configuration.values.get(own) == keys.configuration.values.get(counts):
        keys.account(counts, "env.max_episode_steps")
    else:
        keys.remark(DIFFERS, [counts], f"episodes have one horizon: {own}")


def _read_robotwin(keys: Keys, kind: str) -> None:
    keys.put("env.id", lambda: f"robotwin/{keys.text(f'{_TASK}task_name')}")

    horizon, limit = f"{TRAIN}max_episode_steps", f"{_TASK}step_lim"
    keys.put("env.step_lim", lambda: min(keys.whole(horizon), keys.whole(limit)))
    if keys.configuration.values.get(horizon) != keys.configuration.values.get(limit):
        keys.remark(DIFFERS, [horizon, limit], "an episode has one limit, the lower of the two: env.step_lim")
    keys.put("env.embodiment", lambda: keys.get(f"{_TASK}embodiment"))
    for name in ("head_camera_type", "wrist_camera_type"):
        keys.put(f"env.{name}", _of(keys.text, f"{_TASK}camera.{name}"))
    keys.put("env.collect_wrist_camera", lambda: keys.flag(f"{_TASK}camera.collect_wrist_camera"))
    keys.put("env.center_crop", lambda: keys.flag(f"{TRAIN}center_crop", False))
    keys.settings["env.instruction_type"] = "seen"  # its envs/robotwin asks for these alone

    seeds = f"{TRAIN}seeds_path"
    written = keys.configuration.values.get(seeds)
    if isinstance(written, str) and PurePath(written).name == "train_seeds.json":  # wherever that is
        keys.settings["env.seeds"] = "solved"
        keys.account(seeds, "env.seeds")
    elif seeds in keys.configuration.values:
        if written is None:
            keys.put("env.seeds", lambda: "range")
        text = "env.seeds=solved has the seeds of RLinf's train_seeds.json; no file of seeds is read"
        keys.remark(NONE, [seeds], text)
    names = [f"{_TASK}domain_randomization.{name}" for name in _CLEAN]
    drawn = {name: keys.configuration.values.get(f"{_TASK}domain_randomization.{name}") for name in _CLEAN}
    for config, expected in (("demo_clean", _CLEAN), ("demo_randomized", _RANDOMIZED)):
        if drawn == expected:
            keys.settings["env.task_config"] = config
            for name in names:
                keys.account(name, "env.task_config")
    if "env.task_config" not in keys.settings:
        keys.remark(NONE, names, "scenes are those of RoboTwin's demo_clean or demo_randomized: env.task_config")
    custom = f"{TRAIN}use_custom_reward"
    if keys.configuration.values.get(custom):
        keys.remark(SAME, [custom], "rewards are of success alone")
    else:
        keys.remark(NONE, [custom], "there is no dense reward; rewards are of success alone")


def _read_rewards(keys: Keys, kind: str, *, groups: bool) -> None:
    coefficient, relative, penalty = (
        f"{TRAIN}{name}" for name in ("reward_coef", "use_rel_reward", "use_step_penalty")
    )
    if kind == "maniskill":
        keys.remark(NOTHING, [coefficient], "its ManiSkill reads no such key")
    elif groups:
        keys.settings["env.reward_coef"] = 1.0
        text = "divided out: GRPO divides by the deviation of the group; collector.success_bounds are success rates"
        keys.remark(DIFFERS, [coefficient], text)
    else:
        keys.put("env.reward_coef", lambda: keys.real(coefficient, 1.0))
    if kind == "calvin":
        keys.settings["env.relative_reward"] = False
        keys.remark(NOTHING, [relative], "its CALVIN does not read it: each finished task is paid once, as here")
    elif kind == "maniskill" or keys.where(lambda: keys.flag(f"{TRAIN}ignore_terminations")):
        keys.put("env.relative_reward", lambda: keys.flag(relative))
    else:
        keys.settings["env.relative_reward"] = False
        text = "success ends the episode here and is paid once either way: env.relative_reward=false"
        keys.remark(DIFFERS, [relative], text)
    if kind != "libero":
        keys.settings["env.step_penalty"] = 0.0
        keys.remark(NOTHING, [penalty], "read for LIBERO alone")
    elif keys.configuration.values.get(penalty) and keys.configuration.values.get(relative):
        keys.settings["env.step_penalty"] = 0.0
        text = (
            "with use_rel_reward RLinf pays the change of it: 1 in the first step of an episode and nothing afterwards"
        )
        keys.remark(NONE, [penalty], text)
    else:
        keys.put("env.step_penalty", lambda: float(keys.flag(penalty, False)))


def _of(read: Callable[[str], Any], key: str) -> Callable[[], Any]:
    return lambda: read(key)


def _themselves(*names: str) -> dict[str, str]:
    return {name: name for name in names}


def check_suite(keys: Keys) -> None:
    """Refuse a task that there is not, with the nearest of those that there are.

    Raises:
        ValueError: names the key, and what would be right.
    """
    from vla_envs import list_envs

    found = keys.settings.get("env.id")
    if found is not None and str(found).startswith("robotwin/"):
        tasks = [name.partition("/")[2] for name in list_envs() if name.startswith("robotwin/")]
        name = str(found).partition("/")[2]
        if name not in tasks:
            raise keys.error(f"{_TASK}task_name", str(unknown_name("task", name, tasks)))
