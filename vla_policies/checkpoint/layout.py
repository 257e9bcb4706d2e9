"""The plain layout of a policy: ``config.json`` and ``model.safetensors``; nothing is executed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from vla_common.checksums import write_checksums
from vla_common.tensor_files import add_dimensions
from vla_policies.checkpoint.hub import read_json
from vla_policies.checkpoint.parts import check_finite, in_first
from vla_policies.checkpoint.weights import load_file
from vla_policies.checkpoint.writing import write_safetensors

CONFIG, WEIGHTS = "config.json", "model.safetensors"
_FAMILY = "policy"  # entry of config.json


def save(folder: str | Path, family: str, config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
    """Write a policy of a family: its settings, plain values by name, its weights, and the digests of the two files.

    Of sharded weights all processes must call it.

    Raises:
        ValueError: weights that are not finite.
    """
    folder = Path(folder)
    check_finite(weights, f"the policy {family!r}")
    in_first(weights.values(), lambda: folder.mkdir(parents=True, exist_ok=True))
    write_safetensors(folder / WEIGHTS, weights)

    def finish() -> None:
        (folder / CONFIG).write_text(json.dumps({_FAMILY: family, **config}, indent=2) + "\n")
        write_checksums(folder, (CONFIG, WEIGHTS))

    in_first(weights.values(), finish)


def read(folder: Path) -> tuple[str | None, dict[str, Any]]:
    """Read family and settings of a folder; of one in another layout, ``None`` and the content of ``config.json``.

    Raises:
        FileNotFoundError: there is no ``config.json``, or one of ours without weights.
        ValueError: it is not a JSON object.
    """
    if not (folder / CONFIG).is_file():
        raise FileNotFoundError(_not_a_policy(folder, CONFIG))
    config = read_json(folder / CONFIG)
    family = config.pop(_FAMILY, None)
    if family is not None and not (folder / WEIGHTS).is_file():
        raise FileNotFoundError(_not_a_policy(folder, WEIGHTS))
    return family, config


def family_of(folder: Path) -> str | None:
    """Read which family a folder says it is of; ``None`` if it says nothing, or cannot be read."""
    try:
        return json.loads((folder / CONFIG).read_text()).get(_FAMILY)
    except (OSError, ValueError, AttributeError):
        return None


def load(module: nn.Module, folder: Path) -> None:
    """Fill a module with the weights of a folder.

    Raises:
        ValueError: a truncated file, or tensors that are missing, unknown, of another shape or not finite.
    """
    expected = module.state_dict()
    weights = add_dimensions(load_file(folder / WEIGHTS), expected)
    missing, extra = sorted(expected.keys() - weights.keys()), sorted(weights.keys() - expected.keys())
    wrong = [
        f"{key} {list(weights[key].shape)} instead of {list(expected[key].shape)}"
        for key in expected.keys() & weights.keys()
        if weights[key].shape != expected[key].shape
    ]
    if missing or extra or wrong:
        raise ValueError(
            f"{folder / WEIGHTS} is not of the architecture in {CONFIG}: missing {missing[:5]}, "
            f"unknown {extra[:5]}, wrong shape {sorted(wrong)[:5]}"
        )
    module.load_state_dict(weights)


def _not_a_policy(folder: Path, file: str) -> str:
    if (folder / "policy" / CONFIG).is_file():
        return f"{folder} is not a policy folder but a run's; type policy.checkpoint={folder / 'policy'}"
    return (
        f"{folder} is not a policy folder: it has no {file}; pass an OpenVLA checkpoint, or the folder that "
        "save_pretrained or a recipe wrote, such as runs/ppo/latest/policy"
    )
