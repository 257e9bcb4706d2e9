"""Results of episodes, and the files that have them: ``episodes.jsonl``, a line per episode, and of training."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vla_common.keys import CRASHED, DONE, SUBTASKS, SUCCESS_AT_END, TASK_ID, TRIAL_ID
from vla_common.plain import parse_json
from vla_envs.simulator import Episode

NAME = "episodes.jsonl"
IDENTITY = "evaluation.json"  # in a recipe's folder: of which policy the results are
TRAINED = "training_episodes.jsonl"  # what was executed in training
IN_TRAINING = "eval.jsonl"  # the episodes of an evaluation within a training run
_FIELDS: dict[str, Any] = {  # of a line, in its order
    "index": int,
    "task": str,
    TASK_ID: int,
    TRIAL_ID: int,
    "seed": int,
    "group": str,
    "success_once": bool,
    SUCCESS_AT_END: bool,
    "return": (int, float),
    "length": int,
    CRASHED: bool,
    "attempts": int,
    SUBTASKS: (int, type(None)),
    "error": str,
    "remark": str,
    "actions": (list, type(None)),
}
_OPTIONAL = {SUBTASKS: None, "error": "", "remark": "", "actions": None}
_ATTRIBUTES = {"return": "episode_return", "length": "episode_len"}  # where they are not named as in a line


@dataclass(frozen=True)
class EpisodeResult:
    """How one episode went.

    Attributes:
        episode: its identity.
        task: the name of its task.
        success_once: solved at some time.
        success_at_end: solved after the last action.
        episode_return: sum of its rewards.
        episode_len: primitive actions executed.
        crashed: the simulator failed in every attempt; success, return, length and subtasks mean nothing.
        attempts: runs it took, more than 1 after a crash; 0 if all simulators were broken before its first.
        group: the suite or difficulty that the task belongs to; may be empty.
        index: its place among the episodes of the evaluation.
        error: why it crashed, where that is known.
        subtasks: how many tasks of its chain were solved; ``None`` where episodes are no chains.
        remark: what its simulator has said of it, such as another seed than the one asked for.
        actions: what was executed, ``[L, A]``, where that was kept.
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
    actions: list[list[float]] | None = None

    @property
    def name(self) -> str:
        """Task, trial and seed, for messages."""
        return f"{self.task} trial {self.episode.trial_id} seed {self.episode.seed}"


def as_lines(results: Iterable[EpisodeResult], **more: Any) -> str:
    """Write results as lines of JSON, in their order, each with ``more``; those that were never tried have none."""
    return "".join(f"{json.dumps({**_entry(result), **more})}\n" for result in results if result.attempts)


def _entry(result: EpisodeResult) -> dict[str, Any]:
    known = {**vars(result), **vars(result.episode)}
    entry = {name: known[_ATTRIBUTES.get(name, name)] for name in _FIELDS}
    return {name: value for name, value in entry.items() if name not in _OPTIONAL or value != _OPTIONAL[name]}


def _result(entry: Mapping[str, Any]) -> EpisodeResult:
    """Make the result of a line; ``KeyError`` or ``TypeError`` if it has none."""
    entry = {**_OPTIONAL, **entry}
    for name, kind in _FIELDS.items():
        if not isinstance(entry[name], kind):
            raise TypeError(f"{name} is {entry[name]!r}")
    episode = {name: entry[name] for name in (TASK_ID, TRIAL_ID, "seed")}
    rest = {_ATTRIBUTES.get(name, name): entry[name] for name in _FIELDS if name not in episode}
    return EpisodeResult(Episode(**episode), **rest)


def part_of(path: Path, rank: int) -> Path:
    """Return the file that the process of a rank writes."""
    return path.with_name(f"{path.stem}_rank{rank}{path.suffix}") if rank else path


def parts_of(path: Path) -> list[Path]:
    """List the files that the other processes than rank 0 have written."""
    return sorted(path.parent.glob(f"{path.stem}_rank*{path.suffix}"))


def files_of(path: Path) -> list[Path]:
    """List the files of all processes, as far as they are there."""
    return [path, *parts_of(path)] if path.exists() else parts_of(path)


def _entries(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the place and content of every line; those torn by a kill are left out."""
    for part in files_of(path):
        for number, line in enumerate(part.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            try:
                yield f"{part}: line {number}", parse_json(line)
            except ValueError:
                continue


def read_episodes(path: Path) -> list[EpisodeResult]:
    """Read all results in the order of the episodes; ``ValueError`` if there are none, or lines of something else."""
    found = {result.index: result for _, result in _results(path)}
    if not found:
        raise ValueError(f"{path} has no result of an episode; type the folder of a run")
    return [found[index] for index in sorted(found)]


def read_training(path: Path) -> list[EpisodeResult]:
    """Read the episodes of training that have ended; ``ValueError`` if a line is something else.

    A line has what one environment (``slot``, of all processes) has executed of an episode in one iteration (``step``),
    and how the episode is by then: ``length`` counts from its beginning, and ``done`` says that it has ended. Of an
    episode that crashed or was abandoned there is no such line.
    """
    found, running = list[EpisodeResult](), dict[str, EpisodeResult]()
    for entry, part in _results(path):
        slot, actions = str(entry.get("slot")), part.actions or []
        before = running.pop(slot, None)
        if len(actions) < part.episode_len and before is not None and before.episode == part.episode:
            actions = [*(before.actions or []), *actions]  # it had begun in an earlier iteration
        if len(actions) == part.episode_len and entry.get(DONE):
            found.append(replace(part, actions=actions, index=len(found)))
        elif len(actions) == part.episode_len:
            running[slot] = replace(part, actions=actions)
    return found


def _results(path: Path) -> Iterator[tuple[Mapping[str, Any], EpisodeResult]]:
    """Yield each line and its result; ``ValueError`` if it has none."""
    for place, entry in _entries(path):
        try:
            yield entry, _result(entry)
        except (KeyError, TypeError):
            raise ValueError(f"{place} is no result of an episode; type another file") from None


def finished_episodes(path: Path, episodes: Sequence[Episode], chain_length: int = 1) -> dict[int, EpisodeResult]:
    """Read the results of an interrupted evaluation of ``episodes``, by index; crashed episodes have none.

    Lines of other episodes are left out, and of chains of tasks those without the number of solved ones.
    """
    found = {}
    for _, entry in _entries(path):
        try:
            result = _result(entry)
            known = result.episode == episodes[result.index] and not result.crashed
        except (KeyError, TypeError, IndexError):
            continue
        if known and (chain_length == 1 or result.subtasks in range(chain_length + 1)):
            found[result.index] = result if chain_length > 1 else replace(result, subtasks=None)
    return found
