"""When a process did what: spans of time, as lines of JSON, of which ``benchmarks/timeline.py`` draws a picture.

Nothing is noted, and nothing costs more than a comparison, before :func:`begin` was called.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

_file: TextIO | None = None


def begin(file: Path) -> None:
    """Note the spans of this process in a file from now on, behind those that it has already."""
    global _file
    end()
    file.parent.mkdir(parents=True, exist_ok=True)
    _file = open(file, "a", buffering=1)  # noqa: SIM115


def end() -> None:
    """Note nothing any more."""
    global _file
    if _file is not None:
        _file.close()
    _file = None


@contextlib.contextmanager
def span(what: str, **about: Any) -> Iterator[None]:
    """Note how long the body takes, in seconds of the clock that all processes of a machine share.

    Args:
        what: is done, such as ``"policy"`` or ``"wait"``.
        **about: plain values that tell more, such as ``stage=1``.
    """
    started = time.monotonic()
    try:
        yield
    finally:
        note(what, started, time.monotonic(), **about)


def note(what: str, start: float, end: float, **about: Any) -> None:
    """Note a span that was measured elsewhere; ``start`` and ``end`` are of ``time.monotonic()``."""
    if _file is not None:
        with contextlib.suppress(OSError):  # a full disk must not end a run
            _file.write(json.dumps({"what": what, "start": start, "end": end, **about}) + "\n")
