"""TensorBoard's files, which also grow on a disk that is full for a while.

TorchRL's ``TensorboardLogger`` would do but for three things: what an interrupted process wrote beyond its checkpoint
stays in the curves, what a full disk refuses is lost, and each start has its settings in a run of their own.
"""

from __future__ import annotations

import io
import os
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard.summary import hparams

from vla_algos.run.files import Appended
from vla_algos.run.folder import flat
from vla_algos.run.loggers.sink import Sink, kind_of
from vla_algos.run.loggers.videos import as_gif

_COMPARED = ("eval/success_once", "env/success_once")  # what the table of runs shows beside their settings


class Events(Sink):
    """Writes ``tensorboard/`` into the folder of a run, at once.

    Args:
        folder: of the run.
        after: iterations that are done when a run is resumed: TensorBoard then hides what an interrupted process wrote
            beyond them. ``None`` hides nothing.
        evaluated: the evaluation after those was logged already, and comes again.
        videos: write videos too, as GIFs.
    """

    name = "tensorboard"

    def __init__(self, folder: Path, after: int | None = None, evaluated: bool = False, *, videos: bool = False):
        self._folder, self._videos = folder, videos
        self._evaluated = after if evaluated else None
        self._events = Appended(folder / "tensorboard" / _events_name())
        self._add(file_version="brain.Event:2")
        if after is not None:
            self._add(step=after + 1, session_log=SessionLog(status=SessionLog.START))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Write numbers, but for those of an evaluation that it has."""
        if step == self._evaluated and kind_of(metrics) == "eval":
            return
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._add(step=step, summary=Summary(value=values))

    def log_settings(self, settings: Mapping[str, Any]) -> None:
        """Write the settings for the page HPARAMS, which compares runs."""
        plain = {
            name: value if isinstance(value, (bool, int, float, str)) else str(value)
            for name, value in flat(settings).items()
        }
        for summary in hparams(plain, dict.fromkeys(_COMPARED, 0.0)):
            self._add(summary=Summary.FromString(summary.SerializeToString()))

    def log_videos(self, videos: Mapping[str, Path], step: int) -> None:
        """Write videos as images that move, if asked."""
        if not self._videos or (step == self._evaluated and kind_of(videos) == "eval"):
            return
        for name, path in videos.items():
            gif, height, width = as_gif(path)
            image = Summary.Image(encoded_image_string=gif, height=height, width=width, colorspace=3)
            self._add(step=step, summary=Summary(value=[Summary.Value(tag=name, image=image)]))

    def sync(self) -> None:
        """Flush the file to disk."""
        self._events.sync()

    def close(self, failed: bool) -> None:
        """Write what a full disk has refused, if there is room now."""
        self._events.close()

    def where(self) -> str:
        """Return the command that shows it."""
        return f"tensorboard --logdir {self._folder}"

    def _add(self, **what: Any) -> None:
        record = io.BytesIO()
        RecordWriter(record).write(Event(wall_time=time.time(), **what).SerializeToString())
        self._events.append(record.getvalue())


def _events_name() -> str:
    """Name a file as TensorBoard wants it; it shows all of a folder, in the order of their names, as one curve."""
    return f"events.out.tfevents.{time.time():017.6f}.{platform.node()}.{os.getpid()}"
