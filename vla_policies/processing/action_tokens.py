"""Action tokens: each dimension of an action is one of a number of evenly spaced values."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn


class ActionBins(nn.Module):
    """``num_bins`` evenly spaced values between the bounds, included, of each action dimension; a token is an index."""

    low: Tensor
    high: Tensor

    def __init__(self, low: Sequence[float], high: Sequence[float], num_bins: int):
        super().__init__()
        self.num_bins = num_bins
        self.register_buffer("low", torch.tensor(low, dtype=torch.float32))
        self.register_buffer("high", torch.tensor(high, dtype=torch.float32))

    def decode(self, tokens: Tensor) -> Tensor:
        """Return actions ``[..., A]`` of tokens ``[..., A]``; a fractional token lies between two values."""
        return self.low + tokens.to(torch.float32) * (self.high - self.low) / (self.num_bins - 1)

    def encode(self, actions: Tensor) -> Tensor:
        """Return the fractional tokens ``[..., A]`` of actions ``[..., A]``, clamped to the bounds."""
        fraction = (actions - self.low) / (self.high - self.low)
        return fraction.clamp(0.0, 1.0) * (self.num_bins - 1)

    def expectation(self, logits: Tensor) -> Tensor:
        """Return the fractional token ``[..., A]`` that logits ``[..., A, num_bins]`` mean on average."""
        return logits.softmax(-1) @ torch.arange(self.num_bins, dtype=logits.dtype, device=logits.device)


class ActionTokens:
    """The 256 vocabulary entries that OpenVLA spends on actions: 31744 to 31999, the largest value first.

    256 edges from -1 to 1 have 255 centres between them, so tokens 31744 and 31745 share the largest, 255/256 of the
    way (0.99608); 31999 is -0.99608. Everywhere else in this package a token is *relative*, 0 to 255. Kim et al. 2024,
    "OpenVLA", section 3.2. Not a module: converting a policy to bfloat16 must not round the centres.
    """

    first_id = 31744
    num_tokens = 256

    def __init__(self) -> None:
        self._edges = np.linspace(-1.0, 1.0, self.num_tokens)
        centres = (self._edges[:-1] + self._edges[1:]) / 2
        index = (self.num_tokens - 1 - np.arange(self.num_tokens)).clip(0, len(centres) - 1)
        self.values = torch.from_numpy(centres[index].astype(np.float32))  # float32 [256], by relative token

    def decode(self, tokens: Tensor) -> Tensor:
        """Return the normalised actions float32 in -1..1 of relative tokens int64 0..255, any shape."""
        return self.values.to(tokens.device)[tokens]

    def encode(self, actions: Tensor) -> Tensor:
        """Return relative tokens int64 of normalised actions, any shape, clamped to -1..1: the bin of each."""
        edges = torch.from_numpy(self._edges).to(actions.device)
        bins = torch.bucketize(actions.to(torch.float64).clamp(-1.0, 1.0), edges, right=True)  # 1..256
        return self.num_tokens - bins
