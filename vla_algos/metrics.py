"""Numbers for the log, as pure functions of a collected batch.

Names: ``rollout/...`` describes the data that is learnt from, ``env/...`` the episodes that ended in it,
``train/...`` the update.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import NormalDist

import torch
from tensordict import TensorDictBase
from torch import Tensor

from vla_algos.advantages import valid_decisions
from vla_keys import (
    ADVANTAGE,
    DONE,
    EPISODE_LEN,
    EPISODE_RETURN,
    LOST,
    NEXT,
    STATE_VALUE,
    STEP_MASK,
    STEP_REWARDS,
    SUCCESS,
    SUCCESS_AT_END,
    VALUE_TARGET,
)


def rollout_metrics(batch: TensorDictBase) -> dict[str, float]:
    """Rewards per executed action; advantages and returns over valid decisions, where they are there.

    ``train/critic/explained_variance`` compares the value targets with the values of the rollout.
    """
    valid = valid_decisions(batch)
    metrics = {"rollout/rewards": batch[NEXT, STEP_REWARDS][batch[NEXT, STEP_MASK]].mean()}
    if (advantage := batch.get(ADVANTAGE, None)) is not None and valid.any():
        advantage = advantage[valid]
        metrics["rollout/advantages_mean"] = advantage.mean()
        metrics["rollout/advantages_max"] = advantage.max()
        metrics["rollout/advantages_min"] = advantage.min()
    if (target := batch.get(VALUE_TARGET, None)) is not None:
        metrics["rollout/returns_mean"] = target[valid].mean()
        value = batch[STATE_VALUE]
        metrics["train/critic/explained_variance"] = explained_variance(value[valid], target[valid])
    return {name: float(value) for name, value in metrics.items()}


def env_metrics(batch: TensorDictBase) -> dict[str, float]:
    """Means over the episodes that ended in ``batch``; lost ones are counted and left out.

    ``env/reward`` is the return per primitive action. With no finished episode there are only the counts.
    """
    after = batch[NEXT]
    lost = after[LOST]
    finished = after[DONE] & ~lost & (after[EPISODE_LEN] > 0)  # an idle slot is "done" after 0 actions
    metrics = {"env/num_episodes": float(finished.sum()), "env/lost_episodes": float(lost.sum())}
    if finished.any():
        returns, lengths = after[EPISODE_RETURN][finished], after[EPISODE_LEN][finished].float()
        metrics["env/success_once"] = float(after[SUCCESS][finished].float().mean())
        metrics["env/success_at_end"] = float(after[SUCCESS_AT_END][finished].float().mean())
        metrics["env/return"] = float(returns.mean())
        metrics["env/reward"] = float((returns / lengths).mean())
        metrics["env/episode_len"] = float(lengths.mean())
    return metrics


def explained_variance(value: Tensor, target: Tensor) -> Tensor:
    """``1 - Var(target - value) / Var(target)``: 1 is a perfect critic, 0 one that knows nothing.

    NaN for fewer than two samples or targets that do not vary.
    """
    if target.numel() < 2 or (variance := target.var()) == 0:
        return torch.tensor(torch.nan)
    return 1 - (target - value).var() / variance


def wilson_interval(successes: int, trials: int, confidence: float = 0.95) -> tuple[float, float]:
    """Score interval of a success rate (Wilson 1927), good for few trials and for rates near 0 and 1.

    Returns:
        Lower and upper bound; ``(0, 1)`` without trials.
    """
    if trials == 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    rate = successes / trials
    centre = rate + z * z / (2 * trials)
    margin = z * (rate * (1 - rate) / trials + z * z / (4 * trials * trials)) ** 0.5
    scale = 1 + z * z / trials
    return max(0.0, (centre - margin) / scale), min(1.0, (centre + margin) / scale)


class WeightedMean:
    """Means of named numbers over minibatches of different size.

    Tensors are summed where they are, so that a GPU is not made to wait for every minibatch.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor | float] = {}
        self._weights: dict[str, Tensor | float] = {}

    def add(self, metrics: Mapping[str, Tensor | float], weight: Tensor | float = 1.0) -> None:
        """Count ``metrics`` with ``weight``, usually the number of valid elements they are means over."""
        for name, value in metrics.items():
            self._sums[name] = self._sums.get(name, 0.0) + value * weight
            self._weights[name] = self._weights.get(name, 0.0) + weight

    def compute(self) -> dict[str, float]:
        """The means so far; NaN where all weights were 0."""
        weights = {name: float(weight) for name, weight in self._weights.items()}
        return {name: float(self._sums[name]) / w if w else float("nan") for name, w in weights.items()}


def add_update(mean: WeightedMean, losses: TensorDictBase) -> None:
    """Book what :class:`~vla_algos.losses.ChunkClipPPOLoss` returned for a minibatch under the logged names.

    ``train/entropy_loss`` is the mean entropy per token in nats, ``train/loss`` the sum that is minimised.
    """
    total = sum(value.detach() for key, value in losses.items() if key.startswith("loss_"))
    actor = {
        "train/loss": total,
        "train/entropy_loss": losses["entropy"],
        "train/actor/policy_loss": losses["loss_objective"].detach(),
        "train/actor/approx_kl": losses["kl_approx"],
        "train/actor/clip_fraction": losses["clip_fraction"],
        "train/actor/ratio": losses["ratio"],
        "train/actor/clipped_ratio": losses["clipped_ratio"],
    }
    mean.add(actor, losses["num_elements"])
    critic = {"train/critic/value_loss": "value_loss", "train/critic/value_clip_ratio": "value_clip_fraction"}
    critic = {name: losses.get(key, None) for name, key in critic.items()}
    mean.add({name: v for name, v in critic.items() if v is not None}, losses["num_decisions"])
