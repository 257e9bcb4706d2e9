"""Settings that policies which denoise their actions share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from vla_common.settings import Count, NonNegative, Positive
from vla_policies.flow.steps import METHODS


@dataclass(frozen=True, kw_only=True)
class FlowConfig:
    """How a flow policy samples, and what reinforcement learning trains.

    Attributes:
        method: ``"flow_sde"``, ``"flow_noise"`` or ``"flow_cps"``, see :mod:`vla_policies.flow.steps`; ``"flow_ode"``
            has no log-probability and is for evaluation. A greedy policy takes the deterministic steps, from zeros, the
            middle of the noise.
        num_steps: ``K``, steps from noise to action.
        noise_level: ``a`` of ``flow_sde`` and ``flow_cps``.
        noise_anneal: ``(first, last, iterations)``: the noise level falls linearly over that many iterations, instead
            of being constant.
        noise_std_range: smallest and largest standard deviation that ``flow_noise`` may learn.
        joint_log_prob: all ``K`` steps are stochastic and their log-probabilities are summed; otherwise one step per
            sample is, drawn anew for each decision, and the others are deterministic. ``None``: for ``flow_noise``
            only.
        ignore_last: never make the last step the stochastic one; ``flow_cps``, which adds no noise there, never does.
        value_head: build a value head.
        detach_critic: the value loss does not reach what the value head reads.
    """

    method: Literal["flow_sde", "flow_noise", "flow_cps", "flow_ode"] = "flow_sde"
    num_steps: Count = 5
    noise_level: NonNegative = 0.5
    noise_anneal: tuple[NonNegative, NonNegative, Count] | None = None
    noise_std_range: tuple[Positive, Positive] = (0.08, 0.16)
    joint_log_prob: bool | None = None
    ignore_last: bool = False
    value_head: bool = True
    detach_critic: bool = True

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"method is {self.method!r}, must be one of {', '.join(METHODS)}")
        if self.num_steps < 1:
            raise ValueError(f"num_steps is {self.num_steps}, must be at least 1 (5 is usual)")
        if self.stochastic_steps < 1:
            raise ValueError("no step is left to be stochastic (ignore_last, flow_cps); set num_steps to at least 2")
        if self.ignore_last and self.joint:
            raise ValueError("ignore_last is for one stochastic step per decision; all steps are (joint_log_prob)")
        for name, count in (("noise_std_range", 2), ("noise_anneal", 3)):
            numbers = getattr(self, name)
            if numbers is not None and (not isinstance(numbers, Sequence) or len(numbers) != count):
                raise ValueError(f"{name} is {numbers!r}, must be {count} numbers")
        levels = [self.noise_level] if self.noise_anneal is None else list(self.noise_anneal[:2])
        if self.method == "flow_cps" and max(levels) > 1:
            raise ValueError(f"noise_level is {max(levels)}: flow_cps renews a share of the noise, at most 1")
        if self.method in ("flow_sde", "flow_cps") and min(levels) <= 0:
            raise ValueError(
                f"noise_level is {min(levels)}: {self.method} then has no log-probability; set it above 0 (0.5 is "
                "usual), or method='flow_ode' for evaluation alone"
            )
        if self.noise_anneal is not None and self.noise_anneal[2] < 1:
            raise ValueError(f"noise_anneal is {list(self.noise_anneal)}: the third number, iterations, must be >= 1")

    @property
    def stochastic_steps(self) -> int:
        """How many steps, from the first, may be the stochastic one."""
        return self.num_steps - (self.ignore_last or self.method == "flow_cps")

    @property
    def joint(self) -> bool:
        """Whether all steps are stochastic."""
        return self.method == "flow_noise" if self.joint_log_prob is None else self.joint_log_prob
