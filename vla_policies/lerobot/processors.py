"""LeRobot's processors: lists of steps before and after the network, in ``policy_*processor.json``, and their files."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from vla_common.plain import read_json, read_small
from vla_policies.checkpoint.weights import load_file

PROCESSORS = ("policy_preprocessor.json", "policy_postprocessor.json")
NORMALIZERS = ("normalizer_processor", "unnormalizer_processor")
RENAME, TOKENIZER = "rename_observations_processor", "tokenizer_processor"
_PLAIN_STEPS = {"to_batch_processor", "device_processor"}  # what a policy here does by itself
_RELATIVE = {"relative_actions_processor", "absolute_actions_processor"}  # must not be enabled
_NEEDED = ("input_features", "output_features", "normalization_mapping")  # of config.json, to make them
LARGEST = 50_000_000  # bytes of a file of a tokenizer


def find_step(processor: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the step of a processor by its ``registry_name``, wherever it stands; an empty one without."""
    return next((step for step in processor["steps"] if step.get("registry_name") == name), {})


def make_processors(own: str, config: Mapping[str, Any], what: str, tokenizer: str = "tokenizer") -> list[Any]:
    """Return both processors of a policy of this ``config.json``, with its ``own`` step, as LeRobot makes them.

    ``tokenizer`` is its name where it is not beside them. ValueError, which begins with ``what``: config incomplete.
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
    words = {"task_key": "task", "max_length": config.get("tokenizer_max_length", 48)}
    words |= {"padding": config.get("pad_language_to", "max_length"), "padding_side": "right"}
    words |= {"truncation": True, "tokenizer_name": tokenizer}
    device = {"registry_name": "device_processor", "config": {"device": "cpu", "float_dtype": None}}
    steps = [
        {"registry_name": RENAME, "config": {"rename_map": {}}},
        {"registry_name": "to_batch_processor", "config": {}},
        before,
        {"registry_name": own, "config": {}},
        {"registry_name": TOKENIZER, "config": words, "artifacts": {"tokenizer_name": "tokenizer"}},
        device,
    ]
    return [{"name": "policy_preprocessor", "steps": steps}, {"name": "policy_postprocessor", "steps": [after, device]}]


def inside(name: Any) -> str:
    """Return the last part of a path that a stranger's file has; ValueError for one that would lead out."""
    last = Path(str(name)).name
    if last in ("", ".."):
        raise ValueError(f"{name!r} is no name of a file or folder of the checkpoint; copy it again")
    return last


def read_processors(path: Path, kind: str, own: str) -> tuple[list[Any], list[dict[str, Tensor]]]:
    """Read both processors of a folder, and the statistics of their steps that normalise; ValueError: unknown ones."""
    known = {RENAME, TOKENIZER, *NORMALIZERS, *_PLAIN_STEPS, *_RELATIVE, own}
    if missing := [name for name in PROCESSORS if not (path / name).is_file()]:
        raise FileNotFoundError(f"{path} has no {' and no '.join(missing)}; copy the whole checkpoint")
    processors = [read_json(path / name) for name in PROCESSORS]
    for file, content in zip((path / name for name in PROCESSORS), processors, strict=True):
        steps = content.get("steps")
        if not isinstance(steps, list) or not all(isinstance(step, dict) for step in steps):
            raise ValueError(f"{file} has no list of steps; copy it again")
        if unknown := [name for step in steps if (name := step.get("registry_name")) not in known]:
            raise ValueError(f"{file} has a step {unknown[0]!r}, which is not of {kind} as known here; copy its own")
        if any(step.get("config", {}).get("enabled") for step in steps if step["registry_name"] in _RELATIVE):
            raise ValueError(f"{file} makes actions relative to the state, which is not supported; use absolute ones")
    if not find_step(processors[0], own):
        raise ValueError(f"{path / PROCESSORS[0]} has no step {own}: it is not of {kind}; copy its own")
    tensors = [
        _read_tensors(path, path / name, find_step(content, step), step)
        for name, content, step in zip(PROCESSORS, processors, NORMALIZERS, strict=True)
    ]
    return processors, tensors


def state_file(step: Mapping[str, Any]) -> str | None:
    """Return the name of the file of a step's tensors, if it has one."""
    name = step.get("state_file")
    return None if name is None else inside(name)


def _read_tensors(path: Path, file: Path, step: Mapping[str, Any], name: str) -> dict[str, Tensor]:
    if not isinstance(step.get("config"), dict):
        raise ValueError(f"{file} has no step {name}, so no statistics; copy it from the original checkpoint")
    state = state_file(step)
    if state is None:
        return {}
    if not (path / state).is_file():
        raise FileNotFoundError(f"{path} has no {state}, the statistics; copy it from the original checkpoint")
    return load_file(path / state)


def tokenizer_folder(step: Mapping[str, Any]) -> str:
    """Return the name of the folder that a step's tokenizer is in."""
    return inside(step.get("artifacts", {}).get("tokenizer_name", "tokenizer"))


def read_tokenizer_files(path: Path, step: Mapping[str, Any]) -> dict[str, bytes]:
    """Read the files of a step's tokenizer by their names."""
    place = path / tokenizer_folder(step)
    if not (place / "tokenizer.json").is_file():
        name, to = (shlex.quote(str(each)) for each in (step.get("config", {}).get("tokenizer_name", "NAME"), place))
        raise FileNotFoundError(
            f"{path} has no tokenizer; where there is a network type: hf download {name} tokenizer.json "
            f"tokenizer_config.json --local-dir {to}"
        )
    return {file.name: read_small(file, LARGEST) for file in sorted(place.iterdir()) if file.is_file()}
