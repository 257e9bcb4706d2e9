"""Numbers for the log, as pure functions of a collected batch.

``rollout/...`` describes the data learnt from, ``env/...`` the episodes that ended in it, ``train/...`` the update.
"""

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from vla_algos import distributed
from vla_algos.advantages import valid_decisions
from vla_common import keys


def rollout_metrics(batch: TensorDictBase) -> dict[str, float]:
    """Describe rewards per executed action, and advantages and value targets, if any, over valid decisions or actions.

    ``train/critic/explained_variance`` compares the value targets with the values of the rollout.
    """
    mask = batch[keys.NEXT, keys.STEP_MASK]
    metrics = {"rollout/rewards": batch[keys.NEXT, keys.STEP_REWARDS][mask].mean()}
    advantage, target = batch.get(keys.ADVANTAGE, None), batch.get(keys.VALUE_TARGET, None)
    valid = mask if advantage is not None and advantage.shape == mask.shape else valid_decisions(batch)
    if advantage is not None and valid.any():
        advantage = advantage[valid]
        metrics["rollout/advantages_mean"] = advantage.mean()
        metrics["rollout/advantages_max"] = advantage.max()
        metrics["rollout/advantages_min"] = advantage.min()
    if target is not None:
        metrics["rollout/value_targets_mean"] = target[valid].mean()
        metrics["rollout/returns_mean"] = metrics["rollout/value_targets_mean"]  # its name in RLinf's guides
        if (value := batch.get(keys.STATE_VALUE, None)) is not None:
            metrics["train/critic/explained_variance"] = explained_variance(value[valid], target[valid])
    return {name: float(value) for name, value in metrics.items()}


def finished(batch: TensorDictBase) -> Tensor:
    """Tell with which decisions an episode ended that has a result, bool, of the shape of ``batch``."""
    after = batch[keys.NEXT]
    acted = after[keys.EPISODE_LEN] > 0  # an idle slot is "done" after 0 actions
    return (after[keys.DONE] & ~after[keys.CRASHED] & acted).squeeze(-1)


def env_metrics(batch: TensorDictBase, crashed_elsewhere: int = 0) -> dict[str, float]:
    """Average over the episodes that ended in ``batch``, of any shape; crashed ones are only counted.

    ``env/return`` is the mean sum of an episode's rewards, ``env/reward`` that per primitive action,
    ``env/actions_clipped`` the share of all executed action elements that the simulator clipped. ``crashed_elsewhere``
    counts crashed episodes that were left out of ``batch``, as groups of runs do.
    """
    after, ended = batch[keys.NEXT], finished(batch).unsqueeze(-1)
    crashed = after[keys.CRASHED].sum() + crashed_elsewhere
    metrics = {"env/num_episodes": float(ended.sum()), "env/crashed_episodes": float(crashed)}
    clipped, executed = after.get(keys.ACTIONS_CLIPPED, None), after[keys.STEP_MASK].sum(-1, keepdim=True)
    if clipped is not None and executed.any():
        metrics["env/actions_clipped"] = float((clipped.double() * executed).sum() / executed.sum())
    if ended.any():
        returns, lengths = after[keys.EPISODE_RETURN][ended], after[keys.EPISODE_LEN][ended].float()
        metrics["env/success_once"] = float(after[keys.SUCCESS][ended].float().mean())
        metrics["env/success_at_end"] = float(after[keys.SUCCESS_AT_END][ended].float().mean())
        metrics["env/return"] = float(returns.mean())
        metrics["env/reward"] = float((returns / lengths).mean())
        metrics["env/episode_len"] = float(lengths.mean())
        if (subtasks := after.get(keys.SUBTASKS, None)) is not None:
            metrics["env/avg_num_subtasks"] = float(subtasks[ended].double().mean())
    return metrics


def throughput(batch: TensorDictBase, seconds: float) -> dict[str, float]:
    """Return how many actions were executed, and how many decisions made, per second of an iteration."""
    return {
        "time/iteration": seconds,
        "env_steps_per_s": int(batch[keys.NEXT, keys.STEP_MASK].sum()) / seconds,
        "decisions_per_s": batch.numel() / seconds,
    }


def collector_stats(collector: Any) -> dict[str, float]:
    """Join a collector's ``stats()`` of all processes: frames and restarts add up, of the rest the largest counts."""
    own: dict[str, float] = getattr(collector, "stats", dict)()
    found = [each for each in distributed.all_gather_object(own) if each]
    added = ("frames", "requested_frames_per_batch", "env/worker_restarts")
    names = found[0] if found else ()
    joined = {name: (sum if name in added else max)(each[name] for each in found) for name in names}
    return {name if "/" in name else f"collector/{name}": value for name, value in joined.items()}  # TorchRL's counters


def outcomes_by_task(batch: TensorDictBase) -> tuple[list[int], list[bool]]:
    """List the tasks of the episodes that ended in ``batch``, and whether they were solved."""
    ended = finished(batch)
    return batch[keys.TASK_ID][ended].tolist(), batch[keys.NEXT, keys.SUCCESS].squeeze(-1)[ended].tolist()


def explained_variance(value: Tensor, target: Tensor) -> Tensor:
    """Compute ``1 - Var(target - value) / Var(target)``; NaN for fewer than two samples or constant targets."""
    if target.numel() < 2 or (variance := target.var()) == 0:
        return torch.tensor(torch.nan)
    return 1 - (target - value).var() / variance


class WeightedMean:
    """Means of named numbers over minibatches of different size; tensors are summed on their device."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor | float] = {}
        self._weights: dict[str, Tensor | float] = {}

    def add(self, metrics: Mapping[str, Tensor | float], weight: Tensor | float = 1.0) -> None:
        """Count ``metrics`` with ``weight``, usually the number of valid elements they are means over."""
        for name, value in metrics.items():
            self._sums[name] = self._sums.get(name, 0.0) + value * weight
            self._weights[name] = self._weights.get(name, 0.0) + weight

    def merge(self, other: "WeightedMean") -> None:
        """Count everything that ``other`` has counted."""
        for name, total in other._sums.items():
            self._sums[name] = self._sums.get(name, 0.0) + total
            self._weights[name] = self._weights.get(name, 0.0) + other._weights[name]

    def of_all_processes(self) -> "WeightedMean":
        """Add up what all processes have counted."""
        if distributed.world_size() == 1:
            return self
        own, together = WeightedMean(), WeightedMean()
        own._sums = {name: float(value) for name, value in self._sums.items()}
        own._weights = {name: float(value) for name, value in self._weights.items()}
        for part in distributed.all_gather_object(own):
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


def add_loss_metrics(mean: WeightedMean, losses: TensorDictBase, names: Mapping[str, str], rows: int) -> None:
    """Count the scalars of a loss that are none of its terms ``loss_...``, as ``train/NAME`` or as ``names`` has it.

    Under ``"weights"`` a loss has, by the same names, how many elements each is a mean over; ``rows`` if it has not.
    """
    weights = losses.get("weights", {})
    for name, value in losses.items():
        if name != "weights" and not name.startswith("loss_") and value.numel() == 1:
            mean.add({f"train/{names.get(name, name)}": value.detach()}, weights.get(name, rows))
