"""What a checkpoint of SmolVLA is, lacks and takes of a GPU: from its small files, headers, or published sizes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from vla_policies.checkpoint.report import NOT_SAID, Report, describe_weights
from vla_policies.checkpoint.weights import check_weights
from vla_policies.flow import memory
from vla_policies.lerobot.policy import LeRobotConfig
from vla_policies.memory import DecisionMemory
from vla_policies.nn.gemma import GemmaConfig
from vla_policies.nn.siglip import SiglipConfig
from vla_policies.smolvla.checkpoint import FAMILY, SmolVLACheckpoint, is_unused
from vla_policies.smolvla.model import SmolVLAModel, SmolVLAModelConfig

_VOCABULARY, _DIM, _HORIZON, _SHUFFLE = 49_280, 32, 50, 4


def describe_checkpoint(folder: Path) -> Report:
    """Describe a local folder, and list what it lacks."""
    report = Report({"family": FAMILY})
    facts = report.facts
    try:
        checkpoint = SmolVLACheckpoint.read(folder)
        checkpoint.folder.statistics()
    except (FileNotFoundError, ValueError) as error:
        report.missing.append(str(error))
        return report
    config, options = checkpoint.folder.config, checkpoint.options
    facts["benchmark"] = options.get("benchmark", f"{NOT_SAID}; set benchmark")
    facts["cameras"] = ", ".join(checkpoint.folder.cameras)
    facts["chunk"] = f"{checkpoint.horizon} actions, of which {config.get('n_action_steps')} are executed"
    facts["VLM"] = str(config.get("vlm_model_name", NOT_SAID))
    facts["tokenizer"] = "yes"
    facts["LoRA adapter"] = "lora_adapter/" if options.get("lora_adapter") else "no"
    facts["weights"] = describe_weights(checkpoint.folder.weights)
    facts["heads"] = checkpoint.heads.describe()
    try:
        model, entries = checkpoint.empty_model()
        check_weights(model, entries, unused=is_unused, what=str(folder))
    except ValueError as error:
        report.missing.append(f"weights: {error}")
    return report


def make_meta_model(
    folder: Path | None, settings: Mapping[str, Any]
) -> tuple[SmolVLAModel, SmolVLACheckpoint | None, dict[str, Any]]:
    """See :class:`~vla_policies.pretrained.PretrainedPolicy`; without a folder it is of the published size."""
    if folder is not None:
        checkpoint = SmolVLACheckpoint.read(folder)
        said = {name: value for name, value in checkpoint.options.items() if value is not None}
        return checkpoint.empty_model()[0], checkpoint, {**checkpoint.settings, **said}
    with torch.device("meta"):
        return SmolVLAModel(published_sizes()), None, {}


def published_sizes() -> SmolVLAModelConfig:
    """Return the sizes of lerobot/smolvla_base: arXiv 2506.01844, and SmolVLM2-500M's first 16 layers."""
    vision = SiglipConfig(width=768, depth=12, heads=12, mlp_dim=3072, patch_size=16, num_patches=1024)
    language = GemmaConfig(960, 16, 2560, 15, 5, 64, llama=True)
    expert = GemmaConfig(720, 16, 2048, 15, 5, 64, llama=True, cross=tuple(range(1, 16, 2)))
    return SmolVLAModelConfig(vision, language, expert, _VOCABULARY, _DIM, _DIM, _SHUFFLE)


def decision_memory(
    model: SmolVLAModel, config: LeRobotConfig, checkpoint: SmolVLACheckpoint | None, frozen: bool
) -> DecisionMemory:
    """Return the stacks that a gradient goes through, see :func:`vla_policies.flow.memory.decision_memory`.

    Layers of the expert that cross are counted as the others.
    """
    images = len(config.cameras or (checkpoint.folder.cameras if checkpoint else ())) or 1
    horizon = _HORIZON if checkpoint is None else checkpoint.horizon
    return memory.decision_memory(model, config, frozen, images, model.config.image_tokens, horizon, state=True)
