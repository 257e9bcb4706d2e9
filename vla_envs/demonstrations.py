"""Demonstrations by a benchmark's scripted expert, recorded inside the worker processes."""

from __future__ import annotations

from typing import Any

import numpy as np

from vla_common import keys
from vla_envs.simulator import Episode, SimulatorSpec
from vla_envs.workers.answers import WrongAnswer, check_observation
from vla_envs.workers.chunks import executes_chunks, run_chunk


def check_expert(simulator: Any, spec: SimulatorSpec) -> None:
    """Refuse demonstrations of a benchmark that has nobody to give them.

    Args:
        simulator: one, or its class.
        spec: its.

    Raises:
        ValueError: says what to do instead.
    """
    if not hasattr(simulator, "expert_chunk" if executes_chunks(simulator) else "expert_action"):
        raise ValueError(
            f"{spec.id} has no scripted expert, whom demonstrations are from; type sft=none, and policy.checkpoint="
            "FOLDER to start from a policy"
        )


def demonstrate(
    simulator: Any,
    episode: Episode,
    *,
    chunk_size: int,
    stride: int,
    noise: float,
    noise_correlation: float,
    max_steps: int,
) -> dict[str, Any] | None:
    """Let the scripted expert solve an episode while its actions are disturbed.

    The labels are what the expert wanted to do, not what was done: the recording shows how to come back from
    states that a perfect execution never visits (DART, Laskey et al. 2017).

    Args:
        simulator: one with ``expert_action()``, float ``[A]``; with ``expert_chunk(C)``, float ``[C, A]``, where chunks
            are executed as a whole: it is asked once for each, and all of it is disturbed. ``None`` gives up.
        episode: what to solve; it also seeds the disturbance.
        chunk_size: actions per label, ``C``.
        stride: record every so many primitive actions, or decisions where chunks are executed as a whole; only recorded
            states are rendered.
        noise: standard deviation of the disturbance, as a fraction of half the action's range.
        noise_correlation: of the disturbance between successive actions, 0 to below 1.
        max_steps: give up after that many actions.

    Returns:
        ``images`` uint8 ``[K, H, W, 3]``, ``states`` ``[K, S]``, ``task_descriptions`` (one text), ``action``
        ``[K, C, A]`` and ``step_mask`` bool ``[K, C]`` (False past the end of the episode), or ``None`` if it was
        not solved.

    Raises:
        WrongAnswer: the simulator returns what its description does not allow.
    """
    check_expert(simulator, simulator.spec)
    low, high = np.array(simulator.spec.action_low), np.array(simulator.spec.action_high)
    random = np.random.default_rng([episode.seed, episode.task_id, episode.trial_id])
    disturbance = np.zeros_like(low)
    simulator.reset(episode)
    chunked = executes_chunks(simulator)
    observations: list[tuple[np.ndarray, np.ndarray]] = []
    recorded: list[int] = []  # which actions the observations came before
    wanted: list[np.ndarray] = []  # of each action that was executed
    solved, decisions = False, 0
    while not solved and len(wanted) < max_steps:
        if decisions % stride == 0:
            observation = simulator.observe()
            check_observation(simulator.spec, observation)
            observations.append((observation.images.copy(), observation.states))
            recorded.append(len(wanted))
        decisions += 1
        plan = simulator.expert_chunk(chunk_size) if chunked else np.asarray(simulator.expert_action())[None]
        if plan is None:
            break
        if not np.isfinite(plan).all():
            what, given = ("chunk", plan) if chunked else ("action", plan[0])
            raise WrongAnswer(f"the expert's {what} is {np.asarray(given).tolist()}, must be finite numbers")
        actions = []
        for action in plan:
            fresh = noise * random.standard_normal(low.shape)
            disturbance = noise_correlation * disturbance + (1 - noise_correlation**2) ** 0.5 * fresh
            actions.append(np.clip(action + disturbance * (high - low) / 2, low, high))
        outcomes = list(run_chunk(simulator.spec, simulator, np.array(actions, np.float32), len(wanted)))
        wanted += list(plan[: len(outcomes)])
        solved = outcomes[-1].success
        if chunked and (outcomes[-1].ends_episode or len(wanted) >= simulator.spec.max_episode_steps):
            break
    if not solved:
        return None
    steps = np.array(recorded)[:, None] + np.arange(chunk_size)  # [K, C]
    images, states = zip(*observations, strict=True)
    return {
        keys.IMAGES: np.stack(images),
        keys.STATES: np.stack(states),
        keys.TASK_DESCRIPTIONS: observation.task_description,
        keys.ACTION: np.stack(wanted)[np.minimum(steps, len(wanted) - 1)],
        keys.STEP_MASK: steps < len(wanted),
    }
