"""Checkpoint folders to OpenVLA policies and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from vla_policies.checkpoint.lora import ADAPTER, has_lora, plain_weights, restore_adapter, save_adapter
from vla_policies.checkpoint.settings import dtype_name, merge_settings, saved_dtype
from vla_policies.checkpoint.weights import Entry, load_head, load_weights
from vla_policies.nn.dino_siglip_config import VisionConfig, heads_of
from vla_policies.nn.llama import LlamaConfig
from vla_policies.openvla.film import Adapted, read_film, write_film
from vla_policies.openvla.folder import VALUE_HEAD, OpenVLAFolder
from vla_policies.openvla.model import Prismatic, PrismaticConfig

if TYPE_CHECKING:
    from vla_policies.openvla.base import PrismaticPolicy

Policy = TypeVar("Policy", bound="PrismaticPolicy")
_HEADS = ("action_head", "proprio_projector")


def load(
    policy_class: type[Policy],
    folder: str | Path,
    settings: Mapping[str, Any],
    *,
    dtype: torch.dtype | None,
    device: torch.device | str,
    lora_adapter: str | Path | None,
) -> Policy:
    """Build a policy of a checkpoint. Everything is checked before a tensor is read; memory peaks at its weights.

    Args:
        policy_class: ``OpenVLA`` or ``OpenVLAOFT``.
        folder: local folder or hub id, in the layout of :mod:`vla_policies.openvla.folder`.
        settings: fields of the class's configuration. They override what the checkpoint was saved with, apart from
            those that it was trained with.
        dtype: of the model, ``None`` for what it was saved with here, or float32. Heads are float32.
        device: of the policy.
        lora_adapter: folder of a peft adapter to apply. One that :func:`save` wrote is applied by itself; one that is
            published beside weights is not, because it is merged into them already.

    Raises:
        FileNotFoundError: no checkpoint, or a part of it is missing.
        ValueError: settings, statistics, tokenizer or weights that do not fit.
    """
    checkpoint = OpenVLAFolder.read(folder, policy_class.family)
    config = policy_class.config_class(**_settings(policy_class, checkpoint, settings))
    model, entries, adapted = empty_model(checkpoint)
    policy = policy_class(model, checkpoint, config)

    dtype = saved_dtype(checkpoint.options) if dtype is None else dtype
    unused = load_weights(model, entries, dtype=dtype, device=device, unused=unused_by(model))
    policy.film = adapted
    policy.unused_tensors = {key: tensor for key, tensor in unused.items() if not key.startswith(VALUE_HEAD)}
    for name in _HEADS:
        if getattr(policy, name, None) is not None:
            file = getattr(checkpoint, name)
            if file is None:
                raise FileNotFoundError(
                    f"{checkpoint.path} has no {name}--*.pt, which the policy needs; copy it from the original "
                    "checkpoint, or set head='tokens' (action_head) or use_proprio=False (proprio_projector)"
                )
            load_head(getattr(policy, name), file, dtype=torch.float32)
    if policy.value_head is not None and checkpoint.value_head_in_weights:
        load_weights(policy.value_head, checkpoint.weights, prefix=VALUE_HEAD, dtype=torch.float32)
    elif policy.value_head is not None and checkpoint.value_head is not None:
        load_head(policy.value_head, checkpoint.value_head, dtype=torch.float32, prefix=VALUE_HEAD)
    policy.to(device)
    restore_adapter(policy, checkpoint.path, checkpoint.options, lora_adapter)
    return policy


def empty_model(checkpoint: OpenVLAFolder) -> tuple[Prismatic, dict[str, Entry], Adapted | None]:
    """The model of a checkpoint on the meta device, the tensors to fill it with, and how its file of FiLM is written.

    Raises:
        FileNotFoundError, ValueError: weights that are missing or whose shapes make no such model.
    """
    entries, adapted = dict(checkpoint.weights), None
    if checkpoint.film is not None:
        film, adapted = read_film(checkpoint.film)
        entries |= film
    shapes = {key: entry.shape for key, entry in entries.items()}
    vision = VisionConfig.from_shapes(shapes, heads_of(checkpoint.config))
    language = LlamaConfig.from_dict(checkpoint.config.get("text_config", {}))
    padding = checkpoint.config.get("pad_to_multiple_of", PrismaticConfig.vocabulary_padding)
    with torch.device("meta"):
        return Prismatic(PrismaticConfig(vision, language, vocabulary_padding=padding)), entries, adapted


def unused_by(model: Prismatic) -> Callable[[str], bool]:
    """Says of a tensor's name whether a checkpoint may have it although the model does not."""
    vision = model.config.vision
    return lambda key: vision.unused(key) or key.startswith(VALUE_HEAD) or key.endswith("rotary_emb.inv_freq")


def save(policy: PrismaticPolicy, folder: str | Path) -> None:
    """Write a policy in the layout of its checkpoint, together with its settings in ``vla_torchrl.json``.

    A LoRA adapter goes into ``lora_adapter/``; merge it first
    (:func:`vla_policies.checkpoint.lora.merge_adapter`) for weights that any OpenVLA code can load.
    """
    folder = Path(folder)
    weights = {**plain_weights(policy.model), **policy.unused_tensors}
    if policy.value_head is not None:
        weights |= {f"{VALUE_HEAD}{key}": tensor for key, tensor in policy.value_head.state_dict().items()}
    lora = has_lora(policy)
    dtype = dtype_name(policy.model.language_model.model.norm.weight.dtype)
    options = {"family": policy.family, **asdict(policy.config), "dtype": dtype, ADAPTER: lora}
    if policy.film is not None:
        folder.mkdir(parents=True, exist_ok=True)
        weights = write_film(folder, weights, policy.film)
    policy.folder.write(folder, weights=weights, options=options)
    for name in _HEADS:
        head = getattr(policy, name, None)
        if head is None:
            continue
        for stale in folder.glob(f"{name}--*"):
            stale.unlink()
        tensors: dict[str, Tensor] = {key: tensor.detach().cpu() for key, tensor in head.state_dict().items()}
        torch.save(tensors, folder / f"{name}--latest_checkpoint.pt")
    if lora:
        save_adapter(policy, folder / ADAPTER)


def _settings(policy_class: type, checkpoint: OpenVLAFolder, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What the user asked for over what the checkpoint was saved with over what can be seen in it."""
    merged, stored = merge_settings(policy_class, checkpoint.path, checkpoint.options, settings)
    if "benchmark" not in merged:
        raise ValueError(
            f"{checkpoint.path} does not say which benchmark it acts in; set benchmark, such as "
            "'libero'; recipes do so with policy=openvla or policy=openvla_oft"
        )
    if policy_class.family != "openvla_oft":
        return merged
    if merged.setdefault("use_film", checkpoint.film is not None) != bool(checkpoint.film):
        has = "was trained with FiLM" if checkpoint.film else "has no vision_backbone--*.pt, where FiLM's weights are"
        raise ValueError(f"use_film is {merged['use_film']}, but {checkpoint.path} {has}; leave use_film out")
    if not stored:
        merged.setdefault("head", "l1" if checkpoint.action_head else "tokens")
        merged.setdefault("use_proprio", checkpoint.proprio_projector is not None)
        if merged["head"] == "tokens" and "layout" not in merged:
            raise ValueError(
                f"{checkpoint.path} does not say how its sequences end; set layout='official' for checkpoints of "
                "openvla-oft and SimpleVLA-RL, layout='rlinf' for those of RLinf"
            )
    return merged
