"""A new folder of LeRobot: features, and the steps around the network as LeRobot's factories of policies make them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from vla_policies.lerobot.folder import ACTION, NORMALIZERS, PROCESSORS, RENAME, STATE, TOKENIZER, LeRobotFolder
from vla_policies.lerobot.statistics import MEAN_STD


def new_folder(
    path: Path,
    config: Mapping[str, Any],
    cameras: Mapping[str, Sequence[int]],
    statistics: Mapping[str, Tensor],
    mode: str,
    step: str,
    tokenizer: Mapping[str, bytes],
) -> LeRobotFolder:
    """Make a folder that is not written yet; ``config`` has the ``type`` and ``tokenizer_max_length``.

    ``cameras`` are shapes by name, ``statistics`` stand by ``<feature>.<name>``, ``step`` is the one that no other
    policy has. With the ``mode`` ``QUANTILES`` states are normalised before the prompt, which then lists them.
    """
    features: dict[str, Any] = {name: {"type": "VISUAL", "shape": list(shape)} for name, shape in cameras.items()}
    for name, kind in ((STATE, "STATE"), (ACTION, "ACTION")):
        size = next(len(each) for key, each in statistics.items() if key.startswith(f"{name}."))
        features[name] = {"type": kind, "shape": [size]}
    modes = {"VISUAL": "IDENTITY", "STATE": mode, "ACTION": mode}
    number = 5 if mode == MEAN_STD else 2
    before, after = (
        {
            "registry_name": each,
            "config": {"eps": 1e-8, "features": features, "norm_map": modes},
            "state_file": f"{name.removesuffix('.json')}_step_{index}_{each}.safetensors",
        }
        for each, name, index in zip(NORMALIZERS, PROCESSORS, (number, 0), strict=True)
    )
    device = {"registry_name": "device_processor", "config": {"device": "cpu", "float_dtype": None}}
    words = {"padding": "longest", "padding_side": "right", "truncation": True, "task_key": "task"}
    words |= {"max_length": config["tokenizer_max_length"], "tokenizer_name": "tokenizer"}
    steps: list[dict[str, Any]] = [
        {"registry_name": RENAME, "config": {"rename_map": {}}},
        {"registry_name": "to_batch_processor", "config": {}},
        {"registry_name": step, "config": {}},
        {"registry_name": TOKENIZER, "config": words, "artifacts": {"tokenizer_name": "tokenizer"}},
        device,
    ]
    steps.insert(number, before)
    parts = ("policy_preprocessor", steps), ("policy_postprocessor", [after, device])
    processors = [{"name": name, "steps": each} for name, each in parts]
    seen, done = ({name: features[name] for name in names} for names in ((*cameras, STATE), (ACTION,)))
    whole = {**config, "input_features": seen, "output_features": done, "normalization_mapping": modes}
    return LeRobotFolder(path, whole, {}, processors, (statistics, statistics), tokenizer, {})
