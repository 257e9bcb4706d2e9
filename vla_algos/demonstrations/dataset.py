"""Demonstrations on disk, and what a policy learns from them.

A data set is a folder of raw arrays and JSON, ``TensorDict``'s memory-mapped layout: ``<key>.memmap`` is the array of a
key, C order, little endian; ``meta.json`` has the shape and dtype of each; ``dataset.json`` says what was recorded and
how. ``TensorDict.load_memmap(FOLDER)`` reads it, and so does ``numpy.memmap``. Nothing in it is code, and nothing is
unpickled. Images stay on disk until a batch asks for them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from vla_algos.samples import CAMERAS, Samples
from vla_common import keys
from vla_common.plain import read_json
from vla_common.texts import decode
from vla_envs.simulator import SimulatorSpec
from vla_policies import VLAPolicy

FORMAT = 1
KIND = "demonstrations of vla-torchrl"
FACTS = "dataset.json"
_NO_CODE = (".pkl", ".pickle", ".pt", ".pth")  # files that are unpickled where they are read
_META = "meta.json"  # TensorDict's name for it
_DTYPES = {keys.STATES: "float32", keys.ACTION: "float32", keys.FINAL_STATES: "float32", keys.STEP_MASK: "bool"}
_DTYPES |= dict.fromkeys((*CAMERAS, keys.TASK_DESCRIPTIONS), "uint8")
_DTYPES |= dict.fromkeys((keys.TASK_ID, keys.TRIAL_ID, keys.EPISODE, keys.STEP, keys.EPISODE_LEN), "int64")


class Arrays:
    """Files that grow by rows, in ``TensorDict``'s memory-mapped layout when they are finished."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._shapes: dict[str, list[int]] = {}

    def append(self, rows: Mapping[str, np.ndarray]) -> None:
        """Write rows ``[k, ...]`` of some entries."""
        for name, array in rows.items():
            self._shapes.setdefault(name, [0, *array.shape[1:]])[0] += len(array)
            with open(self.folder / f"{name}.memmap", "ab") as file:
                file.write(np.ascontiguousarray(array, np.dtype(_DTYPES[name]).newbyteorder("<")).tobytes())

    def finish(self) -> None:
        """Say what is in the files."""
        entries = {
            name: {"device": "cpu", "shape": shape, "dtype": f"torch.{_DTYPES[name]}", "is_nested": False}
            for name, shape in self._shapes.items()
        }
        [frames] = {shape[0] for shape in self._shapes.values()}
        meta = {**entries, "shape": [frames], "device": "cpu", "_type": str(TensorDict)}
        (self.folder / _META).write_text(json.dumps(meta))


def env_facts(spec: SimulatorSpec) -> dict[str, Any]:
    """Return what ``dataset.json`` says of the environment."""
    return {
        "id": spec.id,
        "image_shape": list(spec.image_shape),
        "wrist_image_shape": None if spec.wrist_image_shape is None else list(spec.wrist_image_shape),
        "state_dim": spec.state_dim,
        "action_low": [float(bound) for bound in spec.action_low],
        "action_high": [float(bound) for bound in spec.action_high],
        "gripper_dims": list(spec.gripper_dims),
        "whole_chunks": spec.control_frequency is None,
        "max_episode_steps": spec.max_episode_steps,
        "protocol": spec.protocol,
        "protocol_deviations": list(spec.protocol_deviations),
    }


