"""Robot-manipulation benchmarks as TorchRL environments and Gymnasium ids.

Importing this package imports neither torch nor a simulator: worker processes need the former as little
as a listing needs the latter.
"""

import importlib
from typing import Any

from vla_envs.gym import register_envs

_HOMES = {
    "make_env": "vla_envs.env",
    "VLAEnv": "vla_envs.env",
    "make_spec": "vla_envs.registry",
    "list_envs": "vla_envs.registry",
    "EpisodeSampler": "vla_envs.episodes",
    "EpisodeQueue": "vla_envs.episodes",
    "evaluation_grid": "vla_envs.episodes",
    "Episode": "vla_envs.simulator",
    "Observation": "vla_envs.simulator",
    "Outcome": "vla_envs.simulator",
    "Simulator": "vla_envs.simulator",
    "SimulatorSpec": "vla_envs.simulator",
    "Task": "vla_envs.simulator",
    "WorkerPool": "vla_envs.workers.pool",
    "SimulatorCrash": "vla_envs.workers.pool",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__


register_envs()
