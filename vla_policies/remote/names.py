"""By what names an observation is sent, and the observation of one moment to and from a message."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from vla_common.errors import unknown_name
from vla_common.keys import IMAGES, STATES, TASK_DESCRIPTIONS, WRIST_IMAGES

ProtocolName = Literal["openpi", "vla_eval"]
Names = Mapping[str, str | Sequence[str]]  # by our key; of wrist_images one for each camera

NAMES: Mapping[str, Names] = {  # as each has them for LIBERO; what stands behind a dot is inside
    "openpi": {
        IMAGES: "observation/image",
        WRIST_IMAGES: "observation/wrist_image",
        STATES: "observation/state",
        TASK_DESCRIPTIONS: "prompt",
    },
    "vla_eval": {
        IMAGES: "images.agentview",
        WRIST_IMAGES: "images.wrist",
        STATES: "states",
        TASK_DESCRIPTIONS: "task_description",
    },
}


def complete_names(protocol: str, names: Names | None) -> dict[str, tuple[str, ...]]:
    """Complete the names of observations by those of a protocol; ``ValueError`` for a key that is no observation."""
    for key in names or {}:
        if key not in NAMES[protocol]:
            raise unknown_name("observation", key, NAMES[protocol])
    both = {**NAMES[protocol], **(names or {})}
    return {key: (name,) if isinstance(name, str) else tuple(name) for key, name in both.items()}


def to_message(observation: Mapping[str, Any], names: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Name what is observed, arrays and texts by our keys; ``wrist_images`` ``[..., V, H, W, 3]`` by camera."""
    found: dict[str, Any] = {}
    for key, value in observation.items():
        cameras = np.moveaxis(value, -4, 0) if key == WRIST_IMAGES else [value]
        for name, each in zip(names[key], cameras, strict=True):
            *outer, last = name.split(".")
            place = found
            for part in outer:
                place = place.setdefault(part, {})
            place[last] = np.ascontiguousarray(each) if isinstance(each, np.ndarray) else each
    return found


def from_message(content: Any, names: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Undo :func:`to_message` for the keys of ``names``; ``ValueError`` if one is not there."""
    found: dict[str, Any] = {}
    for key, own in names.items():
        values = [_find(content, name) for name in own]
        found[key] = np.stack(values, -4) if key == WRIST_IMAGES else values[0]
    return found


def _find(content: Any, name: str) -> Any:
    place = content
    for part in name.split("."):
        if not isinstance(place, dict) or part not in place:
            there = ", ".join(map(str, content)) if isinstance(content, dict) else type(content).__name__
            raise ValueError(f"the observation has no {name!r}; it has {there[:200]}")
        place = place[part]
    return place
