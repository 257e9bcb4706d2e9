"""Where code and assets may lie that are on no package index: named folders, offline packs, habits of a benchmark."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path


def list_places(path: str | None, variable: str, packs: Sequence[str] = (), others: Sequence[Path] = ()) -> list[Path]:
    """List folders to look in, in order; one that was named is alone.

    Args:
        path: an explicit one.
        variable: of the environment, that names one.
        packs: where they are in ``$VLA_TORCHRL_ASSETS``.
        others: looked into after those.
    """
    if path is not None:
        return [Path(path).expanduser()]
    if named := os.environ.get(variable):
        return [Path(named).expanduser()]
    root = os.environ.get("VLA_TORCHRL_ASSETS")
    return [*(Path(root) / pack for pack in packs if root), *others]


def find_folder(
    heading: str,
    places: Sequence[Path],
    missing: Callable[[Path], Sequence[str]],
    remedy: str,
    hint: Callable[[Path], str] = lambda place: "",
) -> Path:
    """Return the first folder that has everything.

    Args:
        heading: of the error.
        places: to look in.
        missing: lists what one lacks.
        remedy: what to type.
        hint: what else is to be said of one that is incomplete.

    Raises:
        FileNotFoundError: there is none; says where was looked, what is wrong there and what to type.
    """
    for place in places:
        if not missing(place):
            return place.resolve()

    def problem(place: Path) -> str:
        if not place.is_dir():
            return "no such folder"
        first, *others = missing(place)
        return f"incomplete, lacks {first}" + (f" and {len(others)} more" if others else "") + hint(place)

    looked = "\n".join(f"  {place}: {problem(place)}" for place in places)
    raise FileNotFoundError(f"{heading}. Looked in\n{looked}\n  Type: {remedy}")
