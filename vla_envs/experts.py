"""Scripted experts of benchmarks: their demonstrations, recorded inside the worker processes."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from vla_common import keys
from vla_envs.protocol import are_numbers
from vla_envs.replay import Visit
from vla_envs.simulator import Episode, Observation, SimulatorSpec
from vla_envs.workers.answers import WrongAnswer, check_observation
from vla_envs.workers.chunks import executes_chunks, run_chunk


def check_expert(simulator: Any, spec: SimulatorSpec) -> None:
    """Refuse demonstrations of a benchmark whose ``simulator``, or its class, has no scripted expert, or no worker."""
    if spec.batched:
        raise ValueError(
            f"{spec.id} simulates all worlds together, where no expert acts; type env.backend=processes, or "
            "policy.checkpoint=FOLDER and demonstrations.episodes=0"
        )
    if not hasattr(simulator, "expert_chunk" if executes_chunks(simulator) else "expert_action"):
        raise ValueError(
            f"{spec.id} has no scripted expert, which demonstrations are from; type demonstrations.episodes=0, and "
            "policy.checkpoint=FOLDER to start from a policy"
        )


def noise_of_dimensions(noise: float | Sequence[float], spec: SimulatorSpec) -> np.ndarray:
    """Return the noise on each dimension of an action, float ``[A]``; one number is for all but the grippers."""
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


def record_visit(simulator: Any, visit: Visit, **settings: Any) -> tuple[int, dict[str, Any] | None]:
    """Return :func:`demonstrate` of an episode, after what a policy has done in it, with its number."""
    return visit.number, demonstrate(simulator, visit.episode, visit.chunks, **settings)


def demonstrate(
    simulator: Any,
    episode: Episode,
    before: Sequence[np.ndarray] = (),  # chunks that a policy has executed, float32 [C, A]: the expert takes over then
    *,
    chunk_size: int,  # C, actions per label
    stride: int,  # record every so many actions, or decisions where chunks are executed as a whole
    noise: float | Sequence[float],  # deviation as a fraction of half the action's range, for all or each dimension
    max_steps: int,  # give up after that many actions
) -> dict[str, Any] | None:
    """Let the scripted expert solve an episode while its actions are disturbed; ``None`` if it was not solved.

    The labels are what the expert wanted to do, not what was done: the recording shows how to come back from states
    that a perfect execution never visits (DART, Laskey et al. 2017).

    The simulator has ``expert_action()``, float ``[A]``, or, where chunks are executed as a whole, ``expert_chunk(C)``,
    float ``[C, A]``, which is asked once for each and disturbed as a whole; ``None`` gives up. The episode also seeds
    the disturbance. Returns ``images`` uint8 ``[K, H, W, 3]``, ``wrist_images`` where there are any, ``states`` float32
    ``[K, S]``, ``task_descriptions`` (one text), ``action`` float32 ``[K, C, A]``, ``step_mask`` bool ``[K, C]`` (False
    past the end of the episode), ``step`` int64 ``[K]`` (actions before the frame), ``episode_len`` (how many there
    were), ``executed_actions`` float32 ``[L, A]``, ``reward`` (their sum) and ``final_states`` float32 ``[S]``.
    """
    spec, chunked = simulator.spec, executes_chunks(simulator)
    check_expert(simulator, spec)
    disturb = _Disturbance(spec, episode, noise)
    simulator.reset(episode)
    elapsed = 0
    for chunk in before:
        elapsed += len(list(run_chunk(spec, simulator, chunk, elapsed, ignore_terminations=True)))
    seen: list[Observation] = []
    recorded: list[int] = []  # how many actions came before each observation
    wanted: list[np.ndarray] = []  # of each action that was executed
    executed: list[np.ndarray] = []
    solved, decisions, total = False, 0, 0.0
    while not solved and len(wanted) < max_steps:
        if decisions % stride == 0:
            seen.append(_observe(simulator))
            recorded.append(len(wanted))
        decisions += 1
        plan = _ask(simulator, chunk_size, chunked)
        if plan is None:
            break
        actions = np.array([disturb(action) for action in plan], np.float32)
        outcomes = list(run_chunk(spec, simulator, actions, elapsed + len(wanted)))
        wanted += list(plan[: len(outcomes)])
        executed += list(actions[: len(outcomes)])
        total += sum(outcome.reward for outcome in outcomes)
        solved = outcomes[-1].success
        if outcomes[-1].ends_episode or (chunked and elapsed + len(wanted) >= spec.max_episode_steps):
            break
    if not solved:
        return None
    steps = np.array(recorded)[:, None] + np.arange(chunk_size)  # [K, C]
    wrist = [each.wrist_images for each in seen if each.wrist_images is not None]
    return {
        keys.IMAGES: np.stack([each.images for each in seen]),
        **({keys.WRIST_IMAGES: np.stack(wrist)} if wrist else {}),
        keys.STATES: np.stack([each.states for each in seen]),
        keys.TASK_DESCRIPTIONS: seen[-1].task_description,
        keys.ACTION: np.stack(wanted).astype(np.float32)[np.minimum(steps, len(wanted) - 1)],
        keys.STEP_MASK: steps < len(wanted),
        keys.STEP: np.array(recorded, np.int64),
        keys.EPISODE_LEN: len(wanted),
        keys.EXECUTED: np.stack(executed),
        keys.REWARD: total,
        keys.FINAL_STATES: np.array(check_observation(spec, simulator.observe())),
    }


class _Disturbance:
    """Noise on one action after the other, of correlation 0.8, clipped to the bounds."""

    def __init__(self, spec: SimulatorSpec, episode: Episode, noise: float | Sequence[float]):
        self._low, self._high = np.array(spec.action_low), np.array(spec.action_high)
        self._scale = noise_of_dimensions(noise, spec)
        self._random = np.random.default_rng([episode.seed, episode.task_id, episode.trial_id])
        self._now = np.zeros_like(self._low)

    def __call__(self, action: np.ndarray) -> np.ndarray:
        fresh = self._scale * self._random.standard_normal(self._low.shape)
        self._now = 0.8 * self._now + (1 - 0.8**2) ** 0.5 * fresh
        return np.clip(action + self._now * (self._high - self._low) / 2, self._low, self._high)


def _observe(simulator: Any) -> Observation:
    """Observe with copies: the next frame may be drawn into the same memory."""
    seen = simulator.observe()
    states = np.array(check_observation(simulator.spec, seen))
    wrist = None if seen.wrist_images is None else seen.wrist_images.copy()
    return Observation(seen.images.copy(), states, seen.task_description, wrist)


def _ask(simulator: Any, chunk_size: int, chunked: bool) -> np.ndarray | None:
    answer = simulator.expert_chunk(chunk_size) if chunked else simulator.expert_action()
    plan = answer if chunked or answer is None else np.asarray(answer)[None]
    if plan is not None and not np.isfinite(plan).all():
        what, given = ("chunk", plan) if chunked else ("action", plan[0])
        raise WrongAnswer(f"the expert's {what} is {np.asarray(given).tolist()}, must be finite numbers")
    return plan
