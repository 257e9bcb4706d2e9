"""What a policy was trained in: ``environment.json`` in its folder, and what evaluate.py takes from it."""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from vla_algos.evaluation import TRAINING_ENV
from vla_algos.run.arguments import compose_settings, read_flags
from vla_algos.run.environments import evaluated_env
from vla_algos.run.evaluator import Evaluator
from vla_common.checksums import SUMS, add_checksum, verify_checksums
from vla_common.experiments import all_experiments
from vla_common.plain import read_json
from vla_common.settings import Length, check_settings, setting_types
from vla_envs import SimulatorSpec, make_env
from vla_envs.make import env_types
from vla_envs.registry import find_benchmark
from vla_policies.checkpoint.hub import HUB, find_cached, is_hub_id

EPISODES = ("trials", "repeats", "seed", "mean_of")  # settings of an evaluation that say which it has
_TYPES = {
    "recipe": str,
    "env": dict[str, Any],
    "chunk_size": Length,
    "evaluation": dict[str, Any],
    "evaluated_on": str,
    "protocol": str | None,
    "protocol_deviations": list[str],
}
_NEEDED = ("recipe", "env", "chunk_size")
_NAME = "trained_on"  # the choice that Hydra gets


def save_training_env(
    folder: Path,
    recipe: str,
    env: Mapping[str, Any],
    spec: SimulatorSpec,
    chunk_size: int,
    evaluation: Mapping[str, Any],
    evaluated_on: str | None = None,
) -> None:
    """Write into a policy's folder what it was trained in: the settings ``env``, of which ``spec`` was made.

    What is of the machine or of the reward alone is left out. Of ``evaluation``, the settings of the run's evaluations,
    the episodes are noted, and ``evaluated_on``, the id of their suite; of another than that of ``env`` only the seed.
    """
    episodes = {name: evaluation[name] for name in EPISODES if name in evaluation}
    if evaluated_on not in (None, spec.id):
        episodes |= {"trials": None, "repeats": 1, "mean_of": []}
    known = {
        "recipe": recipe,
        "env": {name: value for name, value in env.items() if name not in _left_out(env["id"])},
        "chunk_size": chunk_size,
        "evaluation": episodes,
        "evaluated_on": evaluated_on or spec.id,
        "protocol": spec.protocol or None,
        "protocol_deviations": list(spec.protocol_deviations),
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / TRAINING_ENV).write_text(json.dumps(known, indent=2) + "\n")
    add_checksum(folder, TRAINING_ENV)


def load_training_env(folder: str | Path) -> dict[str, Any] | None:
    """Read what :func:`save_training_env` wrote into a policy's folder, which may be a stranger's.

    ``None`` if the folder does not say, as those of published checkpoints do not. ``env`` has settings that could be
    typed; of a benchmark that is not installed the id alone. ValueError: it has what no recipe writes.
    """
    folder = Path(folder).expanduser()
    if not (folder / TRAINING_ENV).exists():
        return None
    verify_checksums(folder, only=TRAINING_ENV)
    try:
        found: dict[str, Any] = read_json(folder / TRAINING_ENV)
        if missing := [name for name in _NEEDED if name not in found]:
            raise ValueError(f"it has no {missing[0]}")
        check_settings("", found, _TYPES)
        if "${" in json.dumps(found):
            raise ValueError("it has ${...}, which is not resolved")
        found["env"] = _checked_env(found["env"])
        check_settings("evaluation", found.get("evaluation", {}), setting_types(Evaluator, only=EPISODES))
    except ValueError as error:
        raise ValueError(
            f"{folder / TRAINING_ENV} is broken, or no recipe wrote it ({error}); remove it, with its line in {SUMS}, "
            "and type env=NAME"
        ) from error
    return found


def _checked_env(env: dict[str, Any]) -> dict[str, Any]:
    check_settings("env", {"id": env.get("id")}, {"id": str})
    try:
        types = env_types(env["id"])
    except (ValueError, ImportError):  # of a package that is not installed here
        return {"id": env["id"]}
    check_settings("env", env, {name: each for name, each in types.items() if name not in _left_out(env["id"])})
    return {"id": env["id"], **env}


def env_of(folder: str | Path) -> dict[str, Any] | None:
    """Read the settings of the environment that the policy of a local folder was trained in, or ``None``."""
    found = load_training_env(folder)
    return None if found is None else dict(found["env"])


