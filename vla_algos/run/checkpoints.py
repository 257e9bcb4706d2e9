"""Checkpoint folders that are whole or not there at all.

::

    <root>/step_00000012/training.pt    trained weights, optimizer, counters, episodes and random states
                        /SHA256SUMS     its digest, verified after writing and before reading
                        /policy/...     the policy's own files, for evaluation and publishing; not in all
          /latest                       link to the newest
"""

from __future__ import annotations

import hashlib
import os
import random
import re
import shutil
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

import numpy as np
import torch
from safetensors import SafetensorError

from vla_algos.run.files import flush, link_atomically, remove
from vla_common.checksums import SUMS, ChecksumError, verify_checksums, write_lines
from vla_common.tensor_files import ExecutableFileError, load_plain

_FORMAT = "vla-torchrl training state 5"
_FILE = "training.pt"
_STEP = re.compile(r"step_(\d+)")
_UNFINISHED, _LATEST = ".unfinished_", "latest"
_PLAIN = (bool, int, float, str, type(None))


class CheckpointError(RuntimeError):
    """A checkpoint cannot be used; the message says what to do."""


class BrokenCheckpoint(CheckpointError):
    """It is damaged; one before it may be whole."""


class _Savable(Protocol):
    def save_pretrained(self, folder: Path) -> Any: ...


def save_checkpoint(root: Path, step: int, policy: _Savable | None, state: dict[str, Any], keep: int = 2) -> Path:
    """Write a checkpoint, then delete older ones until ``keep`` are left.

    Everything is written and flushed to disk under another name in the same folder, read again, compared by its
    SHA-256 and renamed at the end: a crash, a full or broken disk or a preemption at any time leaves the older
    checkpoints as they were.

    Args:
        root: folder of all checkpoints of a run.
        step: number of finished iterations, the name of the checkpoint.
        policy: its ``save_pretrained`` writes the folder ``policy``; ``None`` for none.
        state: nested dicts, lists and tuples of tensors, numbers and text: counters, ``state_dict`` of
            optimizer and collector, :func:`random_state`.
        keep: how many checkpoints to keep, at least 1. Those of later steps (the run was resumed from an
            older one) are not touched.

    Returns:
        The folder of the checkpoint.

    Raises:
        CheckpointError: ``state`` holds something else; it could not be loaded again.
        OSError: it could not be written, or what is on the disk is not what was written.
    """
    if keep < 1:
        raise ValueError(f"keep is {keep}, must be at least 1")
    _check_plain(state, "state")  # better to fail now than at the resume
    root.mkdir(parents=True, exist_ok=True)
    for rest in root.glob(f"{_UNFINISHED}*"):  # of a run that died while saving
        remove(rest)
    final = root / f"step_{step:08d}"
    temporary = root / f"{_UNFINISHED}{final.name}"
    try:
        temporary.mkdir()
        digest = _write({"format": _FORMAT, "step": step, "state": state}, temporary / _FILE)
        write_lines(temporary, {_FILE: digest})
        if policy is not None:
            policy.save_pretrained(temporary / "policy")
        for path in [*temporary.rglob("*"), temporary]:
            flush(path)
        for folder in (temporary, temporary / "policy"):
            verify_checksums(folder)
    except (OSError, RuntimeError, SafetensorError, ChecksumError) as error:  # what torch and safetensors raise
        shutil.rmtree(temporary, ignore_errors=True)
        raise OSError(f"{final} could not be written: {error}") from error
    if final.exists():  # a run that was resumed from an older checkpoint comes by here again
        final.rename(root / f"{_UNFINISHED}old_{final.name}")
    temporary.rename(final)
    if (root / _LATEST).exists() and not (root / _LATEST).is_symlink():  # a copy that did not keep links made it
        (root / _LATEST).rename(root / f"{_UNFINISHED}old_{_LATEST}")
    link_atomically(root / _LATEST, final.name)
    flush(root)
    older = checkpoints(root)
    older = older[: older.index(final) + 1]
    for old in older[:-keep]:
        old.rename(root / f"{_UNFINISHED}old_{old.name}")  # half of one must not pass for a checkpoint
    for old in root.glob(f"{_UNFINISHED}*"):
        remove(old)
    return final


