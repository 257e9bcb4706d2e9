"""Demonstrations on disk, and what a policy learns from them.

A data set is a folder of raw arrays and JSON, ``TensorDict``'s memory-mapped layout: ``<key>.memmap`` is the array of a
key, C order, little endian; ``meta.json`` has the shape and dtype of each; ``dataset.json`` says what was recorded and
how. ``TensorDict.load_memmap(FOLDER)`` reads it, and so does ``numpy.memmap``. Nothing in it is code, and nothing is
unpickled. Images stay on disk until a batch asks for them.
"""

import json
import math
from collections.abc import Mapping, Sequence
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
_AGAIN = "record again into another folder (recipes: demonstrations.folder=FOLDER)"
_NO_CODE = (".pkl", ".pickle", ".pt", ".pth")  # files that are unpickled where they are read
_META = "meta.json"  # TensorDict's name for it
_ENV = (  # of a SimulatorSpec
    *("id", "image_shape", "wrist_image_shape", "state_dim", "action_low", "action_high", "gripper_dims"),
    *("max_episode_steps", "protocol", "protocol_deviations"),
)
_DTYPES = {keys.STATES: "float32", keys.ACTION: "float32", keys.FINAL_STATES: "float32", keys.STEP_MASK: "bool"}
_DTYPES |= dict.fromkeys((*CAMERAS, keys.TASK_DESCRIPTIONS), "uint8")
_DTYPES |= dict.fromkeys((keys.TASK_ID, keys.TRIAL_ID, keys.EPISODE, keys.STEP, keys.EPISODE_LEN), "int64")


def append_rows(folder: Path, rows: Mapping[str, np.ndarray]) -> None:
    """Write rows ``[k, ...]`` of some entries behind those that their files have."""
    for name, array in rows.items():
        with open(folder / f"{name}.memmap", "ab") as file:
            file.write(np.ascontiguousarray(array, np.dtype(_DTYPES[name]).newbyteorder("<")).tobytes())


def write_facts(folder: Path, facts: Mapping[str, Any], width: int) -> None:
    """Say what was recorded, and what is in the files; an instruction has ``width`` bytes."""
    meta: dict[str, Any] = {"shape": [facts["frames"]], "device": "cpu", "_type": str(TensorDict)}
    for name, shape in _shapes(facts, width).items():
        meta[name] = {"device": "cpu", "shape": shape, "dtype": f"torch.{_DTYPES[name]}", "is_nested": False}
    (folder / _META).write_text(json.dumps(meta))
    (folder / FACTS).write_text(json.dumps(facts, indent=1) + "\n")


def env_facts(spec: SimulatorSpec) -> dict[str, Any]:
    """Return what ``dataset.json`` says of the environment."""
    facts = {name: getattr(spec, name) for name in _ENV} | {"whole_chunks": spec.control_frequency is None}
    return json.loads(json.dumps(facts, default=float))  # tuples as lists, numpy's numbers as Python's


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
        return (
            f"{facts['demonstrations']:,} demonstrations with {facts['frames']:,} frames of {facts['env']['id']}, "
            f"{' x '.join(map(str, facts['env']['image_shape']))} pixels, chunks of {recording['chunk_size']}, stride "
            f"{recording['stride']}, noise {recording['noise']}, seeds {', '.join(map(str, recording['seeds']))}"
        )

    def check(self, spec: SimulatorSpec, chunk_size: int | None = None) -> None:
        """Refuse (``ValueError``) an environment, or a length of chunks, that the demonstrations are not for."""
        self._check_env(spec)
        recorded = {task["name"]: task for task in self.facts["tasks"]}
        for name, instruction in ((task.name, task.instruction) for task in spec.tasks):
            if name not in recorded:
                raise ValueError(f"{self.folder}: {name} is not among its tasks ({self.facts['env']['id']}); {_AGAIN}")
            if (theirs := recorded[name]["instruction"]) != instruction:
                raise ValueError(f"{self.folder}: {name} was recorded as {theirs!r}, is {instruction!r} here; {_AGAIN}")
        if not any(recorded[task.name]["solved"] for task in spec.tasks):  # of many, an expert may fail some
            raise ValueError(f"{self.folder}: the expert solved no task of {spec.id}; {_AGAIN}")
        length, whole = self.facts["recording"]["chunk_size"], self.facts["env"]["whole_chunks"]
        if chunk_size is not None and (length < chunk_size or (whole and length != chunk_size)):
            raise ValueError(
                f"{self.folder}: demonstrations are for chunks of {'' if whole else 'at most '}{length}, the policy "
                f"has {chunk_size}; make the policy with chunk_size={length} (recipes: policy.chunk_size), or {_AGAIN}"
            )

    def _check_env(self, spec: SimulatorSpec) -> None:
        theirs, ours = self.facts["env"], env_facts(spec)
        height, width = theirs["image_shape"]
        cameras = "choose the cameras as they were recorded"
        same = f"take the environment that was recorded, {theirs['id']}"
        size = f"type image_size=[{height},{width}] as it was recorded (recipes: env.image_size)"
        for name, what, how in (
            ("image_shape", "images of {} pixels", size),
            ("wrist_image_shape", "wrist images {}", cameras),
            ("state_dim", "{} states", same),
            ("action_low", "actions from {}", same),
            ("action_high", "actions up to {}", same),
            ("whole_chunks", "chunks as one motion: {}", same),
        ):
            if theirs[name] != ours[name]:
                raise ValueError(
                    f"{self.folder}: its demonstrations have {what.format(theirs[name])}, {spec.id} has {ours[name]} "
                    f"here; {how}, or {_AGAIN}"
                )


