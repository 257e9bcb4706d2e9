"""What a checkpoint of pi0 or pi0.5 is, lacks and takes of a GPU: from its small files, headers, or published sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vla_policies.checkpoint.report import NOT_SAID, Report, describe_weights
from vla_policies.checkpoint.settings import SettingError
from vla_policies.checkpoint.weights import check_weights
from vla_policies.memory import GB, PROMPT_LENGTH, DecisionMemory, Stack
from vla_policies.nn.gemma import Gemma, GemmaConfig
from vla_policies.nn.siglip import SiglipConfig
from vla_policies.pi0.checkpoint import Pi0Checkpoint, is_unused
from vla_policies.pi0.config import Pi0Config
from vla_policies.pi0.model import Pi0Model, Pi0ModelConfig
from vla_policies.pi0.presets import get_preset

_VOCABULARY, _ACTION_DIM, _HORIZON = 257_152, 32, 50


def describe_checkpoint(folder: Path) -> Report:
    """Describe a local folder, and list what it lacks."""
    report = Report({"family": "pi0"})
    facts = report.facts
    try:
        checkpoint = Pi0Checkpoint.read(folder)
    except FileNotFoundError as error:
        report.missing.append(str(error))
        return report
    options = checkpoint.options
    facts["benchmark"] = options.get("benchmark", f"{NOT_SAID}; set benchmark")
    facts["variant"] = options.get("config_name", f"{NOT_SAID}; set config_name")
    facts["statistics"] = ", ".join(sorted(checkpoint.statistics))
    facts["tokenizer"] = "yes"
    facts["LoRA adapter"] = "lora_adapter/" if options.get("lora_adapter") else "no"
    facts["weights"] = describe_weights(checkpoint.weights)
    facts["heads"] = checkpoint.heads.describe()
    try:
        model, entries = checkpoint.empty_model()
        facts["family"] = "pi0 (pi0.5)" if model.config.pi05 else "pi0"
        horizon = options.get("action_horizon") or checkpoint.config.get("action_horizon")
        facts["horizon"] = str(horizon or "that of the variant")
        check_weights(model, entries, unused=is_unused, what=str(folder))
    except ValueError as error:
        report.missing.append(f"weights: {error}")
    return report


def make_meta_model(
    folder: Path | None, settings: Mapping[str, Any]
) -> tuple[Pi0Model, Pi0Checkpoint | None, dict[str, Any]]:
    """See :class:`~vla_policies.pretrained.PretrainedPolicy`; SettingError: no folder and no ``config_name``."""
    if folder is not None:
        checkpoint = Pi0Checkpoint.read(folder)
        said = {name: value for name, value in checkpoint.options.items() if value is not None}
        said.setdefault("action_horizon", checkpoint.config.get("action_horizon"))
        return checkpoint.empty_model()[0], checkpoint, said
    if not settings.get("config_name"):
        raise SettingError("config_name: which variant is it? such as pi0_libero or pi05_libero")
    with torch.device("meta"):
        return Pi0Model(published_sizes(get_preset(settings["config_name"]).pi05)), None, {}


def published_sizes(pi05: bool) -> Pi0ModelConfig:
    """Return the sizes of pi0, or of pi0.5: arXiv 2410.24164, openpi's gemma.py and PaliGemma."""
    language = GemmaConfig(2048, 18, 16_384, 8, 1, 256)
    expert = GemmaConfig(1024, 18, 4096, 8, 1, 256, conditioned=pi05)
    return Pi0ModelConfig(SiglipConfig(), language, expert, _VOCABULARY, _ACTION_DIM, pi05)


def decision_memory(model: Pi0Model, config: Pi0Config, frozen: bool) -> DecisionMemory:
    """Return the stacks that a gradient goes through: SigLIP and PaliGemma's Gemma unless ``frozen``, and the expert.

    An update holds keys and values of PaliGemma, once more for each of the steps if all of these are stochastic.
    """
    images, sizes, language = config.num_images_in_input, model.config.vision, model.config.language
    length = images * sizes.num_patches + PROMPT_LENGTH
    stacks = []
    if not frozen:
        layers = model.vision.encoder.layers
        stacks.append(Stack(layers[0], len(layers), sizes.num_patches, sizes.width, lambda block, x: block(x), images))
        read = config.value_head and config.value_after_vlm  # else the last layer is keys and values alone
        stacks.append(_gemma(model.language, length, depth=language.depth - (0 if read else 1)))
    joint = config.method == "flow_noise" if config.joint_log_prob is None else config.joint_log_prob
    rows = config.num_steps if joint else 0
    preset = get_preset(config.config_name).horizon if getattr(config, "config_name", None) else _HORIZON
    tokens = (config.action_horizon or preset) + (0 if model.config.pi05 else 1)
    stacks.append(_gemma(model.expert, tokens, before=length, rows=max(rows, 1)))
    prefix = 2 * language.depth * language.kv_heads * language.head_dim * length * model.dtype.itemsize
    kept = int(config.prefix_cache_gb * GB) if frozen else 0
    return DecisionMemory(stacks, held=prefix * (1 + rows), kept_for_update=kept, cache=prefix)


def _gemma(gemma: Gemma, tokens: int, before: int = 0, rows: int = 1, depth: int | None = None) -> Stack:
    config = gemma.config

    def call(block: Callable[..., Any], hidden: Tensor) -> Any:
        rotation = 2 * (hidden.new_zeros(rows, 1, tokens, config.head_dim),)
        shape = (rows, config.kv_heads, before, config.head_dim)
        earlier = (hidden.new_zeros(shape), hidden.new_zeros(shape)) if before else None
        condition = hidden.new_zeros(rows, config.width, requires_grad=True) if config.conditioned else None
        return block(hidden, rotation, None, earlier, condition)

    return Stack(gemma.layers[0], config.depth if depth is None else depth, tokens, config.width, call, rows)
