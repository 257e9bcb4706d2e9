"""The distribution that action tokens are drawn from, the same in the rollout and in the update.

What was drawn and the action that came of it are two entries, often of one shape, and the probability of the wrong one
is a number like any other: distributions of the library refuse it.
"""

import torch
from torch import Tensor
from torch.distributions import Categorical

from vla_common import keys

SET_KEYS = (
    'say which entry was sampled: loss.set_keys(action=policy.sample_key, sample_log_prob="action_log_prob", '
    'value="state_value")'
)


class TokenDistribution(Categorical):
    """Of action tokens ``[N, C, A]``."""

    def log_prob(self, value: Tensor) -> Tensor:
        """Return log-probabilities of tokens; ValueError for actions, or tokens of another shape."""
        if value.is_floating_point():
            raise ValueError(
                f"the policy sampled {keys.ACTION_TOKENS!r}, and was asked for the probability of actions in the "
                f"simulator's units; {SET_KEYS}"
            )
        check_shape(value, self.batch_shape)
        return super().log_prob(value)


def action_distribution(
    logits: Tensor, temperature: float, top_k: int, chosen: Tensor | None = None
) -> TokenDistribution:
    """Build the distribution of action tokens of logits float32 ``[..., 256]``, which ``temperature`` divides.

    Only the ``top_k`` likeliest may be drawn (ties included; 0: all). ``chosen`` int64 ``[...]``, drawn earlier, stay
    in, so that their log-probability remains finite and keeps its gradient when the policy has changed.
    """
    logits = logits / temperature
    if top_k:
        dropped = logits < logits.topk(top_k, dim=-1).values[..., -1:]
        if chosen is not None:
            dropped = dropped.scatter(-1, chosen.unsqueeze(-1), False)
        logits = logits.masked_fill(dropped, -torch.inf)
    return TokenDistribution(logits=logits, validate_args=False)


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
