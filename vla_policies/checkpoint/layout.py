"""The plain layout of a policy: ``config.json`` and ``model.safetensors``; nothing is executed."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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


def check(module: nn.Module, folder: Path) -> None:
    """Compare a module, which may be on the meta device, with the names and shapes in a file, or ValueError."""
    expected = {key: tuple(tensor.shape) for key, tensor in module.state_dict().items()}
    found = {
        key: (1,) if not entry.shape and expected.get(key) == (1,) else entry.shape  # see add_dimensions
        for key, entry in list_weights(folder / WEIGHTS).items()
    }
    check_layout(expected, found, what=str(folder / WEIGHTS))


def load(module: nn.Module, folder: Path) -> None:
    """Fill a module; ValueError for a truncated file or tensors that do not fit or are not finite."""
    check(module, folder)
    module.load_state_dict(add_dimensions(load_file(folder / WEIGHTS), module.state_dict()))


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
