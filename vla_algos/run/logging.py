"""Where the numbers go: a JSON-lines file, always, and the loggers that were chosen."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import imageio
import numpy as np
from tqdm import tqdm

from vla_algos import parallel
from vla_algos.run.files import Appended, attempt, finite_or_none, write_atomically
from vla_algos.run.loggers.sink import Sink, kind_of


def progress_bar(title: str, total: int, unit: str, initial: int = 0) -> tqdm:
    """Make a progress bar, shown by the first process."""
    return tqdm(total=total, initial=initial, desc=title, unit=unit, disable=not parallel.is_main())


class RunLogger:
    """Writes ``metrics.jsonl`` into a folder, one line per call and at once, and gives the numbers to the loggers.

    Of several processes the first one does. What a full disk refuses is written later, when there is room; a logger
    that fails is left out of that call, which is said once.

    Args:
        folder: of the run.
        after: iterations that are done when a run is resumed: what an interrupted process wrote beyond them goes, and
            what comes is appended. ``None`` keeps everything.
        sinks: loggers, see :func:`~vla_algos.run.loggers.open_loggers`, which comes before.
    """

    def __init__(self, folder: Path, after: int | None = None, sinks: Sequence[Sink] = ()):
        self._writes, self._sinks, self._closed = parallel.is_main(), sinks, False
        if not self._writes:
            return
        path = folder / "metrics.jsonl"
        self._lines = Appended(path)
        if after is not None:
            attempt(f"{path} without what comes again", lambda: _forget(path, after), "some of its lines come twice")

    def log(self, metrics: Mapping[str, float], step: int, notes: Mapping[str, str] | None = None) -> None:
        """Write numbers; those that are not finite become ``null`` in the file, as JSON has no NaN.

        Args:
            metrics: numbers by name.
            step: the iteration that they are of.
            notes: texts that stand beside them in the file.
        """
        if not self._writes:
            return
        numbers = {name: float(value) for name, value in metrics.items()}
        self._lines.append(json.dumps({"step": step, **(notes or {}), **finite_or_none(numbers)}).encode() + b"\n")
        self._give("what {} logs", lambda sink: sink.log(numbers, step))

    def log_settings(self, settings: Mapping[str, Any]) -> None:
        """Give the settings of the run to the loggers."""
        self._give("the settings for {}", lambda sink: sink.log_settings(settings))

    def log_videos(self, prefix: str, paths: Sequence[Path], step: int) -> None:
        """Give videos to the loggers, as ``<prefix>/video_0``, ... in each iteration."""
        videos = {f"{prefix}/video_{index}": path for index, path in enumerate(paths)}
        if videos:
            self._give("videos for {}", lambda sink: sink.log_videos(videos, step))

    def where(self) -> list[str]:
        """Say for each logger how one looks at what it has."""
        return [sink.where() for sink in self._sinks]

    def sync(self) -> None:
        """Flush the files to disk."""
        if self._writes:
            self._lines.sync()
            self._give("the file for {}", lambda sink: sink.sync())

    def close(self, failed: bool = False) -> None:
        """Write what a full disk has refused, if there is room now, and end the runs of the loggers, once.

        Args:
            failed: the run was broken off.
        """
        if self._writes and not self._closed:
            self._closed = True
            self._lines.close()
            self._give("the end of what {} logs", lambda sink: sink.close(failed))

    def _give(self, what: str, give: Callable[[Sink], object]) -> None:
        if not self._writes:
            return
        for sink in self._sinks:
            attempt(what.format(sink.name), functools.partial(give, sink), "the run goes on without it", Exception)


def _forget(path: Path, after: int) -> None:
    """Keep the lines of iterations up to ``after``, without its evaluation, which runs again, and what is not ours."""
    if not path.exists():
        return
    content = path.read_bytes()
    kept = b"".join(line for line in content.splitlines(keepends=True) if _stays(line, after))
    if kept == content:
        return
    if content.startswith(kept):
        os.truncate(path, len(kept))  # which a full disk allows too
    else:
        write_atomically(path, kept)


def _stays(line: bytes, after: int) -> bool:
    try:
        entry = json.loads(line)
    except ValueError:
        return line.endswith(b"\n")  # else of a process that died while writing
    if not line.endswith(b"\n"):
        return False
    step = entry.get("step") if isinstance(entry, dict) else None
    if not isinstance(step, int):
        return True
    return step < after or (step == after and kind_of(entry) != "eval")


def write_video(path: Path, frames: np.ndarray, fps: float) -> Path:
    """Write an mp4 that plays everywhere (H.264, yuv420p).

    Args:
        path: ending in ``.mp4``; missing folders are made.
        frames: uint8 ``[T, H, W, 3]``.
        fps: frames per second. With one frame per decision, control frequency / chunk length is real time.

    Returns:
        ``path``.

    Raises:
        OSError: it could not be written whole; nothing is left of it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # yuv420p halves the resolution of colour and so needs even sides: repeat the last row or column.
    odd_rows, odd_columns = frames.shape[1] % 2, frames.shape[2] % 2
    frames = np.pad(frames, ((0, 0), (0, odd_rows), (0, odd_columns), (0, 0)), mode="edge")
    unfinished = path.with_name(f".unfinished_{path.name}")
    how: dict[str, Any] = {"codec": "libx264", "macro_block_size": 1, "quality": 8, "ffmpeg_log_level": "fatal"}
    try:
        imageio.mimwrite(unfinished, list(frames), fps=fps, **how)
        if not _is_whole(unfinished):
            raise OSError("ffmpeg broke off; is there room?")
        unfinished.replace(path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise OSError(f"{path}: {str(error).partition(chr(10))[0]}") from error
    return path


def _is_whole(video: Path) -> bool:
    """Tell whether an mp4 has its index and ends where its last part does; ffmpeg's failure goes unnoticed."""
    size, position, found = video.stat().st_size, 0, set()
    with open(video, "rb") as file:
        while position < size:
            file.seek(position)
            header = file.read(16)
            length, kind = int.from_bytes(header[:4], "big"), header[4:8]
            length = int.from_bytes(header[8:16], "big") if length == 1 else length
            found.add(kind)
            position += max(length, 8)
    return position == size and b"moov" in found
