"""OpenVLA policies without weights: of a checkpoint's headers, or of the published configuration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vla_policies.nn import rotary
from vla_policies.nn.dino_siglip_config import TransformerConfig, VisionConfig
from vla_policies.nn.llama import Llama
from vla_policies.nn.value_head import ValueHead
from vla_policies.openvla.folder import OpenVLAFolder
from vla_policies.openvla.heads import L1Head, ProprioProjector
from vla_policies.openvla.loading import empty_model
from vla_policies.openvla.model import Prismatic, PrismaticConfig
from vla_policies.outline import PROMPT_LENGTH, Stack
from vla_policies.processing.normalization import ACTION, KINDS

PUBLISHED = "the published sizes: arXiv 2406.09246, config.json of openvla/openvla-7b"
ACTION_DIM, PROPRIO_DIM = 7, 8  # of the published checkpoints, RoboTwin's and ALOHA's aside


def find_model(path: Path | None, settings: Mapping[str, Any]) -> tuple[Prismatic, dict[str, Any], str]:
    """Build the model on the meta device; returns it, what the checkpoint says of the settings, and where from.

    Args:
        path: local folder, ``None`` for the published model.
        settings: asked for; ``unnorm_key`` chooses statistics.

    Raises:
        FileNotFoundError, ValueError: see :class:`OpenVLAFolder`.
    """
    if path is None:
        film = PrismaticConfig(VisionConfig()).language.hidden_size if settings.get("use_film") else None
        vision = VisionConfig(
            TransformerConfig(1024, 24, 16, 4096, registers=4, layer_scale=True, film_dim=film),
            TransformerConfig(1152, 27, 16, 4304, film_dim=film),
        )
        with torch.device("meta"):
            model = Prismatic(PrismaticConfig(vision))
        return model, {"action_dim": ACTION_DIM, "proprio_dim": PROPRIO_DIM}, PUBLISHED
    folder = OpenVLAFolder.read(path)
    model, _, _ = empty_model(folder)
    said: dict[str, Any] = {"action_dim": ACTION_DIM, "proprio_dim": PROPRIO_DIM}
    said["head"] = "l1" if folder.action_head else "tokens"
    said["use_proprio"] = folder.proprio_projector is not None
    key = settings.get("unnorm_key") or next(iter(folder.statistics), None)
    for name, part in (("action_dim", ACTION), ("proprio_dim", "proprio")):
        entry = folder.statistics.get(key or "", {}).get(part, {})
        lists = [entry[statistic] for names in KINDS.values() for statistic in names if statistic in entry]
        said |= {name: len(lists[0])} if lists else {}
    said |= {name: value for name, value in folder.options.items() if value is not None}
    return model, said, f"the headers of {path}"


def make_heads(hidden_size: int, settings: Mapping[str, Any]) -> dict[str, nn.Module]:
    """Build the heads that settings ask for, on the meta device."""
    heads: dict[str, nn.Module] = {}
    chunk = settings["num_action_chunks"] if settings.get("value_per_action") else 1
    with torch.device("meta"):
        if settings["value_head"]:
            heads["value_head"] = ValueHead(hidden_size, chunk)
        if settings.get("head") == "l1":
            heads["action_head"] = L1Head(hidden_size, settings["action_dim"])
        if settings.get("use_proprio"):
            heads["proprio_projector"] = ProprioProjector(settings["proprio_dim"], hidden_size)
    return heads


def stacks_of(model: Prismatic, settings: Mapping[str, Any], causal: bool) -> list[Stack]:
    """List the three stacks of a decision: DINOv2, SigLIP and Llama."""
    images, vision = settings.get("num_images_in_input", 1), model.vision_backbone
    language = torch.zeros(images, vision.config.film_dim or 0, device="meta") if vision.config.film_dim else None

    def see(block: nn.Module, hidden: Tensor) -> Any:
        return block(hidden, None if language is None else language.to(hidden.dtype))

    stacks = []
    for part in (vision.featurizer, vision.fused_featurizer):
        sizes = part.config
        tokens = sizes.num_patches + (0 if sizes.registers is None else 1 + sizes.registers)
        stacks.append(Stack(part.blocks[0], len(part.blocks), tokens, sizes.dim, see, rows=images))
    actions = settings["action_dim"] * settings.get("num_action_chunks", 1)
    length = 1 + images * vision.config.num_patches + bool(settings.get("use_proprio")) + PROMPT_LENGTH + actions
    return [*stacks, _read(model.language_model, length, causal)]


def _read(language: Llama, length: int, causal: bool) -> Stack:
    config = language.config

    def call(block: nn.Module, hidden: Tensor) -> Any:
        positions = torch.zeros(1, length, dtype=torch.int64, device="meta")
        rotation = rotary.rotation(positions, config.head_dim, config.rope_theta, hidden.dtype)
        return block(hidden, rotation, (None, causal))

    layers = language.model.layers
    return Stack(layers[0], len(layers), length, config.hidden_size, call)


def cache_bytes(model: Prismatic, settings: Mapping[str, Any]) -> int:
    """Return bytes of keys and values of a decision that is decoded token by token."""
    config = model.config.language
    length = 1 + model.config.vision.num_patches + PROMPT_LENGTH + settings["action_dim"]
    numbers = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * length
    return numbers * model.language_model.lm_head.weight.element_size()