def checkpoints(root: Path) -> list[Path]:
    """List the finished checkpoints of a run, oldest first."""
    found = [path for path in root.glob("step_*") if path.is_dir() and _STEP.fullmatch(path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step_")))


def latest_checkpoint(root: Path) -> Path:
    """Find the newest checkpoint of a run: where ``latest`` points to.

    Raises:
        CheckpointError: there is none.
    """
    if found := by_preference(root):
        return found[0]
    raise CheckpointError(f"no checkpoint in {root}: expected folders named step_00000001 and so on")


def by_preference(root: Path) -> list[Path]:
    """List the checkpoints that a run may go on from: where ``latest`` points to, those before it, those after it."""
    found = checkpoints(root)[::-1]
    link = root / _LATEST
    if not (link.is_symlink() and link.is_dir()):
        return found
    latest = root / os.readlink(link)
    before = [path for path in found if path.name < latest.name]
    return [latest, *before, *(path for path in found if path.name > latest.name)]


def load_training_state(checkpoint: Path) -> dict[str, Any]:
    """Load the ``state`` that was given to :func:`save_checkpoint`, on the CPU.

    Nothing in the file is executed (``weights_only``), wherever it comes from.

    Raises:
        BrokenCheckpoint: the file is missing, truncated or damaged, by its checksum or by itself.
        CheckpointError: it is not one of ours.
    """
    path = checkpoint / _FILE
    if not path.is_file():
        raise BrokenCheckpoint(
            f"{path} does not exist; a checkpoint to resume from is a folder step_... with that "
            "file in it; a folder with a policy alone can be evaluated or fine-tuned anew"
        )
    try:
        verify_checksums(checkpoint)
        content = load_plain(path)
    except ExecutableFileError as error:
        raise CheckpointError(str(error)) from error
    except (ValueError, OSError) as error:
        raise BrokenCheckpoint(f"{error}; or delete {checkpoint} and resume from the checkpoint before it") from error
    found = str(content.get("format")) if isinstance(content, dict) else ""
    if found != _FORMAT and found.startswith(_FORMAT.rpartition(" ")[0]):
        raise CheckpointError(
            f"{path} is a {found!r}, this version of the library reads {_FORMAT!r}: resume with the version that wrote "
            "it (run.json in the folder of the run names its commit), or start a new run from the policy"
        )
    if found != _FORMAT:
        raise CheckpointError(
            f"{path} is not a training state of this library ({_FORMAT!r}); to start from foreign weights, "
            "load them as a policy instead of resuming"
        )
    if not (checkpoint / SUMS).is_file():
        raise BrokenCheckpoint(
            f"{checkpoint} has no {SUMS}; if you are sure of the file type: (cd {checkpoint} && sha256sum {_FILE} > "
            f"{SUMS})"
        )
    named = _STEP.fullmatch(checkpoint.resolve().name)
    if named and int(named[1]) != content["step"]:
        raise BrokenCheckpoint(f"{path} is of iteration {content['step']}: exchanged; copy the folder again")
    return content["state"]


def random_state() -> dict[str, Any]:
    """Return the states of all random number generators, as tensors and numbers."""
    numpys: Any = np.random.get_state()  # a tuple, which numpy's annotations do not know
    name, words, *position = numpys
    assert name == "MT19937"  # the only one of numpy's legacy interface
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": (torch.from_numpy(words.astype(np.int64)), *position),
        "python": random.getstate(),
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Restore :func:`random_state`; states of GPUs that are not here are left out."""
    torch.set_rng_state(state["torch"])
    for device, cuda_state in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(cuda_state, device)
    words, *position = state["numpy"]
    np.random.set_state(("MT19937", words.numpy().astype(np.uint32), *position))
    random.setstate(state["python"])


def _check_plain(value: Any, where: str) -> None:
    """Raise unless ``value`` is made of what ``torch.load(weights_only=True)`` accepts."""
    if isinstance(value, dict):
        for key, item in value.items():
            _check_plain(item, f"{where}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            _check_plain(item, f"{where}[{index}]")
    elif type(value) not in _PLAIN and not isinstance(value, torch.Tensor):
        raise CheckpointError(f"{where} is a {type(value).__name__}; save tensors, numbers, text and None only")


def _write(content: dict[str, Any], path: Path) -> str:
    """Write a file; returns the digest of what should be in it, which is not necessarily what is."""
    with open(path, "wb") as file:
        hashed = _HashedFile(file)
        try:
            torch.save(content, cast(BinaryIO, hashed))
        except RuntimeError as error:
            raise hashed.error or error from error  # torch says "unexpected pos" of a full disk
    return hashed.sha256.hexdigest()


class _HashedFile:
    """What ``torch.save`` writes into, hashed on the way."""

    def __init__(self, file: BinaryIO):
        self._file, self.sha256 = file, hashlib.sha256()
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        self.sha256.update(data)
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        self._file.flush()
