"""Demonstrations by a benchmark's scripted expert, recorded inside the worker processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from vla_common import keys
from vla_common.validation import are_numbers
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


def noise_of_dimensions(noise: float | Sequence[float], spec: SimulatorSpec) -> np.ndarray:
    """Return the noise on each dimension of an action, float ``[A]``: one number is for all but the grippers.

    Raises:
        ValueError: it is neither one number nor one for each; says how many there are.
    """
    if are_numbers([noise], 1):
        scale = np.full(spec.action_dim, noise, float)
        scale[list(spec.gripper_dims)] = 0.0
        return scale
    if not are_numbers(noise, spec.action_dim):
        raise ValueError(
            f"noise is one number, for all but the gripper, or one for each of the {spec.action_dim} dimensions of an "
            f"action, got {noise}"
        )
    return np.array(noise, float)


def record_numbered(simulator: Any, item: tuple[int, Episode], **settings: Any) -> tuple[int, dict[str, Any] | None]:
    """Return :func:`demonstrate` of an episode with its number, by which whoever asked for several tells them apart."""
    number, episode = item
    return number, demonstrate(simulator, episode, **settings)


def demonstrate(
    simulator: Any,
    episode: Episode,
    *,
    chunk_size: int,
    stride: int,
    noise: float | Sequence[float],
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
        noise: standard deviation of the disturbance, as a fraction of half the action's range: one number, for all
            dimensions but ``spec.gripper_dims``, or one for each dimension.
        noise_correlation: of the disturbance between successive actions, 0 to below 1.
        max_steps: give up after that many actions.

    Returns:
        ``images`` uint8 ``[K, H, W, 3]``, ``wrist_images`` where there are any, ``states`` float32 ``[K, S]``,
        ``task_descriptions`` (one text), ``action`` float32 ``[K, C, A]``, ``step_mask`` bool ``[K, C]`` (False past
        the end of the episode), ``step`` int64 ``[K]`` (actions before the frame), ``episode_len`` (how many there
        were) and ``final_states`` float32 ``[S]``, in which they ended; or ``None`` if it was not solved.

    Raises:
        WrongAnswer: the simulator returns what its description does not allow.
    """
    check_expert(simulator, simulator.spec)
    low, high = np.array(simulator.spec.action_low), np.array(simulator.spec.action_high)
    scale = noise_of_dimensions(noise, simulator.spec)
    random = np.random.default_rng([episode.seed, episode.task_id, episode.trial_id])
    disturbance = np.zeros_like(low)
    simulator.reset(episode)
    chunked = executes_chunks(simulator)
    frames: dict[str, list[np.ndarray]] = {keys.IMAGES: [], keys.WRIST_IMAGES: [], keys.STATES: []}
    recorded: list[int] = []  # which actions the observations came before
    wanted: list[np.ndarray] = []  # of each action that was executed
    solved, decisions = False, 0
    while not solved and len(wanted) < max_steps:
        if decisions % stride == 0:
            observation = simulator.observe()
            frames[keys.STATES].append(np.array(check_observation(simulator.spec, observation)))
            frames[keys.IMAGES].append(observation.images.copy())
            if observation.wrist_images is not None:
                frames[keys.WRIST_IMAGES].append(observation.wrist_images.copy())
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
            fresh = scale * random.standard_normal(low.shape)
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
    return {
        **{name: np.stack(shown) for name, shown in frames.items() if shown},
        keys.TASK_DESCRIPTIONS: observation.task_description,
        keys.ACTION: np.stack(wanted).astype(np.float32)[np.minimum(steps, len(wanted) - 1)],
        keys.STEP_MASK: steps < len(wanted),
        keys.STEP: np.array(recorded, np.int64),
        keys.EPISODE_LEN: len(wanted),
        keys.FINAL_STATES: np.array(check_observation(simulator.spec, simulator.observe())),
    }
