"""Value head and noise network of a pi0 policy, in a file that the official loader does not see."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor, nn

from vla_policies.checkpoint.weights import list_weights

HEADS = "vla_torchrl_heads.safetensors"
_NOISE_LEVEL = "noise_level"


def make_value_head(*sizes: int) -> nn.Sequential:
    """Make layers of these sizes with ReLU between, and one value at the end."""
    layers: list[nn.Module] = []
    for before, after in pairwise((*sizes, 1)):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def load_heads(folder: Path, heads: Mapping[str, nn.Module | None]) -> Tensor | None:
    """Fill the heads that a policy has, by name, as far as the folder has them too.

    Returns:
        The noise level that was saved with them; ``None`` if the folder has no such file.

    Raises:
        ValueError: a tensor is missing or of another shape.
    """
    file = folder / HEADS
    if not file.is_file():
        return None
    weights = {key: entry.read() for key, entry in list_weights(file).items()}
    for name, module in heads.items():
        prefix = f"{name}."
        found = {key.removeprefix(prefix): tensor for key, tensor in weights.items() if key.startswith(prefix)}
        if module is None or not found:
            continue
        try:
            module.load_state_dict(found)
        except RuntimeError as error:
            raise ValueError(
                f"{file} has another {name} than these settings make: {str(error).splitlines()[1].strip()}"
            ) from error
    return weights[_NOISE_LEVEL]


def save_heads(folder: Path, heads: Mapping[str, nn.Module | None], noise_level: Tensor) -> None:
    """Write the heads that a policy has, and its noise level."""
    tensors = {_NOISE_LEVEL: noise_level}
    for name, module in heads.items():
        if module is not None:
            tensors |= {f"{name}.{key}": tensor for key, tensor in module.state_dict().items()}
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, folder / HEADS)
