"""Errors that say what was wrong, what would be right and what to type."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest_names(name: str, known: Iterable[str]) -> list[str]:
    """Up to three of the ``known`` names that are spelt like ``name``, the nearest first."""
    lowered = {candidate.lower(): candidate for candidate in known}
    return [lowered[match] for match in difflib.get_close_matches(str(name).lower(), lowered, n=3, cutoff=0.5)]


def unknown_name(kind: str, name: str, known: Iterable[str], example: str | None = None) -> ValueError:
    """Make a ``ValueError`` for a misspelt name that offers the nearest known ones."""
    known = list(known)
    near = nearest_names(name, known)
    message = f"unknown {kind} {name!r}"
    if near:
        message += f"; did you mean {' or '.join(near)}?"
    else:
        shown = ", ".join(known[:12]) + (", ..." if len(known) > 12 else "")
        message += f"; known are {shown}"
    return ValueError(message + (f" (for example {example})" if example and not near else ""))
