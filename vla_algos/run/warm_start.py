"""Demonstrations of a benchmark's scripted expert, and cloning them before reinforcement learning begins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tensordict import TensorDict

from vla_algos.imitation import BehaviourCloning, record_demonstrations
from vla_algos.run.logging import progress_bar
from vla_common.settings import BelowOne, Count, Fraction, Whole
from vla_envs import Episode, VLAEnv
from vla_policies import VLAPolicy

_FAMILY = 1_000_000  # added to a run's seed for the initial states of demonstrations


def demonstration_seed(seed: int, evaluation_seed: int) -> int:
    """Choose the seed of the demonstrations' initial states: neither the training episodes' nor the evaluation's.

    Raises:
        ValueError: the evaluation would repeat episodes that were trained on.
    """
    demonstrations = seed + _FAMILY
    if evaluation_seed in (seed, demonstrations):
        raise ValueError(
            f"eval.seed={evaluation_seed} is the family of initial states that this run trains on; "
            "take another one, such as eval.seed=9000000"
        )
    return demonstrations


def record(
    env: VLAEnv,
    policy: VLAPolicy,
    seed: int,
    *,
    episodes: Whole,
    stride: Count = 4,
    noise: Fraction = 0.25,
    noise_correlation: BelowOne = 0.8,
    max_steps: Count = 150,
) -> TensorDict:
    """Record demonstrations of ``env``'s tasks in turn, with a progress bar.

    Args:
        env: the episodes that run in it are abandoned.
        policy: whose instructions and chunks they are for.
        seed: family of the demonstrations' initial states.
        episodes: how many.
        stride: record every so many primitive actions.
        noise: standard deviation of the disturbance, as a fraction of half the action's range.
        noise_correlation: of the disturbance between successive actions, 0 to below 1.
        max_steps: give up after that many actions.

    Returns:
        The samples ``[K]`` that it returns.
    """
    tasks = len(env.simulator_spec.tasks)
    wanted = [Episode(n % tasks, n // tasks, seed) for n in range(episodes)]
    with progress_bar("demonstrations", len(wanted), "episode") as bar:
        return record_demonstrations(
            env,
            policy,
            wanted,
            stride=stride,
            noise=noise,
            noise_correlation=noise_correlation,
            max_steps=max_steps,
            on_episode=lambda solved: bar.update(),
        )


def clone(
    policy: VLAPolicy, demonstrations: TensorDict, settings: dict[str, Any], before_step: Callable[[], None]
) -> None:
    """Clone demonstrations into ``policy``, in all processes at once: ``recipes/sft.py`` within another recipe.

    Args:
        policy: trained in place.
        demonstrations: of :func:`record`.
        settings: of :class:`~vla_algos.imitation.BehaviourCloning`.
        before_step: called before each step; may raise to abandon it.
    """
    learner = BehaviourCloning(policy, demonstrations, **settings)
    with progress_bar("behaviour cloning", settings["steps"], "step") as bar:
        for _ in range(settings["steps"]):
            before_step()
            bar.set_postfix(loss=f"{learner.step():.3f}", refresh=False)
            bar.update()
