"""Saving and loading policies: a folder with ``config.json`` and ``model.safetensors``; nothing is executed."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

if TYPE_CHECKING:
    from vla_policies.policy import VLAPolicy

POLICIES = {"small": "vla_policies.small:SmallVLA"}  # by the "policy" entry of config.json
_CONFIG, _WEIGHTS = "config.json", "model.safetensors"


def save_policy(folder: str | Path, name: str, config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
    """Write a policy that :func:`load_policy` reads."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_file({key: tensor.contiguous() for key, tensor in weights.items()}, folder / _WEIGHTS)
    (folder / _CONFIG).write_text(json.dumps({"policy": name, **config}, indent=2) + "\n")


def load_policy(folder: str | Path) -> VLAPolicy:
    """Load a policy that ``save_pretrained`` wrote, with its normalisation statistics.

    Raises:
        FileNotFoundError: the folder is not a policy.
        ValueError: an unknown architecture, a truncated file, or weights that do not fit the configuration.
    """
    folder = Path(folder)
    for file in (_CONFIG, _WEIGHTS):
        if not (folder / file).is_file():
            raise FileNotFoundError(
                f"{folder} is not a policy folder: it has no {file}; pass the folder that save_pretrained or a recipe "
                "wrote, such as runs/ppo/latest/policy"
            )
    try:
        config = json.loads((folder / _CONFIG).read_text())
        name = config.pop("policy", None)
    except (json.JSONDecodeError, AttributeError) as error:
        raise ValueError(f"{folder / _CONFIG} is not a policy configuration ({error})") from error
    if name not in POLICIES:
        raise ValueError(f"{folder / _CONFIG} describes the policy {name!r}; this version knows {sorted(POLICIES)}")
    module, _, attribute = POLICIES[name].partition(":")
    try:
        policy = getattr(importlib.import_module(module), attribute).from_config(config)
    except TypeError as error:
        raise ValueError(f"{folder / _CONFIG} does not fit the policy {name!r}: {error}") from error
    try:
        weights = load_file(folder / _WEIGHTS)
    except SafetensorError as error:
        raise ValueError(f"{folder / _WEIGHTS} is truncated or no safetensors file ({error}); copy it again") from error
    expected = policy.state_dict()
    missing, extra = sorted(expected.keys() - weights.keys()), sorted(weights.keys() - expected.keys())
    wrong = [
        f"{key} {list(weights[key].shape)} instead of {list(expected[key].shape)}"
        for key in expected.keys() & weights.keys()
        if weights[key].shape != expected[key].shape
    ]
    if missing or extra or wrong:
        raise ValueError(
            f"{folder / _WEIGHTS} is not of the architecture in {_CONFIG}: missing {missing[:5]}, "
            f"unknown {extra[:5]}, wrong shape {sorted(wrong)[:5]}"
        )
    policy.load_state_dict(weights)
    return policy
