"""The environments of a run as this process starts them: that of training, and another suite of evaluations."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch

from vla_algos import distributed
from vla_algos.run.seeds import random_state, set_random_state
from vla_common.settings import check_settings, setting_types
from vla_envs import EpisodeQueue, EpisodeSampler, SimulatorSpec, VLAEnv, make_env, make_spec
from vla_envs.make import check_env, check_machine, env_types
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


def own_share(
    env: Mapping[str, Any],
    spec: SimulatorSpec,
    pipeline: Mapping[str, Any] | None = None,
    section: str = "env",
    processes: int | None = None,
) -> dict[str, Any]:
    """Return the settings of an environment as this process starts it: with its part of the simulators.

    Where ``num_workers`` is ``None`` there are as many as this process has cores, but no more than environments of a
    stage. Of several processes on several GPUs each draws on its own. ``pipeline`` is the section of that name:
    ``stages``, and ``overlap_resets`` where a recipe has it; ``processes`` share the simulators, ``None`` for all.
    ValueError: they cannot be shared evenly, or there are fewer than stages.
    """
    pipeline = pipeline or {}
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
        settings["gpus"] = (torch.cuda.current_device(),)
    return settings


def training_episodes(config: SimpleNamespace, spec: SimulatorSpec, group_size: int) -> EpisodeSampler:
    """Sample this process's share of the training episodes of ``config.seed``, each ``group_size`` times."""
    rank, world_size = distributed.rank(), distributed.world_size()
    order = config.episode_order
    return EpisodeSampler(spec, config.seed, mode=order, group_size=group_size, rank=rank, world_size=world_size)


@dataclass(frozen=True)
class EvalEnv:
    """Another suite than the one that a run trains on, whose simulators live as long as an evaluation.

    Those of training stay, with their episodes where they are: both are in memory while it lasts.
    """

    settings: Mapping[str, Any]  # of make_env, as this process starts it
    spec: SimulatorSpec  # made of them

    def check(self, policy: VLAPolicy) -> None:
        """Refuse (ValueError) what cannot be evaluated there; ImportError, FileNotFoundError: something is missing."""
        try:
            check_share(self.settings, policy)
            policy.check_environment(self.spec)
        except ValueError as error:
            raise ValueError(f"eval.env.id={self.spec.id}: {error}") from error
        check_machine(self.spec, self.settings["num_envs"], self.settings.get("gpus"))
        self.spec.check()

    @contextlib.contextmanager
    def started(self, chunk_size: int) -> Iterator[VLAEnv]:
        """Start its simulators, which end afterwards; random numbers continue where they were."""
        before = random_state()
        env = make_env(**self.settings, chunk_size=chunk_size, episodes=EpisodeQueue())
        try:
            yield env
        finally:
            env.close()
            set_random_state(before)


def check_share(settings: Mapping[str, Any], policy: VLAPolicy) -> None:
    """Refuse (ValueError) environments of a process that :func:`~vla_envs.make_env` could not make for this policy."""
    use = {"ignore_terminations", "reward_coef", "step_penalty", "step_timeout", "start_timeout", "gpus"}
    what = {name: value for name, value in settings.items() if name not in use}
    check_env(**what, chunk_size=policy.chunk_size)


@contextlib.contextmanager
def at_temperature(policy: VLAPolicy, temperature: float | None) -> Iterator[None]:
    """Have a policy sample at another ``config.temperature`` than it is trained at; ``None`` for that."""
    if temperature is None:
        yield
        return
    check_temperature(policy, temperature)
    trained = policy.config
    policy.config = replace(trained, temperature=temperature)
    try:
        yield
    finally:
        policy.config = trained


def check_temperature(policy: VLAPolicy, temperature: float | None) -> None:
    """Refuse a temperature, by a ValueError, of a policy that has none."""
    if temperature is not None and not hasattr(policy.config, "temperature"):
        raise ValueError(
            f"eval.temperature={temperature:g}: policy={policy.family} does not sample at a temperature; leave it out"
        )
