"""pi0 and pi0.5 without weights: of a checkpoint's headers, or of the published configuration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vla_policies.checkpoint.settings import SettingError
from vla_policies.flow.config import FlowConfig
from vla_policies.flow.steps import NOISE_WIDTHS, NoiseNetwork
from vla_policies.nn import rotary
from vla_policies.nn.gemma import Gemma, GemmaConfig
from vla_policies.nn.siglip import SiglipConfig
from vla_policies.nn.value_head import make_value_layers
from vla_policies.outline import PROMPT_LENGTH, Stack
from vla_policies.pi0.folder import Pi0Folder, empty_model
from vla_policies.pi0.model import Pi0Model, Pi0ModelConfig
from vla_policies.pi0.presets import get_preset

PUBLISHED = "the published sizes: arXiv 2410.24164, openpi's gemma.py and PaliGemma"
VALUE_WIDTHS = (512, 256, 128)  # of the value head's layers: RLinf's
_VOCABULARY, _ACTION_DIM = 257_152, 32


def find_model(path: Path | None, settings: Mapping[str, Any]) -> tuple[Pi0Model, dict[str, Any], str]:
    """Build the model on the meta device; returns it, what the checkpoint says of the settings, and where from.

    Args:
        path: local folder, ``None`` for the published model that ``config_name`` is of.
        settings: asked for.

    Raises:
        FileNotFoundError, ValueError: see :class:`Pi0Folder`.
        SettingError: neither a folder nor ``config_name`` was given.
    """
    if path is not None:
        folder = Pi0Folder.read(path)
        model, _ = empty_model(folder)
        said = {name: value for name, value in folder.options.items() if value is not None}
        said |= {f"{name} sizes": folder.heads.sizes(name) for name in ("value_head", "noise_network")}
        said.setdefault("action_horizon", folder.config.get("action_horizon"))
        return model, said, f"the headers of {path}"
    if not settings.get("config_name"):
        raise SettingError("config_name: which variant is it? set it, such as config_name=pi0_libero or pi05_libero")
    pi05 = get_preset(settings["config_name"]).pi05
    language = GemmaConfig(2048, 18, 16_384, 8, 1, 256)
    expert = GemmaConfig(1024, 18, 4096, 8, 1, 256, conditioned=pi05)
    with torch.device("meta"):
        model = Pi0Model(Pi0ModelConfig(SiglipConfig(), language, expert, _VOCABULARY, _ACTION_DIM, pi05))
    return model, {}, PUBLISHED


def horizon_of(settings: Mapping[str, Any]) -> int:
    """Return how many actions are denoised together."""
    if settings.get("action_horizon"):
        return int(settings["action_horizon"])
    return get_preset(settings["config_name"]).horizon if settings.get("config_name") else 50


def make_heads(model: Pi0Model, settings: Mapping[str, Any]) -> dict[str, nn.Module]:
    """Build the heads that settings ask for, on the meta device."""
    heads: dict[str, nn.Module] = {}
    expert = model.config.expert.width
    preset = get_preset(settings["config_name"]).value_head if settings.get("config_name") else None
    widths = {name: settings.get(f"{name} sizes") for name in ("value_head", "noise_network")}
    with torch.device("meta"):
        if settings["value_head"]:
            reads = model.config.language.width if settings.get("value_after_vlm") else expert
            between = (preset or VALUE_WIDTHS) if widths["value_head"] is None else widths["value_head"][1:-1]
            heads["value_head"] = make_value_layers((reads, *between, 1), nn.ReLU, bias_last=True)
        if settings["method"] == "flow_noise":
            between = NOISE_WIDTHS if widths["noise_network"] is None else widths["noise_network"][1:-1]
            bounds = tuple(settings["noise_std_range"])
            heads["noise_network"] = NoiseNetwork(expert, model.config.action_dim, (bounds[0], bounds[1]), between)
    return heads


def stacks_of(model: Pi0Model, settings: Mapping[str, Any], frozen: bool) -> list[Stack]:
    """List the stacks that a gradient goes through: SigLIP and PaliGemma's Gemma unless ``frozen``, and the expert."""
    images, sizes = settings["num_images_in_input"], model.config.vision
    length = images * sizes.num_patches + PROMPT_LENGTH
    stacks = []
    if not frozen:
        layers = model.vision.encoder.layers
        stacks.append(Stack(layers[0], len(layers), sizes.num_patches, sizes.width, _plain, rows=images))
        read = settings["value_head"] and settings.get(
            "value_after_vlm"
        )  # else the last layer is keys and values alone
        stacks.append(_gemma(model.language, length, depth=len(model.language.layers) - (0 if read else 1)))
    rows = settings["num_steps"] if is_joint(settings) else 1
    expert = horizon_of(settings) + (0 if model.config.pi05 else 1)
    return [*stacks, _gemma(model.expert, expert, before=length, rows=rows)]


def is_joint(settings: Mapping[str, Any]) -> bool:
    """Tell whether all steps of the flow are stochastic, so that all are computed again in an update."""
    joint = settings.get("joint_log_prob", FlowConfig.joint_log_prob)
    return settings["method"] == "flow_noise" if joint is None else bool(joint)


def prefix_bytes(model: Pi0Model, settings: Mapping[str, Any]) -> int:
    """Return bytes of PaliGemma's keys and values of a decision."""
    config = model.config.language
    tokens = settings["num_images_in_input"] * model.config.vision.num_patches + PROMPT_LENGTH
    return 2 * config.depth * config.kv_heads * config.head_dim * tokens * model.dtype.itemsize


def _plain(block: nn.Module, hidden: Tensor) -> Any:
    return block(hidden)


def _gemma(gemma: Gemma, tokens: int, before: int = 0, rows: int = 1, depth: int | None = None) -> Stack:
    config = gemma.config

    def call(block: nn.Module, hidden: Tensor) -> Any:
        positions = torch.zeros(rows, tokens, dtype=torch.int64, device="meta")
        rotation = rotary.rotation(positions, config.head_dim, 10_000.0, hidden.dtype)
        shape = (rows, config.kv_heads, before, config.head_dim)
        earlier = (hidden.new_zeros(shape), hidden.new_zeros(shape)) if before else None
        condition = hidden.new_zeros(rows, config.width, requires_grad=True) if config.conditioned else None
        return block(hidden, rotation, None, earlier, condition)

    return Stack(gemma.layers[0], len(gemma.layers) if depth is None else depth, tokens, config.width, call, rows)
