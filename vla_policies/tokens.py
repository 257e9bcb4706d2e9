"""Action tokens: each dimension of an action is one of a number of evenly spaced values."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class ActionBins(nn.Module):
    """Evenly spaced values between the bounds of each action dimension; a token is the index of one.

    Args:
        low, high: bounds of an action, ``A`` numbers each, in the simulator's units.
        num_bins: values per dimension, both bounds included.
    """

    def __init__(self, low: Sequence[float], high: Sequence[float], num_bins: int):
        super().__init__()
        if num_bins < 2:
            raise ValueError(f"num_bins must be at least 2, got {num_bins}; 256 is usual")
        self.num_bins = num_bins
        self.register_buffer("low", torch.tensor(low, dtype=torch.float32))
        self.register_buffer("high", torch.tensor(high, dtype=torch.float32))

    def decode(self, tokens: Tensor) -> Tensor:
        """Actions ``[..., A]`` of tokens ``[..., A]``; a fractional token lies between two values."""
        return self.low + tokens.to(torch.float32) * (self.high - self.low) / (self.num_bins - 1)

    def encode(self, actions: Tensor) -> Tensor:
        """Fractional tokens ``[..., A]`` of actions ``[..., A]``, clamped to the bounds."""
        fraction = (actions - self.low) / (self.high - self.low)
        return fraction.clamp(0.0, 1.0) * (self.num_bins - 1)

    def expectation(self, logits: Tensor) -> Tensor:
        """Fractional token ``[..., A]`` that logits ``[..., A, num_bins]`` mean on average."""
        return logits.softmax(-1) @ torch.arange(self.num_bins, dtype=logits.dtype, device=logits.device)
