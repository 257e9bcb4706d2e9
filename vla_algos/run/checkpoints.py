"""Checkpoint folders that are whole or not there at all, by one process or several; ``docs/runs.md`` lists their files.

The files of ``tensors`` are those of ``torch.distributed.checkpoint`` (``HuggingFaceStorageWriter``), whose reader puts
a tensor together for any number of processes. They are written here because its writer keeps each file a second time in
memory, takes three to five times as long, and gives no digest of what it was to write. Nothing in a folder is a pickle.
"""

import hashlib
import json
import os
import re
import shlex
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, atleast_1d
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.tensor import DTensor

from vla_algos import distributed
from vla_algos.files import flush, link_atomically, remove
from vla_algos.run.plain_state import NotPlainError, from_json, to_json
from vla_common.checksums import SUMS, ChecksumError, digest, verify_checksums, write_lines
from vla_common.tensor_files import not_finite
from vla_policies.checkpoint.parts import own_part, write_safetensors

_FORMAT = "vla-torchrl training state 9"
_FILE, _TENSORS, _POLICY = "training.json", "tensors", "policy"
_KINDS = {"step": int, "processes": int, "state": dict}  # of what is in it, beside the format
_STEP = re.compile(r"step_(\d+)")
_UNFINISHED, _LATEST = ".unfinished_", "latest"
_WRITING = (OSError, ChecksumError)  # what is raised where something cannot be written
_KEEP = 2  # checkpoints of a run


class CheckpointError(RuntimeError):
    """A checkpoint cannot be used; the message says what to do."""


class BrokenCheckpoint(CheckpointError):
    """It is damaged; one before it may be whole."""


# ---- writing


