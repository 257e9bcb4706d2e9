"""Advantages over decisions: a chunk of primitive actions is one time step."""

from __future__ import annotations

from typing import Literal

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.objectives.value.functional import generalized_advantage_estimate

from vla_keys import (
    ADVANTAGE,
    DONE,
    NEXT,
    REWARD,
    STATE_VALUE,
    STEP_MASK,
    TERMINATED,
    VALUE_TARGET,
)


def valid_decisions(batch: TensorDictBase) -> Tensor:
    """Decisions of which at least one primitive action was executed: bool ``[..., 1]``.

    The others (the simulator died, or the slot was idle) carry no information and enter no statistic.
    """
    return batch[NEXT, STEP_MASK].any(-1, keepdim=True)


def gae(
    batch: TensorDictBase,
    gamma: float = 0.99,
    lmbda: float = 0.95,
    normalize: bool = True,
    bootstrap: Literal["truncation", "none"] = "truncation",
) -> TensorDictBase:
    """Generalized advantage estimation (Schulman et al. 2016, arXiv 1506.02438) over decisions.

    ``done`` (terminated or truncated) cuts the recursion; only ``terminated`` cuts the bootstrap. A
    truncated episode and the end of the rollout therefore bootstrap from the value of the true final
    observation, which the collector stores as ``("next", "state_value")``. Where the horizon is part of the
    task, ``bootstrap="none"`` makes running out of time a failure; the end of the rollout still bootstraps.

    Args:
        batch: ``[N, T]`` in time order, with ``state_value`` and, under ``"next"``, ``state_value``,
            ``reward``, ``done``, ``terminated`` (each ``[N, T, 1]``) and ``step_mask`` ``[N, T, C]``.
        gamma: discount per decision, not per primitive action.
        lmbda: weight of the longer returns.
        normalize: whether to normalise with :func:`normalize_advantages`.
        bootstrap: whether a truncated episode is worth what its final observation promises, or nothing.

    Returns:
        ``batch`` itself, with ``advantage`` and ``value_target`` (never normalised) ``[N, T, 1]`` written.
    """
    if bootstrap not in ("truncation", "none"):
        raise ValueError(f"bootstrap is {bootstrap!r}, must be 'truncation' or 'none'")
    valid = valid_decisions(batch)
    # A decision that was never executed says nothing about the one before it, which therefore ends in a
    # bootstrap from the value of the observation they share.
    cut = batch[NEXT, DONE].clone()
    cut[:, :-1] |= ~valid[:, 1:]
    advantage, value_target = generalized_advantage_estimate(
        gamma,
        lmbda,
        state_value=batch[STATE_VALUE],
        next_state_value=batch[NEXT, STATE_VALUE],
        reward=batch[NEXT, REWARD],
        done=cut,
        terminated=batch[NEXT, TERMINATED if bootstrap == "truncation" else DONE],
    )
    batch[ADVANTAGE] = normalize_advantages(advantage, valid) if normalize else advantage
    batch[VALUE_TARGET] = value_target
    return batch


def normalize_advantages(advantage: Tensor, valid: Tensor, eps: float = 1e-5) -> Tensor:
    """``(A - mean) / (std + eps)`` with mean and unbiased std over the valid decisions only.

    Args:
        advantage: float ``[...]``.
        valid: bool, same shape.
        eps: added to the standard deviation.

    Returns:
        Same shape; a single valid decision, which has no standard deviation, becomes 0.
    """
    sample = advantage[valid]
    if sample.numel() < 2:
        return torch.zeros_like(advantage)
    return (advantage - sample.mean()) / (sample.std() + eps)
