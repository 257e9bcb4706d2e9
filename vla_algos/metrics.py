"""Numbers for the log, as pure functions of a collected batch.

Names: ``rollout/...`` describes the data that is learnt from, ``env/...`` the episodes that ended in it,
``train/...`` the update.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Annotated

import torch
from annotated_types import Gt, Lt
from tensordict import TensorDictBase
from torch import Tensor

from vla_algos import parallel
from vla_algos.advantages import valid_decisions
from vla_common.keys import (
    ACTIONS_CLIPPED,
    ADVANTAGE,
    CRASHED,
    DONE,
    EPISODE_LEN,
    EPISODE_RETURN,
    NEXT,
    STATE_VALUE,
    STEP_MASK,
    STEP_REWARDS,
    SUBTASKS,
    SUCCESS,
    SUCCESS_AT_END,
    VALUE_TARGET,
)
from vla_common.settings import Whole, checked


def rollout_metrics(batch: TensorDictBase) -> dict[str, float]:
    """Describe rewards per executed action, and advantages and value targets, if any, over valid decisions or actions.

    ``train/critic/explained_variance`` compares the value targets with the values of the rollout.
    """
    mask = batch[NEXT, STEP_MASK]
    metrics = {"rollout/rewards": batch[NEXT, STEP_REWARDS][mask].mean()}
    advantage, target = batch.get(ADVANTAGE, None), batch.get(VALUE_TARGET, None)
    valid = mask if advantage is not None and advantage.shape == mask.shape else valid_decisions(batch)
    if advantage is not None and valid.any():
        advantage = advantage[valid]
        metrics["rollout/advantages_mean"] = advantage.mean()
        metrics["rollout/advantages_max"] = advantage.max()
        metrics["rollout/advantages_min"] = advantage.min()
    if target is not None:
        metrics["rollout/value_targets_mean"] = target[valid].mean()
        metrics["rollout/returns_mean"] = metrics["rollout/value_targets_mean"]  # deprecated since 0.1.0
        if (value := batch.get(STATE_VALUE, None)) is not None:
            metrics["train/critic/explained_variance"] = explained_variance(value[valid], target[valid])
    return {name: float(value) for name, value in metrics.items()}


def finished(batch: TensorDictBase) -> Tensor:
    """Tell with which decisions an episode ended that has a result, bool, of the shape of ``batch``."""
    after = batch[NEXT]
    ended = after[DONE] & ~after[CRASHED] & (after[EPISODE_LEN] > 0)  # an idle slot is "done" after 0 actions
    return ended.squeeze(-1)


def env_metrics(batch: TensorDictBase, crashed_elsewhere: int = 0) -> dict[str, float]:
    """Average over the episodes that ended in ``batch``; crashed ones are counted and left out.

    ``env/return`` is the mean sum of an episode's rewards, ``env/reward`` that per primitive action. With no finished
    episode there are only the counts, and ``env/actions_clipped``: the share of all executed action elements that the
    simulator clipped. Where episodes are chains of tasks, ``env/avg_num_subtasks`` is how many of them were solved.

    Args:
        batch: any shape.
        crashed_elsewhere: crashed episodes that were left out of ``batch``, as groups of runs do.
    """
    after = batch[NEXT]
    crashed = after[CRASHED]
    ended = finished(batch).unsqueeze(-1)
    metrics = {
        "env/num_episodes": float(ended.sum()),
        "env/crashed_episodes": float(crashed.sum() + crashed_elsewhere),
    }
    clipped, executed = after.get(ACTIONS_CLIPPED, None), after[STEP_MASK].sum(-1, keepdim=True)
    if clipped is not None and executed.any():
        metrics["env/actions_clipped"] = float((clipped.double() * executed).sum() / executed.sum())
    if ended.any():
        returns, lengths = after[EPISODE_RETURN][ended], after[EPISODE_LEN][ended].float()
        metrics["env/success_once"] = float(after[SUCCESS][ended].float().mean())
        metrics["env/success_at_end"] = float(after[SUCCESS_AT_END][ended].float().mean())
        metrics["env/return"] = float(returns.mean())
        metrics["env/reward"] = float((returns / lengths).mean())
        metrics["env/episode_len"] = float(lengths.mean())
        if (subtasks := after.get(SUBTASKS, None)) is not None:
            metrics["env/avg_num_subtasks"] = float(subtasks[ended].double().mean())
    return metrics


def explained_variance(value: Tensor, target: Tensor) -> Tensor:
    """Compute ``1 - Var(target - value) / Var(target)``: 1 is a perfect critic, 0 one that knows nothing.

    NaN for fewer than two samples or targets that do not vary.
    """
    if target.numel() < 2 or (variance := target.var()) == 0:
        return torch.tensor(torch.nan)
    return 1 - (target - value).var() / variance


@checked
def wilson_interval(
    successes: Whole, trials: Whole, confidence: Annotated[float, Gt(0), Lt(1)] = 0.95
) -> tuple[float, float]:
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


@checked
def mean_interval(
    values: Sequence[float], largest: Annotated[float, Gt(0)], confidence: Annotated[float, Gt(0), Lt(1)] = 0.95
) -> tuple[float, float]:
    """Interval of the mean of numbers from 0 to ``largest``, such as the solved tasks of chains.

    That of Agresti and Coull (1998), which it is where all numbers are 0 or ``largest``: the normal interval after
    ``z^2`` more numbers, half of them 0 and half ``largest``. So a few episodes that went alike are not taken for
    certainty, as the plain normal interval and the bootstrap take them, and with many it is the normal interval.

    Returns:
        Lower and upper bound, within 0 and ``largest``; these themselves without numbers.
    """
    if not values:
        return 0.0, float(largest)
    z2 = NormalDist().inv_cdf(0.5 + confidence / 2) ** 2
    number = len(values) + z2
    mean = (sum(values) + z2 * largest / 2) / number
    square = (sum(value * value for value in values) + z2 * largest * largest / 2) / number
    margin = (z2 * max(0.0, square - mean * mean) / number) ** 0.5
    return max(0.0, mean - margin), min(float(largest), mean + margin)


@dataclass(frozen=True)
class Estimate:
    """A mean over episodes, or a difference of two, with its 95 % interval."""

    value: float
    low: float
    high: float


@checked
def paired_difference(
    pairs: Sequence[tuple[bool, bool]], confidence: Annotated[float, Gt(0), Lt(1)] = 0.95
) -> Estimate:
    """Success of the second minus that of the first, of two evaluations of the same episodes.

    The interval of Agresti and Min (2005, Statistics in Medicine 24:729), the normal one of paired proportions after
    half an episode more of each of the four outcomes of a pair. With ``b`` episodes that the first alone solved, ``c``
    that the second alone did, ``n`` in all, and ``b* = b + 1/2``, ``c* = c + 1/2``, ``n* = n + 2``::

        (c* - b*) / n*  +-  z sqrt(b* + c* - (c* - b*)^2 / n*) / n*

    What both solve, or neither, adds no variance: that is what pairs are for. Ten pairs that went alike are not
    certainty; with many pairs it is the normal interval.

    Args:
        pairs: of each episode, whether the first and the second solved it.
        confidence: of the interval.

    Returns:
        ``(c - b) / n`` and the interval, within -1 and 1; NaN and these themselves without pairs.
    """
    if not pairs:
        return Estimate(float("nan"), -1.0, 1.0)
    number = len(pairs)
    first_alone = sum(first and not second for first, second in pairs) + 0.5
    second_alone = sum(second and not first for first, second in pairs) + 0.5
    gained = second_alone - first_alone
    value = gained / number
    z, number = NormalDist().inv_cdf(0.5 + confidence / 2), number + 2
    margin = z * (first_alone + second_alone - gained * gained / number) ** 0.5 / number
    return Estimate(value, max(-1.0, gained / number - margin), min(1.0, gained / number + margin))


def mean_of_estimates(estimates: Sequence[Estimate]) -> Estimate:
    """Mean of independent estimates that count the same, such as those of a benchmark's difficulties.

    The interval is that of Zou, Huang and Zhang (2009, Computational Statistics and Data Analysis 53:1080), of ``G``
    estimates ``x_g`` with bounds ``l_g`` and ``u_g``::

        mean - sqrt(sum (x_g - l_g)^2) / G   to   mean + sqrt(sum (u_g - x_g)^2) / G

    which is the usual stratified one, ``sqrt(sum variance_g) / G``, where the bounds are as far below as above.
    """
    if not estimates:
        return Estimate(float("nan"), float("nan"), float("nan"))
    mean = sum(each.value for each in estimates) / len(estimates)
    below = sum((each.value - each.low) ** 2 for each in estimates) ** 0.5 / len(estimates)
    above = sum((each.high - each.value) ** 2 for each in estimates) ** 0.5 / len(estimates)
    return Estimate(mean, mean - below, mean + above)


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

    def merge(self, other: WeightedMean) -> None:
        """Count everything that ``other`` has counted."""
        for name, total in other._sums.items():
            self._sums[name] = self._sums.get(name, 0.0) + total
            self._weights[name] = self._weights.get(name, 0.0) + other._weights[name]

    def of_all_processes(self) -> WeightedMean:
        """Add up what all processes have counted."""
        if parallel.world_size() == 1:
            return self
        together = WeightedMean()
        for sums, weights in parallel.all_gather_object((_numbers(self._sums), _numbers(self._weights))):
            part = WeightedMean()
            part._sums, part._weights = sums, weights
            together.merge(part)
        return together

    def __contains__(self, name: object) -> bool:
        return name in self._sums

    def mean_of(self, name: str) -> float:
        """Return one mean so far; NaN where all weights were 0."""
        weight = float(self._weights[name])
        return float(self._sums[name]) / weight if weight else float("nan")

    def compute(self) -> dict[str, float]:
        """Return the means so far; NaN where all weights were 0."""
        return {name: self.mean_of(name) for name in self._sums}


def _numbers(values: Mapping[str, Tensor | float]) -> dict[str, Tensor | float]:
    return {name: float(value) for name, value in values.items()}


def add_loss_metrics(mean: WeightedMean, losses: TensorDictBase, names: Mapping[str, str], rows: int) -> None:
    """Count what a loss returned beside its terms ``loss_...``, under the names of the log.

    Args:
        mean: counts them.
        losses: scalars; under ``"weights"``, by the same names, how many elements each is a mean over.
        names: logged names after ``train/``, where they are not the loss's own.
        rows: weight of a scalar without one.
    """
    weights = losses.get("weights", {})
    for name, value in losses.items():
        if name != "weights" and not name.startswith("loss_") and value.numel() == 1:
            mean.add({f"train/{names.get(name, name)}": value.detach()}, weights.get(name, rows))
