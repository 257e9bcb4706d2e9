"""Checkpoint folders that are whole or not there at all.

::

    <root>/step_00000012/training.pt    trained weights, optimizer, counters, episodes and random states
                        /policy/...     the policy's own files, for evaluation and publishing; not in all
          /latest                       link to the newest
"""

from __future__ import annotations

import os
import random
import re
import shutil
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors import SafetensorError

from vla_algos.run.files import flush, link_atomically, remove

_FORMAT = "vla-torchrl training state 4"
_STEP = re.compile(r"step_(\d+)")
_UNFINISHED, _LATEST = ".unfinished_", "latest"
_PLAIN = (bool, int, float, str, type(None))


class CheckpointError(RuntimeError):
    """A checkpoint cannot be used; the message says what to do."""


class _Savable(Protocol):
    def save_pretrained(self, folder: Path) -> Any: ...


def save_checkpoint(root: Path, step: int, policy: _Savable | None, state: dict[str, Any], keep: int = 2) -> Path:
    """Write a checkpoint, then delete older ones until ``keep`` are left.

    Everything is written and flushed to disk under another name in the same folder and renamed at the end:
    a crash, a full disk or a preemption at any time leaves the older checkpoints as they were.

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
        torch.save({"format": _FORMAT, "step": step, "state": state}, temporary / "training.pt")
        if policy is not None:
            policy.save_pretrained(temporary / "policy")
        for path in [*temporary.rglob("*"), temporary]:
            flush(path)
    except (OSError, RuntimeError, SafetensorError) as error:  # whatever torch and safetensors raise on a full disk
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
    if (root / _LATEST).is_symlink() and (root / _LATEST).is_dir():
        return root / os.readlink(root / _LATEST)
    if found := checkpoints(root):
        return found[-1]
    raise CheckpointError(f"no checkpoint in {root}: expected folders named step_00000001 and so on")


def load_training_state(checkpoint: Path) -> dict[str, Any]:
    """Load the ``state`` that was given to :func:`save_checkpoint`, on the CPU.

    Nothing in the file is executed (``weights_only``), wherever it comes from.

    Raises:
        CheckpointError: the file is missing, truncated, or not one of ours.
    """
    path = checkpoint / "training.pt"
    if not path.is_file():
        raise CheckpointError(
            f"{path} does not exist; a checkpoint to resume from is a folder step_... with that "
            "file in it; a folder with a policy alone can be evaluated or fine-tuned anew"
        )
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises half a dozen types for a broken file
        reason = str(error).partition("\n")[0]
        raise CheckpointError(
            f"{path} is truncated or not a checkpoint ({type(error).__name__}: {reason}); "
            f"delete {checkpoint} and resume from the checkpoint before it"
        ) from error
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
