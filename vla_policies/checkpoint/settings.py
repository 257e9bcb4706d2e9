"""Settings of a policy: what the user asks for over what ``save_pretrained`` stored with the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch


def merge_settings(
    policy_class: type, path: Path, options: Mapping[str, Any], settings: Mapping[str, Any]
) -> tuple[dict[str, Any], bool]:
    """Settings for ``policy_class.config_class``; lists become tuples.

    Args:
        policy_class: with ``config_class``, and in ``bound`` the settings that a checkpoint was trained with.
        path: of the checkpoint, for messages.
        options: what was stored with it; entries that are no settings are ignored.
        settings: what the user asks for.

    Returns:
        The settings, and whether any was stored.

    Raises:
        ValueError: an unknown setting, or another value for one that the checkpoint was trained with.
    """
    names = [entry.name for entry in fields(policy_class.config_class)]
    unknown = sorted(settings.keys() - set(names))
    if unknown:
        raise ValueError(f"{policy_class.__name__} has no settings {unknown}; there are {names}")
    stored = {name: value for name, value in options.items() if name in names}
    for name in policy_class.bound:
        if stored.get(name) is not None and settings.get(name, stored[name]) != stored[name]:
            raise ValueError(
                f"{name} is {settings[name]!r}, but {path} was trained with {stored[name]!r}; leave {name} out"
            )
    merged = {**stored, **settings}
    return {k: tuple(v) if isinstance(v, list) else v for k, v in merged.items()}, bool(stored)


def dtype_name(dtype: torch.dtype) -> str:
    """``"float32"`` of ``torch.float32``, as it is stored."""
    return str(dtype).removeprefix("torch.")


def saved_dtype(options: Mapping[str, Any]) -> torch.dtype:
    """The dtype of the model that a policy was saved with here, or float32."""
    return getattr(torch, options.get("dtype", "float32"))
