"""What a checkpoint folder is and what it lacks, from its small files and the headers of its weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import torch

from vla_policies.checkpoint.hub import resolve
from vla_policies.checkpoint.weights import Entry, check_layout, list_weights
from vla_policies.openvla.folder import FAMILIES, OpenVLAFolder
from vla_policies.openvla.loading import empty_model, unused_by
from vla_policies.openvla.prompts import Prompts
from vla_policies.pi0 import folder as pi0_folder
from vla_policies.pi0.folder import HEADS, Pi0Folder, is_pi0
from vla_policies.processing.normalization import ACTION, KINDS
from vla_policies.registry import POLICIES, read_config

_NOT_SAID = "not in the files"


@dataclass
class Report:
    """What :func:`inspect` found.

    Attributes:
        facts: name and text, in the order to print.
        missing: what has to be there before the checkpoint can be loaded.
    """

    facts: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"{name:<15} {text}" for name, text in self.facts.items()]
        return "\n".join(lines + [f"{'MISSING':<15} {text}" for text in self.missing])


def inspect(folder: str | Path) -> Report:
    """Describe a checkpoint folder or hub id without reading a tensor.

    Raises:
        FileNotFoundError, ValueError: it is no checkpoint of a policy of this package.
    """
    path = resolve(folder)
    if is_pi0(path):
        return _inspect_pi0(path)
    config = read_config(path)
    if config.get("model_type") in FAMILIES:
        return _inspect_openvla(OpenVLAFolder.read(path))
    name = config.get("policy")
    if name not in POLICIES:
        what = repr(config.get("model_type") or name or "an unknown model")
        raise ValueError(f"{path} is a checkpoint of {what}; this version knows {sorted(POLICIES)}")
    report = Report({"family": name, "chunk": str(config.get("chunk_size")), "statistics": "part of the weights"})
    report.facts["weights"] = _size(list_weights(path))
    return report


def _inspect_pi0(path: Path) -> Report:
    report = Report({"family": "pi0"})
    facts = report.facts
    try:
        folder = Pi0Folder.read(path)
    except FileNotFoundError as error:
        report.missing.append(str(error))
        return report
    options = folder.options
    facts["benchmark"] = options.get("benchmark", f"{_NOT_SAID}; set benchmark")
    facts["variant"] = options.get("config_name", f"{_NOT_SAID}; set config_name")
    facts["statistics"] = ", ".join(sorted(folder.statistics))
    facts["tokenizer"] = "yes"
    facts["LoRA adapter"] = "lora_adapter/" if options.get("lora_adapter") else "no"
    facts["weights"] = _size(folder.weights)
    facts["heads"] = HEADS if (path / HEADS).is_file() else "no: new ones are initialised"
    try:
        model, entries = pi0_folder.empty_model(folder)
        found = {key: entry.shape for key, entry in entries.items()}
        facts["family"] = "pi0 (pi0.5)" if model.config.pi05 else "pi0"
        horizon = options.get("action_horizon") or folder.config.get("action_horizon")
        facts["horizon"] = str(horizon or "that of the variant")
        expected = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
        check_layout(expected, found, unused=pi0_folder.unused, what=str(path))
    except ValueError as error:
        report.missing.append(f"weights: {error}")
    return report


def _inspect_openvla(folder: OpenVLAFolder) -> Report:
    options, report = folder.options, Report()
    facts = report.facts
    doubt = "" if folder.family_is_known else ", or openvla_oft with the token head: published files do not say"
    facts["family"] = folder.family + doubt
    facts["benchmark"] = options.get("benchmark", f"{_NOT_SAID}; set benchmark")
    facts["head"] = head = options.get("head", "l1" if folder.action_head else "tokens")
    if folder.family == "openvla_oft":
        layout = "official" if head == "l1" else f"{_NOT_SAID}; set layout to 'official' or 'rlinf'"
        facts["layout"] = options.get("layout", layout)
        for name, option in (("chunk", "num_action_chunks"), ("images", "num_images_in_input")):
            facts[name] = str(options.get(option, f"{_NOT_SAID}; set {option}"))
    else:
        facts |= {"layout": "one token after the other", "chunk": "1", "images": "1"}
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
        facts["weights"] = _size(folder.weights)
        value_head = "in the weights" if folder.value_head_in_weights else _name_or_no(folder.value_head)
        facts["value head"] = "no: a new one is initialised" if value_head == "no" else value_head
        _check_weights(folder)
    except (FileNotFoundError, ValueError) as error:
        report.missing.append(f"weights: {error}")
    return report


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


def _size(weights: Mapping[str, Entry]) -> str:
    count = sum(prod(entry.shape) for entry in weights.values())
    dtypes = Counter(str(entry.dtype).removeprefix("torch.") for entry in weights.values())
    size = sum(prod(entry.shape) * (entry.dtype or torch.int64).itemsize for entry in weights.values())
    files = len({entry.file for entry in weights.values()})
    unit, amount = ("GB", size / 1e9) if size > 1e9 else ("MB", size / 1e6)
    names = ", ".join(name for name, _ in dtypes.most_common())
    return f"{count:,} parameters, {names}, {amount:.1f} {unit} in {files} file{'s' if files > 1 else ''}"


def _name_or_no(file: Path | None) -> str:
    return file.name if file else "no"
