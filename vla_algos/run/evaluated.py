"""What a training run is evaluated on: its own environment, or another suite (``eval.env``)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from vla_algos.run.checkpoints import random_state, set_random_state
from vla_common.settings import check_settings, setting_types
from vla_envs import EpisodeQueue, SimulatorSpec, VLAEnv, make_env, make_spec
from vla_envs.env import check_env, check_machine, env_types
from vla_policies import VLAPolicy


def evaluated_env(env: Mapping[str, Any], evaluation: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the environment of evaluations: what ``eval.env`` does not say is as in ``env``.

    Args:
        env: of training.
        evaluation: the section ``eval``.
    """
    return {**env, **(evaluation.get("env") or {})}


def check_evaluated(env: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    """Refuse settings of ``eval.env`` that nobody reads, of a wrong type or out of range, and another benchmark's.

    Raises:
        ValueError: names the setting as it is typed.
    """
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
    """Make the specification of what the section ``env`` describes; nothing is started.

    Args:
        settings: of the section.
        section: how it is typed.

    Raises:
        ValueError: an unknown name or option.
    """
    starting = set(setting_types(make_env)) - {"id"}
    try:
        return make_spec(**{name: value for name, value in settings.items() if name not in starting})
    except ValueError as error:
        kept = "" if section == "env" else f"; what {section} does not say is as in env"
        raise ValueError(f"{section}.id={settings['id']}: {error}{kept}") from error


@dataclass(frozen=True)
class OtherSuite:
    """A suite beside the one that a run trains on, whose simulators live as long as an evaluation.

    Kept alive they would take their memory during every update; what they cost to start is little beside an
    evaluation. Those of training stay, with their episodes where they are: both are in memory while it lasts, and
    ``eval.env.num_envs`` says how many there are of these.

    Attributes:
        settings: of :func:`~vla_envs.make_env`, as this process starts it.
        spec: made of them.
    """

    settings: Mapping[str, Any]
    spec: SimulatorSpec

    def check(self, policy: VLAPolicy) -> None:
        """Refuse before any work what could not be evaluated there.

        Raises:
            ValueError: the policy cannot act there, or there are no such environments.
        """
        try:
            check_share(self.settings, policy)
            policy.check_environment(self.spec)
        except ValueError as error:
            raise ValueError(f"eval.env.id={self.spec.id}: {error}") from error

    def check_machine(self) -> None:
        """Refuse what could not be simulated on this machine.

        Raises:
            ValueError: GPUs that are not here, or too many environments.
            ImportError, FileNotFoundError: a package or assets are missing.
        """
        check_machine(self.spec, self.settings["num_envs"], self.settings.get("gpus"))
        self.spec.check()

    @contextlib.contextmanager
    def started(self, chunk_size: int) -> Iterator[VLAEnv]:
        """Start its simulators, which end afterwards; random numbers then go on as if nothing had been."""
        before = random_state()
        env = make_env(**self.settings, chunk_size=chunk_size, episodes=EpisodeQueue())
        try:
            yield env
        finally:
            env.close()
            set_random_state(before)


def check_share(settings: Mapping[str, Any], policy: VLAPolicy) -> None:
    """Refuse the environments of a process that could be on no machine, or with no policy of this chunk length.

    Args:
        settings: of :func:`~vla_envs.make_env`, as the process starts them.
        policy: acts in them.

    Raises:
        ValueError: see :func:`~vla_envs.make_env`.
    """
    use = {"ignore_terminations", "reward_coef", "step_penalty", "step_timeout", "start_timeout", "gpus"}
    what = {name: value for name, value in settings.items() if name not in use}
    check_env(**what, chunk_size=policy.chunk_size)


@contextlib.contextmanager
def at_temperature(policy: VLAPolicy, temperature: float | None) -> Iterator[None]:
    """Have a policy sample at another ``config.temperature`` than it is trained at; ``None`` for that."""
    trained = getattr(policy, "config", None)
    if temperature is not None:
        check_temperature(policy, temperature)
        policy.config = replace(policy.config, temperature=temperature)
    try:
        yield
    finally:
        if temperature is not None:
            policy.config = trained


def check_temperature(policy: VLAPolicy, temperature: float | None) -> None:
    """Refuse a temperature of a policy that has none.

    Raises:
        ValueError: it has none.
    """
    if temperature is not None and not hasattr(policy.config, "temperature"):
        raise ValueError(
            f"eval.temperature={temperature:g}: policy={policy.family} does not sample at a temperature; leave it out"
        )
