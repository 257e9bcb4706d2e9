"""What a benchmark's own protocol has for an option, and what is said of a result under another value."""

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np

HORIZON = "horizon {value} instead of {usual}"
SETTLE_STEPS = "{value} settle steps instead of {usual}"
PIXELS = "{value} pixels instead of {usual}"


def list_deviations(*table: tuple[Any, Any, str | Mapping[Any, str]]) -> tuple[str, ...]:
    """List what deviates from a protocol, for ``SimulatorSpec.protocol_deviations``.

    Args:
        *table: of each option the value, the protocol's own, and what is said where they differ: a text with
            ``{value}`` and ``{usual}``, or such texts by value.
    """
    found = []
    for value, usual, text in table:
        if value != usual:
            said = text[value] if isinstance(text, Mapping) else text
            found.append(said.format(value=_shown(value), usual=_shown(usual)))
    return tuple(found)


def _shown(value: Any) -> str:
    return " x ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def image_shape(image_size: Any) -> tuple[int, int]:
    """Return ``(height, width)``, given either that or the pixels of a side."""
    height, width = [image_size] * 2 if np.ndim(image_size) == 0 else image_size
    return height, width


def are_numbers(values: Any, count: int) -> bool:
    """Tell whether it is a sequence, or an array, of so many finite numbers."""
    return (
        isinstance(values, (Sequence, np.ndarray))
        and len(values) == count
        and all(isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value) for value in values)
    )


def check_once(benchmark: str, suite: str, names: Sequence[Any], what: str = "task") -> None:
    """Refuse a suite that has something twice."""
    if len(set(names)) != len(names):
        raise ValueError(f"{benchmark} suite {suite!r} names a {what} twice; name each {what} once")
