"""What ``launcher:`` takes: where a recipe runs, and what a SLURM job asks for."""

import re
import subprocess
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from annotated_types import Ge, Le, MinLen
from submitit.slurm.slurm import SlurmJobEnvironment

from vla_algos.distributed import per_rank
from vla_common.errors import unknown_name
from vla_common.settings import Seed, Whole

_OPTION = re.compile(r"[a-z][a-z0-9]*([_-][a-z0-9]+)*")
_TEXT = ("partition", "account", "qos", "constraint")
SUBMITIT_NAMES = {
    **{name: f"slurm_{name}" for name in (*_TEXT, "signal_delay_s", "setup")},
    "nodes": "nodes",
    "tasks_per_node": "tasks_per_node",
    "cpus": "cpus_per_task",
    "gpus": "gpus_per_node",
    "memory_gb": "mem_gb",
    "minutes": "timeout_min",
}
_LAUNCHERS: dict[str, dict[str, Any]] = {
    "local": {},
    "slurm": {
        **dict.fromkeys(_TEXT, str | Annotated[int, Ge(0)] | None),
        **dict.fromkeys(("nodes", "minutes"), Annotated[int, Ge(1), Le(1_000_000)]),  # without: 5, submitit's own
        "tasks_per_node": Annotated[int, Ge(1), Le(1000)],
        **dict.fromkeys(("cpus", "memory_gb", "gpus", "signal_delay_s"), Whole | None),
        "setup": Sequence[str] | None,
        "seeds": Annotated[Sequence[Seed], MinLen(1)] | None,
        "wait": bool,
        "extra": Mapping[str, str | int | float | bool | None] | None,
    },
}


def launcher_types(name: str) -> dict[str, Any]:
    """Return the types of the settings of a launcher; a ``ValueError`` says which launchers there are."""
    if name not in _LAUNCHERS:
        raise unknown_name("launcher", name, _LAUNCHERS, example="local")
    return _LAUNCHERS[name]


def count_processes(settings: Mapping[str, Any]) -> int:
    """Return how many processes a launcher starts."""
    return settings.get("nodes", 1) * settings.get("tasks_per_node", 1)


def requeue() -> str:
    """Put the SLURM job of this process back into the queue; returns what SLURM says if it does not."""
    done = subprocess.run(["scontrol", "requeue", SlurmJobEnvironment().job_id], capture_output=True, text=True)
    return done.stderr.strip() or "scontrol fails" if done.returncode else ""


def check_job(settings: Mapping[str, Any], shared: Mapping[str, int]) -> None:
    """Refuse (ValueError) what would fail only after the queue; ``shared``: numbers that the job's processes share."""
    minutes, delay, seeds = (settings.get(name) for name in ("minutes", "signal_delay_s", "seeds"))
    if minutes and delay and delay >= 60 * minutes:
        raise ValueError(
            f"launcher.signal_delay_s={delay}: seconds before the time limit, which is launcher.minutes={minutes}; "
            "take fewer, such as 120"
        )
    if seeds and len(set(seeds)) < len(seeds):
        raise ValueError(f"launcher.seeds={seeds}: a seed is there twice, two jobs would write into one folder")
    for name, value in (settings.get("extra") or {}).items():  # nothing else may get into the batch script
        said = f"launcher.extra.{name}={value}"
        if not _OPTION.fullmatch(name):
            raise ValueError(f"{said}: is no option of sbatch; type its long name without --, such as reservation=x")
        if value is None or value is False or "\n" in str(value):
            raise ValueError(f"{said}: must be a text or a number, true for an option that has no value, or left out")
    for name, number in shared.items():
        per_rank(number, name, count_processes(settings))
