"""What a run says on the console, in a file too: ``console.log``."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from vla_algos import parallel
from vla_algos.run.files import Appended

NAME = "console.log"


@contextlib.contextmanager
def console_file(folder: Path) -> Iterator[None]:
    """Within, append to ``console.log`` what this process prints, of a progress bar only what stays on the screen.

    Of several processes the first one does. What a full disk refuses is written when there is room.
    """
    if not parallel.is_main():
        yield
        return
    file = Appended(folder / NAME)
    out, errors = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _Both(out, file), _Both(errors, file)
    try:
        yield
    finally:
        sys.stdout.end()
        sys.stderr.end()
        sys.stdout, sys.stderr = out, errors
        file.close()


class _Both:
    """A stream whose whole lines go into a file too, without what was overwritten behind a carriage return."""

    def __init__(self, stream: TextIO, file: Appended):
        self._stream, self._file, self._line = stream, file, ""
        self._writes = False  # that the file could not be written is said on this stream

    def write(self, text: str) -> int:
        """Write to the stream; of the file, what ends with a line."""
        written = self._stream.write(text)
        *lines, self._line = (self._line + text).split("\n")
        self._line = self._line.rpartition("\r")[2] if len(self._line) > _LONG else self._line
        if lines and not self._writes:
            self._append("".join(_visible(line) + "\n" for line in lines))
        return written

    def end(self) -> None:
        """Write what has not ended with a line."""
        if line := _visible(self._line):
            self._append(line + "\n")
        self._line = ""

    def _append(self, text: str) -> None:
        self._writes = True
        try:
            self._file.append(text.encode(errors="replace"))
        finally:
            self._writes = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


_LONG = 10_000  # characters, after which what was overwritten is forgotten


def _visible(line: str) -> str:
    """Return what of a line is seen at its end."""
    return next((part for part in reversed(line.split("\r")) if part.strip()), "")
