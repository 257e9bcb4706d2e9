"""Terms of a loss at a level: per token, per action or per chunk, and means over what was executed."""

from typing import Literal

import torch
from torch import Tensor

from vla_common import keys

Level = Literal["token", "action", "chunk"]
ONE_RATIO = (
    "one ratio per chunk needs one advantage per chunk: use reward_level='chunk', or log_prob_level='action' or 'token'"
)
_LARGEST_LOG_RATIO = 20.0  # in the KL to the reference, whose exponential would overflow


def expand(advantage: Tensor, log_weight: Tensor, mask: Tensor) -> Tensor:
    """Give ``[B, 1]`` or ``[B, C]`` as many dimensions as ``log_weight`` has."""
    if advantage.shape not in (mask.shape, (len(mask), 1)):
        raise ValueError(
            f"{keys.ADVANTAGE!r} is {list(advantage.shape)}, must be [B, 1] per decision or [B, C] per primitive "
            f"action, here {[len(mask), 1]} or {list(mask.shape)}"
        )
    if log_weight.ndim == 1:
        if advantage.shape[-1] > 1:
            raise ValueError(ONE_RATIO)
        return advantage.squeeze(-1)
    return advantage.unsqueeze(-1) if log_weight.ndim == 3 else advantage


def reference_kl(difference: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Estimate the KL of each token ``[B, C, A]`` of ``reference - log_prob``; returns which are valid too."""
    difference = torch.where(mask.unsqueeze(-1), difference, 0.0).clamp(max=_LARGEST_LOG_RATIO)
    return to_level(difference.exp() - difference - 1, mask, "token")


def to_level(values: Tensor, mask: Tensor, level: Level) -> tuple[Tensor, Tensor]:
    """Sum ``[B, C, A]``, already 0 where masked, to a level; returns its validity in the same shape too."""
    if level == "token":
        return values, mask.unsqueeze(-1).expand_as(values)
    if level == "action":
        return values.sum(-1), mask
    return values.sum((-2, -1)), mask.any(-1)


def count(mask: Tensor, level: Level, width: int) -> Tensor:
    """Count the valid elements of a level: ``mask`` ``[B, C]``, ``width`` is ``A``."""
    if level == "chunk":
        return mask.any(-1).sum()
    return mask.sum() * (width if level == "token" else 1)


def mean(values: Tensor, valid: Tensor, weight: Tensor | None = None, count: Tensor | None = None) -> Tensor:
    """Sum of ``weight * values`` over the valid elements divided by ``count``, theirs unless given; 0 for none."""
    if weight is not None:  # [B, 1] against [B], [B, C] or [B, C, A]
        values = values * weight.reshape(-1, *(1,) * (values.ndim - 1))
    return torch.where(valid, values, 0.0).sum() / (valid.sum() if count is None else count).clamp(min=1)
