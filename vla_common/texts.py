"""Instructions as text and as bytes: what reads ``task_descriptions`` takes both.

Text is what environments write, and what people read. Bytes, UTF-8 padded with zeros in a uint8 tensor, are for where
text does not survive or cannot go (``docs/explanation/nontensor-storage.md``).
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vla_common import keys

WIDTH = keys.MAX_INSTRUCTION  # bytes


def encode(texts: Sequence[str], width: int = WIDTH) -> Tensor:
    """Return ``N`` texts as uint8 ``[N, width]``, UTF-8 padded with zeros.

    A ``ValueError`` if a text is longer than ``width`` bytes, or has a character 0, which is what pads.
    """
    rows = [text.encode() for text in texts]
    for text, row in zip(texts, rows, strict=True):
        if len(row) > width:
            raise ValueError(
                f"the instruction {text[:60]!r}... has {len(row)} bytes and there is room for {width}; "
                f"use InstructionsToBytes(width={len(row)}) or shorten it"
            )
        if 0 in row:
            raise ValueError(f"the instruction {text[:60]!r} has a character 0, which pads the bytes; leave it out")
    return torch.from_numpy(np.array(rows, f"S{width}").view(np.uint8).reshape(len(rows), width))


def decode(value: Any) -> list[str]:
    """Return the texts of a batch ``[*B]`` as one flat list, the last dimension running fastest.

    ``value`` is text ``[*B]`` (``NonTensorStack``, ``NonTensorData``, lists of lists or one text), or uint8 ``[*B,
    width]`` of :func:`encode`; else a ``TypeError``.
    """
    if isinstance(value, Tensor):
        if value.dtype != torch.uint8 or not value.ndim:
            raise TypeError(
                f"instructions are text or uint8 [*B, bytes], got {value.dtype} {list(value.shape)}; "
                "make them with InstructionsToBytes() or vla_common.texts.encode()"
            )
        rows = value.cpu().reshape(-1, value.shape[-1]).numpy()
        return [row.tobytes().rstrip(b"\0").decode() for row in rows]
    return list(_flat(value.tolist() if hasattr(value, "tolist") else value))


def to_strings(tensordict: Any, key: Any = keys.TASK_DESCRIPTIONS) -> list[str]:
    """Return the texts under ``key`` of a batch ``[*B]`` as one flat list; ``ValueError`` if there is no such entry."""
    value = tensordict.get(key, None)
    if value is None:
        raise ValueError(f"the batch has no {key!r}: text or uint8 [*B, bytes], such as an environment writes")
    return decode(value)


def _flat(texts: Any) -> Iterator[str]:
    if isinstance(texts, str):
        yield texts
    elif isinstance(texts, list | tuple):
        for part in texts:
            yield from _flat(part)
    else:
        raise TypeError(f"instructions are text or uint8 [*B, bytes], got {type(texts).__name__} {str(texts)[:60]}")
