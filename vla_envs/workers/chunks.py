"""How a chunk of actions is executed, one by one or as a whole, in workers, for Gymnasium and demonstrations."""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from vla_envs.simulator import Outcome, Simulator, SimulatorSpec
from vla_envs.workers.answers import WrongAnswer, check_outcome


def executes_chunks(simulator: Any) -> bool:
    """Tell whether a simulator, or its class, executes chunks as a whole (:class:`~vla_envs.ChunkSimulator`)."""
    return hasattr(simulator, "execute")


def check_chunk_size(spec: SimulatorSpec, chunk_size: int | None) -> None:
    """Refuse chunks without a size, or longer than an episode, where a chunk is one motion."""
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
    """Yield what each action of a chunk, float32 ``[C, A]``, did, checked, until it ends.

    It ends by success (unless terminations are ignored), by what an outcome says, at the horizon of an episode with so
    many ``elapsed`` actions, or with its last action. A simulator that executes whole chunks is asked once for all.
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
