"""What ``launcher:`` takes: where a recipe runs, and what a SLURM job asks for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vla_common.errors import unknown_name
from vla_common.settings import Count, Whole

SUBMITIT_NAMES = {
    "partition": "slurm_partition",
    "account": "slurm_account",
    "qos": "slurm_qos",
    "constraint": "slurm_constraint",
    "nodes": "nodes",
    "tasks_per_node": "tasks_per_node",
    "cpus": "cpus_per_task",
    "gpus": "gpus_per_node",
    "memory_gb": "mem_gb",
    "minutes": "timeout_min",
    "signal_delay_s": "slurm_signal_delay_s",
    "setup": "slurm_setup",
}
_TEXT = ("partition", "account", "qos", "constraint")
_LAUNCHERS: dict[str, dict[str, Any]] = {
    "local": {},
    "slurm": {
        **dict.fromkeys(_TEXT, str | int | None),
        **dict.fromkeys(("nodes", "tasks_per_node"), Count),
        **dict.fromkeys(("cpus", "memory_gb", "minutes"), Whole | None),
        **dict.fromkeys(("gpus", "signal_delay_s"), Whole | None),
        "setup": Sequence[str] | None,
        "seeds": Sequence[Whole] | None,
        "wait": bool,
    },
}


def launcher_types(name: str) -> dict[str, Any]:
    """Annotate the settings of a launcher, ``"local"`` or ``"slurm"``.

    Raises:
        ValueError: there is no launcher of that name.
    """
    if name not in _LAUNCHERS:
        raise unknown_name("launcher", name, _LAUNCHERS, example="local")
    return _LAUNCHERS[name]