@dataclass(frozen=True)
class DemonstrationSet:
    """Demonstrations of a folder.

    Attributes:
        folder: where they are.
        facts: what ``dataset.json`` says.
        frames: TensorDict ``[K]``, mapped; what is written into it stays in this process.
    """

    folder: Path
    facts: Mapping[str, Any]
    frames: TensorDict

    def describe(self) -> str:
        """Say in a line what there is."""
        facts, recording = self.facts, self.facts["recording"]
        noise = recording["noise"]
        return (
            f"{facts['demonstrations']:,} demonstrations with {facts['frames']:,} frames of {facts['env']['id']}, "
            f"{' x '.join(map(str, facts['env']['image_shape']))} pixels, chunks of {recording['chunk_size']}, stride "
            f"{recording['stride']}, noise {noise}, seeds {', '.join(map(str, recording['seeds']))}"
        )

    def check(self, spec: SimulatorSpec, chunk_size: int | None = None) -> None:
        """Refuse an environment, or a length of chunks, that the demonstrations are not for.

        Raises:
            ValueError: says what differs and what to type.
        """
        theirs, ours = self.facts["env"], env_facts(spec)
        again = "record again into another folder (recipes: demonstrations.folder=FOLDER)"
        other, size = f"or {again}", theirs["image_shape"]
        typed = f"type image_size=[{size[0]},{size[1]}] as it was recorded (recipes: env.image_size), {other}"
        for name, what, how in (
            ("image_shape", "images of {} pixels", typed),
            ("wrist_image_shape", "wrist images {}", f"choose the cameras as they were recorded, {other}"),
            ("state_dim", "{} states", f"take the environment that was recorded, {theirs['id']}, {other}"),
            ("action_low", "actions from {}", f"take the environment that was recorded, {theirs['id']}, {other}"),
            ("action_high", "actions up to {}", f"take the environment that was recorded, {theirs['id']}, {other}"),
            ("whole_chunks", "chunks as one motion: {}", f"take the environment that was recorded, {other}"),
        ):
            if theirs[name] != ours[name]:
                raise ValueError(
                    f"{self.folder}: its demonstrations have {what.format(theirs[name])}, {spec.id} has {ours[name]} "
                    f"here; {how}"
                )
        recorded = {task["name"]: task for task in self.facts["tasks"]}
        for task in spec.tasks:
            if task.name not in recorded:
                raise ValueError(f"{self.folder}: {task.name} is not among its tasks ({theirs['id']}); {again}")
            if recorded[task.name]["instruction"] != task.instruction:
                raise ValueError(
                    f"{self.folder}: {task.name} was recorded as {recorded[task.name]['instruction']!r}, here it is "
                    f"{task.instruction!r}; {again}"
                )
        if not any(recorded[task.name]["solved"] for task in spec.tasks):  # of many, an expert may fail some
            raise ValueError(f"{self.folder}: the expert solved no task of {spec.id}; {again}")
        length = self.facts["recording"]["chunk_size"]
        if chunk_size is not None and (length < chunk_size or (theirs["whole_chunks"] and length != chunk_size)):
            most = "chunks of" if theirs["whole_chunks"] else "chunks of at most"
            raise ValueError(
                f"{self.folder}: its demonstrations are for {most} {length}, the policy has {chunk_size}; make the "
                f"policy with chunk_size={length} (recipes: policy.chunk_size), {other}"
            )


def load_demonstrations(folder: str | Path) -> DemonstrationSet:
    """Map a folder of :func:`~vla_algos.demonstrations.write_demonstrations`; nothing is read before it is needed.

    Raises:
        ValueError: it is no such folder, of another format, damaged, or has files that could hold code.
    """
    folder = Path(folder)
    another = "take another folder (recipes: demonstrations.folder=FOLDER)"
    if not (folder / FACTS).is_file():
        raise ValueError(f"{folder}: no demonstrations are here, {FACTS} is missing; {another}")
    for path in folder.rglob("*"):
        if path.suffix in _NO_CODE:
            raise ValueError(f"{folder}: {path.name} may hold code, which is never loaded; remove it, or {another}")
    try:
        facts, meta = (read_json(folder / name) for name in (FACTS, _META))
        kind, number = facts.get("kind"), facts.get("format")
    except (OSError, ValueError, AttributeError) as error:
        raise _damaged(folder, str(error)) from None
    if kind != KIND or number != FORMAT:
        raise ValueError(
            f"{folder}: {FACTS} is of kind {kind!r} and format {number!r}, this version reads {KIND!r} of format "
            f"{FORMAT}; {another}, to record again"
        )
    try:
        shapes = _expected(facts)
        entries = {name: (entry["dtype"], entry["shape"]) for name, entry in meta.items() if isinstance(entry, Mapping)}
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(folder, f"{FACTS} or {_META} lacks {error}") from None
    wanted = {name: (f"torch.{_DTYPES[name]}", shape) for name, shape in shapes.items()}
    text = entries.get(keys.TASK_DESCRIPTIONS, ("", [0, 0]))[1]
    wanted[keys.TASK_DESCRIPTIONS] = ("torch.uint8", [facts["frames"], *text[1:]])
    if entries != wanted:
        wrong = next(name for name in [*wanted, *entries] if entries.get(name) != wanted.get(name))
        raise _damaged(folder, f"{_META} says {wrong} is {entries.get(wrong)}, {FACTS} {wanted.get(wrong)}")
    frames = {}
    for name, (_, shape) in wanted.items():
        path, kind = folder / f"{name}.memmap", np.dtype(_DTYPES[name]).newbyteorder("<")
        size, right = path.stat().st_size if path.is_file() else 0, math.prod(shape) * kind.itemsize
        if size != right:
            raise _damaged(folder, f"{path.name} has {size:,} bytes, not {right:,}")
        # Copy on write: nothing that is done to a sample gets into the file.
        frames[name] = torch.from_numpy(np.memmap(path, kind, "c", shape=tuple(shape)))
    return DemonstrationSet(folder, facts, TensorDict(frames, [facts["frames"]]))


