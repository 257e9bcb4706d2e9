"""What a run's folder remembers of its trackers: ``loggers.json``, with the id of each and what it has."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vla_algos.run.files import attempt, write_atomically
from vla_algos.run.loggers.sink import kind_of


class Memory:
    """Reads ``loggers.json`` of a run that is resumed; a new run begins without.

    Args:
        folder: of the run.
        resumed: the run goes on.
        written: the lines of ``metrics.jsonl`` as the process before has left them.
    """

    def __init__(self, folder: Path, resumed: bool, written: Sequence[Mapping[str, Any]]):
        self._path = folder / "loggers.json"
        self._trackers: dict[str, dict[str, Any]] = _read(self._path) if resumed else {}
        before: dict[str, int] = {}
        for entry in written:
            kind = kind_of(entry)
            before[kind] = max(entry["step"], before.get(kind, -1))
        for tracker in self._trackers.values():
            if tracker["active"]:  # what was written to metrics.jsonl was logged there too
                logged = tracker["logged"]
                logged |= {kind: max(step, logged.get(kind, -1)) for kind, step in before.items()}
            tracker["active"] = False

    def id_of(self, name: str) -> str:
        """Return the id of the run there, a new one if there is none."""
        return self._of(name)["id"]

    def logged(self, name: str) -> dict[str, int]:
        """Return the last step that it has of each kind of numbers."""
        return self._of(name)["logged"]

    def keep(self, active: list[str]) -> None:
        """Write the file: from now on, ``active`` get what ``metrics.jsonl`` gets."""
        if not self._trackers and not self._path.exists():
            return
        for name in active:
            self._of(name)["active"] = True
        content = json.dumps(self._trackers, indent=2) + "\n"
        otherwise = "a resumed run would be another one there"
        attempt(str(self._path), lambda: write_atomically(self._path, content), otherwise)

    def _of(self, name: str) -> dict[str, Any]:
        return self._trackers.setdefault(name, {"id": secrets.token_hex(4), "active": False, "logged": {}})


def _read(path: Path) -> dict[str, dict[str, Any]]:
    """Read the file; nothing of it where it is missing or broken."""
    try:
        found = json.loads(path.read_text())
        return {
            str(name): {
                "id": str(each["id"]),
                "active": bool(each["active"]),
                "logged": {str(kind): int(step) for kind, step in each["logged"].items()},
            }
            for name, each in found.items()
        }
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}
