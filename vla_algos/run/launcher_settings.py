"""What ``launcher:`` takes: where a recipe runs, and what a SLURM job asks for."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from annotated_types import Ge, Le, MinLen

from vla_common.errors import unknown_name
from vla_common.settings import Seed, Whole

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
# Options of sbatch, for launcher.extra, by the setting that says the same ...
_SAID_BY = {
    **{name: name for name in ("partition", "account", "qos", "constraint", "nodes", "wait")},
    **dict.fromkeys(("ntasks", "ntasks_per_node"), "tasks_per_node"),
    **{"cpus_per_task": "cpus", "gpus_per_node": "gpus", "mem": "memory_gb", "time": "minutes"},
    **{"signal": "signal_delay_s", "array": "seeds", "requeue": "retries", "no_requeue": "retries"},
}
# ... and that say it otherwise, where the setting is empty: gres=gpu:a100:4.
_INSTEAD_OF = {
    **dict.fromkeys(("gres", "gpus", "gpus_per_task"), "gpus"),
    **dict.fromkeys(("mem_per_cpu", "mem_per_gpu"), "memory_gb"),
    "cpus_per_gpu": "cpus",
}
_SUBMITITS = ("output", "error", "open_mode", "chdir", "wrap", "parsable", "quiet", "test_only")
_OPTION = re.compile(r"[a-z][a-z0-9]*([_-][a-z0-9]+)*")
_TEXT = ("partition", "account", "qos", "constraint")
_LAUNCHERS: dict[str, dict[str, Any]] = {
    "local": {},
    "slurm": {
        **dict.fromkeys(_TEXT, str | Annotated[int, Ge(0)] | None),
        "nodes": Annotated[int, Ge(1), Le(10_000)],
        "tasks_per_node": Annotated[int, Ge(1), Le(1000)],
        **dict.fromkeys(("cpus", "memory_gb", "minutes"), Whole | None),
        **dict.fromkeys(("gpus", "signal_delay_s"), Whole | None),
        "retries": Whole,
        "setup": Sequence[str] | None,
        "seeds": Annotated[Sequence[Seed], MinLen(1)] | None,
        "wait": bool,
        "extra": Mapping[str, str | int | float | bool | None] | None,
        "check": bool,
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


def count_processes(settings: Mapping[str, Any]) -> int:
    """Return how many processes a launcher starts."""
    return settings.get("nodes", 1) * settings.get("tasks_per_node", 1)


def asks_for_gpus(settings: Mapping[str, Any]) -> bool:
    """Tell whether a job of such settings has GPUs."""
    extra = settings["extra"] or {}
    return bool(settings["gpus"]) or any("gpu" in (value if name == "gres" else name) for name, value in extra.items())


def check_job(settings: Mapping[str, Any], shared: Mapping[str, int], sharing: int | None = None) -> None:
    """Refuse what would fail only when the job has waited in the queue.

    Args:
        settings: of a launcher, of the right types.
        shared: numbers that processes of the job share, by their names.
        sharing: how many do, where not all.

    Raises:
        ValueError: says which setting, and what would be right.
    """
    minutes, delay, seeds = (settings.get(name) for name in ("minutes", "signal_delay_s", "seeds"))
    if minutes and delay and delay >= 60 * minutes:
        raise ValueError(
            f"launcher.signal_delay_s={delay}: seconds before the time limit, which is launcher.minutes={minutes}; "
            "take fewer, such as 120"
        )
    if seeds and len(set(seeds)) < len(seeds):
        raise ValueError(f"launcher.seeds={seeds}: a seed is there twice, two jobs would write into one folder")
    trap = next((line for line in settings.get("setup") or () if re.search(r"\btrap\b.*\b(EXIT|0)\b", line)), None)
    if trap and settings.get("retries"):
        raise ValueError(
            f"launcher.setup: {trap!r} takes the place of what launcher.retries does at the job's end; leave out the "
            "trap, or type launcher.retries=0"
        )
    _check_extra(settings)
    everybody = count_processes(settings)
    processes = everybody if sharing is None else sharing
    said = "launcher.nodes and launcher.tasks_per_node" if processes == everybody else "placement.rollout"
    for name, number in shared.items():
        if number % processes:
            raise ValueError(
                f"{name}={number} cannot be shared by the {processes} processes of {said}; try "
                f"{name}={-(-number // processes) * processes}"
            )


def _check_extra(settings: Mapping[str, Any]) -> None:
    for name, value in (settings.get("extra") or {}).items():
        option, said = name.replace("-", "_"), f"launcher.extra.{name}={value}"
        if not _OPTION.fullmatch(name):
            raise ValueError(f"{said}: is no option of sbatch; type its long name without --, such as reservation=x")
        if (setting := _SAID_BY.get(option)) is not None:
            raise ValueError(f"{said}: there is a setting for it; type launcher.{setting}={_same(option, value)}")
        if settings.get(setting := _INSTEAD_OF.get(option, "")):
            raise ValueError(
                f"{said}: launcher.{setting}={settings[setting]} says it already; type launcher.{setting}=0"
            )
        if option in _SUBMITITS:
            raise ValueError(f"{said}: would take the job's script, folder or log from us; leave it out")
        if value is None or value is False or "\n" in str(value):
            raise ValueError(f"{said}: must be a text or a number, true for an option that has no value, or left out")


def _same(option: str, value: Any) -> Any:
    return value if _SAID_BY[option] == option else "VALUE"
