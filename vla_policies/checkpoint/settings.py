"""Settings of a policy: what the user asks for over what was stored with its checkpoint."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch


class SettingError(ValueError):
    """A setting that does not fit; the message begins with its name, so that whoever knows its section can add it."""


def merge_settings(
    policy_class: type[Any], path: Path, options: Mapping[str, Any], settings: Mapping[str, Any]
) -> tuple[dict[str, Any], bool]:
    """Put together the settings for ``policy_class.config_class``; lists become tuples.

    Args:
        policy_class: a :class:`~vla_policies.policy.PretrainedPolicy`.
        path: of the checkpoint, for messages.
        options: what was stored with it; entries that are no settings are ignored.
        settings: what the user asks for.

    Returns:
        The settings, and whether any was stored.

    Raises:
        ValueError: an unknown setting, or another value for one that the checkpoint was trained with.
    """
    names, renamed = [entry.name for entry in fields(policy_class.config_class)], policy_class.renamed_settings
    for old in settings.keys() & renamed.keys():
        warnings.warn(f"{old} is called {renamed[old]} now", DeprecationWarning, stacklevel=4)
    settings = {renamed.get(name, name): value for name, value in settings.items()}
    options = {renamed.get(name, name): value for name, value in options.items()}
    stored = {name: value for name, value in options.items() if name in names}
    check_unchanged(settings, stored, names, policy_class.__name__, path, policy_class.checkpoint_settings)
    return as_tuples({**stored, **settings}), bool(stored)


def check_unchanged(
    settings: Mapping[str, Any],
    stored: Mapping[str, Any],
    known: Iterable[str],
    whose: str,
    path: Path,
    fixed: Iterable[str] | None = None,
) -> None:
    """Refuse settings that there are not, or that a checkpoint has fixed to another value.

    Args:
        settings: what the user asks for.
        stored: what the checkpoint has.
        known: names of all settings.
        whose: name of the policy.
        path: of the checkpoint.
        fixed: names of the settings that it fixes; ``None`` for all.

    Raises:
        SettingError: names the setting, the checkpoint's value and what to do.
    """
    known = list(known)
    unknown = sorted(settings.keys() - set(known))
    if unknown:
        raise SettingError(f"{unknown[0]}: {whose} has no settings {unknown}; there are {known}")
    asked, there = as_tuples(settings), as_tuples(stored)
    for name in asked.keys() & there.keys() if fixed is None else asked.keys() & set(fixed):
        open_yet = fixed is not None and there.get(name) is None  # the checkpoint leaves it to the user
        if not open_yet and asked[name] != there[name]:
            raise SettingError(
                f"{name}={settings[name]}: {path} was trained with {name}={stored[name]}, which cannot be changed; "
                f"leave {name} out"
            )


def as_tuples(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Replace lists, as configurations have them, by tuples."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """Return ``"float32"`` of ``torch.float32``, as it is stored."""
    return str(dtype).removeprefix("torch.")


def saved_dtype(options: Mapping[str, Any]) -> torch.dtype:
    """Return the dtype of the model that a policy was saved with here, or float32."""
    dtype: torch.dtype = getattr(torch, options.get("dtype", "float32"))
    return dtype
