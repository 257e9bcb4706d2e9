"""Services that collect runs, Weights & Biases and SwanLab: TorchRL loggers that append, and forget nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import StringConstraints
from torchrl.record.loggers import Logger

from vla_algos.run.loggers.sink import Sink, kind_of

_PATIENCE = 120  # seconds for what is not uploaded when the run is over; it stays in the run's folder
_LONGEST_NAME = 128

Mode = Literal["online", "offline"]


class Tracker(Sink):
    """A TorchRL logger that only appends: what comes again after an interruption is not given to it twice.

    Args:
        name: of the logger.
        logger: such as ``torchrl.record.loggers.wandb.WandbLogger(...)``.
        logged: the last step that it has, of each kind of numbers (:func:`~vla_algos.run.loggers.sink.kind_of`).
        as_video: makes of a video's path what ``log_metrics`` takes; ``None`` to log no videos.
        finish: ends its run, told whether that was broken off; ``logger.close()`` if ``None``.
        where: how one looks at it.
    """

    def __init__(
        self,
        name: str,
        logger: Logger,
        logged: Mapping[str, int] | None = None,
        *,
        as_video: Callable[[Path], Any] | None = None,
        finish: Callable[[bool], object] | None = None,
        where: str = "",
    ):
        self.name, self._logger, self._logged = name, logger, dict(logged or {})
        self._as_video, self._where = as_video, where
        self._finish = finish or (lambda failed: logger.close())

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log numbers, but for those that it has."""
        if step > self._logged.get(kind_of(metrics), -1):
            self._logger.log_metrics(dict(metrics), step=step)

    def log_settings(self, settings: Mapping[str, Any]) -> None:
        """Log the settings."""
        self._logger.log_hparams(dict(settings))

    def log_videos(self, videos: Mapping[str, Path], step: int) -> None:
        """Log videos, but for those that it has."""
        if self._as_video is None or step <= self._logged.get(kind_of(videos), -1):
            return
        self._logger.log_metrics({name: self._as_video(path) for name, path in videos.items()}, step=step)

    def close(self, failed: bool) -> None:
        """End the run there; what is not uploaded in two minutes stays in the folder."""
        self._finish(failed)

    def where(self) -> str:
        """Return its address, or the command that uploads it."""
        return self._where


def open_wandb(
    folder: Path,
    run_id: str,
    logged: Mapping[str, int] | None = None,
    *,
    project: Annotated[str, StringConstraints(pattern=r"^[^/\\#?%:]{1,128}$")] = "vla-torchrl",
    name: str | None = None,
    entity: str | None = None,
    group: str | None = None,
    mode: Mode = "online",
    videos: bool = True,
) -> Tracker:
    """Begin a run of Weights & Biases by TorchRL's logger, or go on with the one of that id.

    Args:
        folder: of the run; wandb's own is ``wandb/`` in it.
        run_id: of wandb's run.
        logged: what it has, see :class:`Tracker`.
        project: of wandb.
        name: of the run; the last two parts of ``folder`` if ``None``.
        entity: user or team; the user's default if ``None``.
        group: of runs that belong together.
        mode: ``"offline"`` writes files for ``wandb sync``.
        videos: log videos.

    Raises:
        wandb.Error: the server cannot be reached, or refuses the key.
    """
    import wandb
    from torchrl.record.loggers.wandb import WandbLogger

    logger = WandbLogger(
        name or _name(folder),
        save_dir=str(folder),
        id=run_id,
        project=project,
        log_env_packages=False,  # wandb notes them itself
        entity=entity,
        group=group,
        mode=mode,
        reinit="finish_previous",  # of a sweep in one process
        settings=wandb.Settings(finish_timeout=_PATIENCE),
    )
    run = logger.experiment

    def as_video(path: Path) -> Any:
        return wandb.Video(str(path), caption=path.stem, format="mp4")

    return Tracker(
        "wandb",
        logger,
        logged,
        as_video=as_video if videos else None,
        finish=lambda failed: run.finish(exit_code=int(failed)),
        where=run.url if mode == "online" else f"wandb sync {folder}/wandb/offline-run-*-{run_id}",
    )


def open_swanlab(
    folder: Path,
    run_id: str,
    logged: Mapping[str, int] | None = None,
    *,
    project: Annotated[str, StringConstraints(pattern=r"^[0-9a-zA-Z_.+-]{1,100}$")] = "vla-torchrl",
    name: str | None = None,
    workspace: Annotated[str, StringConstraints(pattern=r"^[0-9a-zA-Z_-]{1,25}$")] | None = None,
    group: str | None = None,
    mode: Mode = "online",
    videos: bool = True,
) -> Tracker:
    """Begin a run of SwanLab, or go on with the one of that id.

    Args:
        folder: of the run; SwanLab's own is ``swanlab/`` in it.
        run_id: of SwanLab's run.
        logged: what it has, see :class:`Tracker`.
        project: of SwanLab.
        name: of the run; the last two parts of ``folder`` if ``None``.
        workspace: user or team; the user's own if ``None``.
        group: of runs that belong together.
        mode: ``"offline"`` writes files for ``swanlab sync``.
        videos: log videos, as GIFs, which are all that it shows.

    Raises:
        RuntimeError: the server cannot be reached, or refuses the key.
    """
    from vla_algos.run.loggers.swanlab_logger import SwanLabLogger, as_video

    logger = SwanLabLogger(
        name or _name(folder),
        str(folder / "swanlab"),
        project=project,
        workspace=workspace,
        group=group,
        mode=mode,
        id=run_id,
        resume="allow",
    )
    run = logger.experiment
    return Tracker(
        "swanlab",
        logger,
        logged,
        as_video=as_video if videos else None,
        finish=lambda failed: logger.finish("crashed" if failed else "success", _PATIENCE),
        where=run.url if mode == "online" else f"swanlab sync {folder}/swanlab/run-*-{run_id}",
    )


def has_key(name: str) -> bool:
    """Tell whether the user has logged in to a service, without asking it."""
    if name == "wandb":
        import wandb

        return bool(wandb.login(prompt=False, verify=False))
    import swanlab

    return swanlab.Settings().api_key is not None


def _name(folder: Path) -> str:
    return "/".join(folder.absolute().parts[-2:])[-_LONGEST_NAME:]