def _expected(facts: Mapping[str, Any]) -> dict[str, list[int]]:
    env, recording, count = facts["env"], facts["recording"], facts["frames"]
    chunk, dims = recording["chunk_size"], len(env["action_low"])
    if not all(type(number) is int and number > 0 for number in (count, chunk, dims, env["state_dim"])):
        raise ValueError("a number of rows")
    for task in facts["tasks"]:
        _ = task["name"], task["instruction"], task["group"], task["tried"], task["solved"], task["within_horizon"]
    _ = facts["demonstrations"], recording["seeds"], recording["stride"], recording["noise"], env["protocol_deviations"]
    _ = env["id"], env["action_high"], env["whole_chunks"], env["max_episode_steps"], recording["episodes"]
    wrist = env["wrist_image_shape"]
    return {
        keys.IMAGES: [count, *env["image_shape"], 3],
        **({} if wrist is None else {keys.WRIST_IMAGES: [count, *wrist, 3]}),
        keys.STATES: [count, env["state_dim"]],
        keys.ACTION: [count, chunk, dims],
        keys.STEP_MASK: [count, chunk],
        **{key: [count] for key in (keys.TASK_ID, keys.TRIAL_ID, keys.EPISODE, keys.STEP)},
        keys.EPISODE_LEN: [count, 1],
        keys.FINAL_STATES: [count, env["state_dim"]],
    }


def _damaged(folder: Path, what: str) -> ValueError:
    return ValueError(f"{folder}: damaged, {what}; copy it again, or remove it to record again")


def for_policy(demonstrations: DemonstrationSet, policy: VLAPolicy, spec: SimulatorSpec) -> Samples:
    """Make what ``policy`` learns from, of the tasks of ``spec``: the entries of ``record_demonstrations``.

    The cameras that the policy looks at stay mapped, as they were recorded: a policy that resizes does so for each
    batch. Chunks are cut to the policy's. The rest is in memory.

    Raises:
        ValueError: the demonstrations do not fit, see :meth:`DemonstrationSet.check`.
    """
    demonstrations.check(spec, policy.chunk_size)
    frames, length = demonstrations.frames, policy.chunk_size
    data = {name: entry for name, entry in frames.items() if name not in CAMERAS or name in policy.in_keys}
    for name, entry in data.items():
        if name not in CAMERAS:
            data[name] = (entry[:, :length] if name in (keys.ACTION, keys.STEP_MASK) else entry).clone()
    data[keys.PROMPT_TOKENS] = policy.prompt_tokens(decode(data[keys.TASK_DESCRIPTIONS]), data[keys.STATES]).cpu()
    ours = {task.name: number for number, task in enumerate(spec.tasks)}
    numbers = torch.tensor([ours.get(task["name"], -1) for task in demonstrations.facts["tasks"]])
    data[keys.TASK_ID] = numbers[data[keys.TASK_ID]]
    samples = Samples(TensorDict(data, frames.batch_size))
    wanted = data[keys.TASK_ID] >= 0
    return samples if wanted.all() else samples.choose(wanted)
