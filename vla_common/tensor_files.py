"""Files of tensors that ``torch.save`` wrote, read so that nothing in them is executed; and what is finite."""

import contextlib
import pickle
import pickletools
import re
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_GLOBAL = re.compile(r"GLOBAL ([\w.]+)")
_CALLS = ("GLOBAL", "STACK_GLOBAL", "INST", "OBJ", "REDUCE", "NEWOBJ", "NEWOBJ_EX")


class ExecutableFileError(ValueError):
    """A pickle asks for code to be executed."""


def load_tensors(file: Path, *, mmap: bool = False) -> dict[str, Tensor]:
    """Load tensors by name onto the CPU; nothing in the file is executed.

    ExecutableFileError: loading it would execute code. ValueError: it is truncated, damaged, or holds something else.
    """
    try:
        with warnings.catch_warnings():  # torch's, about what it finds in damaged files
            warnings.simplefilter("ignore")
            entries = zipfile.ZipFile(file).infolist() if zipfile.is_zipfile(file) else ()
            if sum(entry.file_size for entry in entries) > file.stat().st_size:  # torch packs nothing
                raise ValueError("it unpacks to more than it has")
            content = torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)
    except OSError as error:
        raise ValueError(f"{file} cannot be read ({error})") from error
    except Exception as error:  # torch raises a dozen types for a damaged file
        if code := _code(file, error):
            raise ExecutableFileError(
                f"{file} is refused: loading it would execute code ({code}), and only tensors are loaded here; do not "
                "load it with other tools either, unless you trust its author: ask for a state_dict of tensors alone, "
                "or safetensors"
            ) from None
        reason = str(error).rpartition("WeightsUnpickler error: ")[2].strip()  # not torch's advice to load it even so
        reason = f"{type(error).__name__}: {reason.partition(chr(10))[0][:120]}"
        raise ValueError(f"{file} is truncated or not a file of tensors ({reason}); copy it again") from error
    if not isinstance(content, dict) or not content or not all(isinstance(key, str) for key in content):
        raise ValueError(f"{file} is not a file of tensors by name; save a module's state_dict() in it")
    if others := [key for key, value in content.items() if not isinstance(value, Tensor) or _is_larger(value)]:
        kind = type(content[others[0]]).__name__
        raise ValueError(f"{file} has {kind} under {others[0]!r}, must be a dense tensor; save a module's state_dict()")
    return content


def _is_larger(tensor: Tensor) -> bool:  # than what is stored of it: sparse, or repeated
    return tensor.layout is not torch.strided or tensor.nbytes > tensor.untyped_storage().nbytes()


def is_finite(tensor: Tensor) -> bool:
    """Tell whether all numbers of a tensor are finite; one pass over it, no memory."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    try:
        smallest, largest = tensor.detach().aminmax()  # NaN if there is one
    except RuntimeError:  # a dtype without order, such as float8
        return bool(tensor.detach().float().isfinite().all())
    return bool((smallest.isfinite() & largest.isfinite()).item())


def not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """List the names of tensors that have NaN or infinity in them."""
    return [name for name, tensor in tensors.items() if not is_finite(tensor)]


def add_dimensions(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Give single numbers that were saved without a dimension the shape ``[1]``, where that is ``expected`` now."""
    return {
        key: tensor.reshape(1) if not tensor.ndim and key in expected and expected[key].shape == (1,) else tensor
        for key, tensor in tensors.items()
    }


def make_room(saved: Any, like: Any = None) -> Any:
    """Return a state like ``saved``, whose tensors have shapes alone (meta device), with memory for them.

    ``like``, a tensor or by the same keys some, says where tensors of its shape lie, and how they are sharded; others
    lie on the CPU, whole.
    """
    if isinstance(saved, Tensor):
        if isinstance(like, Tensor) and like.shape == saved.shape:
            return torch.empty_like(like, dtype=saved.dtype, requires_grad=False)
        return torch.empty(saved.shape, dtype=saved.dtype)
    if isinstance(saved, Mapping):
        places = like if isinstance(like, Mapping) else dict.fromkeys(saved, like)
        return {key: make_room(item, places.get(key)) for key, item in saved.items()}
    if isinstance(saved, (list, tuple)):
        return type(saved)(make_room(item, like) for item in saved)
    return saved


def _code(file: Path, error: Exception) -> str | None:
    """Name the code that a pickle wants executed; ``None`` if it is merely damaged, or no pickle."""
    if found := _GLOBAL.search(str(error)):  # torch's words
        return found[1]
    if not isinstance(error, pickle.UnpicklingError) or zipfile.is_zipfile(file):
        return None
    with contextlib.suppress(Exception):  # nothing is promised of what it raises for what is no pickle
        if any(operation.name in _CALLS for operation, _, _ in pickletools.genops(file.read_bytes())):
            return "a pickle of objects"  # in a protocol that torch does not read
    return None
