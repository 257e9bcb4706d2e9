"""Saving and loading policies: a folder with ``config.json`` and weights in safetensors; nothing is executed.

:func:`load_policy` reads what any policy of this package saved, and published checkpoints. How an OpenVLA folder is
laid out is the business of :mod:`vla_policies.openvla.folder`; the rest of this module is the small policy's.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from vla_policies.checkpoint.hub import resolve
from vla_policies.openvla.folder import FAMILIES, OpenVLAFolder
from vla_policies.pi0.folder import is_pi0

if TYPE_CHECKING:
    from vla_policies.policy import VLAPolicy

POLICIES = {  # by the "policy" entry of config.json, or by the family of an OpenVLA checkpoint
    "small": "vla_policies.small.token_policy:SmallVLA",
    "small_flow": "vla_policies.small.flow_policy:SmallFlow",
    "pi0": "vla_policies.pi0.policy:Pi0",
    "openvla": "vla_policies.openvla.openvla:OpenVLA",
    "openvla_oft": "vla_policies.openvla.oft:OpenVLAOFT",
}
_CONFIG, _WEIGHTS = "config.json", "model.safetensors"


def save_policy(folder: str | Path, name: str, config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
    """Write a policy that :func:`load_policy` reads."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_file({key: tensor.contiguous() for key, tensor in weights.items()}, folder / _WEIGHTS)
    (folder / _CONFIG).write_text(json.dumps({"policy": name, **config}, indent=2) + "\n")


def load_policy(folder: str | Path, **settings: Any) -> VLAPolicy:
    """Load a policy that ``save_pretrained`` wrote, or a published checkpoint of OpenVLA or pi0, with its statistics.

    Args:
        folder: local folder or hub id.
        **settings: of ``from_pretrained`` of the large policies. Files of OpenVLA-OFT that have neither its heads nor
            our options look like OpenVLA's: load those with ``OpenVLAOFT.from_pretrained``.

    Raises:
        FileNotFoundError: the folder is not a policy.
        ValueError: an unknown architecture, a truncated file, or weights that do not fit the configuration.
    """
    folder = resolve(folder)
    if is_pi0(folder):
        return policy_class("pi0").from_pretrained(folder, **settings)
    config = read_config(folder)
    if config.get("model_type") in FAMILIES:
        return policy_class(OpenVLAFolder.read(folder).family).from_pretrained(folder, **settings)
    if settings:
        raise ValueError(f"{folder} is a policy that has no settings; leave out the settings {sorted(settings)}")
    if not (folder / _WEIGHTS).is_file():
        raise FileNotFoundError(_not_a_policy(folder, _WEIGHTS))
    name = config.pop("policy", None)
    if name not in POLICIES:
        raise ValueError(f"{folder / _CONFIG} describes the policy {name!r}; this version knows {sorted(POLICIES)}")
    try:
        policy = policy_class(name).from_config(config)
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


def read_config(folder: Path) -> dict[str, Any]:
    """``config.json`` of a policy folder.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is not a JSON object.
    """
    if not (folder / _CONFIG).is_file():
        raise FileNotFoundError(_not_a_policy(folder, _CONFIG))
    try:
        return dict(json.loads((folder / _CONFIG).read_text()))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{folder / _CONFIG} is not a policy configuration ({error})") from error


def policy_class(name: str) -> type[VLAPolicy]:
    """The class of a name in :data:`POLICIES`."""
    module, _, attribute = POLICIES[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def _not_a_policy(folder: Path, file: str) -> str:
    return (
        f"{folder} is not a policy folder: it has no {file}; pass an OpenVLA checkpoint, or the folder that "
        "save_pretrained or a recipe wrote, such as runs/ppo/latest/policy"
    )
