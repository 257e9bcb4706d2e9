"""The plain layout of a policy: ``config.json`` and ``model.safetensors``; nothing is executed."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vla_common.checksums import write_checksums
from vla_common.plain import read_json
from vla_common.tensor_files import add_dimensions
from vla_policies.checkpoint.parts import check_finite, in_first, write_safetensors
from vla_policies.checkpoint.weights import check_layout, list_weights, load_file

CONFIG, WEIGHTS = "config.json", "model.safetensors"
_FAMILY = "policy"  # entry of config.json
_RLINF = [f"{inside}full_weights.pt" for inside in ("", "model_state_dict/", "actor/model_state_dict/")]


def save(folder: str | Path, family: str, config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
    """Write settings (plain values by name), weights and the digests of both; sharded: all processes call it.

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
    """Read family and settings of a folder; in another layout ``None`` and the content of ``config.json``.

    FileNotFoundError: there is no ``config.json``, or one of ours without weights.
    """
    if not (folder / CONFIG).is_file():
        raise FileNotFoundError(_not_a_policy(folder, CONFIG))
    config = read_json(folder / CONFIG)
    family = config.pop(_FAMILY, None)
    if family is not None and not (folder / WEIGHTS).is_file():
        raise FileNotFoundError(_not_a_policy(folder, WEIGHTS))
    return family, config


def family_of(folder: Path) -> str | None:
    """Return the family that a folder names; ``None`` if it names none or cannot be read."""
    try:
        return read_json(folder / CONFIG).get(_FAMILY)
    except (OSError, ValueError):
        return None


def load(module: nn.Module, folder: Path, *, check: bool = False) -> None:
    """Fill a module; ValueError for a truncated file or tensors that do not fit or are not finite.

    ``check`` compares names and shapes alone, also of a module on the meta device.
    """
    expected, file = module.state_dict(), folder / WEIGHTS
    sizes = {key: torch.empty(entry.shape, device="meta") for key, entry in list_weights(file).items()}
    pair = (expected, add_dimensions(sizes, expected))
    check_layout(*({key: tuple(each.shape) for key, each in tensors.items()} for tensors in pair), what=str(file))
    if not check:
        module.load_state_dict(add_dimensions(load_file(file), expected))


def unconverted(folder: Path) -> str | None:
    """Say what to type where a folder is of one of RLinf's own runs, with weights that only its code can read."""
    for found in (folder / name for name in _RLINF if (folder / name).is_file()):
        return (
            f"{found} is a pickle; convert it with RLinf's python -m rlinf.utils.ckpt_convertor.fsdp_convertor."
            f"convert_pt_to_hf convertor.ckpt_path={found} convertor.save_path=NEW, and pass NEW"
        )
    return None


def _not_a_policy(folder: Path, file: str) -> str:
    if (folder / "policy" / CONFIG).is_file():
        return f"{folder} is not a policy folder but a run's; type that of its policy: {folder / 'policy'}"
    if (folder / "run.json").is_file() and (folder / "checkpoints").is_dir():  # evaluations have none
        return f"{folder} has a run that has not finished, and no policy yet; type its command again, which resumes it"
    return unconverted(folder) or (
        f"{folder} is not a policy folder: it has no {file}; pass an OpenVLA checkpoint, or the folder that "
        "save_pretrained or a recipe wrote, such as runs/ppo/latest/policy"
    )
