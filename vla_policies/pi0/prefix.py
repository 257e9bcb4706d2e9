"""What pi0's PaliGemma makes of a batch of decisions, as entries of a TensorDict: kept while it is frozen."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torch.nn import functional as F

from vla_common.keys import PREFIX_KEYS, PREFIX_POOLED, PREFIX_VALID, PREFIX_VALUES
from vla_policies.pi0.model import PrefixCache


def to_entries(prefix: PrefixCache, pooled: Tensor | None, length: int) -> dict[tuple[str, str], Tensor]:
    """Make entries of a prefix and of what the value head reads of it, filled up to ``length`` tokens."""
    missing = length - prefix.valid.shape[1]
    first, second = (
        F.pad(torch.stack([pair[place] for pair in prefix.layers], dim=1), (0, 0, 0, missing)) for place in (0, 1)
    )
    entries = {PREFIX_KEYS: first, PREFIX_VALUES: second, PREFIX_VALID: F.pad(prefix.valid, (0, missing))}
    return entries if pooled is None else {**entries, PREFIX_POOLED: pooled}


def from_entries(tensordict: TensorDictBase) -> tuple[PrefixCache, Tensor | None] | None:
    """Invert :func:`to_entries`; ``None`` if the batch has no such entries."""
    valid = tensordict.get(PREFIX_VALID, None)
    if valid is None:
        return None
    stored = (tensordict.get(key).unbind(1) for key in (PREFIX_KEYS, PREFIX_VALUES))
    return PrefixCache(list(zip(*stored, strict=True)), valid), tensordict.get(PREFIX_POOLED, None)


def pool(prefix: PrefixCache, how: str) -> Tensor:
    """Pool the last hidden states for a value head: float32 ``[N, width]``.

    ``how``: ``"first"``, ``"last"`` or ``"mean"`` of its tokens that are no padding.
    """
    assert prefix.output is not None  # asked for when it is pooled
    hidden, valid = prefix.output.float(), prefix.valid
    if how == "first":
        return hidden[:, 0]
    if how == "last":
        return hidden[torch.arange(len(hidden), device=hidden.device), valid.sum(1) - 1]
    return (hidden * valid.unsqueeze(-1)).sum(1) / valid.sum(1, keepdim=True)
