"""Action tokens: each dimension of an action is one of a number of evenly spaced values, drawn from a distribution.

What was drawn and the action that came of it are two entries, often of one shape, and the probability of the wrong one
is a number like any other: distributions of the library refuse it.
"""

from collections.abc import Sequence
from typing import Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Categorical

from vla_common import keys

SET_KEYS = (
    'say which entry was sampled: loss.set_keys(action=policy.sample_key, sample_log_prob="action_log_prob", '
    'value="state_value")'
)


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
        return ((actions - self.low) / (self.high - self.low)).clamp(0.0, 1.0) * (self.num_bins - 1)

    def expectation(self, logits: Tensor) -> Tensor:
        """Return the fractional token ``[..., A]`` that logits ``[..., A, num_bins]`` mean on average."""
        return logits.softmax(-1) @ torch.arange(self.num_bins, dtype=logits.dtype, device=logits.device)


class ActionTokens:
    """The 256 vocabulary entries that OpenVLA spends on actions: 31744 to 31999, the largest value first.

    256 edges from -1 to 1 have 255 centres between them, so tokens 31744 and 31745 share the largest, 255/256 of the
    way (0.99608); 31999 is -0.99608. Everywhere else in this package a token is *relative*, 0 to 255. Kim et al. 2024,
    "OpenVLA", section 3.2. Not a module: converting a policy to bfloat16 must not round the centres.
    """

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


class TokenDistribution(Categorical):
    """Of action tokens ``[N, C, A]``."""

    @classmethod
    def of(cls, logits: Tensor, temperature: float, top_k: int, chosen: Tensor | None = None) -> Self:
        """Build the distribution of action tokens of logits float32 ``[..., 256]``, which ``temperature`` divides.

        Only the ``top_k`` likeliest may be drawn (ties included; 0: all). ``chosen`` int64 ``[...]``, drawn earlier,
        stay in, so that their log-probability remains finite and keeps its gradient when the policy has changed.
        """
        logits = logits / temperature
        if top_k:
            dropped = logits < logits.topk(top_k, dim=-1).values[..., -1:]
            if chosen is not None:
                dropped = dropped.scatter(-1, chosen.unsqueeze(-1), False)
            logits = logits.masked_fill(dropped, -torch.inf)
        return cls(logits=logits, validate_args=False)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return log-probabilities of tokens; ValueError for actions, or tokens of another shape."""
        if value.is_floating_point():
            raise ValueError(
                f"the policy sampled {keys.ACTION_TOKENS!r}, and was asked for the probability of actions in the "
                f"simulator's units; {SET_KEYS}"
            )
        check_shape(value, self.batch_shape)
        return super().log_prob(value)


def soft_cross_entropy(log_prob: Tensor, target: Tensor, sigma: float) -> Tensor:
    """Return the cross-entropy ``[...]`` of log-probabilities ``[..., bins]`` with labels around ``target`` ``[...]``.

    Labels are Gaussians over the bins; ``sigma`` is their width as a fraction of half the range.
    """
    bins = log_prob.shape[-1]
    distance = torch.arange(bins, device=target.device) - target.unsqueeze(-1)
    label = (-0.5 * (distance / (sigma * (bins - 1) / 2)) ** 2).softmax(-1)
    return -(label * log_prob).sum(-1)


def check_shape(value: Tensor, shape: torch.Size) -> None:
    """Refuse samples of another shape than a distribution's, but for dimensions in front: ValueError."""
    if value.shape[value.ndim - len(shape) :] != shape:
        raise ValueError(
            f"the policy sampled {list(shape)}, and was asked for the probability of {list(value.shape)}; {SET_KEYS}"
        )
