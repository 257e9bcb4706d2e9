"""Settings of the recipes: how they are composed, how one is typed, and from where the least has to be typed."""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import InterpolationKeyError

from vla_algos.run.arguments import compose_settings
from vla_common.experiments import as_typed, find_experiments
from vla_envs import make_env, make_spec
from vla_from_rlinf.keys import Keys
from vla_policies.registry import get_policy_class

_FEWER = {"recipe", "policy.family"}  # are chosen, not typed


def composed(recipe: str, typed: Sequence[str], conf: Path) -> dict[str, Any]:
    """Compose the configuration of a recipe, with what is typed after it; ``conf`` is the folder of it."""
    found: Any = OmegaConf.to_container(compose_settings(recipe, typed, conf), resolve=True)
    return found


def shortest(keys: Keys, recipe: str, kind: str, family: str, conf: Path) -> list[str]:
    """Return what is typed, beginning with an experiment or with environment and policy, so that it is the least."""
    same = {keys.configuration.path.stem, keys.values.get("runner.logger.experiment_name")}
    experiments = sorted(_experiments(recipe, kind, family, conf), key=lambda name: name not in same)
    other = [f"recipe={recipe}"] if recipe == "ppo_async" else []  # which has no experiments of its own
    bases = [[f"experiment={name}", *other] for name in experiments]
    chosen = ["demonstrations.episodes=0"]
    for world in sorted(conf.glob(f"env/{kind}*.yaml")):
        if world.stem in (kind, "robotwin_piper"):
            bases.append([f"env={world.stem}", f"policy={family}", *chosen])
    return min(filter(None, (_complete(keys.settings, recipe, base, conf) for base in bases)), key=len)


def _complete(wanted: Mapping[str, Any], recipe: str, base: list[str], conf: Path) -> list[str] | None:
    """Return what is typed after a base, its suite first: settings hang on it; ``None`` if the base has it not."""
    if wanted["env.id"] != _effective(recipe, tuple(base), conf)["env.id"]:
        base = [*base, f"env.id={as_typed(wanted['env.id'])}"]
    try:
        found = _effective(recipe, tuple(base), conf)
    except InterpolationKeyError:
        return None
    return [*base, *_differences(wanted, found)]


def _experiments(recipe: str, kind: str, family: str, conf: Path) -> Iterator[str]:
    """Yield experiments of a recipe, a benchmark and a family."""
    algorithm = recipe.partition("_")[0]
    for name, experiment in find_experiments(conf).items():
        ours = experiment.recipe == algorithm and experiment.groups.get("policy") == family
        if ours and name.startswith(f"{kind}_"):
            yield name


@functools.cache
def _effective(recipe: str, typed: tuple[str, ...], conf: Path) -> dict[str, Any]:
    """Return each setting, with ``null`` replaced by what it stands for where that does not hang on the checkpoint."""
    content = composed(recipe, typed, conf)
    policy, env = content["policy"], content["env"]
    for field in dataclasses.fields(get_policy_class(policy["family"]).config_class):
        if field.default is not dataclasses.MISSING and policy.get(field.name, ...) is None:
            policy[field.name] = field.default
    policy["dtype"] = policy.get("dtype") or "float32"
    if policy.get("joint_log_prob", ...) is None:
        policy["joint_log_prob"] = policy["method"] == "flow_noise"
    if env.get("max_episode_steps", ...) is None:
        starting = signature(make_env).parameters.keys() - {"id"}
        options = {name: value for name, value in env.items() if name not in starting}
        env["max_episode_steps"] = make_spec(**options).max_episode_steps
    found: dict[str, Any] = {}
    for name, value in content.items():
        section = isinstance(value, dict)
        found.update({f"{name}.{key}": each for key, each in value.items()} if section else {name: value})
    return found


def _differences(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """List what has to be typed for the settings that are wanted."""
    absent = {"pipeline.stages": 1, "sync.lag": 0}  # of a recipe that has no such section
    names = sorted(wanted.keys() - _FEWER, key=lambda name: (name != "policy.checkpoint", [*wanted].index(name)))
    values = {name: found.get(name, absent.get(name)) for name in names}
    return [f"{name}={as_typed(wanted[name])}" for name in names if not _same(wanted[name], values[name])]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    if any(isinstance(value, (bool, str, type(None), list, tuple)) for value in (one, other)):
        return type(one) is type(other) and bool(one == other)
    return math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-12)
