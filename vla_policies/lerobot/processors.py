"""LeRobot's processors: lists of steps before and after the network, as ``policy_*processor.json`` has them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

PROCESSORS = ("policy_preprocessor.json", "policy_postprocessor.json")
NORMALIZERS = ("normalizer_processor", "unnormalizer_processor")
RENAME, TOKENIZER = "rename_observations_processor", "tokenizer_processor"
_PLAIN_STEPS = {"to_batch_processor", "device_processor"}  # what a policy here does by itself
_RELATIVE = {"relative_actions_processor", "absolute_actions_processor"}  # must not be enabled
_NEEDED = ("input_features", "output_features", "normalization_mapping")  # of config.json, to make them


def find_step(processor: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    """Return the step of a processor by its ``registry_name``, wherever it stands."""
    return next((step for step in processor["steps"] if step.get("registry_name") == name), None)


def check_steps(file: Path, content: Mapping[str, Any], kind: str, own: str) -> None:
    """Refuse steps that are not known, nor the policy's ``own``, or that are not supported (ValueError)."""
    steps, known = content.get("steps"), {RENAME, TOKENIZER, *NORMALIZERS, *_PLAIN_STEPS, *_RELATIVE, own}
    if not isinstance(steps, list) or not all(isinstance(step, dict) for step in steps):
        raise ValueError(f"{file} has no list of steps; copy it again")
    names = [step.get("registry_name") for step in steps]
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"{file} has a step {unknown[0]!r}, which is not of {kind} as known here; copy its own")
    if any(step.get("config", {}).get("enabled") for step in steps if step["registry_name"] in _RELATIVE):
        raise ValueError(
            f"{file} makes actions relative to the state, which is not supported; train with absolute ones"
        )


def make_processors(own: str, config: Mapping[str, Any], what: str, tokenizer: str = "tokenizer") -> list[Any]:
    """Return both processors of a policy of this ``config.json``, with its ``own`` step, as LeRobot makes them.

    ``tokenizer`` is its name where it is not beside them. ValueError, which begins with ``what``: the config is not
    complete.
    """
    if missing := [name for name in _NEEDED if name not in config]:
        raise ValueError(f"{what} has no {missing[0]}; copy it again")
    features = {**config["input_features"], **config["output_features"]}
    before, after = (
        {
            "registry_name": step,
            "config": {"eps": 1e-8, "features": features, "norm_map": config["normalization_mapping"]},
            "state_file": f"{name.removesuffix('.json')}_step_{number}_{step}.safetensors",
        }
        for step, name, number in zip(NORMALIZERS, PROCESSORS, (2, 0), strict=True)
    )
    words = {
        "task_key": "task",
        "max_length": config.get("tokenizer_max_length", 48),
        "padding": config.get("pad_language_to", "max_length"),
        "padding_side": "right",
        "truncation": True,
        "tokenizer_name": tokenizer,
    }
    device = {"registry_name": "device_processor", "config": {"device": "cpu", "float_dtype": None}}
    steps = [
        {"registry_name": RENAME, "config": {"rename_map": {}}},
        {"registry_name": "to_batch_processor", "config": {}},
        before,
        {"registry_name": own, "config": {}},
        {"registry_name": TOKENIZER, "config": words, "artifacts": {"tokenizer_name": "tokenizer"}},
        device,
    ]
    return [
        {"name": "policy_preprocessor", "steps": steps},
        {"name": "policy_postprocessor", "steps": [after, device]},
    ]