def differences(trained: Mapping[str, Any], env: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """List what a policy sees otherwise than in its training: ``{setting: (then, now)}``."""
    hidden = unseen(trained["id"]) | unseen(env["id"])
    both = {name: (trained.get(name), env.get(name)) for name in {**trained, **env} if name not in hidden}
    return {name: (then, now) for name, (then, now) in both.items() if then != now}


def _left_out(suite: str) -> set[str]:
    return unseen(suite) - {"num_envs"}  # the number of environments is no fact of the policy, but is kept


def unseen(suite: str) -> set[str]:
    """List settings of the machine or of the reward, which no policy sees, of the environments of a name."""
    try:
        own = find_benchmark(suite)[0].unseen
    except (ValueError, ImportError):  # of a package that is not installed here
        own = ()
    return set(setting_types(make_env)) - {"id"} | set(own)


# ---- what evaluate.py takes from it


def evaluation_defaults(arguments: Sequence[str], conf: Path) -> list[str]:
    """Complete what was typed after ``evaluate.py``; ``conf`` is the folder of the recipes' configuration.

    The name of an experiment that trains stands for its policy, its evaluations and the environment of these
    (``eval.env``), with what its section ``evaluation`` has otherwise. Where neither an environment nor an experiment
    is named, environment and episodes are those that the policy's folder says it was trained in and evaluated on.
    ValueError: a sweep over policies, or a ``hf:NAME`` that is not downloaded yet, without an environment.
    """
    flags = read_flags(arguments)
    typed = {name: value for name, _, value in (each.lstrip("+").partition("=") for each in flags.overrides)}
    place = list(arguments).index(flags.overrides[0]) if flags.overrides else 0  # Hydra wants them side by side
    chosen, rest = [], list(arguments[place:])
    if experiment := _of_training(typed.get("experiment"), conf):
        chosen = _of_experiment(*experiment, typed, rest, conf)
        rest = [each for each in rest if not re.match(r"\+?experiment=", each)]
    elif not {"env", "experiment"} & typed.keys() and (checkpoint := typed.get("policy.checkpoint")):
        if flags.multirun and ("," in checkpoint or "(" in checkpoint):
            raise ValueError(f"policy.checkpoint={checkpoint}: each may be of another environment; type env=NAME too")
        chosen = _of_folder(checkpoint.strip("'\""), typed.get("env.id"))
    return [*arguments[:place], *chosen, *rest]


def is_chosen(arguments: Sequence[str]) -> bool:
    """Tell whether what was typed says in which environment."""
    return any(re.match(r"\+*(env|env\.id|experiment)=", each) for each in arguments)


def _of_training(name: str | None, conf: Path) -> tuple[str, str] | None:
    """Find the recipe of an experiment that trains, ours or an installed package's; ``None`` if there is none."""
    found = all_experiments(conf).get(name or "")
    return (found.recipe, str(name)) if found and found.recipe not in ("", "evaluate") else None


def _of_experiment(recipe: str, name: str, typed: Mapping[str, str], rest: Sequence[str], conf: Path) -> list[str]:
    chosen = [f"experiment={name}", *(each for each in rest if each.startswith("env.id="))]
    trained: Any = OmegaConf.to_container(compose_settings(recipe, chosen, conf), resolve=True)
    protocol, evaluation = trained.get("evaluation", {}), trained["eval"]
    found = {"env": evaluated_env(trained["env"], evaluation), "policy": trained["policy"]}
    sampled, temperature, _ = (evaluation.pop(each, None) for each in ("sampled", "temperature", "env"))
    found = {section: {**settings, **protocol.get(section, {})} for section, settings in found.items()}
    if sampled and "greedy" not in {*typed, *protocol}:
        at = f" policy.temperature={temperature:g}" if temperature is not None else ""
        print(
            f"experiment={name} evaluates sampled actions beside greedy ones: type greedy=false{at} for these",
            file=sys.stderr,
        )
    groups = [section for section in found if section not in typed]
    for section in groups:
        _offer(section, found[section])
    others = {**protocol, "eval": {**evaluation, **protocol.get("eval", {})}}
    _offer("experiment", {key: value for key, value in others.items() if key not in found})
    return [*(f"{section}={_NAME}" for section in groups), f"experiment={_NAME}"]


def _of_folder(checkpoint: str, env_id: str | None) -> list[str]:
    """Offer what a folder, or the local copy of a hub repository, says that it was trained in, if it does."""
    copy = find_cached(checkpoint) if is_hub_id(checkpoint) else checkpoint
    if copy is None:
        raise ValueError(
            f"policy.checkpoint={checkpoint}: what it was trained on is not known before it is downloaded; type: hf "
            f"download {checkpoint.removeprefix(HUB)}, and this again, or say it with env=NAME or experiment=NAME"
        )
    if (origin := load_training_env(copy)) is None:  # a line says so when there is a policy
        return []
    _offer("env", {"defaults": ["base", "_self_"], **origin["env"]})
    if not (episodes := origin.get("evaluation")):
        return [f"env={_NAME}"]
    if env_id not in (None, origin["env"]["id"]):
        episodes = {**episodes, "mean_of": []}  # groups that another suite need not have
    _offer("experiment", {"eval": {"videos": Evaluator.videos, **episodes}})
    return [f"env={_NAME}", f"experiment={_NAME}"]


def _offer(group: str, settings: Mapping[str, Any]) -> None:
    """Let ``group=trained_on`` stand for settings, as if there were a file."""
    package = "_global_" if group == "experiment" else group
    ConfigStore.instance().store(group=group, name=_NAME, node=dict(settings), package=package)
