"""A chunk of actions is executed here, one by one or as a whole, whoever asks: worker, Gymnasium, demonstrations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from vla_envs.simulator import Outcome, Simulator, SimulatorSpec
from vla_envs.workers.answers import WrongAnswer, check_outcome


def executes_chunks(simulator: Any) -> bool:
    """Tell whether a simulator, or its class, executes chunks as a whole; see :class:`~vla_envs.ChunkSimulator`."""
    return hasattr(simulator, "execute")


def check_chunk_size(spec: SimulatorSpec, chunk_size: int | None) -> None:
    """Refuse chunks of no size, or that no episode has room for, where a chunk is one motion: it would be another one.

    Raises:
        ValueError: says what would do.
    """
    if spec.control_frequency is not None:
        return
    if chunk_size is None:
        raise ValueError(
            f"{spec.id} executes a chunk of actions as one motion, so that each length is another environment; type "
            "chunk_size=25, or the number that the policy decides at once"
        )
    if chunk_size > spec.max_episode_steps:
        raise ValueError(
            f"chunk_size={chunk_size}: a chunk of {spec.id} is one motion, and its episodes end after "
            f"{spec.max_episode_steps} actions; type chunk_size={spec.max_episode_steps} (policy.chunk_size in a "
            "recipe) or less, or take longer episodes"
        )


def run_chunk(
    spec: SimulatorSpec, simulator: Simulator, chunk: np.ndarray, elapsed: int, *, ignore_terminations: bool = False
) -> Iterator[Outcome]:
    """Execute a chunk until it ends: by success, by what an outcome says, at the horizon, or with its last action.

    Args:
        spec: of the simulator.
        simulator: is asked once for all, if it executes chunks as a whole, otherwise for one action after the other.
        chunk: float32 ``[C, A]``.
        elapsed: primitive actions of the episode so far.
        ignore_terminations: success does not end it.

    Yields:
        What each executed action did, checked.

    Raises:
        WrongAnswer: the simulator returns what its description does not allow.
    """
    left = spec.max_episode_steps - elapsed
    if left > 0:
        chunk = chunk[:left]
    source = "item {} of what execute returned is" if executes_chunks(simulator) else "step returned"
    for number, outcome in enumerate(_execute(simulator, chunk)):
        checked = check_outcome(spec, outcome, source.format(number))
        yield checked
        if checked.ends_chunk or checked.ends_episode or (checked.success and not ignore_terminations):
            return


def _execute(simulator: Any, chunk: np.ndarray) -> Iterable[Outcome]:
    if not executes_chunks(simulator):
        return (simulator.step(action) for action in chunk)
    outcomes = simulator.execute(chunk)
    try:
        number = len(outcomes)
    except TypeError:
        raise WrongAnswer(f"execute returned {type(outcomes).__name__}, must be a list of Outcomes") from None
    if not 1 <= number <= len(chunk):
        raise WrongAnswer(f"execute returned {number} outcomes of {len(chunk)} actions, must be 1 to {len(chunk)}")
    return outcomes
