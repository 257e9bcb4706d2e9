"""Where the numbers go: ``metrics.jsonl``, always, and what else takes them (:mod:`~vla_algos.run.loggers`)."""

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from vla_algos import distributed
from vla_algos.files import finite_or_none, flush, write_atomically
from vla_common.plain import parse_json


def progress_bar(title: str, total: int, unit: str, initial: int = 0) -> tqdm:
    """Make a progress bar, shown by rank 0; the time left is by the mean of all that was done."""
    often: dict[str, Any] = {"miniters": 0, "smoothing": 0}  # drawn within an iteration too
    return tqdm(total=total, initial=initial, desc=title, unit=unit, disable=not distributed.is_main(), **often)


def show_iteration(bar: tqdm, iteration: int, metrics: Mapping[str, float]) -> None:
    """Show success and speed beside the progress bar, and as a line in the log of a SLURM job."""
    success = metrics.get("env/success_once", float("nan"))  # not a number where none has ended
    how = "no episode ended" if math.isnan(success) else f"success {100 * success:.0f}%"
    if not math.isnan(subtasks := metrics.get("env/avg_num_subtasks", float("nan"))):
        how += f", {subtasks:.2f} subtasks"
    text = f"{how}, {metrics['env_steps_per_s']:.0f} env steps/s"
    bar.set_postfix_str(text)
    if "SLURM_JOB_ID" in os.environ:
        print(f"iteration {iteration} of {bar.total}: {text}", flush=True)


class RunLogger:
    """Writes ``metrics.jsonl`` into a run's folder, a line per call and at once, and gives the numbers to the loggers.

    Of several processes rank 0 does. ``after`` are the iterations that are done when a run is resumed: what an
    interrupted process wrote beyond them goes. ``loggers`` were opened before (:func:`open_loggers`).
    """

    def __init__(self, folder: Path, after: int | None = None, loggers: "Sequence[Logger]" = ()):
        self._path, self._loggers, self._failed = folder / "metrics.jsonl", loggers, set[str]()
        self._open = distributed.is_main()
        if self._open and after is not None:
            forget(self._path, after)

    def log(self, metrics: Mapping[str, float], step: int, notes: Mapping[str, str] | None = None) -> None:
        """Write numbers of an iteration, ``null`` for those that are not finite, and ``notes`` into the file."""
        if not self._open:
            return
        numbers = {name: float(value) for name, value in metrics.items()}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with open(self._path, "a") as file:
            file.write(json.dumps({"step": step, **(notes or {}), **finite_or_none(numbers)}) + "\n")
        self._give(lambda logger: logger.log(numbers, step))

    def log_settings(self, settings: Mapping[str, Any]) -> None:
        """Give the settings of the run to the loggers."""
        self._give(lambda logger: logger.log_settings(settings))

    def log_videos(self, prefix: str, paths: Sequence[Path], step: int) -> None:
        """Give videos to the loggers, as ``<prefix>/video_0``, ... in each iteration."""
        videos = {f"{prefix}/video_{index}": path for index, path in enumerate(paths)}
        self._give(lambda logger: logger.log_videos(videos, step))

    def where(self) -> list[str]:
        """Say for each logger how one looks at what it has."""
        return [logger.where for logger in self._loggers]

    def sync(self) -> None:
        """Flush the files to disk."""
        if self._open and self._path.exists():
            flush(self._path)
            flush(self._path.parent)
        self._give(lambda logger: logger.sync())

    def close(self, failed: bool = False) -> None:
        """End the runs of the loggers, once; ``failed``: the run was broken off."""
        self._give(lambda logger: logger.close(failed))
        self._open = False

    def _give(self, give: "Callable[[Logger], object]") -> None:
        for logger in self._loggers if self._open else ():
            try:
                give(logger)
            except Exception as error:
                if not logger.may_fail:
                    raise
                if logger.name not in self._failed:  # once: a network may be gone for hours
                    tqdm.write(f"warning: {logger.name} fails ({error}); the run continues")
                self._failed.add(logger.name)


class Logger:
    """Where the numbers of a run go as well as into ``metrics.jsonl``; a subclass overrides what it takes."""

    name: str  # as it is typed
    where: str  # how one looks at it, for printing
    may_fail: bool = False  # the run continues without it

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Take numbers of an iteration."""

    def log_settings(self, settings: Mapping[str, Any]) -> None:
        """Take the settings of the run, by section."""

    def log_videos(self, videos: Mapping[str, Path], step: int) -> None:
        """Take videos (mp4) by name."""

    def sync(self) -> None:
        """Write what waits; called before each checkpoint."""

    def close(self, failed: bool) -> None:
        """Write the rest; ``failed`` if the run did not reach its end."""


def entries(path: Path) -> list[dict[str, Any]]:
    """Read the lines of ``metrics.jsonl`` that are of a run; none if there is no file."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    return [entry for entry in map(_entry, lines) if entry is not None]


def never_trained(folder: Path) -> list[str]:
    """Say, where that is so, that the policy of a run never had a learning rate above 0."""
    lines = [line for line in entries(folder / "metrics.jsonl") if line.get("train/actor/lr") is not None]
    if not lines or any(line["train/actor/lr"] for line in lines):
        return []
    steps = sum(int(line.get("train/steps") or 0) for line in lines)
    return [
        f"the policy is as it was: in all {steps} optimizer steps of this run only the critic learnt; type more "
        "iterations, or a smaller update.critic_warmup_steps (0 for none)"
    ]


def kind_of(names: Iterable[str]) -> str:
    """Tell names of an evaluation from those of training: of an iteration, either may come again without the other."""
    return "eval" if any(name.startswith("eval") for name in names) else "train"


def _entry(line: bytes) -> dict[str, Any] | None:
    try:
        entry = parse_json(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) and isinstance(entry.get("step"), int) else None


def last_steps(path: Path) -> dict[str, int]:
    """Read the last iteration in ``metrics.jsonl``, by :func:`kind_of` its numbers."""
    found: dict[str, int] = {}
    for entry in entries(path):
        kind = kind_of(entry)
        found[kind] = max(entry["step"], found.get(kind, -1))
    return found


def forget(path: Path, after: int) -> None:
    """Keep the lines of iterations up to ``after``, and what is not ours, but for what a process that died has torn."""

    def stays(line: bytes) -> bool:
        entry = _entry(line)
        return line.endswith(b"\n") and (entry is None or entry["step"] <= after)

    if path.exists():
        write_atomically(path, b"".join(line for line in path.read_bytes().splitlines(keepends=True) if stays(line)))
