"""Checks of option values that benchmarks share: each says which option is wrong, what it takes and what to type."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from numbers import Integral, Real
from typing import Any

import numpy as np

from vla_common.errors import unknown_name


def check_name(option: str, value: Any, known: Iterable[str], example: str | None = None) -> None:
    """Refuse what is not one of the ``known`` names.

    Raises:
        ValueError: offers the nearest ones.
    """
    known = list(known)
    if not isinstance(value, str) or value not in known:
        raise unknown_name(option, value, known, example)


def check_whole_number(option: str, value: Any, least: int) -> None:
    """Refuse what is not an integer of at least ``least``.

    Raises:
        ValueError: says which option.
    """
    if not is_whole_number(value) or value < least:
        raise ValueError(f"{option} must be >= {least} and whole, got {value!r}")


def is_whole_number(value: Any) -> bool:
    """Tell whether it is an integer; ``True`` and ``False`` are none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def are_numbers(values: Any, count: int) -> bool:
    """Tell whether it is a sequence, or an array, of so many finite numbers."""
    return (
        isinstance(values, (Sequence, np.ndarray))
        and len(values) == count
        and all(isinstance(value, Real) and not isinstance(value, bool) for value in values)
        and all(map(math.isfinite, values))
    )


def image_shape(image_size: Any) -> tuple[int, int]:
    """Return ``(height, width)``, given either that or the pixels of a side.

    Raises:
        ValueError: it is neither.
    """
    sides = [image_size] * 2 if is_whole_number(image_size) else image_size
    if not isinstance(sides, Sequence) or len(sides) != 2 or not all(is_whole_number(n) and n > 0 for n in sides):
        raise ValueError(
            f"image_size is a number of pixels or (height, width), each at least 1, got {image_size!r}; "
            "try image_size=224"
        )
    return tuple(sides)
