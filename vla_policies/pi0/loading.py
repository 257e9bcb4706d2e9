"""Checkpoint folders to pi0 policies and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from vla_policies.checkpoint.lora import ADAPTER, has_lora, plain_weights, restore_adapter, save_adapter
from vla_policies.checkpoint.settings import dtype_name, merge_settings, saved_dtype
from vla_policies.checkpoint.weights import list_weights, load_weights
from vla_policies.pi0.folder import HEADS, Pi0Folder, empty_model
from vla_policies.pi0.model import needs_float32

if TYPE_CHECKING:
    from vla_policies.pi0.policy import Pi0

Policy = TypeVar("Policy", bound="Pi0")
_HEADS = ("value_head", "noise_network")


def load(
    policy_class: type[Policy],
    folder: str | Path,
    settings: Mapping[str, Any],
    *,
    dtype: torch.dtype | None,
    device: torch.device | str,
    lora_adapter: str | Path | None,
) -> Policy:
    """Build a policy of a checkpoint; see :meth:`vla_policies.pi0.policy.Pi0.from_pretrained`."""
    checkpoint = Pi0Folder.read(folder)
    config = policy_class.config_class(**_settings(policy_class, checkpoint, settings))
    model, entries = empty_model(checkpoint)
    policy = policy_class(model, checkpoint, config)
    dtype = saved_dtype(checkpoint.options) if dtype is None else dtype
    policy.unused_tensors = load_weights(
        model, entries, dtype=dtype, device=device, float32=needs_float32, unused=policy.unused
    )
    if (checkpoint.path / HEADS).is_file():
        stored = {key: entry.read() for key, entry in list_weights(checkpoint.path / HEADS).items()}
        load_heads(policy, stored)
        if not settings.keys() & {"noise_level", "noise_anneal"}:
            policy.noise_level.copy_(stored["noise_level"])
    policy.to(device)
    restore_adapter(policy, checkpoint.path, checkpoint.options, lora_adapter)
    return policy


def save(policy: Pi0, folder: str | Path) -> None:
    """Write a policy in the layout of its checkpoint, together with its settings in ``vla_torchrl.json``."""
    folder, lora = Path(folder), has_lora(policy)
    dtype = dtype_name(policy.model.dtype)
    options = {"family": policy.family, **asdict(policy.config), "dtype": dtype, ADAPTER: lora}
    weights = {**plain_weights(policy.model), **policy.unused_tensors}
    config = {"action_horizon": policy.horizon, "vision_heads": policy.model.config.vision.heads}
    policy.folder.write(folder, weights, options, {**config, "model_type": policy.family})
    heads = {"noise_level": policy.noise_level}
    for name in _HEADS:
        module: nn.Module | None = getattr(policy, name)
        if module is not None:
            heads |= {f"{name}.{key}": tensor for key, tensor in module.state_dict().items()}
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in heads.items()}, folder / HEADS)
    if lora:
        save_adapter(policy, folder / ADAPTER)


def load_heads(policy: Pi0, weights: Mapping[str, Tensor]) -> None:
    """Fill value head and noise network, as far as the policy has them and ``weights`` too.

    Raises:
        ValueError: a tensor is missing or of another shape.
    """
    for name in _HEADS:
        module: nn.Module | None = getattr(policy, name)
        prefix = f"{name}."
        found = {key.removeprefix(prefix): tensor for key, tensor in weights.items() if key.startswith(prefix)}
        if module is None or not found:
            continue
        try:
            module.load_state_dict(found)
        except RuntimeError as error:
            raise ValueError(
                f"{policy.folder.path / HEADS} has another {name} than these settings make: "
                f"{str(error).splitlines()[1].strip()}"
            ) from error


def _settings(policy_class: type[Policy], checkpoint: Pi0Folder, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What the user asked for over what the checkpoint was saved with."""
    merged, _ = merge_settings(policy_class, checkpoint.path, checkpoint.options, settings)
    for name, example in (("benchmark", "libero"), ("config_name", "pi05_libero")):
        if name not in merged:
            raise ValueError(
                f"{checkpoint.path} does not say its {name}; set {name}, such as {example!r} (recipes: policy=pi0)"
            )
    return merged
