"""Files of tensors, written as they come: of a sharded one no more than a piece is in memory at a time."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vla_policies.checkpoint.parts import in_first, pieces

# Names in safetensors files. Tensors stand in a file by dtype, the last of these first, then by name.
DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "C64": torch.complex64,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ALIGNMENT = 8  # bytes


def write_safetensors(
    file: Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str] | None = None,
    on_write: Callable[[bytes | memoryview], object] = lambda _: None,
    among: Iterable[Tensor] = (),
) -> None:
    """Write a file of the same bytes as ``safetensors.torch.save_file``, with sharded tensors too.

    ``on_write`` is given all bytes before they are written. ``among`` are tensors of the same policy: where none of
    ``tensors`` is sharded, they tell that several processes write one file.
    """
    order = sorted(tensors, key=lambda key: (-list(_NAMES).index(tensors[key].dtype), key))
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    stop = 0
    for key in order:
        tensor = tensors[key]
        start, stop = stop, stop + tensor.numel() * tensor.element_size()
        header[key] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, stop]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    stream = (piece for key in order for piece in pieces(tensors[key]))

    def content_of_file() -> Iterator[bytes | memoryview]:
        yield len(text).to_bytes(8, "little") + text
        for piece in stream:
            yield piece.reshape(-1).view(torch.uint8).numpy().data

    def write() -> None:
        with open(file, "wb") as content:
            for data in content_of_file():
                on_write(data)
                content.write(data)

    in_first([*tensors.values(), *among], write, stream)


def write_pickled(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write what ``torch.save`` does of a dict of tensors; the first process holds all of it."""
    stream = (piece for tensor in tensors.values() for piece in pieces(tensor))

    def write() -> None:
        torch.save({key: _whole(stream, tensor.shape) for key, tensor in tensors.items()}, file)

    in_first(tensors.values(), write, stream)


def _whole(stream: Iterator[Tensor], shape: torch.Size) -> Tensor:
    first = next(stream)
    if first.shape == shape:  # of a storage that may have more in it, which would be saved as well
        return first if first.untyped_storage().nbytes() == first.nbytes else first.clone()
    whole, filled = first.new_empty(shape), len(first)
    whole[:filled] = first
    while filled < len(whole):
        piece = next(stream)
        whole[filled : filled + len(piece)] = piece
        filled += len(piece)
    return whole
