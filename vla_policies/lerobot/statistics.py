"""Normalisation as LeRobot's processors do it: the formulas of lerobot 0.6.2, processor/normalize_processor.py."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

IDENTITY, MEAN_STD = "IDENTITY", "MEAN_STD"
_BOUNDS = {"QUANTILES": ("q01", "q99"), "QUANTILE10": ("q10", "q90"), "MIN_MAX": ("min", "max")}
_NAMES = {MEAN_STD: ("mean", "std"), **_BOUNDS}


@dataclass(frozen=True)
class FeatureStatistics:
    """How a feature is normalised, dimension by dimension.

    ``MEAN_STD``: mean 0 and deviation 1, with ``epsilon`` added to the deviation in one direction alone; otherwise two
    bounds become -1 and 1, where a span of 0 counts as ``epsilon``.
    """

    mode: str
    first: Tensor  # float32 [D]: mean, or what becomes -1
    second: Tensor  # deviation, or what becomes 1
    epsilon: float

    @classmethod
    def read(cls, tensors: Mapping[str, Tensor], feature: str, mode: str, epsilon: float, what: str) -> Self:
        """Take the statistics ``<feature>.<name>`` of a ``mode``; ValueError, which begins with ``what``, without."""
        if mode == IDENTITY:
            return cls(mode, torch.zeros(0), torch.zeros(0), epsilon)
        if mode not in _NAMES:
            raise ValueError(f"{what} normalises {feature} by {mode!r}; known are {', '.join((IDENTITY, *_NAMES))}")
        names = [f"{feature}.{name}" for name in _NAMES[mode]]
        if missing := [name for name in names if name not in tensors]:
            raise ValueError(
                f"{what} has no statistics {' and '.join(missing)}; copy them from the original checkpoint"
            )
        first, second = (tensors[name].float().flatten() for name in names)
        if len(first) != len(second) or (second < (0 if mode == MEAN_STD else first)).any():
            raise ValueError(f"{what}: {names[0]} and {names[1]} do not belong together; copy the statistics again")
        return cls(mode, first, second, epsilon)

    def normalize(self, values: Tensor) -> Tensor:
        """Normalise ``[..., D]`` in physical units."""
        if self.mode == IDENTITY:
            return values
        first, second = self.first.to(values.device), self.second.to(values.device)
        if self.mode == MEAN_STD:
            return (values - first) / (second + self.epsilon)
        return 2 * (values - first) / self._span(first, second) - 1

    def unnormalize(self, values: Tensor) -> Tensor:
        """Invert :meth:`normalize`."""
        if self.mode == IDENTITY:
            return values
        first, second = self.first.to(values.device), self.second.to(values.device)
        if self.mode == MEAN_STD:
            return values * second + first
        return (values + 1) / 2 * self._span(first, second) + first

    def _span(self, first: Tensor, second: Tensor) -> Tensor:
        return torch.where(second == first, self.epsilon, second - first)

    def check(self, size: int, what: str) -> None:
        """Refuse statistics of another robot, by a ValueError on ``what``, which has ``size`` numbers."""
        if self.mode != IDENTITY and len(self.first) != size:
            raise ValueError(
                f"the statistics of {what} have {len(self.first)} numbers, the benchmark has {size}: take a "
                "checkpoint of this benchmark"
            )


@dataclass(frozen=True)
class LeRobotStatistics:
    """Those of a policy's ``state`` and ``actions``."""

    state: FeatureStatistics
    actions: FeatureStatistics

    def normalize(self, what: str, values: Tensor) -> Tensor:
        """Normalise ``state`` or ``actions`` ``[..., D]`` in physical units; ValueError for those of another robot."""
        statistics: FeatureStatistics = getattr(self, what)
        statistics.check(values.shape[-1], what)
        return statistics.normalize(values)

    def unnormalize(self, what: str, values: Tensor) -> Tensor:
        """Invert :meth:`normalize`."""
        statistics: FeatureStatistics = getattr(self, what)
        statistics.check(values.shape[-1], what)
        return statistics.unnormalize(values)

    def check(self, state_dim: int, action_dim: int) -> None:
        """Refuse statistics of another robot (ValueError)."""
        self.state.check(state_dim, "state")
        self.actions.check(action_dim, "actions")


_NONE = torch.zeros(0), torch.zeros(0), 0.0  # prompts of pi0.5 list states before there are any
NO_STATISTICS = LeRobotStatistics(FeatureStatistics(IDENTITY, *_NONE), FeatureStatistics(MEAN_STD, *_NONE))


def to_tensors(feature: str, summary: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return statistics by name, as :func:`~vla_policies.processing.normalization.summarise` has them, as stored."""
    return {f"{feature}.{name}": torch.tensor(values, dtype=torch.float32) for name, values in summary.items()}
