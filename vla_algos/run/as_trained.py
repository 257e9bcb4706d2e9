"""What evaluate.py evaluates in if nobody says: what the policy, or the experiment that is named, was trained in."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import yaml
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from vla_algos.run.arguments import compose_settings, read_flags
from vla_algos.run.evaluated import evaluated_env
from vla_algos.run.evaluator import Evaluator
from vla_algos.run.origin import origin_of
from vla_common.registry import config_packages
from vla_policies.checkpoint.hub import find_cached, is_hub_id

_SECTIONS = ("env", "policy", "eval")  # of an experiment that trains, which an evaluation has too
_UNREAD = {"eval": ("sampled", "temperature", "env")}  # evaluate.py has greedy, policy.temperature and env
_NAME = "trained_on"


def as_trained(arguments: Sequence[str], conf: Path) -> list[str]:
    """Complete what was typed after ``evaluate.py``.

    The name of an experiment that trains stands for its policy, its evaluations and the environment of these
    (``eval.env``). Where neither an environment nor an experiment is named, environment and episodes are those that
    the policy's folder says it was trained in and evaluated on.

    Args:
        arguments: what was typed, in today's names.
        conf: folder of the recipes' configuration.

    Raises:
        ValueError: a sweep over policies, or a hub id that is not downloaded yet, without an environment.
    """
    flags = read_flags(arguments)
    typed = {name: value for name, _, value in (each.lstrip("+").partition("=") for each in flags.overrides)}
    place = list(arguments).index(flags.overrides[0]) if flags.overrides else 0  # Hydra wants them side by side
    before, rest = list(arguments[:place]), list(arguments[place:])
    if experiment := _of_training(typed.get("experiment"), conf):
        recipe, name = experiment
        trained: Any = OmegaConf.to_container(compose_settings(recipe, [f"experiment={name}"], conf), resolve=True)
        trained["env"] = evaluated_env(trained["env"], trained["eval"])
        sections = [section for section in _SECTIONS if section not in typed]
        for section in sections:
            unread = _UNREAD.get(section, ())
            _offer(section, name, {key: value for key, value in trained[section].items() if key not in unread})
        if trained["eval"].get("sampled") and "greedy" not in typed:
            _say_how_to_sample(name, trained["eval"].get("temperature"))
        rest = [each for each in rest if not re.match(r"\+?experiment=", each)]
        return [*before, *(f"{section}={name}" for section in sections), *rest]
    if not {"env", "experiment"} & typed.keys() and (checkpoint := typed.get("policy.checkpoint")):
        if flags.multirun and ("," in checkpoint or "(" in checkpoint):
            raise ValueError(f"policy.checkpoint={checkpoint}: each may be of another environment; type env=NAME too")
        if (origin := _origin(checkpoint.strip("'\""))) is None:  # a line says so when there is a policy
            return list(arguments)
        _offer("env", _NAME, {"defaults": ["base", "_self_"], **origin["env"]})
        chosen = [f"env={_NAME}"]
        if "eval" not in typed and (episodes := origin.get("evaluation")):
            if typed.get("env.id", origin["env"]["id"]) != origin["env"]["id"]:
                episodes = {**episodes, "mean_of": []}  # groups that another suite need not have
            _offer("eval", _NAME, {"videos": Evaluator.videos, **episodes})
            chosen.append(f"eval={_NAME}")
        return [*before, *chosen, *rest]
    return list(arguments)


def _origin(checkpoint: str) -> dict[str, Any] | None:
    """Read what a folder, or the local copy of a hub repository, says that it was trained on.

    Raises:
        ValueError: there is no local copy.
    """
    if not is_hub_id(checkpoint):
        return origin_of(checkpoint)
    if (copy := find_cached(checkpoint)) is None:
        raise ValueError(
            f"policy.checkpoint={checkpoint}: what it was trained on is not known before it is downloaded; type: hf "
            f"download {checkpoint}, and this again, or say it with env=NAME or experiment=NAME"
        )
    return origin_of(copy)


def _say_how_to_sample(name: str, temperature: float | None) -> None:
    """Say that an experiment has sampled evaluations too, of which evaluate.py has one or the other."""
    at = "" if temperature is None else f" at temperature {temperature:g}"
    typed = "greedy=false" + ("" if temperature is None else f" policy.temperature={temperature:g}")
    print(
        f"experiment={name} evaluates sampled actions{at} beside greedy ones: type {typed} for these", file=sys.stderr
    )


def is_chosen(arguments: Sequence[str]) -> bool:
    """Tell whether what was typed says in which environment."""
    return any(re.match(r"\+?(env|env\.id|experiment)=", each) for each in arguments)


def _of_training(name: str | None, conf: Path) -> tuple[str, str] | None:
    """Find the recipe of an experiment that trains, ours or an installed package's; ``None`` if there is none."""
    for folder in _folders(conf) if name else ():
        file = folder / "experiment" / f"{name}.yaml"
        if file.is_file():
            recipe = (yaml.safe_load(file.read_text()) or {}).get("recipe", "evaluate")
            return None if recipe == "evaluate" else (recipe, str(name))
    return None


def _folders(conf: Path) -> Iterator[Path | Traversable]:
    """Yield where Hydra looks for configuration groups, in its order."""
    yield conf
    for package in config_packages():
        with contextlib.suppress(ImportError):  # Hydra says so
            yield files(package)


def _offer(group: str, name: str, settings: Mapping[str, Any]) -> None:
    """Let ``group=name`` stand for settings, as if there were a file."""
    ConfigStore.instance().store(group=group, name=name, node=dict(settings))
