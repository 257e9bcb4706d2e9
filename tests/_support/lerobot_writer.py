"""Writes data sets in LeRobot's format, as a recording of LeRobot would be: v2.1 and v3, with PNG images or videos."""

import io
import json

import numpy as np
from PIL import Image

FPS = 80  # Meta-World's
QUANTILES = {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}


def write_lerobot(
    folder, episodes, *, version="v3.0", fps=FPS, video=False, state="observation.state", action="action"
):
    """Write ``episodes`` and return ``folder``.

    Each is ``{"task": text, "states": [T, S], "actions": [T, A], "images": {camera: uint8 [T, H, W, 3]}}``. In v3 all
    are in one file, with a row group each; in v2.1 each has a file.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    (folder / "meta").mkdir(parents=True)
    tasks = list(dict.fromkeys(episode["task"] for episode in episodes))
    frames, tables, rows = 0, [], []
    for number, episode in enumerate(episodes):
        length = len(episode["states"])
        columns = {
            state: _vectors(pa, episode["states"]),
            action: _vectors(pa, episode["actions"]),
            "timestamp": pa.array(np.arange(length, dtype=np.float32) / fps),
            "frame_index": pa.array(np.arange(length)),
            "episode_index": pa.array(np.full(length, number)),
            "index": pa.array(np.arange(frames, frames + length)),
            "task_index": pa.array(np.full(length, tasks.index(episode["task"]))),
        }
        if not video:
            for name, images in episode["images"].items():
                encoded = [{"bytes": _png(image), "path": None} for image in images]
                columns[name] = pa.array(encoded, pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
        tables.append(_with_features(pa, pa.table(columns), [] if video else list(episode["images"])))
        rows.append({"episode_index": number, "tasks": [episode["task"]], "length": length, "from": frames})
        frames += length
    if version == "v3.0":
        _write_v3(pa, pq, folder, tasks, tables, rows, episodes, fps, video)
    else:
        _write_v21(pq, folder, tasks, tables, rows, episodes, fps, video)
    example = episodes[0]
    features = {
        state: {"dtype": "float32", "shape": [len(example["states"][0])], "names": None},
        action: {"dtype": "float32", "shape": [len(example["actions"][0])], "names": None},
        **{
            name: {
                "dtype": "video" if video else "image",
                "shape": list(images.shape[1:]),
                "names": ["height", "width", "channels"],
                **({"info": {"video.fps": fps, "video.is_depth_map": False}} if video else {}),
            }
            for name, images in example["images"].items()
        },
        "timestamp": {"dtype": "float32", "shape": [1], "names": None},
        **{name: {"dtype": "int64", "shape": [1], "names": None} for name in _INDICES},
    }
    info = {
        "codebase_version": version,
        "robot_type": "sawyer",
        "total_episodes": len(episodes),
        "total_frames": frames,
        "total_tasks": len(tasks),
        "chunks_size": 1000,
        "fps": fps,
        "splits": {"train": f"0:{len(episodes)}"},
        "data_path": _DATA[version],
        "video_path": _VIDEO[version] if video else None,
        "features": features,
    }
    if version == "v3.0":
        info |= {"data_files_size_in_mb": 100, "video_files_size_in_mb": 200}
    else:
        info |= {"total_videos": len(episodes) * len(example["images"]) * video, "total_chunks": 1}
    (folder / "meta" / "info.json").write_text(json.dumps(info, indent=2))
    return folder


_INDICES = ("frame_index", "episode_index", "index", "task_index")
_DATA = {
    "v3.0": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
    "v2.1": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
}
_VIDEO = {
    "v3.0": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
    "v2.1": "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
}


def _write_v3(pa, pq, folder, tasks, tables, rows, episodes, fps, video):
    data = folder / "data" / "chunk-000" / "file-000.parquet"
    data.parent.mkdir(parents=True)
    with pq.ParquetWriter(data, tables[0].schema) as writer:
        for table in tables:
            writer.write_table(table)
    described = []
    for row, episode in zip(rows, episodes, strict=True):
        start = row["from"]
        entry = {"episode_index": row["episode_index"], "tasks": row["tasks"], "length": row["length"]}
        entry |= {"data/chunk_index": 0, "data/file_index": 0}
        entry |= {"dataset_from_index": start, "dataset_to_index": start + row["length"]}
        entry |= {"meta/episodes/chunk_index": 0, "meta/episodes/file_index": 0}
        for name in episode["images"] if video else ():
            entry |= {f"videos/{name}/chunk_index": 0, f"videos/{name}/file_index": 0}
            entry[f"videos/{name}/from_timestamp"] = start / fps
            entry[f"videos/{name}/to_timestamp"] = (start + row["length"]) / fps
        for name, numbers in _stats(episode).items():
            entry |= {f"stats/{name}/{kind}": value for kind, value in numbers.items()}
        described.append(entry)
    place = folder / "meta" / "episodes" / "chunk-000" / "file-000.parquet"
    place.parent.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(described), place)
    index = {"task_index": pa.array(range(len(tasks))), "__index_level_0__": pa.array(tasks)}
    # As pandas writes a table whose index is the instruction.
    meta = {"index_columns": ["__index_level_0__"], "columns": [], "column_indexes": [], "pandas_version": "2.2.0"}
    meta["columns"] = [
        {"name": "task_index", "field_name": "task_index", "pandas_type": "int64", "numpy_type": "int64"},
        {"name": None, "field_name": "__index_level_0__", "pandas_type": "unicode", "numpy_type": "object"},
    ]
    table = pa.table(index).replace_schema_metadata({"pandas": json.dumps(meta)})
    pq.write_table(table, folder / "meta" / "tasks.parquet")
    joined = {name: np.concatenate([episode[name] for episode in episodes]) for name in ("states", "actions")}
    (folder / "meta" / "stats.json").write_text(json.dumps(_stats({**joined, "images": {}})))
    if video:
        for name in episodes[0]["images"]:
            file = folder / "videos" / name / "chunk-000" / "file-000.mp4"
            write_video(file, np.concatenate([episode["images"][name] for episode in episodes]), fps)


def _write_v21(pq, folder, tasks, tables, rows, episodes, fps, video):
    (folder / "data" / "chunk-000").mkdir(parents=True)
    for number, (table, episode) in enumerate(zip(tables, episodes, strict=True)):
        pq.write_table(table, folder / "data" / "chunk-000" / f"episode_{number:06d}.parquet")
        if video:
            for name, images in episode["images"].items():
                write_video(folder / "videos" / "chunk-000" / name / f"episode_{number:06d}.mp4", images, fps)
    lines = {
        "tasks.jsonl": [{"task_index": number, "task": task} for number, task in enumerate(tasks)],
        "episodes.jsonl": [{name: row[name] for name in ("episode_index", "tasks", "length")} for row in rows],
        "episodes_stats.jsonl": [
            {"episode_index": number, "stats": _stats(episode)} for number, episode in enumerate(episodes)
        ],
    }
    for name, entries in lines.items():
        (folder / "meta" / name).write_text("".join(json.dumps(entry) + "\n" for entry in entries))


def write_video(file, images, fps, codec="libx264"):
    """Write frames as LeRobot does: a key frame every second frame. Fine enough to tell frames apart."""
    import av

    file.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(file), "w") as container:
        stream = container.add_stream(codec, rate=fps, options={"g": "2", "crf": "4"})
        stream.height, stream.width, stream.pix_fmt = *images.shape[1:3], "yuv420p"
        for image in images:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        container.mux(stream.encode())


def _vectors(pa, values):
    values = np.asarray(values, np.float32)
    return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1])


def _png(image):
    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    return file.getvalue()


def _stats(episode):
    found = {}
    for name, values in (("observation.state", episode["states"]), ("action", episode["actions"])):
        values = np.asarray(values, np.float64)
        numbers = {"min": values.min(0), "max": values.max(0), "mean": values.mean(0), "std": values.std(0)}
        numbers |= {kind: np.quantile(values, share, axis=0) for kind, share in QUANTILES.items()}
        found[name] = {kind: value.tolist() for kind, value in numbers.items()} | {"count": [len(values)]}
    for name, images in episode["images"].items():
        pixels = images.reshape(-1, 3) / 255.0
        numbers = {"min": pixels.min(0), "max": pixels.max(0), "mean": pixels.mean(0), "std": pixels.std(0)}
        numbers |= {kind: np.quantile(pixels, share, axis=0) for kind, share in QUANTILES.items()}
        found[name] = {kind: value[:, None, None].tolist() for kind, value in numbers.items()} | {
            "count": [len(images)]
        }
    return found


def _with_features(pa, table, cameras):
    """Say, as the ``datasets`` library does, which columns are images."""
    if not cameras:
        return table
    features = {
        name: {"_type": "Image"} if name in cameras else _feature(table.schema.field(name).type)
        for name in table.column_names
    }
    return table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})


def _feature(kind):
    if str(kind).startswith("fixed_size_list"):
        return {"feature": {"dtype": "float32", "_type": "Value"}, "length": kind.list_size, "_type": "Sequence"}
    return {"dtype": {"float": "float32"}.get(str(kind), str(kind)), "_type": "Value"}
