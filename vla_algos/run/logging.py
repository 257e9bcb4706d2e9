"""Where the numbers go: TensorBoard and a JSON-lines file, always; other TorchRL loggers on request."""

from __future__ import annotations

import functools
import io
import json
import os
import platform
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import imageio
import numpy as np
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter
from torchrl.record.loggers import Logger
from tqdm import tqdm

from vla_algos import parallel
from vla_algos.run.files import Appended, attempt, finite_or_none, write_atomically


def progress_bar(title: str, total: int, unit: str, initial: int = 0) -> tqdm:
    """Make a progress bar, shown by the first process."""
    return tqdm(total=total, initial=initial, desc=title, unit=unit, disable=not parallel.is_main())


class RunLogger:
    """Writes ``metrics.jsonl`` (one line per call) and ``tensorboard/`` into a folder, both at once.

    Of several processes the first one does. What a full disk refuses is written later, when there is room.

    Args:
        folder: of the run.
        after: iterations that are done when a run is resumed: what an interrupted process wrote beyond them goes, and
            what comes is appended. ``None`` keeps everything.
        others: further TorchRL loggers, for example ``torchrl.record.loggers.wandb.WandbLogger(...)``.
    """

    def __init__(self, folder: Path, after: int | None = None, others: Sequence[Logger] = ()):
        self._writes = parallel.is_main()
        if not self._writes:
            return
        path = folder / "metrics.jsonl"
        self._lines, self._events = Appended(path), Appended(folder / "tensorboard" / _events_name())
        self._others = others
        self._add_event(file_version="brain.Event:2")
        if after is not None:
            attempt(f"{path} without what comes again", lambda: _forget(path, after), "some of its lines come twice")
            # TensorBoard then hides what an interrupted process wrote beyond.
            self._add_event(step=after + 1, session_log=SessionLog(status=SessionLog.START))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Write numbers; those that are not finite become ``null`` in the file, as JSON has no NaN."""
        if not self._writes:
            return
        numbers = {name: float(value) for name, value in metrics.items()}
        finite = finite_or_none(numbers)
        self._lines.append(json.dumps({"step": step, **finite}).encode() + b"\n")
        values = [Summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
        self._add_event(step=step, summary=Summary(value=values))
        for logger in self._others:
            log = functools.partial(logger.log_metrics, dict(metrics), step=step)
            attempt(f"what {type(logger).__name__} logs", log, "the run goes on without it", Exception)

    def sync(self) -> None:
        """Flush the files to disk."""
        if self._writes:
            self._lines.sync()
            self._events.sync()

    def close(self) -> None:
        """Write what a full disk has refused, if there is room now."""
        if self._writes:
            self._lines.close()
            self._events.close()

    def _add_event(self, **what: Any) -> None:
        record = io.BytesIO()
        RecordWriter(record).write(Event(wall_time=time.time(), **what).SerializeToString())
        self._events.append(record.getvalue())


def _events_name() -> str:
    """Name a file as TensorBoard wants it; it shows all of a folder, in the order of their names, as one curve."""
    return f"events.out.tfevents.{time.time():017.6f}.{platform.node()}.{os.getpid()}"


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
    return step < after or (step == after and not any(name.startswith("eval") for name in entry))


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
