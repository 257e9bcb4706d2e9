"""The loggers that can be chosen: TensorBoard, and services that collect runs."""

import contextlib
import importlib.util
import io
import math
import os
import struct
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Literal
from unittest import mock

import huggingface_hub
import imageio.v3 as iio
from pydantic import StringConstraints
from tensorboard.compat.proto.summary_pb2 import Summary
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams
from tqdm import tqdm

from vla_algos import distributed
from vla_algos.run.folder import flat
from vla_algos.run.logging import Logger, kind_of, last_steps
from vla_algos.run.provenance import last_sent, run_id
from vla_common.settings import check_settings, setting_types

_COMPARED = ("eval/success_once", "env/success_once")  # what TensorBoard's table of runs shows beside their settings
_PLAIN = (bool, int, float, str)  # what that table can show
_LONGEST_NAME = 128  # characters, that wandb takes
_Mode = Literal["online", "offline"]
_GIF_SIDE = 320  # pixels at most: a GIF of an episode is to be some hundred kilobytes


class _TensorBoard(Logger):
    """``tensorboard/`` in the folder of a run; of a resumed one, what was written beyond its checkpoint is hidden."""

    name = "tensorboard"

    def __init__(self, folder: Path, after: int | None, videos: bool = True):
        self._videos, self.where = videos, f"tensorboard --logdir {folder}"
        purge = 0 if after is None else after + 1  # also what a run wrote that was killed before its first checkpoint
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=purge)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def log_settings(self, settings: Mapping[str, Any]) -> None:
        """Write the settings for the page HPARAMS; ``SummaryWriter.add_hparams`` would make another run."""
        plain = {name: value if isinstance(value, _PLAIN) else str(value) for name, value in flat(settings).items()}
        for summary in hparams(plain, dict.fromkeys(_COMPARED, 0.0)):
            self._writer._get_file_writer().add_summary(summary)

    def log_videos(self, videos: Mapping[str, Path], step: int) -> None:
        for name, path in videos.items() if self._videos else ():
            gif = as_gif(path)
            width, height = struct.unpack("<HH", gif[6:10])
            image = Summary.Image(encoded_image_string=gif, width=width, height=height, colorspace=3)
            self._writer._get_file_writer().add_summary(Summary(value=[Summary.Value(tag=name, image=image)]), step)

    def sync(self) -> None:
        self._writer.flush()

    def close(self, failed: bool) -> None:
        self._writer.close()


class _Service(Logger):
    """A service that collects runs; what ``metrics.jsonl`` had before a resume is not sent again."""

    may_fail = True
    _run: Any  # the service's own

    def __init__(
        self,
        folder: Path,
        after: int | None,
        *,
        project: Annotated[str, StringConstraints(pattern=r"^[0-9a-zA-Z_.+-]{1,100}$")] = "vla-torchrl",
        name: str | None = None,
        group: str | None = None,
        videos: bool = True,
    ):
        self._videos = videos
        self._id = run_id(folder, self.name, new=after is None)
        self._logged = last_sent(folder, self.name, {} if after is None else last_steps(folder / "metrics.jsonl"))
        self._name = name or "/".join(folder.absolute().parts[-2:])[-_LONGEST_NAME:]
        self._where = {"project": project, "group": group}

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        if step > self._logged.get(kind_of(metrics), -1):
            self._give(dict(metrics), step)

    def log_videos(self, videos: Mapping[str, Path], step: int) -> None:
        if self._videos and videos:
            self.log({name: self._video(path) for name, path in videos.items()}, step)

    def log_settings(self, settings: Mapping[str, Any]) -> None:
        self._run.config.update(dict(settings))

    def _give(self, metrics: dict[str, Any], step: int) -> None:
        self._run.log(metrics, step=step)

    def _video(self, path: Path) -> Any:
        return importlib.import_module(self.name).Video(str(path), caption=path.stem, format="mp4")


class _Wandb(_Service):
    """Weights & Biases, by TorchRL's logger; ``entity`` is a user or team."""

    name = "wandb"

    def __init__(
        self, folder: Path, after: int | None, *, entity: str | None = None, mode: _Mode = "online", **options: Any
    ):
        from torchrl.record.loggers.wandb import WandbLogger

        super().__init__(folder, after, **options)
        others = {"entity": entity, "log_env_packages": False, "reinit": "finish_previous"}  # of a sweep
        others |= {"mode": mode, "id": self._id, "resume": "allow"}
        self._logger = WandbLogger(self._name, save_dir=str(folder), **self._where, **others)
        self.where = self._logger.experiment.url or f"wandb sync {folder}/wandb/offline-run-*-{self._id}"

    def _give(self, metrics: dict[str, Any], step: int) -> None:
        self._logger.log_metrics(metrics, step=step)

    def log_settings(self, settings: Mapping[str, Any]) -> None:
        self._logger.log_hparams(dict(settings))

    def close(self, failed: bool) -> None:
        self._logger.experiment.finish(exit_code=int(failed))


