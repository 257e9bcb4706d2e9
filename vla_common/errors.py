"""Errors that say what was wrong, what would be right and what to type."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def unknown_name(kind: str, name: str, known: Iterable[str], example: str | None = None) -> ValueError:
    """A ``ValueError`` for a misspelt name that offers the nearest known ones."""
    known = list(known)
    lowered = {candidate.lower(): candidate for candidate in known}
    near = [lowered[match] for match in difflib.get_close_matches(str(name).lower(), lowered, n=3, cutoff=0.5)]
    message = f"unknown {kind} {name!r}"
    if near:
        message += f"; did you mean {' or '.join(near)}?"
    else:
        shown = ", ".join(known[:12]) + (", ..." if len(known) > 12 else "")
        message += f"; known are {shown}"
    return ValueError(message + (f" (for example {example})" if example and not near else ""))
