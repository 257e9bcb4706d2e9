"""pi0 and pi0.5 from openpi's layout into LeRobot's and back: the same network and heads in another folder."""

import itertools
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vla_common.plain import read_small
from vla_common.schema import get_schema
from vla_policies.flow.config import VLMFlowConfig
from vla_policies.lerobot.checkpoint import ACTION, LEROBOT, STATE
from vla_policies.lerobot.policy import LeRobotConfig
from vla_policies.lerobot.processors import LARGEST, make_processors
from vla_policies.lerobot.statistics import MEAN_STD, to_tensors
from vla_policies.pi0.checkpoint import TOKENIZERS, UNUSED, Pi0Checkpoint
from vla_policies.pi0.lerobot import LeRobotPi0, LeRobotPi0Checkpoint
from vla_policies.pi0.policy import Pi0, Pi0Config
from vla_policies.pi0.presets import list_presets
from vla_policies.policy import VLAPolicy
from vla_policies.processing.adapters import published_settings
from vla_policies.processing.normalization import numbers

_MODES = {"pi0": MEAN_STD, "pi05": "QUANTILES"}  # of normalisation, by LeRobot's type
_NAMES = ("mean", "std", "min", "max", "q01", "q99")
_PARTS = (("state", STATE), ("actions", ACTION))


def check_layout(policy_class: type[VLAPolicy], layout: str) -> None:
    """Refuse (ValueError) policies that have this layout already, or cannot have it."""
    if not issubclass(policy_class, (Pi0, LeRobotPi0)):
        raise ValueError(f"{policy_class.family} has one layout; those of pi0 and pi0.5 are exported")
    if issubclass(policy_class, LeRobotPi0) == (layout == LEROBOT):
        raise ValueError(f"{policy_class.family} has {layout}'s layout already; there is nothing to export")


def convert(policy: Any, layout: str, tokenizer: Path) -> tuple[Any, list[str]]:
    """Make the policy of the other layout, which shares network and heads; returns it and lines on what differs.

    ``tokenizer`` is a folder with the tokenizer's files of that layout. ValueError: something has no counterpart there.
    """
    kind, files = "pi05" if policy.model.config.pi05 else "pi0", _read_tokenizer(tokenizer, layout)
    other = _to_lerobot(policy, kind, files) if layout == LEROBOT else _to_openpi(policy, kind, *files.values())
    if other.adapter != policy.adapter:
        raise ValueError(f"gripper or joints of {policy.config.benchmark} are not converted in {layout}'s layout")
    text, zeros = [get_schema(policy.config.benchmark).instruction], torch.zeros(1, policy.state_dim)
    rows = [(each.prompt_tokens(text, zeros)[0].tolist(), each.prompts.padding) for each in (policy, other)]
    first, second = ([token for token in row if token != padding] for row, padding in rows)
    if first != second:
        raise ValueError(f"{tokenizer} has another tokenizer: {text[0]!r} is {second} there, {first} in the checkpoint")
    other.value_head, other.noise_network = policy.value_head, policy.noise_network
    other.unused_tensors = {key: each for key, each in policy.unused_tensors.items() if key.startswith(UNUSED)}
    return other, _differences(policy, other)


