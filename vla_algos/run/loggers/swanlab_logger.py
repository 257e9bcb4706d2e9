"""TorchRL has no logger for SwanLab: this is one."""

from __future__ import annotations

import functools
import math
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import swanlab
from torch import Tensor
from torchrl.record.loggers import Logger

from vla_algos.run.loggers.videos import as_gif


class SwanLabLogger(Logger):
    """Logs to SwanLab.

    Args:
        exp_name: name of the run.
        log_dir: where SwanLab puts its files.
        **options: of ``swanlab.init``. Nothing is asked on the terminal: without a key ``mode="online"`` is an error.
    """

    def __init__(self, exp_name: str, log_dir: str, **options: Any):
        self._options = options
        super().__init__(exp_name, log_dir)

    def _create_experiment(self) -> Any:
        begin = functools.partial(
            swanlab.init,
            name=self.exp_name,
            log_dir=self.log_dir,
            reinit=True,  # of a sweep in one process
            settings=swanlab.Settings(interactive=False),
            **self._options,
        )
        return _in_thread(begin)

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None, **_: Any) -> dict[str, Any]:
        """Log numbers that are finite, and what SwanLab shows otherwise, such as a video."""
        shown = {name: value for name, value in metrics.items() if not isinstance(value, float) or math.isfinite(value)}
        self.experiment.log(shown, step=step)
        return shown

    def log_scalar(self, name: str, value: float, step: int | None = None) -> None:
        """Log a number."""
        self.log_metrics({name: float(value)}, step)

    def log_video(self, name: str, video: Tensor, step: int | None = None, **_: Any) -> None:
        """Refuse tensors: :func:`as_video` makes of a file what :meth:`log_metrics` takes."""
        raise NotImplementedError("log_metrics({name: as_video(path)}, step) logs a video from its file")

    def log_hparams(self, cfg: Mapping[str, Any]) -> None:
        """Log settings."""
        self.experiment.config.update(dict(cfg))

    def log_histogram(self, name: str, data: Sequence, **_: Any) -> None:
        """Refuse histograms, which SwanLab does not have."""
        raise NotImplementedError("SwanLab has no histograms")

    def finish(self, state: str, seconds: float) -> None:
        """End the run.

        Args:
            state: ``"success"``, ``"crashed"`` or ``"aborted"``.
            seconds: to wait for what is not uploaded.

        Raises:
            TimeoutError: it took longer; the files stay.
        """
        error = "the run was broken off" if state == "crashed" else None
        _in_thread(functools.partial(self.experiment.finish, state=state, error=error), seconds)

    def __repr__(self) -> str:
        return f"SwanLabLogger({self.exp_name!r})"


def as_video(path: Path) -> swanlab.Video:
    """Read a video for :meth:`SwanLabLogger.log_metrics`."""
    return swanlab.Video(as_gif(path)[0], caption=path.stem)


def _in_thread(work: Callable[[], Any], seconds: float | None = None) -> Any:
    """Do something in a thread: there SwanLab leaves Ctrl-C to the run. The hook of exceptions is put back.

    Raises:
        TimeoutError: it takes longer than ``seconds``, and goes on as long as the process does.
    """
    hook, done = sys.excepthook, Future[Any]()

    def in_thread() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=in_thread, daemon=True).start()
    try:
        return done.result(seconds)
    finally:
        sys.excepthook = hook