@dataclass(frozen=True)
class Snapshot:
    """What a process writes of a state, as it was in the moment of :meth:`take`."""

    rank: int
    processes: int
    replicated: str  # JSON of what is the same in all
    own: str  # JSON of what this process has of its own
    tensors: dict[str, Tensor]  # of both, on the CPU; of a sharded one the part of this process
    offsets: dict[str, list[int]]  # where such a part begins in the whole
    not_finite: list[str]  # names of what is the same in all, which has NaN or infinities here

    @classmethod
    def take(cls, replicated: Mapping[str, Any], own: Mapping[str, Any]) -> "Snapshot":
        """Copy a state: nested dicts, lists and tuples of tensors, numbers and text.

        ``replicated`` is the same in all processes, with tensors of which each may have a part (DTensors); ``own`` is
        of this process. CheckpointError: there is something else in the state, which could not be loaded again.
        """
        rank, processes = distributed.rank(), distributed.world_size()
        try:
            replicated_text, shared = to_json(replicated)
            own_text, tensors = to_json(own)
        except NotPlainError as error:
            raise CheckpointError(str(error)) from error
        parts = {name: tensor.detach() for name, tensor in shared.items()}
        parts = {name: part.to_local() if isinstance(part, DTensor) else part for name, part in parts.items()}
        here = [name for name, tensor in shared.items() if _writes(tensor, rank)]
        offsets = {name: [each.start for each in own_part(shared[name])] for name in here}
        copies = {name: parts[name].to("cpu", copy=True) for name in here}
        copies |= {f"{_of(rank)}.{name}": tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
        return cls(rank, processes, replicated_text, own_text, copies, offsets, not_finite(parts))


def _writes(tensor: Tensor, rank: int) -> bool:
    """Tell whether a process writes its part: the first of those that have the same, if there is anything."""
    if not isinstance(tensor, DTensor):
        return rank == 0
    if not tensor.to_local().numel():
        return False
    places = zip(tensor.device_mesh.get_coordinate() or (), tensor.placements, strict=True)
    return not any(place for place, placement in places if placement.is_replicate())


def begin_checkpoint(root: Path, step: int) -> Path:
    """Make the folder of a checkpoint (OSError), by the first process, before the others write."""
    remove_unfinished(root)
    folder = unfinished(root, step)
    (folder / _TENSORS).mkdir(parents=True)
    flush(root.parent)  # the first checkpoint has made root
    return folder


def remove_unfinished(root: Path) -> None:
    """Remove what a run has left behind that died while it was saving."""
    for rest in root.glob(f"{_UNFINISHED}*"):
        remove(rest)


def unfinished(root: Path, step: int) -> Path:
    """Name the folder of :func:`begin_checkpoint`."""
    return root / f"{_UNFINISHED}step_{step:08d}"


def save_checkpoint(root: Path, step: int, snapshot: Snapshot, group: dist.ProcessGroup | None = None) -> Path:
    """Write a checkpoint after :func:`begin_checkpoint`, then delete older ones until two are left.

    Everything is written and flushed to disk under another name in the same folder, read again, compared by its SHA-256
    and renamed at the end: a crash, a full or broken disk or a preemption at any time leaves the older checkpoints as
    they were. Those of later steps (the run was resumed from an older one) are not touched. Each process writes and
    compares its files, rank 0 does the rest, and all hear over ``group`` what became of it: they return its folder, or
    raise if one could not (OSError: it is not written, or something else is on the disk).
    """
    final, temporary = root / f"step_{step:08d}", unfinished(root, step)
    digests, error = _attempt(lambda: _write_part(temporary, snapshot))
    there = distributed.all_gather_object((digests, error and str(error)), group)
    problem = next((text for _, text in there if text is not None), None)
    if snapshot.rank == 0:
        if problem is None:
            written = {name: each for digests, _ in there for name, each in digests.items()}
            _, error = _attempt(lambda: _complete(root, step, snapshot, written))
            problem = error and str(error)
        if problem is not None:
            shutil.rmtree(temporary, ignore_errors=True)
    problem = distributed.all_gather_object(problem, group)[0]  # rank 0 has heard of all
    if error is not None and not isinstance(error, _WRITING):
        raise error
    if problem is not None:
        raise OSError(f"{final} could not be written: {problem}") from error
    return final


def _attempt(work: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return work(), None
    except Exception as error:  # the others wait to hear of it
        return {}, error


def _write_part(folder: Path, snapshot: Snapshot) -> dict[str, str]:
    """Write the files of a process; returns their digests, of what should be in them."""
    name = _of(snapshot.rank)
    written = {f"{name}.json": _write_text(folder / f"{name}.json", snapshot.own)}
    if snapshot.tensors:
        file = folder / _TENSORS / f"{name}.safetensors"
        sums = hashlib.sha256()
        flat = {key: atleast_1d(tensor) for key, tensor in snapshot.tensors.items()}
        places = {key: {"saved_offsets": snapshot.offsets.get(key) or [0] * part.ndim} for key, part in flat.items()}
        metadata = {"DCP_SHARDING_INFO": json.dumps(places), "DCP_VERSION": "1.0", "format": "pt"}
        write_safetensors(file, flat, metadata, sums.update)
        written[f"{_TENSORS}/{name}.safetensors"] = sums.hexdigest()
    for name in written:
        flush(folder / name)
    _compare(folder, written)
    return written


def _complete(root: Path, step: int, snapshot: Snapshot, written: dict[str, str]) -> None:
    """Write what tells that a checkpoint is whole, give it its name, and delete older ones."""
    final, temporary = root / f"step_{step:08d}", unfinished(root, step)
    content = {"format": _FORMAT, "step": step, "processes": snapshot.processes}
    text = f'{json.dumps(content)[:-1]}, "state": {snapshot.replicated}}}'
    common = {_FILE: _write_text(temporary / _FILE, text)}
    write_lines(temporary, common | written)
    for path in [*temporary.rglob("*"), temporary]:
        flush(path)
    _compare(temporary, common)
    verify_checksums(temporary / _POLICY)
    if final.exists():  # a run that was resumed from an older checkpoint comes by here again
        final.rename(root / f"{_UNFINISHED}old_{final.name}")
    temporary.rename(final)
    if (root / _LATEST).exists() and not (root / _LATEST).is_symlink():  # a copy that did not keep links made it
        (root / _LATEST).rename(root / f"{_UNFINISHED}old_{_LATEST}")
    link_atomically(root / _LATEST, final.name)
    flush(root)
    there = checkpoints(root)
    for old in there[: there.index(final) + 1][:-_KEEP]:
        old.rename(root / f"{_UNFINISHED}old_{old.name}")  # half of one must not pass for a checkpoint
    remove_unfinished(root)


def _write_text(file: Path, text: str) -> str:
    content = text.encode()
    with open(file, "wb") as stream:
        stream.write(content)
    return hashlib.sha256(content).hexdigest()


def _compare(folder: Path, digests: Mapping[str, str]) -> None:
    if changed := [name for name, expected in digests.items() if digest(folder / name) != expected]:
        raise ChecksumError(f"{folder} has another {', '.join(changed)} than was written")


def _of(rank: int) -> str:
    return f"process_{rank:05d}"


# ---- reading


def checkpoints(root: Path) -> list[Path]:
    """List the finished checkpoints of a run, oldest first."""
    found = [path for path in root.glob("step_*") if path.is_dir() and _STEP.fullmatch(path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step_")))


def by_preference(root: Path) -> list[Path]:
    """List the checkpoints from which a run may continue: that of ``latest``, those before it, those after it."""
    found = checkpoints(root)[::-1]
    link = root / _LATEST
    if not (link.is_symlink() and link.is_dir()):
        return found
    latest = root / os.readlink(link)
    before = [path for path in found if path.name < latest.name]
    return [latest, *before, *(path for path in found if path.name > latest.name)]


@dataclass(frozen=True)
class SavedState:
    """A checkpoint that is open: its digests were right, its tensors are read when they are asked for."""

    folder: Path
    step: int
    processes: int  # that have written it
    state: dict[str, Any]  # what was the same in all; its tensors have shapes and no values (meta device)

    def fill(self, into: Mapping[str, Any]) -> None:
        """Read the tensors of a part of the state into tensors like them; of a sharded one the part of this process.

        ``into`` is the state or some of its keys, with tensors in the places of those of :attr:`state`.
        BrokenCheckpoint: some cannot be read.
        """
        self._read(to_json(into)[1])

    def of_process(self, rank: int) -> dict[str, Any]:
        """Load what a process had of its own; BrokenCheckpoint if it cannot be read."""
        own = _of(rank)
        state, tensors = _read_json(self.folder / f"{own}.json", "cpu")
        self._read({f"{own}.{name}": tensor for name, tensor in tensors.items()})
        return state

    def _read(self, tensors: Mapping[str, Tensor]) -> None:
        if not tensors:
            return
        flat = {name: atleast_1d(tensor.detach()) for name, tensor in tensors.items()}
        reader, planner = HuggingFaceStorageReader(str(self.folder / _TENSORS)), DefaultLoadPlanner()
        try:  # what dcp.load does, but for its collectives: each process reads by itself
            metadata = reader.read_metadata()
            planner.set_up_planner(flat, metadata)
            reader.set_up_storage_reader(metadata, is_coordinator=True)
            [plan] = planner.create_global_plan([planner.create_local_plan()])
            reader.read_data(planner.finish_plan(plan), planner).wait()
        except Exception as error:  # DCP and safetensors raise many types
            why = str(error).strip().partition("\n")[0]
            raise BrokenCheckpoint(
                f"{self.folder / _TENSORS} cannot be read ({why}); delete {self.folder} and resume from the checkpoint "
                "before it"
            ) from error


def verify_checkpoint(checkpoint: Path) -> None:
    """Compare the files of a checkpoint with their digests: each process a part of them, before they open it.

    BrokenCheckpoint: it is truncated or damaged. CheckpointError: it is not one of ours.
    """
    path = checkpoint / _FILE
    if not path.is_file():
        raise BrokenCheckpoint(
            f"{path} does not exist; a checkpoint to resume from is a folder step_... with that "
            "file in it; a folder with a policy alone can be evaluated or fine-tuned"
        )
    try:
        verify_checksums(checkpoint, (distributed.rank(), distributed.world_size()))
    except (ValueError, OSError) as error:
        raise BrokenCheckpoint(f"{error}; or delete {checkpoint} and resume from the checkpoint before it") from error


def open_checkpoint(checkpoint: Path, verified: bool = False) -> SavedState:
    """Open a checkpoint. Nothing in it is executed, wherever it comes from.

    ``verified``: all processes together have called :func:`verify_checkpoint`; else all call it here, or one alone.
    BrokenCheckpoint: it is truncated or damaged, by its checksums or by itself. CheckpointError: it is not one of ours.
    """
    if not verified:
        verify_checkpoint(checkpoint)
    path = checkpoint / _FILE
    content, _ = _read_json(path, "meta")
    content = content if isinstance(content, dict) else {}
    found = str(content.get("format", "foreign file"))
    if found != _FORMAT:
        raise CheckpointError(
            f"{path} is a {found!r}, this version of the library reads {_FORMAT!r}: resume with the version that wrote "
            "it (run.json in the folder of the run names its commit), or start a new run from the policy; foreign "
            "weights cannot be resumed, load them as a policy"
        )
    if not (checkpoint / SUMS).is_file():
        raise BrokenCheckpoint(
            f"{checkpoint} has no {SUMS}; if you are sure of the files type: (cd {shlex.quote(str(checkpoint))} && "
            f"sha256sum *.json {_TENSORS}/* > {SUMS})"
        )
    wrong = [name for name, kind in _KINDS.items() if not isinstance(content.get(name), kind)]
    if wrong:
        raise BrokenCheckpoint(f"{path} has no {wrong[0]}; copy the folder again")
    named = _STEP.fullmatch(checkpoint.resolve().name)
    if named and int(named[1]) != content["step"]:
        raise BrokenCheckpoint(f"{path} is of iteration {content['step']}: exchanged; copy the folder again")
    return SavedState(checkpoint, content["step"], content["processes"], content["state"])


def _read_json(path: Path, device: str) -> tuple[Any, dict[str, Tensor]]:
    """Read a state with empty tensors on a device, and these by name; BrokenCheckpoint if it cannot be read."""
    try:
        return from_json(path.read_text(), device)
    except (ValueError, OSError) as error:
        raise BrokenCheckpoint(
            f"{path} cannot be read ({error}); copy it again, or delete {path.parent} and resume from the checkpoint "
            "before it"
        ) from error
