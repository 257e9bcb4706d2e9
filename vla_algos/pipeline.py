"""Whether stages of environments that take turns would help: from how long simulators and policy took, in one line."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median

_WORTH_IT = 1.25  # times faster than one stage: what is less is eaten up by turns that wait for resets
_BETTER = 1.05  # times faster than several stages
_APART = 1.5  # times as many environments, so that two calls tell what an environment more costs


def cost_of_half(calls: Sequence[tuple[int, float]], rows: int) -> float | None:
    """Tell how long a call on half of ``rows`` environments takes, of a call on all: 0.5 in proportion, 1 the same.

    Args:
        calls: of the policy: environments, seconds.
        rows: all of the environments.

    Returns:
        From the median of the largest and of the smallest calls, in a straight line; ``None`` where all were about as
        large.
    """
    by_size: dict[int, list[float]] = defaultdict(list)
    for size, seconds in calls:
        by_size[size].append(seconds)
    if not by_size or max(by_size) < _APART * min(by_size):
        return None
    small, large = min(by_size), max(by_size)
    per_row = max(0.0, (median(by_size[large]) - median(by_size[small])) / (large - small))
    fixed = max(0.0, median(by_size[large]) - per_row * large)
    whole = fixed + per_row * rows
    return (fixed + per_row * rows / 2) / whole if whole > 0 else None


def advise(stages: int, seconds: Mapping[str, float], calls: Sequence[tuple[int, float]], rows: int) -> str:
    """Say whether other stages would be faster, in one line; empty if not, or if nobody can know.

    In one stage collecting takes ``env + policy`` seconds, in two the larger of ``env`` and ``2 * half * policy``,
    where ``half`` is :func:`cost_of_half`.

    Args:
        stages: those of the batch.
        seconds: of the batch: ``env``, ``policy`` and ``rollout``.
        calls: of the policy in it.
        rows: number of environments.
    """
    env, policy, half = seconds["env"], seconds["policy"], cost_of_half(calls, rows)
    spent = f"simulators worked {env:.1f} s, the policy {policy:.1f} s"
    if stages == 1:

        def gain(half: float) -> float:
            return (env + policy) / max(env, 2 * half * policy, 1e-9)

        if half is None:
            if gain(0.5) < _WORTH_IT:
                return ""
            return (
                f"{spent}, in turns: pipeline.stages=2 would collect up to {gain(0.5):.1f} times as fast if a call on "
                f"half the environments takes half as long, {gain(1.0):.2f} times if it takes as long as on all"
            )
        if gain(half) < _WORTH_IT:
            return ""
        return (
            f"{spent}, in turns: pipeline.stages=2 would collect up to {gain(half):.1f} times as fast (a call on half "
            f"the environments takes {half:.2f} of one on all)"
        )
    if half is None:
        return ""
    whole = policy / (stages - 2 * (stages - 1) * (1 - half))  # of stages calls each: fixed + its part of the rest
    if (faster := seconds["rollout"] / max(env + whole, 1e-9)) < _BETTER:
        return ""
    return (
        f"{spent}, both together {seconds['rollout']:.1f} s: pipeline.stages=1 would collect about {faster:.1f} times "
        f"as fast (a call on half the environments takes {half:.2f} of one on all)"
    )
