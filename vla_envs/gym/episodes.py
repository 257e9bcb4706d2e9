"""What one environment and many have in common: the simulator that is meant, which episode runs, what is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np

from vla_common import keys
from vla_common.errors import unknown_name
from vla_common.validation import is_whole_number
from vla_envs.actions import refuse_actions
from vla_envs.registry import find_benchmark, make_spec, option_types, refuse_options
from vla_envs.simulator import Episode, SimulatorSpec
from vla_envs.workers.chunks import check_chunk_size

RESET_OPTIONS = (keys.TASK_ID, keys.TRIAL_ID)
DECISIONS_PER_SECOND = 2  # of a recorded video, where actions have no duration
_MAX_SEED = 2**31
_HORIZONS = ("max_episode_steps", "step_lim")  # what benchmarks call it


def resolve_spec(name: str | SimulatorSpec, horizon: int | None, options: dict[str, Any]) -> SimulatorSpec:
    """Describe the simulator that is meant.

    Raises:
        ValueError: an unknown name or option.
        TypeError: ``frameskip``, which TorchRL's ``GymEnv`` tries; told so in these words, it goes on without it.
    """
    if "frameskip" in options:
        raise TypeError(
            "unexpected keyword argument 'frameskip': a chunk of actions is chunk_size of make_vec or make_env"
        )
    if isinstance(name, SimulatorSpec):
        refuse_options(name, options)
        spec = name
    else:
        if horizon is not None:  # as an option, where there is one: it is among the deviations from the protocol
            known = option_types(find_benchmark(name)[0])
            options.update({option: horizon for option in _HORIZONS if option in known})
        spec = make_spec(name, **options)
    return spec if horizon is None else replace(spec, max_episode_steps=horizon)


def frames_per_second(spec: SimulatorSpec, chunk_size: int | None) -> float:
    """Return how fast frames are shown: in real time, one for each step.

    Raises:
        ValueError: chunks are executed as a whole, and nobody has said how long they are, or they do not fit.
    """
    if spec.control_frequency is not None:
        return spec.control_frequency / chunk_size if chunk_size else spec.control_frequency
    check_chunk_size(spec, chunk_size)
    return DECISIONS_PER_SECOND


class EpisodeStream:
    """The episodes of one environment, drawn from its random numbers or chosen by the options of a reset."""

    def __init__(self, spec: SimulatorSpec):
        self._spec = spec
        self._seed: int | None = None  # of its episodes

    def next(self, random: np.random.Generator, seed: int | None, options: Mapping[str, Any]) -> Episode:
        """Return the next episode.

        Args:
            random: the environment's random numbers, restarted by the caller where there is a ``seed``.
            seed: of this episode and those after it; drawn once if none was ever given.
            options: ``task_id`` and ``trial_id``; what is left out is drawn.

        Raises:
            ValueError: an unknown option, or a task that does not exist.
        """
        spec = self._spec
        for name in options:
            if name not in RESET_OPTIONS:
                raise unknown_name("reset option", name, RESET_OPTIONS)
        if seed is not None:
            self._seed = seed
        elif self._seed is None:
            self._seed = int(random.integers(_MAX_SEED))
        # Both are always drawn, so that fixing one does not change the other.
        tasks, trials = len(spec.tasks), spec.initial_states or _MAX_SEED
        drawn = int(random.integers(tasks)), int(random.integers(trials))
        task_id, trial_id = options.get(keys.TASK_ID, drawn[0]), options.get(keys.TRIAL_ID, drawn[1])
        whole = is_whole_number(task_id) and is_whole_number(trial_id)  # 3.7 is no task
        evaluation = spec.evaluation_trials or range(0)
        if not whole or not 0 <= task_id < tasks or not (0 <= trial_id < trials or trial_id in evaluation):
            also = f" and {evaluation[0]} to {evaluation[-1]}" if evaluation else ""
            raise ValueError(
                f"{spec.id} has task_id 0 to {tasks - 1} and trial_id 0 to {trials - 1}{also}, "
                f"got task_id={task_id!r} and trial_id={trial_id!r}"
            )
        return Episode(int(task_id), int(trial_id), self._seed)


def make_info(
    spec: SimulatorSpec, episode: Episode, success: bool = False, subtasks: int = 0, remark: str = ""
) -> dict[str, Any]:
    """Say whether the task is solved, how many tasks of a chain are, which episode this is, and what is to be said."""
    return {
        "is_success": success,
        **({keys.SUBTASKS: subtasks} if spec.chain_length > 1 else {}),
        keys.TASK_ID: episode.task_id,
        keys.TRIAL_ID: episode.trial_id,
        "episode_seed": episode.seed,
        **({"remark": remark} if remark else {}),
    }


def check_actions(
    spec: SimulatorSpec, actions: np.ndarray, expected: Sequence[int], running: np.ndarray | None = None
) -> np.ndarray:
    """Return actions as float32; see :func:`~vla_envs.actions.refuse_actions`.

    Raises:
        ValueError: another shape than expected, not floating point, not finite, or absurdly far out of bounds.
    """
    actions = np.asarray(actions)
    if actions.shape != tuple(expected) or not np.issubdtype(actions.dtype, np.floating):
        raise ValueError(
            f"{spec.id} takes actions of float32 {list(expected)}, got {actions.dtype} {list(actions.shape)}"
        )
    actions = actions.astype(np.float32)
    refuse_actions(spec, actions[None] if running is None else actions, running)
    return actions


def closed(spec: SimulatorSpec) -> gymnasium.error.ClosedEnvironmentError:
    """Make the error of whoever uses an environment after ``close``."""
    return gymnasium.error.ClosedEnvironmentError(f"this environment ({spec.id}) is closed: make a new one")
