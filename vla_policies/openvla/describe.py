"""What an OpenVLA checkpoint is and what it lacks, from its small files and the headers of its weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vla_policies.checkpoint.report import NOT_SAID, Report, describe_weights
from vla_policies.checkpoint.weights import check_layout
from vla_policies.openvla.config import OpenVLAConfig, pixels_of
from vla_policies.openvla.folder import OpenVLAFolder
from vla_policies.openvla.loading import empty_model, unused_by
from vla_policies.openvla.prompts import Prompts
from vla_policies.processing.normalization import ACTION, KINDS


def describe(folder: OpenVLAFolder) -> Report:
    """Describe a checkpoint, and list what it lacks."""
    options, report = folder.options, Report()
    facts = report.facts
    doubt = "" if folder.family_is_known else ", or openvla_oft with the token head: published files do not say"
    facts["family"] = folder.family + doubt
    facts["benchmark"] = options.get("benchmark", f"{NOT_SAID}; set benchmark")
    facts["head"] = head = options.get("head", "l1" if folder.action_head else "tokens")
    if folder.family == "openvla_oft":
        layout = "official" if head == "l1" else f"{NOT_SAID}; set layout to 'official' or 'rlinf'"
        facts["layout"] = options.get("layout", layout)
        for name, option in (("chunk", "num_action_chunks"), ("images", "num_images_in_input")):
            facts[name] = str(options.get(option, f"{NOT_SAID}; set {option}"))
    else:
        facts |= {"layout": "one token after the other", "chunk": "1", "images": "1"}
    facts["pixels"] = _pixels(folder, options.get("layout", "official" if head == "l1" else None))
    facts["statistics"] = _statistics(folder)
    facts["proprioception"] = _name_or_no(folder.proprio_projector)
    facts["FiLM"] = _name_or_no(folder.film)
    facts["LoRA adapter"] = "lora_adapter/" if folder.lora_adapter else "no"
    if not folder.statistics:
        report.missing.append("statistics: put dataset_statistics.json of the training data into the folder")
    try:
        Prompts(folder.path, max_length=1)
        facts["tokenizer"] = "yes"
    except (FileNotFoundError, ValueError) as error:
        report.missing.append(f"tokenizer: {error}")
    if options.get("head") == "l1" and not folder.action_head:
        report.missing.append("action head: copy action_head--*.pt of the original checkpoint")
    if options.get("use_proprio") and not folder.proprio_projector:
        report.missing.append("proprioception: copy proprio_projector--*.pt of the original checkpoint")
    try:
        facts["weights"] = describe_weights(folder.weights)
        value_head = "in the weights" if folder.value_head_in_weights else _name_or_no(folder.value_head)
        facts["value head"] = "no: a new one is initialised" if value_head == "no" else value_head
        _check_weights(folder)
    except (FileNotFoundError, ValueError) as error:
        report.missing.append(f"weights: {error}")
    return report


def _pixels(folder: OpenVLAFolder, layout: str | None) -> str:
    """Say how cameras are resized and cropped once the checkpoint is loaded."""
    if folder.options or layout:
        return _in_words(folder.options or pixels_of(layout or ""))
    return f"{_in_words({})}; with layout='official' {_in_words(pixels_of('official'))}"


def _in_words(settings: Mapping[str, Any]) -> str:
    resize = settings.get("image_resize", OpenVLAConfig.image_resize)
    crop = settings.get("center_crop", OpenVLAConfig.center_crop)
    jpeg = " after a JPEG round trip" if resize == "lanczos3" else ""
    return f"{resize}{jpeg}, {'the central 0.9 of the area' if crop else 'not cropped'}"


def _statistics(folder: OpenVLAFolder) -> str:
    texts = []
    for key, entry in sorted(folder.statistics.items()):
        action = entry.get(ACTION, {})
        kinds = [kind for kind, names in KINDS.items() if all(name in action for name in names)]
        size = len(action[KINDS[kinds[0]][0]]) if kinds else 0
        texts.append(f"{key} ({size} action dimensions, {' or '.join(kinds)})")
    return ", ".join(texts) or "none"


def _check_weights(folder: OpenVLAFolder) -> None:
    """Compare names and shapes with the model, which is built on the meta device."""
    model, entries, _ = empty_model(folder)
    expected = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
    found = {key: entry.shape for key, entry in entries.items()}
    check_layout(expected, found, unused=unused_by(model), what=str(folder.path))


def _name_or_no(file: Path | None) -> str:
    return file.name if file else "no"
