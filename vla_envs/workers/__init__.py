"""Worker processes that run simulators, and the memory they share with the environment."""

import warnings
from typing import Any


def __getattr__(name: str) -> Any:
    """Find what this module had before it became a package: the pool."""
    if name not in ("WorkerPool", "SimulatorCrash"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vla_envs.workers import pool

    warnings.warn(f"{__name__}.{name} is vla_envs.{name} now", DeprecationWarning, stacklevel=2)
    return getattr(pool, name)
