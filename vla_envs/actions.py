"""Which actions no simulator is given, and how many elements of the others it clips."""

import numpy as np

from vla_common import keys
from vla_envs.simulator import SimulatorSpec

_ABSURD = 1000.0  # times the width of its bounds: no action is that far outside


def refuse_actions(spec: SimulatorSpec, actions: np.ndarray, running: np.ndarray | None = None) -> None:
    """Refuse actions, float ``[N, ..., A]``, that no policy means, of the environments that are ``running``."""
    among = np.ones(len(actions), bool) if running is None else running
    inner = tuple(range(1, actions.ndim))

    def where(wrong: np.ndarray) -> str:
        return f" in environments {np.flatnonzero(wrong).tolist()}" if len(actions) > 1 else ""

    broken = ~np.isfinite(actions).all(inner) & among
    if broken.any():
        raise ValueError(
            f"{keys.ACTION!r} is not finite{where(broken)}; the policy has diverged: lower the learning rate or clip "
            "gradients"
        )
    low, high = _bounds(spec)
    far = _ABSURD * np.where(high > low, high - low, 1.0)
    absurd = ((actions < low - far) | (actions > high + far)).any(inner) & among
    if absurd.any():
        raise ValueError(
            f"{keys.ACTION!r} is more than {_ABSURD:.0f} times the bounds' width outside of {low.tolist()} to "
            f"{high.tolist()}{where(absurd)}: check the action's units and the policy's action statistics, or, if it "
            "has diverged, lower the learning rate"
        )


def share_clipped(spec: SimulatorSpec, actions: np.ndarray, executed: np.ndarray) -> np.ndarray:
    """Return the share of the executed elements of ``actions`` ``[N, C, A]`` that are clipped, float32 ``[N, 1]``."""
    steps = executed.sum(1, keepdims=True)
    if not spec.clips_actions:
        return np.zeros_like(steps, np.float32)
    low, high = _bounds(spec)
    outside = ((actions < low) | (actions > high)).sum(2) * executed
    return (outside.sum(1, keepdims=True) / np.maximum(steps * actions.shape[2], 1)).astype(np.float32)


def _bounds(spec: SimulatorSpec) -> tuple[np.ndarray, np.ndarray]:
    return np.array(spec.action_low, np.float32), np.array(spec.action_high, np.float32)
