"""The distribution that action tokens are drawn from, the same in the rollout and in the update."""

from __future__ import annotations

import torch
from torch import Tensor

from vla_policies.distributions import TokenDistribution


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
