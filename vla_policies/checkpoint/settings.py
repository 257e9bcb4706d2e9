"""Settings of a policy: what the user asks for over what was stored with its checkpoint."""

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import torch

from vla_common.errors import nearest_names
from vla_common.plain import read_json

OPTIONS = "vla_torchrl.json"  # what a policy that was saved in a published layout was set to


class SettingError(ValueError):
    """A setting that does not fit; the message begins with its name, so that a caller can add its section."""


def check_unchanged(
    policy_class: type[Any],
    path: Path,
    stored: Mapping[str, Any],
    settings: Mapping[str, Any],
    fixed: Iterable[str] | None = None,
) -> None:
    """Refuse ``settings`` that a policy lacks, or other ones than a checkpoint has ``fixed`` (``None``: all)."""
    known = [entry.name for entry in fields(policy_class.config_class)]
    if unknown := sorted(settings.keys() - set(known)):
        near = ", ".join(nearest_names(unknown[0], known) or known)
        raise SettingError(f"{unknown[0]}: {policy_class.__name__} has no settings {unknown}; there is {near}")
    asked, there = as_tuples(settings), as_tuples(stored)
    for name in asked.keys() & there.keys() if fixed is None else asked.keys() & set(fixed):
        open_yet = fixed is not None and there.get(name) is None  # the checkpoint leaves it to the user
        if not open_yet and asked[name] != there[name]:
            raise SettingError(
                f"{name}={settings[name]}: {path} was trained with {name}={stored[name]}; leave {name} out"
            )


def defaults_of(policy_class: type[Any]) -> dict[str, Any]:
    """Return the settings of a policy that have a default."""
    known = fields(policy_class.config_class)
    return {entry.name: entry.default for entry in known if entry.default is not MISSING}


def as_tuples(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Replace lists, as configurations have them, by tuples."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()}


def read_options(folder: Path, file: str = OPTIONS) -> dict[str, Any]:
    """Read a JSON object of a folder; empty where there is no such file."""
    return read_json(folder / file) if (folder / file).is_file() else {}


def saved_dtype(options: Mapping[str, Any]) -> torch.dtype:
    """Return the dtype of the model that a policy was saved with here, or float32."""
    name = options.get("dtype", "float32")
    if name not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"dtype is {name!r}, must be float32 or bfloat16; copy vla_torchrl.json again, or type one")
    return getattr(torch, name)
