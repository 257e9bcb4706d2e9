"""All numbers of a run as one table: ``metrics.csv``.

TorchRL's ``CSVLogger`` writes a file for each name, without a heading, in which the lines of an interrupted process
stand twice.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any

from annotated_types import MinLen

from vla_algos.run.files import write_atomically
from vla_algos.run.loggers.sink import Sink


class Table(Sink):
    """Writes ``metrics.csv`` from ``metrics.jsonl``, whole, with each checkpoint and at the end.

    A row for each step, with the numbers of training and evaluation; a column for each name, in the order in which they
    first came. What is not known, or is not finite, is empty.

    Args:
        folder: of the run.
        columns: patterns of the names that get one, such as ``eval/*``; ``("*",)`` for all.
    """

    name = "csv"

    def __init__(self, folder: Path, columns: Annotated[Sequence[str], MinLen(1)] = ("*",)):
        self._folder, self._columns, self._changed = folder, columns, True

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Note that there is something new."""
        self._changed = True

    def sync(self) -> None:
        """Write the table, if there is something new."""
        if self._changed:
            write_atomically(self._folder / "metrics.csv", as_table(self._folder / "metrics.jsonl", self._columns))
        self._changed = False

    def close(self, failed: bool) -> None:
        """Write the table."""
        self.sync()

    def where(self) -> str:
        """Return the path."""
        return str(self._folder / "metrics.csv")


def as_table(path: Path, columns: Sequence[str] = ("*",)) -> str:
    """Read ``metrics.jsonl`` and return it as comma-separated values; lines that are not of a run are passed over."""
    rows: dict[int, dict[str, Any]] = {}
    names = {"step": None}
    for entry in entries(path):
        rows.setdefault(entry["step"], {}).update(entry)
        names |= dict.fromkeys(name for name in entry if any(fnmatchcase(name, column) for column in columns))
    table = io.StringIO()
    writer = csv.DictWriter(table, list(names), extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows[step] for step in sorted(rows))
    return table.getvalue()


def entries(path: Path) -> list[dict[str, Any]]:
    """Read the lines of ``metrics.jsonl`` that are of a run; none if there is no file."""
    found = []
    for line in path.read_bytes().splitlines() if path.exists() else []:
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and isinstance(entry.get("step"), int):
            found.append(entry)
    return found