def _to_lerobot(policy: Pi0, kind: str, tokenizer: dict[str, bytes]) -> LeRobotPi0:
    sizes, mode = policy.model.config, _MODES[kind]
    if policy.preset.relative:
        name = policy.config.config_name
        raise ValueError(f"actions of {name} are relative to the state, which is not supported in LeRobot's layout")
    if policy.preset.state_in_prompt != sizes.pi05:
        raise ValueError("prompts of this pi0.5 do not list the state; those of LeRobot's do")
    statistics: dict[str, Tensor] = {}
    for (what, feature), size in zip(_PARTS, (policy.state_dim, policy.action_dim), strict=True):
        entry = policy.statistics.raw[what]
        found = {name: numbers(entry[name], f"norm_stats, {what}: {name}")[:size] for name in _NAMES if name in entry}
        statistics |= to_tensors(feature, found)
    cameras = published_settings(policy.config.benchmark, LEROBOT).get("cameras", ())[: policy.num_images]
    seen: dict[str, Any] = {name: {"type": "VISUAL", "shape": [3, *policy.model_image_size]} for name in cameras}
    config = {
        "type": kind,
        "input_features": {**seen, STATE: {"type": "STATE", "shape": [policy.state_dim]}},
        "output_features": {ACTION: {"type": "ACTION", "shape": [policy.action_dim]}},
        "normalization_mapping": {"VISUAL": "IDENTITY", "STATE": mode, "ACTION": mode},
        "chunk_size": policy.horizon,
        "max_state_dim": sizes.state_dim,
        "max_action_dim": sizes.action_dim,
        "tokenizer_max_length": policy.prompts.max_length,
        "dtype": str(policy.model.dtype).removeprefix("torch."),
    }
    processors = make_processors(LeRobotPi0Checkpoint.kinds[kind], config, kind)
    folder = LeRobotPi0Checkpoint(policy.folder.path, config, {}, processors, (statistics, statistics), tokenizer, {})
    return LeRobotPi0(policy.model, folder, LeRobotConfig(**_settings(policy), cameras=cameras))


def _to_openpi(policy: LeRobotPi0, kind: str, tokenizer: bytes) -> Pi0:
    sizes, benchmark, mode = policy.model.config, policy.config.benchmark, _MODES[kind]
    if found := {policy.statistics.state.mode, policy.statistics.actions.mode} - {mode}:
        raise ValueError(f"{policy.folder.path} normalises by {found.pop()}; openpi's {kind} by {mode}")
    if policy.camera_order != sorted(policy.camera_order):
        raise ValueError(f"{policy.folder.path} looks at a wrist camera first; openpi's policies do last")
    known = list_presets().items()
    presets = [name for name, each in known if (each.benchmark, each.pi05) == (benchmark, sizes.pi05)]
    if not presets:
        raise ValueError(f"openpi has no {kind} for {benchmark}")
    statistics = {
        what: {name: each[f"{feature}.{name}"].tolist() for name in _NAMES if f"{feature}.{name}" in each}
        for (what, feature), each in zip(_PARTS, policy.folder.tensors, strict=True)
    }
    config = {"action_dim": sizes.action_dim, "discrete_state_input": sizes.pi05, "extra_delta_transform": False}
    folder = Pi0Checkpoint(policy.folder.path, config, {}, {benchmark: statistics}, tokenizer, {})
    settings = _settings(policy) | {"num_images_in_input": policy.num_images, "action_horizon": policy.horizon}
    return Pi0(policy.model, folder, Pi0Config(**settings, config_name=presets[0], adapt_to_pi=False))


def _settings(policy: Any) -> dict[str, Any]:
    return {entry.name: getattr(policy.config, entry.name) for entry in fields(VLMFlowConfig)}


def _read_tokenizer(folder: Path, layout: str) -> dict[str, bytes]:
    sets = [("tokenizer.json", "tokenizer_config.json")] if layout == LEROBOT else [(name,) for name in TOKENIZERS]
    for place, names in itertools.product((folder, folder / "tokenizer"), sets):
        if all((place / name).is_file() for name in names):
            return {name: read_small(place / name, LARGEST) for name in names}
    raise FileNotFoundError(
        f"{folder} has no {' and '.join(sets[-1])}, PaliGemma's tokenizer; where there is a network type: "
        f"hf download google/paligemma-3b-pt-224 {' '.join(sets[-1])} --local-dir NEW, and add --tokenizer NEW"
    )


def _differences(policy: Any, other: Any) -> list[str]:
    ones = torch.ones(policy.action_dim)
    first, second = (each.statistics.unnormalize("actions", ones) for each in (policy, other))
    lines = [
        "openpi adds 1e-06 to deviations (pi0.5: spans) in both directions, LeRobot 1e-08 to deviations that divide: "
        f"actions differ by {(first - second).abs().max():.0e}, states that hardly move in the statistics by more",
        "openpi rounds resized images to 8 bits, LeRobot does not",
    ]
    if isinstance(other, Pi0):
        facts = f"action_horizon={other.horizon}, no delta actions, asset_id={other.statistics.key!r}"
        lines.append(f"openpi's TrainConfig needs {facts}")
    return lines
