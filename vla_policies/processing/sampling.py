"""The distribution that action tokens are drawn from, the same in the rollout and in the update.

What was drawn and the action that the simulator got of it are two entries, often of one shape. The probability of the
wrong one is a number like any other, so a loss that reads it would train on noise: distributions of the library refuse.
"""

from __future__ import annotations

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
        """Return log-probabilities of tokens.

        Raises:
            ValueError: actions, or tokens of another shape.
        """
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
    """Build the tempered and truncated distribution of action tokens.

    Args:
        logits: float32 ``[..., 256]``.
        temperature: divides the logits.
        top_k: only the ``top_k`` likeliest tokens may be drawn (ties included); 0 for all.
        chosen: int64 ``[...]``, tokens that were drawn earlier. They stay in even if the policy has changed and others
            are likelier by now: their log-probability remains finite and keeps its gradient.
    """
    logits = logits / temperature
    if top_k:
        dropped = logits < logits.topk(top_k, dim=-1).values[..., -1:]
        if chosen is not None:
            dropped = dropped.scatter(-1, chosen.unsqueeze(-1), False)
        logits = logits.masked_fill(dropped, -torch.inf)
    return TokenDistribution(logits=logits, validate_args=False)


def check_sampling(temperature: float, top_k: int, num_tokens: int) -> None:
    """Refuse settings that no distribution has.

    Raises:
        ValueError: a temperature that is not positive, or ``top_k`` beyond the number of tokens.
    """
    if not temperature > 0:
        raise ValueError(
            f"temperature is {temperature}, must be positive (1 is usual, 1.6 explores more); greedy actions come from "
            "set_exploration_type(ExplorationType.DETERMINISTIC)"
        )
    if not 0 <= top_k <= num_tokens:
        raise ValueError(f"top_k is {top_k}, must be from 1 to {num_tokens}, or 0 for all tokens")


def check_shape(value: Tensor, shape: torch.Size) -> None:
    """Refuse samples of another shape than that of a distribution, but for dimensions in front.

    Raises:
        ValueError: says how a loss is told what was sampled.
    """
    if value.shape[value.ndim - len(shape) :] != shape:
        raise ValueError(
            f"the policy sampled {list(shape)}, and was asked for the probability of {list(value.shape)}; {SET_KEYS}"
        )
