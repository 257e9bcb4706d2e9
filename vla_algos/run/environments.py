"""The environments of a run as this process starts them: that of training, and another suite of evaluations."""

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from vla_algos import distributed
from vla_common.settings import check_settings, setting_types
from vla_envs import EpisodeSampler, SimulatorSpec, make_env, make_spec
from vla_envs.make import check_env, env_types
from vla_envs.stages import TOGETHER, check_stages
from vla_policies import VLAPolicy


def evaluated_env(env: Mapping[str, Any], evaluation: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the environment of evaluations: ``env``, changed by ``env`` of the section ``eval``."""
    return {**env, **(evaluation.get("env") or {})}


def check_evaluated(env: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    """Refuse (ValueError) settings of ``eval.env`` that are unknown or not possible, and another benchmark's."""
    check_settings("eval.env", {"id": other.get("id", env["id"])}, {"id": str})
    suite = str(other.get("id", env["id"]))
    theirs, own = suite.partition("/")[0], str(env["id"]).partition("/")[0]
    try:
        types = {"id": str, **env_types(suite)}
    except ValueError as error:
        raise ValueError(f"eval.env.id={suite}: {error}") from error
    if theirs != own:
        raise ValueError(
            f"eval.env.id={suite}: is of {theirs}, and the policy learns to act in {own} (env.id={env['id']}); type "
            f"another suite of {own}"
        )
    check_settings("eval.env", other, types)
    if other.get("group_size", 1) != 1:
        raise ValueError(f"eval.env.group_size={other['group_size']}: evaluations have no groups; leave it out")


def make_env_spec(settings: Mapping[str, Any], section: str = "env") -> SimulatorSpec:
    """Make the specification of a section ``env``; nothing is started. ValueError: an unknown name or option."""
    starting = set(setting_types(make_env)) - {"id"}
    try:
        return make_spec(**{name: value for name, value in settings.items() if name not in starting})
    except ValueError as error:
        kept = "" if section == "env" else f"; what {section} does not say is as in env"
        raise ValueError(f"{section}.id={settings['id']}: {error}{kept}") from error


def describe_spec(spec: SimulatorSpec) -> str:
    """Name a suite, its protocol and what differs from the benchmark's own one, for printing."""
    protocol = [f"  protocol: {spec.protocol}"] if spec.protocol else []
    return "\n".join([spec.id, *protocol, *(f"  not the benchmark's: {text}" for text in spec.protocol_deviations)])


def facts_of(spec: SimulatorSpec) -> dict[str, Any]:
    """Return what ``run.json`` says of where a result was measured."""
    protocol = {"protocol": spec.protocol} if spec.protocol else {}
    return {"evaluated_on": spec.id, **protocol, "protocol_deviations": spec.protocol_deviations}


def as_evaluated(spec: SimulatorSpec, trials: int | None) -> SimulatorSpec:
    """Add to the deviations from the protocol that it has more initial states of each task than ``trials``."""
    if spec.initial_states is None or trials is None or trials >= spec.trials:
        return spec
    fewer = f"{trials} of its {spec.trials} initial states of each task (eval.trials=null has all)"
    return replace(spec, protocol_deviations=(*spec.protocol_deviations, fewer))


def own_share(
    env: Mapping[str, Any],
    spec: SimulatorSpec,
    pipeline: Mapping[str, Any] = {},
    section: str = "env",
    processes: int | None = None,
) -> dict[str, Any]:
    """Return the settings of an environment as this process starts it: with its part of the simulators.

    Where ``num_workers`` is ``None`` there are as many as this process has cores, but no more than environments of a
    stage. Of several processes on several GPUs each draws on its own, where that can be chosen. ``pipeline`` is the
    section: ``stages``, ``overlap_resets`` where a recipe has it; ``processes`` share the simulators (``None``: all).
    ValueError: they cannot be shared evenly, or there are fewer than stages.
    """
    stages = pipeline.get("stages", 1)
    num_envs, workers = distributed.per_rank(env["num_envs"], f"{section}.num_envs", processes), env.get("num_workers")
    if workers is None:
        workers = max(1, min(num_envs // stages, distributed.cores()))
    batched = spec.id if spec.batched else ""
    check_stages(stages, num_envs, workers, batched)
    if batched and pipeline.get("overlap_resets"):
        raise ValueError(f"pipeline.overlap_resets=true: {TOGETHER.format(id=batched)}")
    settings = {**env, "num_envs": num_envs, "num_workers": workers}
    if env.get("gpus") is None and distributed.processes_started() > 1 and torch.cuda.device_count() > 1:
        with contextlib.suppress(ValueError):  # then they draw as those of a single process
            spec.check_gpus(own := (torch.cuda.current_device(),))
            settings["gpus"] = own
    return settings


def training_episodes(config: SimpleNamespace, spec: SimulatorSpec, group_size: int | None = None) -> EpisodeSampler:
    """Sample this process's share of ``config.seed``'s training episodes, ``env.group_size`` times unless given."""
    own = {"rank": distributed.rank(), "world_size": distributed.world_size()}
    size = group_size or config.env.get("group_size", 1)
    return EpisodeSampler(spec, config.seed, mode=config.episode_order, group_size=size, **own)


def check_share(settings: Mapping[str, Any], policy: VLAPolicy) -> None:
    """Refuse (ValueError) environments of a process that :func:`~vla_envs.make_env` could not make for this policy."""
    use = {"ignore_terminations", "reward_coef", "step_penalty", "step_timeout", "start_timeout", "gpus"}
    what = {name: value for name, value in settings.items() if name not in use}
    check_env(**what, chunk_size=policy.chunk_size)