class _SwanLab(_Service):
    """SwanLab, for which TorchRL has no logger; it shows videos as GIFs."""

    name = "swanlab"

    def __init__(
        self,
        folder: Path,
        after: int | None,
        *,
        workspace: Annotated[str, StringConstraints(pattern=r"^[0-9a-zA-Z_-]{1,25}$")] | None = None,
        mode: _Mode = "online",
        **options: Any,
    ):
        import swanlab

        super().__init__(folder, after, **options)
        others = {"workspace": workspace, "reinit": True, "settings": swanlab.Settings(interactive=False)}
        others |= {"mode": mode, "id": self._id, "resume": "allow"}
        named = {"name": self._name, "log_dir": str(folder / "swanlab")}
        self._run = _in_thread(lambda: swanlab.init(**named, **self._where, **others))
        self.where = self._run.url if mode == "online" else f"swanlab sync {folder}/swanlab/run-*-{self._id}"

    def _give(self, metrics: dict[str, Any], step: int) -> None:
        shown = {name: each for name, each in metrics.items() if not isinstance(each, float) or math.isfinite(each)}
        self._run.log(shown, step=step)

    def _video(self, path: Path) -> Any:
        import swanlab

        return swanlab.Video(as_gif(path), caption=path.stem)

    def close(self, failed: bool) -> None:
        error = "the run was broken off" if failed else None
        _in_thread(lambda: self._run.finish(state="crashed" if failed else "success", error=error))


class _Trackio(_Service):
    """Trackio, by TorchRL's logger: a data base of this user's; only a Space that is named gets the run."""

    name = "trackio"

    def __init__(
        self,
        folder: Path,
        after: int | None,
        *,
        space: Annotated[str, StringConstraints(pattern=r"^[\w.-]+/[\w.-]+$")] | None = None,
        **options: Any,
    ):
        from torchrl.record.loggers.trackio import TrackioLogger

        super().__init__(folder, after, **options)
        others = {"space_id": space, "private": True, "embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
        # It resumes by name. Of a run that stays here too it would ask Hugging Face who has logged in.
        offline = contextlib.nullcontext() if space else mock.patch("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        with contextlib.redirect_stdout(io.StringIO()), offline:
            self._run = TrackioLogger(f"{self._name}-{self._id}", **self._where, **others).experiment
        shown = f"https://huggingface.co/spaces/{space}"
        self.where = shown if space else f"trackio show --project {self._where['project']}"

    def close(self, failed: bool) -> None:
        import trackio

        with contextlib.redirect_stdout(io.StringIO()):
            trackio.finish()


_SERVICES: dict[str, Callable[..., Logger]] = {"wandb": _Wandb, "swanlab": _SwanLab, "trackio": _Trackio}
_CLASSES: dict[str, Callable[..., Logger]] = {"tensorboard": _TensorBoard, **_SERVICES}
LOGGERS: Mapping[str, Mapping[str, Any]] = {  # settings of each and their types
    name: setting_types(each, without=["folder", "after"]) for name, each in _CLASSES.items()
}


def check_loggers(chosen: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse (ValueError) settings that a logger does not have, and services that lack their package or key."""
    for name, settings in chosen.items():
        check_settings(f"logger.{name}", settings, LOGGERS[name])
    for name in (each for each in chosen if each in _SERVICES):
        _check_service(name, chosen[name])


def open_loggers(chosen: Mapping[str, Mapping[str, Any]], folder: Path, after: int | None = None) -> list[Logger]:
    """Open the loggers of a run, by their settings, in rank 0; ValueError if a service of a new run cannot be reached.

    Of a resumed run ``after`` iterations are done: it continues in the same runs of the services, without those that
    cannot be reached, which is printed.
    """
    found: list[Logger] = []
    for name in chosen if distributed.is_main() else ():
        try:
            found.append(_CLASSES[name](folder, after, **chosen[name]))
        except Exception as error:
            if name not in _SERVICES:
                raise
            reason = f"logger={name}: {str(error).strip().partition(chr(10))[0]}"
            if after is None:
                offline = "space=null" if name == "trackio" else "mode=offline"
                raise OSError(f"{reason}; without a network type logger.{name}.{offline}") from error
            tqdm.write(f"warning: {reason}; the run continues without it")
    return found


def as_gif(path: Path) -> bytes:
    """Read a video and return it as an animated GIF; of a large one every second or third pixel is taken."""
    about = iio.immeta(path)
    every = -(-max(about["size"]) // _GIF_SIDE)
    frames = iio.imread(path)[:, ::every, ::every]
    return iio.imwrite("<bytes>", frames, extension=".gif", duration=1000 / about["fps"], loop=0)


def _check_service(name: str, settings: Mapping[str, Any]) -> None:
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:  # a folder of that name is not it
        raise ValueError(
            f"logger={name}: the package {name} is not installed; type: pip install 'vla-torchrl[{name}]', or leave "
            f"{name} out"
        )
    if name != "trackio":
        if settings.get("mode", "online") == "online" and not _has_key(name):
            raise ValueError(f"logger={name}: no API key; type: {name} login, or logger.{name}.mode=offline")
        return
    space = settings.get("space")
    for variable in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):  # nothing is sent away that was not typed
        if space is None and os.environ.get(variable):
            raise ValueError(
                f"logger=trackio: {variable} would send the run elsewhere; type: unset {variable}, or "
                "logger.trackio.space=NAME/SPACE to send it to one of Hugging Face"
            )
    if space is not None and huggingface_hub.get_token() is None:
        raise ValueError("logger=trackio: no token for logger.trackio.space; type: hf auth login, or leave space out")


def _has_key(name: str) -> bool:
    """Tell whether the user has logged in to a service, without asking it."""
    if name == "wandb":
        import wandb

        return bool(wandb.login(prompt=False, verify=False))
    import swanlab

    return swanlab.Settings().api_key is not None


def _in_thread(work: Callable[[], Any]) -> Any:
    """Do something in a thread: there SwanLab leaves Ctrl-C to the run. The hook of exceptions is put back."""
    hook = sys.excepthook
    try:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(work).result()
    finally:
        sys.excepthook = hook
