"""Which seed of RoboTwin an episode is: lists of seeds that the scripted demonstrations have solved, and ranges.

The lists are RLinf's (rlinf/envs/robotwin/seeds at a3816b596), of 22 tasks; ``seeds.json`` has of each its first seed
and the differences to the next ones.
"""

import json
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import resources
from itertools import accumulate, count

EVALUATION = 1_000_000  # trials from here on have the seeds of evaluations
RANGE = range(10_000, 200_000)  # what RLinf draws from for tasks without a list
_FIRST_OF_EVALUATION = 150_000


@cache
def solved_seeds(kind: str) -> dict[str, tuple[int, ...]]:
    """Read the lists of ``"train"`` or ``"eval"``, by task; no seed is in both."""
    table = json.loads(resources.files("vla_envs.robotwin").joinpath("seeds.json").read_text())
    return {task: tuple(accumulate(steps)) for task, steps in table[kind].items()}


def seeds_of(task: str, kind: str) -> tuple[Sequence[int], Sequence[int]]:
    """List the seeds that a task is trained with and those that it is evaluated with; none is in both.

    ``kind`` is ``"solved"``: the task's lists, where it has some; or ``"range"``, and for the other tasks: the lower
    and the upper part of :data:`RANGE`, which are untried.
    """
    if kind == "solved" and task in solved_seeds("train"):
        return solved_seeds("train")[task], solved_seeds("eval")[task]
    return range(RANGE.start, _FIRST_OF_EVALUATION), range(_FIRST_OF_EVALUATION, RANGE.stop)


def candidates_of(task: str, kind: str, trial: int) -> Iterator[int]:
    """Return the seed of a trial, and the next ones, which take its place where it is unstable.

    Trials from :data:`EVALUATION` on have the seeds of evaluations; neither kind is replaced by one of the other.
    """
    training, evaluation = seeds_of(task, kind)
    seeds, others, index = training, evaluation, trial
    if trial >= EVALUATION:
        seeds, others, index = evaluation, training, trial - EVALUATION
    if not 0 <= index < len(seeds):
        raise ValueError(
            f"{task} has trials 0 to {len(training) - 1} and {EVALUATION} to {EVALUATION + len(evaluation) - 1}, got "
            f"trial_id={trial}"
        )
    return (seed for seed in count(seeds[index]) if seed not in others)
