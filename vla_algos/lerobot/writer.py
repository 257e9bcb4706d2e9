"""Writes a data set of LeRobot's format v3.0, with images as PNG; see :mod:`.dataset` for what that is."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from vla_algos.lerobot.dataset import ACTIONS, INFO, PARQUET, STATES, needs
from vla_common import keys

VERSION = "v3.0"
_DATA = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"  # one file is written, with a row group for each
_EPISODES = "meta/episodes/chunk-000/file-000.parquet"
_QUANTILES = {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}


class LeRobotWriter:
    """Writes episodes into a folder, one after the other; it is a data set once :meth:`finish` has returned.

    ``folder`` is made; ``fps`` are actions per second; ``cameras`` have height and width by name; ``robot_type`` is
    what LeRobot calls the robot. ModuleNotFoundError: pyarrow is not installed.
    """

    def __init__(self, folder: Path, fps: float, cameras: Mapping[str, tuple[int, int]], robot_type: str):
        self.folder, self.fps, self.cameras, self.robot_type = folder, fps, cameras, robot_type
        self._parquet = needs(folder, *PARQUET)
        self._arrow = needs(folder, "pyarrow", PARQUET[1])
        self._tasks: dict[str, int] = {}
        self._rows: list[dict[str, Any]] = []  # of meta/episodes
        self._vectors: dict[str, list[np.ndarray]] = {STATES[0]: [], ACTIONS[0]: []}
        self._numbers: dict[str, str] = {}  # type of a frame's other numbers
        self._pixels: list[np.ndarray] = []
        self._frames = 0
        self._data: Any = None

    def append(self, episode: Mapping[str, Any], actions: np.ndarray, facts: Mapping[str, Any]) -> None:
        """Write an episode of ``L`` frames, as :func:`~vla_envs.replay.replay` returns it, and its actions ``[L, A]``.

        ``facts`` are columns of its row in ``meta/episodes`` beside LeRobot's.
        """
        length, texts = len(actions), episode[keys.TASK_DESCRIPTIONS]
        for text in texts:
            self._tasks.setdefault(text, len(self._tasks))
        frame = np.arange(length, dtype=np.int64)
        numbers = {
            "next.reward": episode[keys.REWARD],
            "next.success": episode[keys.SUCCESS],
            "next.done": frame == length - 1,
            "timestamp": (frame / self.fps).astype(np.float32),
            "frame_index": frame,
            "episode_index": np.full_like(frame, len(self._rows)),
            "index": self._frames + frame,
            "task_index": np.array([self._tasks[text] for text in texts], np.int64),
        }
        pa, vectors = self._arrow, {STATES[0]: episode[keys.STATES], ACTIONS[0]: actions}
        columns = {
            name: pa.array([*values.astype(np.float32)], pa.list_(pa.float32(), values.shape[1]))
            for name, values in vectors.items()
        }
        columns |= {name: pa.array(values) for name, values in numbers.items()}
        self._numbers = {name: str(values.dtype) for name, values in numbers.items()}
        kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
        for name, camera in zip(self.cameras, episode["cameras"], strict=True):
            columns[name] = pa.array([{"bytes": image, "path": None} for image in camera], kind)
        self._write(pa.table(columns))
        row = {"episode_index": len(self._rows), "tasks": list(dict.fromkeys(texts)), "length": length}
        row |= {"data/chunk_index": 0, "data/file_index": 0, **facts}
        row |= {"dataset_from_index": self._frames, "dataset_to_index": self._frames + length}
        row |= {"meta/episodes/chunk_index": 0, "meta/episodes/file_index": 0}
        self._rows.append(row)
        self._frames += length
        for name, values in vectors.items():
            self._vectors[name].append(values)
        self._pixels.append(episode["pixels"])

    def finish(self) -> None:
        """Write ``meta/``."""
        self._data.close()
        pa, pq, meta = self._arrow, self._parquet, self.folder / "meta"
        (self.folder / _EPISODES).parent.mkdir(parents=True)
        pq.write_table(pa.Table.from_pylist(self._rows), self.folder / _EPISODES)
        stats = {name: _of_numbers(np.concatenate(values)) for name, values in self._vectors.items()}
        pixels = np.concatenate(self._pixels)
        stats |= {name: _of_pixels(pixels[:, number]) for number, name in enumerate(self.cameras)}
        (meta / "stats.json").write_text(json.dumps(stats, indent=1) + "\n")
        tasks = pa.table({"task_index": pa.array([*self._tasks.values()]), "task": pa.array([*self._tasks])})
        column = {"pandas_type": "int64", "numpy_type": "int64", "metadata": None}
        text = {"pandas_type": "unicode", "numpy_type": "object", "metadata": None}
        names = {"task_index": column, "task": text}
        columns = [{"name": name, "field_name": name, **kind} for name, kind in names.items()]
        index = {"index_columns": ["task"], "column_indexes": [], "columns": columns}  # as pandas keeps it
        pq.write_table(tasks.replace_schema_metadata({"pandas": json.dumps(index)}), meta / "tasks.parquet")
        (self.folder / INFO).write_text(json.dumps(self._info(), indent=1) + "\n")

    def _info(self) -> dict[str, Any]:
        shapes = {name: len(values[0][0]) for name, values in self._vectors.items()}
        features: dict[str, Any] = {name: _feature("float32", [size]) for name, size in shapes.items()}
        features |= {name: _feature(kind, [1]) for name, kind in self._numbers.items()}
        for name, (height, width) in self.cameras.items():
            features[name] = _feature("image", [height, width, 3], ["height", "width", "channels"])
        return {
            "codebase_version": VERSION,
            "robot_type": self.robot_type,
            "total_episodes": len(self._rows),
            "total_frames": self._frames,
            "total_tasks": len(self._tasks),
            "chunks_size": 1000,
            "data_files_size_in_mb": 100,
            "video_files_size_in_mb": 200,
            "fps": self.fps,
            "splits": {"train": f"0:{len(self._rows)}"},
            "data_path": _DATA,
            "video_path": None,
            "features": features,
        }

    def _write(self, table: Any) -> None:
        """Append a row group; the ``datasets`` library learns which columns are images."""
        fields = {field.name: _hugging_face(field.type) for field in table.schema}
        kinds = fields | {name: {"_type": "Image"} for name in self.cameras}
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": kinds}})})
        if self._data is None:
            path = self.folder / _DATA.format(chunk_index=0, file_index=0)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._data = self._parquet.ParquetWriter(path, table.schema)
        self._data.write_table(table)


def _feature(kind: str, shape: list[int], names: list[str] | None = None) -> dict[str, Any]:
    return {"dtype": kind, "shape": shape, "names": names}


def _hugging_face(kind: Any) -> dict[str, Any]:
    """Say what a column is as the ``datasets`` library does."""
    if str(kind).startswith("fixed_size_list"):
        return {"feature": {"dtype": "float32", "_type": "Value"}, "length": kind.list_size, "_type": "Sequence"}
    return {"dtype": {"float": "float32"}.get(str(kind), str(kind)), "_type": "Value"}


def _of_numbers(values: np.ndarray) -> dict[str, Any]:
    values = values.astype(np.float64)
    found = {"min": values.min(0), "max": values.max(0), "mean": values.mean(0), "std": values.std(0)}
    found |= {name: np.quantile(values, share, axis=0) for name, share in _QUANTILES.items()}
    return {name: value.tolist() for name, value in found.items()} | {"count": [len(values)]}


def _of_pixels(frames: np.ndarray) -> dict[str, Any]:
    """Return statistics by colour, as LeRobot has them ``[3, 1, 1]``; ``frames`` as a replay's ``pixels`` has them."""
    mean, square = frames[:, :2].mean(0)
    found = {"min": frames[:, 2].min(0), "max": frames[:, 3].max(0), "mean": mean}
    found["std"] = np.sqrt(np.maximum(square - mean**2, 0))
    return {name: value.reshape(3, 1, 1).tolist() for name, value in found.items()} | {"count": [len(frames)]}
