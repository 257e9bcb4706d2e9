"""What a data set of LeRobot is: its version, cameras, states, actions, tasks and episodes.

The format is that of https://github.com/huggingface/lerobot, ``codebase_version`` of ``meta/info.json``:

* v2.1 has a file for each episode, ``data/chunk-000/episode_000000.parquet`` and
  ``videos/chunk-000/CAMERA/episode_000000.mp4``, and ``meta/episodes.jsonl`` and ``tasks.jsonl``.
* v3 puts several episodes into a file, ``data/chunk-000/file-000.parquet`` and
  ``videos/CAMERA/chunk-000/file-000.mp4``, and ``meta/episodes/**/*.parquet`` and ``tasks.parquet`` say which.

A camera is a column of PNG bytes (``image``) or a video (``video``). Nothing is downloaded, and nothing that is read
can be code: JSON, parquet, PNG, JPEG and video. No path comes from the data set.
"""

import contextlib
import importlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from vla_common.plain import parse_json, read_json

INFO = Path("meta", "info.json")
ACTIONS, STATES = ("action", "actions"), ("observation.state", "state")  # the names that there are for them
PARQUET = ("pyarrow.parquet", "is a data set of LeRobot, and pyarrow, which reads it")  # of needs()
VIDEOS = ("av", "has videos, and av, which decodes them")
_EPISODE, _FRAME, _TASK, _SUCCESS = "episode_index", "frame_index", "task_index", "next.success"


@dataclass(frozen=True)
class Camera:
    """A camera of a data set."""

    name: str  # of its feature, such as "observation.images.top"
    height: int  # of its images, pixels
    width: int
    video: bool  # whether they are frames of a video


@dataclass(frozen=True)
class Table:
    """All ``F`` frames of a data set but for the images, by episode and in order; what has no type here is int64."""

    actions: np.ndarray  # float32 [F, A]
    states: np.ndarray  # float32 [F, S]
    episode: np.ndarray  # [F], episode_index
    step: np.ndarray  # [F], frame_index
    task: np.ndarray  # [F], task_index
    file: np.ndarray  # [F], which of the files
    group: np.ndarray  # [F], which of its row groups
    row: np.ndarray  # [F], which row of that
    files: Sequence[Path]  # parquet


