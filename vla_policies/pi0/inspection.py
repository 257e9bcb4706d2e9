"""What a checkpoint of pi0 or pi0.5 is, lacks and takes of a GPU: from its small files, headers, or published sizes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from vla_policies.checkpoint.report import NOT_SAID, Report, describe_weights
from vla_policies.checkpoint.settings import SettingError
from vla_policies.checkpoint.weights import check_weights
from vla_policies.nn.gemma import GemmaConfig
from vla_policies.nn.siglip import SiglipConfig
from vla_policies.pi0.checkpoint import Pi0Checkpoint, is_unused
from vla_policies.pi0.model import Pi0Model, Pi0ModelConfig
from vla_policies.pi0.presets import get_preset

_VOCABULARY, _ACTION_DIM = 257_152, 32


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
