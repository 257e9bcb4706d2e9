"""The loggers of a run: which there are, their settings, and how they are opened."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from vla_algos import parallel
from vla_algos.run.files import attempt
from vla_algos.run.loggers.events import Events
from vla_algos.run.loggers.memory import Memory
from vla_algos.run.loggers.sink import Sink, kind_of
from vla_algos.run.loggers.table import Table, entries
from vla_algos.run.loggers.trackers import Tracker, has_key, open_swanlab, open_wandb
from vla_common.settings import check_settings, setting_types

__all__ = ["LOGGERS", "Sink", "Tracker", "check_keys", "check_loggers", "events_of", "open_loggers"]

_TRACKERS: dict[str, Callable[..., Tracker]] = {"wandb": open_wandb, "swanlab": open_swanlab}
LOGGERS: Mapping[str, Mapping[str, Any]] = {  # settings of each and their types
    "tensorboard": setting_types(Events, only=["videos"]),
    "csv": setting_types(Table, without=["folder"]),
    **{name: setting_types(open, without=["folder", "run_id", "logged"]) for name, open in _TRACKERS.items()},
}


def check_loggers(chosen: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse settings that a logger does not have, and loggers whose package is not installed.

    Args:
        chosen: the section ``logger``: settings by logger.

    Raises:
        ValueError: says which, and what to type.
    """
    for name, settings in chosen.items():
        check_settings(f"logger.{name}", settings, LOGGERS[name])
    for name in chosen:
        if name in _TRACKERS and not _is_installed(name):
            raise ValueError(
                f"logger={name}: the package {name} is not installed; type: pip install 'vla-torchrl[{name}]', or "
                f"leave {name} out"
            )


def events_of(chosen: Mapping[str, Mapping[str, Any]], folder: Path) -> list[Sink]:
    """Open TensorBoard's files alone, if they were chosen, for steps that are not the run's and begin anew."""
    return [Events(folder, -1)] if "tensorboard" in chosen and parallel.is_main() else []


def check_keys(chosen: Mapping[str, Mapping[str, Any]], folder: Path) -> None:
    """Refuse a service that the user has not logged in to, before a new run loads anything.

    Raises:
        ValueError: says what to type.
    """
    refusal = None
    goes_on = any((folder / "checkpoints").glob("step_*"))  # which it does without
    for name, settings in chosen.items() if parallel.is_main() and not goes_on else ():
        if name in _TRACKERS and settings.get("mode", "online") == "online" and not has_key(name):
            refusal = f"logger={name}: there is no API key of yours; type: {name} login, or logger.{name}.mode=offline"
    if refusal := parallel.broadcast_object(refusal):
        raise ValueError(refusal)


def open_loggers(chosen: Mapping[str, Mapping[str, Any]], folder: Path, after: int | None = None) -> list[Sink]:
    """Open the loggers of a run; of several processes the first one does, the others get none.

    Args:
        chosen: the section ``logger``: settings by logger.
        folder: of the run; in ``loggers.json`` it keeps the ids of runs elsewhere.
        after: iterations that are done if the run is resumed: it goes on in the same runs elsewhere, without those that
            cannot be reached, which is said. ``None`` for a new run.

    Returns:
        In the order in which they were chosen.

    Raises:
        ValueError: a tracker of a new run cannot be begun.
    """
    sinks: list[Sink] = []
    refusal = None
    if parallel.is_main():
        written = [] if after is None else entries(folder / "metrics.jsonl")
        memory = Memory(folder, after is not None, written)
        evaluated = any(entry["step"] == after and kind_of(entry) == "eval" for entry in written)

        def open_tracker(name: str) -> None:
            sinks.append(_TRACKERS[name](folder, memory.id_of(name), memory.logged(name), **chosen[name]))

        for name in chosen:
            if name == "csv":
                sinks.append(Table(folder, **chosen[name]))
            elif name == "tensorboard":
                sinks.append(Events(folder, -1 if after is None else after, evaluated, **chosen[name]))
            elif after is not None:
                attempt(f"what {name} logs", partial(open_tracker, name), "the run goes on without it", Exception)
            else:
                try:
                    open_tracker(name)
                except Exception as error:
                    reason = str(error).strip().partition("\n")[0]
                    refusal = f"logger={name}: {reason}; to log without a network type logger.{name}.mode=offline"
                    break
        trackers = [sink for sink in sinks if isinstance(sink, Tracker)]
        if refusal is None:
            memory.keep([tracker.name for tracker in trackers])
        else:
            for tracker in trackers:
                with contextlib.suppress(Exception):
                    tracker.close(failed=True)
    if refusal := parallel.broadcast_object(refusal):
        raise ValueError(refusal)
    return sinks


def _is_installed(package: str) -> bool:
    found = importlib.util.find_spec(package)
    return found is not None and found.origin is not None  # a folder of that name is not it
