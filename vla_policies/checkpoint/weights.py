"""Weights in the layout of the Hugging Face hub: one safetensors file or shards with an index; nothing is executed.

Tensors are read one by one into a module that may be on the meta device and sharded: the peak is the weights in the
dtype that was asked for, plus one tensor, and a process reads only its own part of each.
"""

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from vla_common.plain import read_json
from vla_common.tensor_files import is_finite, load_tensors
from vla_policies.checkpoint.parts import DTYPES, empty_like_others, from_part, in_first, own_part, write_safetensors

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_SHARD_SIZE = 5_000_000_000  # bytes
_SHARD = re.compile(r"[\w][\w.-]*\.safetensors")


@dataclass(frozen=True)
class Entry:
    """A tensor in a file: ``key`` there, ``shape``, and ``dtype`` (``None`` for one that is unknown)."""

    file: Path
    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None

    def read(self, part: tuple[slice, ...] = ()) -> Tensor:
        """Read a part of the tensor, all of it by default, backed by a memory map that lives as long as it does.

        The file is opened for each tensor: pages of a map that stays open count as a second copy of the weights.
        """
        with _open(self.file) as file:
            return file.get_slice(self.key)[part]

    def check_finite(self, tensor: Tensor) -> Tensor:
        """Return what was made of the tensor; ValueError with file and entry if it is not finite."""
        if not is_finite(tensor):
            raise ValueError(
                f"{self.file} has numbers that are not finite in {self.key}: damaged, or diverged; take another"
            )
        return tensor


@dataclass(frozen=True)
class Loaded(Entry):
    """A tensor of a file that is read already, or mapped."""

    tensor: Tensor

    def read(self, part: tuple[slice, ...] = ()) -> Tensor:
        """Return a part of the tensor, all of it by default."""
        return self.tensor[part]


def has_weights(folder: Path) -> bool:
    """Tell whether ``folder`` has ``model.safetensors`` or the index of its shards."""
    return any((folder / name).is_file() for name in (WEIGHTS, INDEX))


def list_weights(source: Path) -> dict[str, Entry]:
    """List every tensor of a folder (single file or shards) or of one safetensors file; reads headers only.

    FileNotFoundError: no weights, or shards that the index names are missing. ValueError: a truncated or foreign file,
    or a shard without a tensor that the index promises.
    """
    if source.is_file() or (source / WEIGHTS).is_file():
        return {entry.key: entry for entry in _entries(source if source.is_file() else source / WEIGHTS)}
    if not (source / INDEX).is_file():
        raise FileNotFoundError(f"{source} has no weights: neither {WEIGHTS} nor {INDEX}; copy the whole checkpoint")
    file = source / INDEX
    shard_of = read_json(file).get("weight_map")
    if not isinstance(shard_of, dict) or not shard_of:
        raise ValueError(f"{file} is not an index of shards: it has no weight_map of names; copy it again")
    for key, shard in shard_of.items():
        if not isinstance(shard, str) or not _SHARD.fullmatch(shard):
            raise ValueError(
                f"{file} is not an index of shards: {key} is in {shard!r}, must be a safetensors file in its folder"
            )
    shards = sorted(set(shard_of.values()))
    if missing := [shard for shard in shards if not (source / shard).is_file()]:
        raise FileNotFoundError(
            f"{source} lacks {len(missing)} of {len(shards)} shards of its weights: {_few(missing)}; copy them as well"
        )
    found = {entry.key: entry for shard in shards for entry in _entries(source / shard)}
    if lost := [key for key, shard in shard_of.items() if key not in found or found[key].file.name != shard]:
        raise ValueError(f"the shards of {source} are not those of {INDEX}: they lack {_few(lost)}; copy them again")
    return found


def load_weights(
    module: nn.Module,
    entries: Mapping[str, Entry],
    *,
    prefix: str = "",  # only tensors whose name begins with it are considered, and it is removed
    device: torch.device | str | None = None,  # None for where tensors are, the CPU for those on the meta device
    unused: Callable[[str], bool] = lambda key: False,  # names (without prefix) that the module does not need
    what: str | None = None,  # the source's name in errors
    check: bool = False,  # compare names and shapes alone, and read nothing
) -> dict[str, Tensor]:
    """Fill a module, which may be on the meta device and sharded, tensor by tensor, from :func:`list_weights`.

    All its parameters (but those of adapters) and persistent buffers are replaced, with their dtypes. Returns the
    unused tensors, on the CPU (sharded like the module's), for :func:`save_weights`. ValueError for tensors that do not
    fit or are not finite. ``check`` compares and returns nothing.
    """
    if what is None:
        what = str(next(iter(entries.values())).file.parent) if entries else "the checkpoint"
    entries = {key.removeprefix(prefix): entry for key, entry in entries.items() if key.startswith(prefix)}
    state = module.state_dict()
    names = plain_names(state)
    expected = {key: tuple(state[name].shape) for key, name in names.items()}
    check_layout(expected, {key: entry.shape for key, entry in entries.items()}, unused=unused, what=what)
    if check:
        return {}
    unused_tensors = {}
    for key, entry in entries.items():
        if key in names:
            fill(module, names[key], entry, device)
        else:
            empty = empty_like_others(entry.shape, state.values())
            unused_tensors[key] = from_part(entry.read(own_part(empty)).clone(), empty)
    return unused_tensors


