"""Robots' descriptions for SAPIEN, parsed once: it parses them again for every scene that is built."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator
from functools import lru_cache
from typing import Any


@contextlib.contextmanager
def remembered_descriptions() -> Iterator[None]:
    """Let scenes that are built within reuse the URDF files that this process has parsed before, by their text."""
    from sapien.wrapper import urdf_loader

    before = urdf_loader.URDF
    urdf_loader.URDF = _Remembered
    try:
        yield
    finally:
        urdf_loader.URDF = before


class _Remembered:
    @staticmethod
    def _from_xml(node: Any, path: str, lazy_load_meshes: bool) -> Any:
        from lxml import etree

        # A copy for each: who builds with it normalises axes and scales places in it.
        return pickle.loads(_take_apart(etree.tostring(node), path, lazy_load_meshes))


@lru_cache(maxsize=16)
def _take_apart(text: bytes, path: str, lazy_load_meshes: bool) -> bytes:
    from lxml import etree
    from sapien.wrapper.urchin import URDF

    return pickle.dumps(URDF._from_xml(etree.fromstring(text), path, lazy_load_meshes=lazy_load_meshes))
