"""What a checkpoint of pi0 is and what it lacks, from its small files and the headers of its weights."""

from __future__ import annotations

from pathlib import Path

from vla_policies.checkpoint.report import NOT_SAID, Report, describe_weights
from vla_policies.checkpoint.weights import check_layout
from vla_policies.pi0.folder import Pi0Folder, empty_model, unused


def describe(path: Path) -> Report:
    """Describe a local folder, and list what it lacks."""
    report = Report({"family": "pi0"})
    facts = report.facts
    try:
        folder = Pi0Folder.read(path)
    except FileNotFoundError as error:
        report.missing.append(str(error))
        return report
    options = folder.options
    facts["benchmark"] = options.get("benchmark", f"{NOT_SAID}; set benchmark")
    facts["variant"] = options.get("config_name", f"{NOT_SAID}; set config_name")
    facts["statistics"] = ", ".join(sorted(folder.statistics))
    facts["tokenizer"] = "yes"
    facts["LoRA adapter"] = "lora_adapter/" if options.get("lora_adapter") else "no"
    facts["weights"] = describe_weights(folder.weights)
    facts["heads"] = folder.heads.describe()
    try:
        model, entries = empty_model(folder)
        found = {key: entry.shape for key, entry in entries.items()}
        facts["family"] = "pi0 (pi0.5)" if model.config.pi05 else "pi0"
        horizon = options.get("action_horizon") or folder.config.get("action_horizon")
        facts["horizon"] = str(horizon or "that of the variant")
        expected = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
        check_layout(expected, found, unused=unused, what=str(path))
    except ValueError as error:
        report.missing.append(f"weights: {error}")
    return report