def load_demonstrations(folder: str | Path) -> DemonstrationSet:
    """Map a folder of :func:`~vla_algos.demonstrations.write_demonstrations`; nothing is read before it is needed.

    A ``ValueError`` if it is no such folder, of another format, damaged, or has files that could hold code.
    """
    folder = Path(folder)
    another = "take another folder (recipes: demonstrations.folder=FOLDER)"
    if not (folder / FACTS).is_file():
        raise ValueError(f"{folder}: no demonstrations are here, {FACTS} is missing; {another}")
    for path in folder.rglob("*"):
        if path.suffix in _NO_CODE:
            raise ValueError(f"{folder}: {path.name} may hold code, which is never loaded; remove it, or {another}")
    try:
        facts, entries = (read_json(folder / name) for name in (FACTS, _META))
    except (OSError, ValueError) as error:
        raise _damaged(folder, str(error)) from None
    kind, number = facts.get("kind"), facts.get("format")
    if (kind, number) != (KIND, FORMAT):
        raise ValueError(
            f"{folder}: {FACTS} is of kind {kind!r} and format {number!r}, this version reads {KIND!r} of format "
            f"{FORMAT}; {another}, to record again"
        )
    try:
        said = {name: (entry["dtype"], entry["shape"]) for name, entry in entries.items() if isinstance(entry, Mapping)}
        shapes = _shapes(facts, entries[keys.TASK_DESCRIPTIONS]["shape"][-1])
    except (LookupError, TypeError, ValueError) as error:
        raise _damaged(folder, f"{FACTS} or {_META} lacks {error}") from None
    wanted = {name: (f"torch.{_DTYPES[name]}", shape) for name, shape in shapes.items()}
    if said != wanted:
        wrong = next(name for name in [*wanted, *said] if said.get(name) != wanted.get(name))
        raise _damaged(folder, f"{_META} says {wrong} is {said.get(wrong)}, {FACTS} {wanted.get(wrong)}")
    frames = {name: _mapped(folder, name, shape) for name, shape in shapes.items()}
    return DemonstrationSet(folder, facts, TensorDict(frames, [facts["frames"]]))


def _mapped(folder: Path, name: str, shape: Sequence[int]) -> torch.Tensor:
    path, kind = folder / f"{name}.memmap", np.dtype(_DTYPES[name]).newbyteorder("<")
    size, right = path.stat().st_size if path.is_file() else 0, math.prod(shape) * kind.itemsize
    if size != right:
        raise _damaged(folder, f"{path.name} has {size:,} bytes, not {right:,}")
    # Copy on write: nothing that is done to a sample gets into the file.
    return torch.from_numpy(np.memmap(path, kind, "c", shape=tuple(shape)))


def _shapes(facts: Mapping[str, Any], width: int) -> dict[str, list[int]]:
    """Return the shapes of the arrays; a KeyError, TypeError or ValueError if something is not there."""
    env, recording, count = facts["env"], facts["recording"], facts["frames"]
    chunk, dims, states = recording["chunk_size"], len(env["action_low"]), env["state_dim"]
    wrist = env["wrist_image_shape"]
    if not all(type(number) is int and number > 0 for number in (count, chunk, dims, states)):
        raise ValueError("a number of rows")
    for task in facts["tasks"]:
        _ = task["name"], task["instruction"], task["group"], task["tried"], task["solved"], task["within_horizon"]
    _ = facts["demonstrations"], recording["seeds"], recording["stride"], recording["noise"], env["protocol_deviations"]
    _ = env["id"], env["action_high"], env["whole_chunks"], env["max_episode_steps"], recording["episodes"]
    return {
        keys.IMAGES: [count, *env["image_shape"], 3],
        **({} if wrist is None else {keys.WRIST_IMAGES: [count, *wrist, 3]}),
        keys.STATES: [count, states],
        keys.TASK_DESCRIPTIONS: [count, width],
        keys.ACTION: [count, chunk, dims],
        keys.STEP_MASK: [count, chunk],
        **{key: [count] for key in (keys.TASK_ID, keys.TRIAL_ID, keys.EPISODE, keys.STEP)},
        keys.EPISODE_LEN: [count, 1],
        keys.FINAL_STATES: [count, states],
    }


def _damaged(folder: Path, what: str) -> ValueError:
    return ValueError(f"{folder}: damaged, {what}; copy it again, or remove it to record again")


def for_policy(demonstrations: DemonstrationSet, policy: VLAPolicy, spec: SimulatorSpec) -> Samples:
    """Make what ``policy`` learns from, of the tasks of ``spec``: the entries of ``record_demonstrations``.

    The cameras that the policy looks at stay mapped, as they were recorded: a policy that resizes does so for each
    batch. Chunks are cut to the policy's. The rest is in memory. A ``ValueError`` if they do not fit, see
    :meth:`DemonstrationSet.check`.
    """
    demonstrations.check(spec, policy.chunk_size)
    frames, length = demonstrations.frames, policy.chunk_size
    data = {name: entry for name, entry in frames.items() if name in CAMERAS and name in policy.in_keys}
    for name, entry in frames.items():
        if name not in CAMERAS:
            data[name] = (entry[:, :length] if name in (keys.ACTION, keys.STEP_MASK) else entry).clone()
    data[keys.PROMPT_TOKENS] = policy.prompt_tokens(decode(data[keys.TASK_DESCRIPTIONS]), data[keys.STATES]).cpu()
    ours = {task.name: number for number, task in enumerate(spec.tasks)}
    numbers = torch.tensor([ours.get(task["name"], -1) for task in demonstrations.facts["tasks"]])
    data[keys.TASK_ID] = numbers[data[keys.TASK_ID]]
    samples = Samples(TensorDict(data, frames.batch_size))
    wanted = data[keys.TASK_ID] >= 0
    return samples if wanted.all() else samples.choose(wanted)