@dataclass(frozen=True)
class LeRobotFolder:
    """A data set in a local folder."""

    path: Path
    version: tuple[int, int]  # major and minor number of the format
    fps: float  # frames, and so actions, per second
    episodes: int  # how many there are
    frames: int
    cameras: Mapping[str, Camera]  # the colour cameras by name
    action: str  # name of the feature
    state: str
    action_dim: int
    state_dim: int
    chunks_size: int  # how many episodes of v2.1 are in a folder

    @classmethod
    def read(cls, path: str | Path) -> "LeRobotFolder":
        """Read ``meta/info.json``. FileNotFoundError: there is none. ValueError: another version, or damaged."""
        path = Path(path)
        if not is_lerobot(path):
            what = f"{INFO} is missing" if path.is_dir() else "there is no such folder"
            raise FileNotFoundError(f"{path}: no data set of LeRobot is here, {what}; give the folder that has {INFO}")
        try:
            info = read_json(path / INFO)
            features = {str(name): {**feature} for name, feature in info["features"].items()}
            version = _version(path, str(info.get("codebase_version")))
            fps, episodes, frames = float(info["fps"]), int(info["total_episodes"]), int(info["total_frames"])
            cameras = {name: _camera(name, feature) for name, feature in features.items() if _is_camera(feature)}
            action = _vector(path, features, ACTIONS, "actions")
            state = _vector(path, features, STATES, "states")
            chunks = int(info.get("chunks_size", 1000))
            action_dim, state_dim = (int(np.prod(features[name]["shape"])) for name in (action, state))
        except (OSError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
            raise damaged(path, f"{INFO}{' lacks' if isinstance(error, KeyError) else ':'} {error}") from None
        if min(fps, episodes, frames, chunks, action_dim, state_dim) <= 0:
            raise damaged(path, f"{INFO} has no frames")
        if not cameras:
            raise ValueError(f"{path}: no camera is among its features, {', '.join(features)}; take another data set")
        return cls(path, version, fps, episodes, frames, cameras, action, state, action_dim, state_dim, chunks)

    @cached_property
    def tasks(self) -> dict[int, str]:
        """Instructions by ``task_index``."""
        if self.version[0] == 2:
            rows = _json_lines(self.path, "tasks.jsonl")
        else:
            rows = _rows(self.path, self.path / "meta" / "tasks.parquet")
        try:  # pandas writes the index of a table, which v3 has the instruction for, under one of these names
            return {int(row[_TASK]): str(row.get("task", row.get("__index_level_0__"))) for row in rows}
        except (KeyError, TypeError) as error:
            raise damaged(self.path, f"its tasks lack {error}") from None

    @cached_property
    def episode_rows(self) -> dict[int, dict[str, Any]]:
        """What v3 says of each episode, by ``episode_index``: in which videos it is, from when."""
        files = sorted((self.path / "meta" / "episodes").rglob("*.parquet"))
        rows = [row for file in files for row in _rows(self.path, file, "(?!stats/)")]
        return {int(row[_EPISODE]): row for row in rows}

    @cached_property
    def seeds(self) -> list[Any]:
        """Families of initial states of its episodes, where ``vla-recipe rollouts`` has noted them."""
        files = (self.path / "meta" / "episodes").rglob("*.parquet")
        return [row["seed"] for file in files for row in _rows(self.path, file, "seed$") if row]

    @cached_property
    def unsolved(self) -> int:
        """How many episodes were never solved by ``next.success``; 0 where no such column is."""
        solved: dict[int, bool] = {}
        for file in sorted((self.path / "data").rglob("*.parquet")):
            with reading(self.path, file) as opened:
                if _SUCCESS not in opened.schema_arrow.names:
                    return 0
                read = opened.read(columns=[_EPISODE, _SUCCESS])
            for episode, success in zip(*(read[name].to_pylist() for name in (_EPISODE, _SUCCESS)), strict=True):
                solved[episode] = bool(success) or solved.get(episode, False)
        return sum(not each for each in solved.values())

    @cached_property
    def table(self) -> Table:
        """All frames but for the images, some 130 bytes each; ``ValueError`` if ``meta/info.json`` says otherwise."""
        files = sorted((self.path / "data").rglob("*.parquet"))
        parts = [_read_file(self, file, number) for number, file in enumerate(files)]
        if (found := sum(len(part["row"]) for part in parts)) != self.frames:
            raise damaged(self.path, f"{len(files)} files of data/ have {found:,} frames, {INFO} says {self.frames:,}")
        joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        order = np.lexsort([joined[name] for name in ("step", "episode")])
        table = Table(files=files, **{name: array[order] for name, array in joined.items()})
        _, begins, lengths = np.unique(table.episode, return_index=True, return_counts=True)
        if len(begins) != self.episodes:
            raise damaged(self.path, f"it has {len(begins):,} episodes, {INFO} says {self.episodes:,}")
        if (table.step != np.arange(len(table.step)) - np.repeat(begins, lengths)).any():
            raise damaged(self.path, "the frames of an episode are not numbered from 0 on")
        return table

    def video(self, camera: str, episode: int) -> tuple[Path, float]:
        """Find the video of an episode, and the second at which it begins; ``ValueError`` if it is missing."""
        begin = 0.0
        if self.version[0] == 2:
            chunk = f"chunk-{episode // self.chunks_size:03d}"
            file = self.path / "videos" / chunk / camera / f"episode_{episode:06d}.mp4"
        else:
            try:
                row = self.episode_rows[episode]
                numbers = [int(row[f"videos/{camera}/{name}_index"]) for name in ("chunk", "file")]
                begin = float(row[f"videos/{camera}/from_timestamp"])
            except (KeyError, TypeError) as error:
                raise damaged(self.path, f"meta/episodes does not say where episode {episode} is: {error}") from None
            file = self.path / "videos" / camera / f"chunk-{numbers[0]:03d}" / f"file-{numbers[1]:03d}.mp4"
        if not file.is_file():
            raise damaged(self.path, f"{file.relative_to(self.path)} is missing")
        return file, begin


def is_lerobot(folder: str | Path) -> bool:
    """Tell whether a folder is a data set of LeRobot, of whatever version."""
    return (Path(folder) / INFO).is_file()


def damaged(path: Path, what: str) -> ValueError:
    """Say of what a data set lacks something, and what to do."""
    return ValueError(f"{path}: damaged, {what}; copy the data set again")


def needs(path: Path, module: str, what: str) -> Any:
    """Import what reads a data set; a ModuleNotFoundError says what to type."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:
        raise ModuleNotFoundError(f"{path} {what}, is not installed; type pip install 'vla-torchrl[lerobot]'") from None


@contextlib.contextmanager
def reading(path: Path, file: Path) -> Iterator[Any]:
    """Open a parquet file of the data set in ``path``; a ValueError says which file cannot be read."""
    reader = needs(path, *PARQUET)
    try:
        yield reader.ParquetFile(file)
    except (OSError, ValueError, KeyError) as error:  # pyarrow's are among them
        said = (str(error).splitlines() or ["unreadable"])[0]
        raise damaged(path, f"{file.relative_to(path)}: {said}") from None


def _version(path: Path, stored: str) -> tuple[int, int]:
    found = re.fullmatch(r"v?(\d+)\.(\d+)", stored)
    if found is None:
        raise damaged(path, f"{INFO} has codebase_version {stored!r}")
    major, minor = int(found[1]), int(found[2])
    if (major, minor) != (2, 1) and major != 3:
        raise ValueError(
            f"{path}: is in LeRobot's format {stored}, and v2.1 and v3.0 are read; convert an older one with LeRobot "
            "0.3.3 (python -m lerobot.datasets.v2.convert_dataset_v1_to_v2 and .v21.convert_dataset_v20_to_v21), for a "
            "newer one type pip install --upgrade vla-torchrl"
        )
    return major, minor


def _is_camera(feature: Mapping[str, Any]) -> bool:
    if feature.get("dtype") not in ("image", "video"):
        return False
    info = {**(feature.get("video_info") or {}), **(feature.get("info") or {})}
    return not (info.get("is_depth_map") or info.get("video.is_depth_map"))


def _camera(name: str, feature: Mapping[str, Any]) -> Camera:
    if "/" in name or name.startswith("."):  # a part of paths
        raise ValueError(f"{name!r} is no name of a camera; LeRobot's have no slash; rename it in {INFO}")
    shape = [int(number) for number in feature["shape"]]
    if len(shape) != 3 or 3 not in (shape[0], shape[2]):
        raise ValueError(f"the camera {name} has images of shape {shape}, must be height, width and 3 colours")
    height, width = shape[:2] if shape[2] == 3 else shape[1:]
    return Camera(name, height, width, feature["dtype"] == "video")


def _vector(path: Path, features: Mapping[str, Any], names: Sequence[str], what: str) -> str:
    found = [name for name in names if name in features]
    if not found:
        raise ValueError(
            f"{path}: has no {what}: none of its features is {' or '.join(names)}, there are {', '.join(features)}; "
            f"take a data set with {what}"
        )
    return found[0]


def _json_lines(path: Path, name: str) -> list[dict[str, Any]]:
    try:
        return [parse_json(line) for line in (path / "meta" / name).read_text().splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise damaged(path, f"meta/{name}: {error}") from None


def _rows(path: Path, file: Path, columns: str = "") -> list[dict[str, Any]]:
    with reading(path, file) as opened:
        names = [name for name in opened.schema_arrow.names if re.match(columns, name)]
        return opened.read(columns=names).to_pylist()


def _read_file(folder: LeRobotFolder, file: Path, number: int) -> dict[str, np.ndarray]:
    """Return the arrays of :class:`Table` of one file."""
    path, name = folder.path, file.relative_to(folder.path)
    columns = {"episode": (_EPISODE, 1), "step": (_FRAME, 1), "task": (_TASK, 1)}
    columns |= {"actions": (folder.action, folder.action_dim), "states": (folder.state, folder.state_dim)}
    with reading(path, file) as opened:
        sizes = [opened.metadata.row_group(group).num_rows for group in range(opened.num_row_groups)]
        missing = sorted({column for column, _ in columns.values()} - set(opened.schema_arrow.names))
        read = opened.read(columns=[column for column, _ in columns.values() if column not in missing])
    if missing:
        raise damaged(path, f"{name} has no {', '.join(missing)}")
    found = {key: _numbers(path, f"{name}: {column}", read[column], size) for key, (column, size) in columns.items()}
    return {
        **{key: found[key].astype(np.float32) for key in ("actions", "states")},
        **{key: found[key][:, 0].astype(np.int64) for key in ("episode", "step", "task")},
        "file": np.full(sum(sizes), number),
        "group": np.repeat(np.arange(len(sizes)), sizes),
        "row": np.concatenate([np.arange(0), *(np.arange(size) for size in sizes)]),
    }


def _numbers(path: Path, name: str, column: Any, size: int) -> np.ndarray:
    """Return a column of numbers, or of lists of them, as ``[n, size]``."""
    count = len(column)
    values = column.combine_chunks()
    while hasattr(values, "flatten") and str(values.type).startswith(("list", "large_list", "fixed_size_list")):
        values = values.flatten()
    numbers = np.asarray(values.to_numpy(zero_copy_only=False))
    if numbers.dtype.kind not in "iufb" or numbers.size != count * size or not np.isfinite(numbers).all():
        raise damaged(path, f"{name} is not {size} finite numbers in each row")
    return numbers.reshape(count, size)
