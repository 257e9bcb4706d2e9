"""Results of episodes, and the file that has them: ``episodes.jsonl``, a line per episode."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vla_common import keys
from vla_envs.simulator import Episode

NAME = "episodes.jsonl"
IDENTITY = "evaluation.json"  # beside it, of a recipe: whose results they are, so that it may go on there


@dataclass(frozen=True)
class EpisodeResult:
    """How one episode went.

    Attributes:
        episode: its identity.
        task: the name of its task.
        group: the suite or difficulty that the task belongs to; may be empty.
        success_once: solved at some time.
        success_at_end: solved after the last action.
        episode_return: sum of its rewards.
        episode_len: primitive actions executed.
        crashed: it has no result, because the simulator could not begin it, or failed in every attempt; success,
            return, length and subtasks mean nothing.
        attempts: runs it took, more than 1 after a crashed one; 0 if there was no time for it before all simulators
            were broken.
        index: its place among the episodes of the evaluation.
        error: why it crashed, where that is known.
        subtasks: how many tasks of its chain were solved; ``None`` where episodes are no chains.
        remark: what its simulator has said of it, such as another seed than the one asked for.
    """

    episode: Episode
    task: str
    success_once: bool
    success_at_end: bool
    episode_return: float
    episode_len: int
    crashed: bool = False
    attempts: int = 1
    group: str = ""
    index: int = 0
    error: str = ""
    subtasks: int | None = None
    remark: str = ""

    @property
    def name(self) -> str:
        """Task, trial and seed, for messages."""
        return f"{self.task} trial {self.episode.trial_id} seed {self.episode.seed}"


def as_lines(results: Iterable[EpisodeResult]) -> str:
    """Write results as lines of JSON, in their order; those that were never tried are none."""
    return "".join(f"{json.dumps(_entry(result))}\n" for result in results if result.attempts)


def result_of(entry: Mapping[str, Any]) -> EpisodeResult:
    """Make the result that a line has.

    Raises:
        ValueError, KeyError, TypeError: it is something else.
    """
    return EpisodeResult(
        Episode(int(entry[keys.TASK_ID]), int(entry[keys.TRIAL_ID]), int(entry["seed"])),
        entry["task"],
        entry["success_once"],
        entry[keys.SUCCESS_AT_END],
        entry["return"],
        entry["length"],
        entry[keys.CRASHED],
        entry["attempts"],
        entry["group"],
        int(entry["index"]),
        entry.get("error", ""),
        entry.get(keys.SUBTASKS),
        entry.get("remark", ""),
    )


def parts_of(path: Path) -> list[Path]:
    """List the files that other processes have written beside that of the first one."""
    return sorted(path.parent.glob(f"{path.stem}_rank*{path.suffix}"))


def files_of(path: Path) -> list[Path]:
    """List the files of all processes, as far as they are there."""
    return [path, *parts_of(path)] if path.exists() else parts_of(path)


def read_episodes(path: Path) -> list[EpisodeResult]:
    """Read all results that an evaluation has written, also one that was broken off, in the order of the episodes.

    Raises:
        ValueError: it has none, or lines that are something else (those torn by a kill are left out).
    """
    found: dict[int, EpisodeResult] = {}
    for part in files_of(path):
        for number, line in enumerate(part.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            try:
                result = result_of(entry)
            except (ValueError, KeyError, TypeError):
                raise ValueError(f"{part}: line {number} is no result of an episode; type another file") from None
            found[result.index] = result
    if not found:
        raise ValueError(f"{path} has no result of an episode; type the folder of a run")
    return [found[index] for index in sorted(found)]


def _entry(result: EpisodeResult) -> dict[str, Any]:
    entry = {
        "index": result.index,
        "task": result.task,
        keys.TASK_ID: result.episode.task_id,
        keys.TRIAL_ID: result.episode.trial_id,
        "seed": result.episode.seed,
        "group": result.group,
        "success_once": result.success_once,
        keys.SUCCESS_AT_END: result.success_at_end,
        "return": result.episode_return,
        "length": result.episode_len,
        keys.CRASHED: result.crashed,
        "attempts": result.attempts,
    }
    if result.subtasks is not None:
        entry[keys.SUBTASKS] = result.subtasks
    said = {"error": result.error, "remark": result.remark}
    return entry | {name: text for name, text in said.items() if text}
