"""What a run says on the console, in a file too: ``console.log``."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from vla_algos import parallel
from vla_algos.run.files import Appended
from vla_algos.run.phase import has_begun

NAME = "console.log"
_ended_early: Path | None = None  # folder of this process's last run, if nobody has said yet why it ended


@contextlib.contextmanager
def console_file(folder: Path) -> Iterator[None]:
    """Within, append to ``console.log`` what this process prints, of a progress bar only what stays on the screen.

    It is written from when work begins: a start that is refused leaves nothing. Of several processes the first one
    writes it. What a full disk refuses is written when there is room.
    """
    global _ended_early
    if not parallel.is_main():
        yield
        return
    _ended_early = None
    try:
        with _into(folder):
            yield
    except BaseException:
        _ended_early = folder
        raise


@contextlib.contextmanager
def file_of_failed() -> Iterator[None]:
    """Go on with the file of a run that has just ended early, for what says why; of no other run."""
    global _ended_early
    folder, _ended_early = _ended_early, None
    with contextlib.nullcontext() if folder is None else _into(folder):
        yield


@contextlib.contextmanager
def _into(folder: Path) -> Iterator[None]:
    file = _File(folder / NAME)
    out, errors = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _Both(out, file), _Both(errors, file)
    try:
        yield
    finally:
        sys.stdout.end()
        sys.stderr.end()
        sys.stdout, sys.stderr = out, errors
        file.close()


class _File:
    """A file of lines that are kept in memory until work begins, and forgotten if it never does."""

    def __init__(self, path: Path):
        self._file, self._kept = Appended(path), b""

    def append(self, text: str) -> None:
        self._kept += text.encode(errors="replace")
        if self._kept and has_begun():
            lines, self._kept = self._kept, b""
            self._file.append(lines)

    def close(self) -> None:
        self._file.close()


class _Both:
    """A stream whose whole lines go into a file too, without what was overwritten behind a carriage return."""

    def __init__(self, stream: TextIO, file: _File):
        self._stream, self._file, self._line = stream, file, ""
        self._writes = False  # that the file could not be written is said on this stream

    def write(self, text: str) -> int:
        """Write to the stream; of the file, what ends with a line."""
        written = self._stream.write(text)
        *lines, self._line = (self._line + text).split("\n")
        self._line = self._line.rpartition("\r")[2] if len(self._line) > _LONG else self._line
        if not self._writes:  # also without a line: work may have begun
            self._append("".join(f"{_visible(line)}\n" for line in lines if not _left(line)))
        return written

    def end(self) -> None:
        """Write what has not ended with a line."""
        if not _left(self._line) and (line := _visible(self._line)):
            self._append(line + "\n")
        self._line = ""

    def _append(self, text: str) -> None:
        self._writes = True
        try:
            self._file.append(text)
        finally:
            self._writes = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


_UP = "\x1b[A"  # with it a bar below another one goes back to that, until it is closed and stands for itself
_LONG = 10_000  # characters, after which what was overwritten is forgotten


def _visible(line: str) -> str:
    """Return what of a line is seen at its end."""
    return next((part for part in reversed(line.rpartition(_UP)[2].split("\r")) if part.strip()), "")


def _left(line: str) -> bool:
    """Tell whether a line is of a bar below another one that goes on."""
    return _UP in line and not _visible(line)
