"""Where the numbers go: TensorBoard and a JSON-lines file, always; other TorchRL loggers on request."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import imageio
import numpy as np
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from torchrl.record.loggers import Logger
from torchrl.record.loggers.tensorboard import TensorboardLogger
from tqdm import tqdm

from vla_algos import parallel


def progress_bar(title: str, total: int, unit: str, initial: int = 0) -> tqdm:
    """Make a progress bar, shown by the first process."""
    return tqdm(total=total, initial=initial, desc=title, unit=unit, disable=not parallel.is_main())


class RunLogger:
    """Writes ``metrics.jsonl`` (one line per call, flushed at once) and ``tensorboard/`` into a folder.

    Of several processes the first one does.

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
        folder.mkdir(parents=True, exist_ok=True)
        if after is not None:
            _forget(folder / "metrics.jsonl", after)
        self._tensorboard = TensorboardLogger(exp_name="tensorboard", log_dir=str(folder))
        if after is not None:  # TensorBoard then hides what an interrupted process wrote beyond
            begin = Event(step=after + 1, session_log=SessionLog(status=SessionLog.START))
            self._tensorboard.experiment.file_writer.add_event(begin)
        self._loggers = [self._tensorboard, *others]
        self._file = open(folder / "metrics.jsonl", "a", encoding="utf-8")  # noqa: SIM115, closed in close()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Write numbers; those that are not finite become ``null`` in the file, as JSON has no NaN."""
        if not self._writes:
            return
        for logger in self._loggers:
            logger.log_metrics(dict(metrics), step=step)
        finite = {name: float(value) if math.isfinite(value) else None for name, value in metrics.items()}
        try:
            self._file.write(json.dumps({"step": step, **finite}) + "\n")
            self._file.flush()
        except OSError as error:  # a full disk must not end the run: the checkpoints say when it is too much
            tqdm.write(f"the metrics of step {step} could not be written: {error}")

    def close(self) -> None:
        """Flush and close the files."""
        if not self._writes:
            return
        self._file.close()
        self._tensorboard.experiment.close()


def _forget(path: Path, after: int) -> None:
    """Keep the lines of iterations up to ``after``, without its evaluation, which runs again."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines():
        with contextlib.suppress(json.JSONDecodeError):  # of a process that died while writing
            entry = json.loads(line)
            tested = any(name.startswith("eval") for name in entry)
            if entry["step"] < after or (entry["step"] == after and not tested):
                kept.append(f"{line}\n")
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text("".join(kept))
    unfinished.replace(path)


def write_video(path: Path, frames: np.ndarray, fps: float) -> Path:
    """Write an mp4 that plays everywhere (H.264, yuv420p).

    Args:
        path: ending in ``.mp4``; missing folders are made.
        frames: uint8 ``[T, H, W, 3]``.
        fps: frames per second. With one frame per decision, control frequency / chunk length is real time.

    Returns:
        ``path``.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # yuv420p halves the resolution of colour and so needs even sides: repeat the last row or column.
    odd_rows, odd_columns = frames.shape[1] % 2, frames.shape[2] % 2
    frames = np.pad(frames, ((0, 0), (0, odd_rows), (0, odd_columns), (0, 0)), mode="edge")
    imageio.mimwrite(path, list(frames), fps=fps, codec="libx264", macro_block_size=1, quality=8)
    return path
