"""Messages of openpi's and of vla-eval's servers: msgpack, in which an array is a map of its bytes, dtype and shape.

Both are read, whichever was written: openpi (``openpi_client/msgpack_numpy.py``) has keys of bytes, vla-eval
(``vla_eval/protocol``, protocol version 1) keys of text, and images as PNG or JPEG too. What is read becomes numbers,
texts, lists, dicts and arrays of numbers, and nothing else. Observations are sent by the names that each has for them.
"""

import io
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgpack
import numpy as np
from PIL import Image

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
LARGEST = 64 * 2**20  # bytes of a message: 64 environments with a camera of 480 x 640
_DTYPE = re.compile(r"[<>|=]?(b1|[iuf][1248])")


def pack(content: Any, *, text_keys: bool = False) -> bytes:
    """Write a message; arrays as openpi does, or with ``text_keys`` as vla-eval does, images as they are."""

    def array(value: Any) -> Any:
        if isinstance(value, np.generic):
            return value.item()
        if not isinstance(value, np.ndarray):
            raise TypeError(f"a message has numbers, texts and arrays, not {type(value).__name__}")
        found = {"__ndarray__": True, "data": value.tobytes(), "dtype": value.dtype.str, "shape": value.shape}
        return found if text_keys else {name.encode(): each for name, each in found.items()}

    return msgpack.packb(content, default=array)


def unpack(message: Any) -> Any:
    """Read a message; ``ValueError`` if it is none, or has something else than plain data and arrays in it, or more."""
    room = 2 * LARGEST  # bytes, of which a list or a map takes 1024, an array 16384 or more: few may stand for many

    def take(found: Any) -> Any:
        nonlocal room
        value = _restore(found) if isinstance(found, dict) else found
        room -= max(16384, value.nbytes) if isinstance(value, np.ndarray) else 1024
        if room < 0:
            raise ValueError("there is more in it than observations have")
        return value

    if not isinstance(message, bytes):
        raise ValueError("it is text, and a message is bytes of msgpack")
    try:
        return msgpack.unpackb(message, object_hook=take, list_hook=take, ext_hook=_refuse)
    except Exception as error:  # whatever msgpack, numpy and Pillow raise of broken data
        raise ValueError(f"it cannot be read: {error or type(error).__name__}") from error


def _refuse(code: int, _: bytes) -> Any:
    raise ValueError(f"an extension of msgpack, type {code}")


def _restore(found: dict[Any, Any]) -> Any:
    named = {name.decode() if isinstance(name, bytes) else name: value for name, value in found.items()}
    if "__npgeneric__" in named:
        return named["data"]
    if "__image__" in named and named.get("format") != "raw":
        return _image(named["data"], _shape(named))
    if "__image__" in named or "__ndarray__" in named:
        if not _DTYPE.fullmatch(dtype := str(named["dtype"])):
            raise ValueError(f"an array of {dtype[:20]!r}; numbers are sent")
        return np.frombuffer(named["data"], dtype).reshape(_shape(named)).copy()
    return found


def _shape(named: dict[str, Any]) -> tuple[int, ...]:
    shape = tuple(named["shape"])
    if not all(type(size) is int and 0 <= size <= LARGEST for size in shape) or math.prod(shape) > LARGEST:
        raise ValueError(f"an array of shape {str(shape)[:80]}")
    return shape


def _image(data: bytes, shape: tuple[int, ...]) -> np.ndarray:
    with Image.open(io.BytesIO(data), formats=["PNG", "JPEG"]) as image:
        if (image.height, image.width) != shape[:2]:  # before it is decoded
            raise ValueError(f"an image of {image.height} x {image.width} pixels, said to be {shape[:2]}")
        return np.asarray(image).reshape(shape).copy()


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