def fill(module: nn.Module, name: str, entry: Entry, device: torch.device | str | None = None) -> None:
    """Replace a parameter or buffer, or this process's part of it, by what is in a file; ValueError if not finite."""
    owner, last = module.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
    parameter = owner._parameters.get(last)
    old = owner._buffers[last] if parameter is None else parameter.detach()
    assert old is not None  # it is in the state_dict
    if device is None:
        device = "cpu" if old.is_meta else old.device
    tensor = entry.read(own_part(old))
    tensor = tensor.to(device=device, dtype=old.dtype if tensor.is_floating_point() else None, copy=True)
    tensor = from_part(entry.check_finite(tensor), old)
    if parameter is None:
        owner._buffers[last] = tensor
    else:
        owner._parameters[last] = nn.Parameter(tensor, requires_grad=parameter.requires_grad)


def cast(module: nn.Module, dtype: torch.dtype, float32: Callable[[str], bool] = lambda key: False) -> None:
    """Set the dtype of the parameters of a module in place; ``float32`` tells by name which become float32 instead."""
    for name, parameter in module.named_parameters():
        parameter.data = parameter.data.to(torch.float32 if float32(name) else dtype)


def plain_names(names: Iterable[str]) -> dict[str, str]:
    """Return names of parameters by those that they have without adapters, which are left out."""
    return {name.replace(".base_layer.", "."): name for name in names if ".lora_" not in name}


def check_layout(
    expected: Mapping[str, tuple[int, ...]],
    found: Mapping[str, tuple[int, ...]],
    *,
    unused: Callable[[str], bool] = lambda key: False,
    what: str = "the checkpoint",
) -> None:
    """Compare names and shapes of a module with a checkpoint's; ValueError lists what is missing or differs."""
    missing = sorted(expected.keys() - found.keys())
    unknown = sorted(key for key in found.keys() - expected.keys() if not unused(key))
    wrong = [
        f"{key} {list(found[key])} instead of {list(expected[key])}"
        for key in sorted(expected.keys() & found.keys())
        if tuple(found[key]) != tuple(expected[key])
    ]
    problems = [
        f"{kind} {_few(names)}"
        for kind, names in (("lacks", missing), ("has unknown", unknown), ("has in another shape", wrong))
        if names
    ]
    if problems:
        raise ValueError(f"{what} does not fit the model: it {', '.join(problems)}")


def load_head(module: nn.Module, file: Path) -> None:
    """Fill a small module from one ``.pt`` or ``.safetensors`` file, as OpenVLA-OFT keeps its heads, or ValueError.

    A leading ``module.`` (of DistributedDataParallel) is removed from the names.
    """
    entries: Mapping[str, Entry]
    if file.suffix == ".safetensors":
        entries = list_weights(file)
    else:
        tensors = load_tensors(file)
        entries = {key: Loaded(file, key, tuple(each.shape), each.dtype, each) for key, each in tensors.items()}
    entries = {key.removeprefix("module."): entry for key, entry in entries.items()}
    load_weights(module, entries, what=str(file))


def load_file(file: Path) -> dict[str, Tensor]:
    """Read all tensors of a small safetensors file; ValueError if it is truncated or not finite."""
    return {key: entry.check_finite(entry.read()) for key, entry in list_weights(file).items()}


def save_weights(weights: Mapping[str, Tensor], folder: Path, *, max_shard_size: int = MAX_SHARD_SIZE) -> list[str]:
    """Write ``model.safetensors``, or shards of at most ``max_shard_size`` bytes and their index; returns their names.

    What an earlier call left in the folder is replaced. Of sharded weights all processes must call it.
    """
    in_first(weights.values(), lambda: folder.mkdir(parents=True, exist_ok=True))
    from huggingface_hub import split_state_dict_into_shards_factory

    split = split_state_dict_into_shards_factory(
        dict(weights),
        get_storage_size=lambda tensor: tensor.nbytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_size,
    )
    names = list(split.filename_to_tensors)
    for name, keys in split.filename_to_tensors.items():
        part = {key: weights[key] for key in keys}
        write_safetensors(folder / f"{name}.partial", part, {"format": "pt"}, among=weights.values())
    index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}

    def finish() -> None:
        for name in names:
            (folder / f"{name}.partial").replace(folder / name)
        for stale in [folder / WEIGHTS, *folder.glob("model-?????-of-?????.safetensors")]:
            if stale.name not in names:
                stale.unlink(missing_ok=True)
        if len(names) == 1:
            (folder / INDEX).unlink(missing_ok=True)
        else:
            (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")

    in_first(weights.values(), finish)
    return names if len(names) == 1 else [*names, INDEX]


def write_folder(
    folder: Path, weights: Mapping[str, Tensor], files: Mapping[str, Any], *, shards: bool = False
) -> list[str]:
    """Write small files and all weights, as one file unless ``shards`` may be several; returns the names.

    ``files`` by name: bytes, tensors by name (``.safetensors``), or what JSON can say. If sharded, all must call it.
    """

    def write() -> None:
        for name, content in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            if name.endswith(".safetensors"):
                write_safetensors(folder / name, content)
            else:
                data = content if isinstance(content, bytes) else (json.dumps(content, indent=2) + "\n").encode()
                (folder / name).write_bytes(data)

    in_first(weights.values(), write)
    return [*files, *save_weights(weights, folder, max_shard_size=MAX_SHARD_SIZE if shards else sys.maxsize)]


def _entries(file: Path) -> Iterator[Entry]:
    with _open(file) as header:
        for key in header.keys():  # noqa: SIM118 - not a mapping
            part = header.get_slice(key)
            yield Entry(file, key, tuple(part.get_shape()), DTYPES.get(part.get_dtype()))


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} is truncated or no safetensors file ({error}); copy it again") from error


def _few(names: list[str], count: int = 5) -> str:
    return ", ".join(names[:count]) + (f" and {len(names) - count} more" if len(names) > count else "")
