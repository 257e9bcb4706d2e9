"""Which seed of RoboTwin an episode is: lists of seeds that the scripted demonstrations have solved, and ranges.

The lists are RLinf's (rlinf/envs/robotwin/seeds at a3816b596), of 22 tasks; ``seeds.json`` has of each its first seed
and the differences to the next ones.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from importlib import resources
from itertools import accumulate

KINDS = ("train", "eval", "range")
EVALUATION = 1_000_000  # trials from here on are of the seeds for evaluation, where others are trained on
RANGE = range(10_000, 200_000)  # what RLinf draws from for tasks without a list
_FIRST_OF_EVALUATION = 150_000


@cache
def solved_seeds(kind: str) -> dict[str, tuple[int, ...]]:
    """Read the lists of ``"train"`` or ``"eval"``, by task; no seed is in both."""
    table = json.loads(resources.files("vla_envs.robotwin").joinpath("seeds.json").read_text())
    return {task: tuple(accumulate(steps)) for task, steps in table[kind].items()}


def seeds_of(task: str, kind: str) -> Sequence[int]:
    """List the seeds of a task's trials.

    Args:
        task: its name.
        kind: ``"train"`` or ``"eval"``: the list, or where there is none the lower or the upper part of
            :data:`RANGE`. ``"range"``: all of that, which nobody has tried.
    """
    if kind == "range":
        return RANGE
    if task in solved_seeds(kind):
        return solved_seeds(kind)[task]
    parts = {"train": range(RANGE.start, _FIRST_OF_EVALUATION), "eval": range(_FIRST_OF_EVALUATION, RANGE.stop)}
    return parts[kind]


def seed_of(task: str, kind: str, trial: int) -> int:
    """Return the seed of a trial.

    Args:
        task: its name.
        kind: of :func:`seeds_of`; trials of ``"train"`` from :data:`EVALUATION` on are those of ``"eval"``.
        trial: counts from 0.

    Raises:
        ValueError: there is no such trial.
    """
    held_out = kind == "train" and trial >= EVALUATION
    seeds, index = (seeds_of(task, "eval"), trial - EVALUATION) if held_out else (seeds_of(task, kind), trial)
    if not 0 <= index < len(seeds):
        evaluation = f" and {EVALUATION} to {EVALUATION + len(seeds_of(task, 'eval')) - 1}" if kind == "train" else ""
        raise ValueError(f"{task} has trials 0 to {len(seeds_of(task, kind)) - 1}{evaluation}, got trial_id={trial}")
    return seeds[index]
