"""What is in a checkpoint folder of SmolVLA, in LeRobot's layout, and the same folder written again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vla_common.plain import read_json
from vla_policies.checkpoint.layout import CONFIG
from vla_policies.checkpoint.parts import in_first
from vla_policies.checkpoint.weights import Entry
from vla_policies.flow.heads import StoredHeads
from vla_policies.lerobot.folder import ACTION, STATE, LeRobotFolder, is_type
from vla_policies.lerobot.statistics import to_tensors
from vla_policies.smolvla.model import VLM, SmolVLAModel, SmolVLAModelConfig

FAMILY = "smolvla"
STEPS = ("smolvla_new_line_processor",)
UNUSED = f"{VLM}lm_head."
_FIXED = {  # entries of config.json that the network has built in
    "n_obs_steps": 1,
    "min_period": 4e-3,
    "max_period": 4.0,
    "add_image_special_tokens": False,
    "adapt_to_pi_aloha": False,
    "use_delta_joint_actions_aloha": False,
}


@dataclass(frozen=True)
class SmolVLACheckpoint:
    """A checkpoint folder without its weights."""

    folder: LeRobotFolder
    vlm: Mapping[str, Any]  # config.json of its VLM, empty for SmolVLM2-500M

    @classmethod
    def read(cls, folder: str | Path) -> SmolVLACheckpoint:
        """Read a folder, or download ``hf:NAME`` first; errors of :meth:`LeRobotFolder.read`.

        The ``config.json`` of a VLM other than SmolVLM2-500M is in a folder called ``vlm_model_name``, in this one.
        """
        found = LeRobotFolder.read(folder, FAMILY, STEPS)
        for name, value in _FIXED.items():
            if found.config.get(name, value) != value:
                said = json.dumps(found.config[name])
                raise ValueError(f"{found.path / CONFIG}: {name} is {said}, only {json.dumps(value)} is supported")
        places = (found.path / Path(found.config.get("vlm_model_name", FAMILY)).name / CONFIG,)
        return cls(found, next((read_json(place) for place in places if place.is_file()), {}))

    @property
    def path(self) -> Path:
        return self.folder.path

    @property
    def options(self) -> Mapping[str, Any]:
        return self.folder.options

    @property
    def horizon(self) -> int:
        """Actions that are denoised together."""
        return int(self.folder.config.get("chunk_size", 50))

    @property
    def settings(self) -> dict[str, Any]:
        """What the config says of a policy's settings: how many actions are executed, and steps to make them."""
        said = ("num_action_chunks", "n_action_steps"), ("num_steps", "num_steps")
        return {name: self.folder.config[entry] for name, entry in said if entry in self.folder.config}

    @cached_property
    def heads(self) -> StoredHeads:
        """Value head and noise network; headers only."""
        return StoredHeads.read(self.path, {})

    def empty_model(self) -> tuple[SmolVLAModel, dict[str, Entry]]:
        entries = self.folder.model_weights
        try:
            sizes = SmolVLAModelConfig.from_shapes({key: entry.shape for key, entry in entries.items()}, self.vlm)
        except ValueError as error:
            name = self.folder.config.get("vlm_model_name", "VLM")
            raise ValueError(
                f"{self.path}: {error}; put the config.json of {name} into {self.path / Path(name).name}, if it is "
                "another VLM"
            ) from error
        side, given = sizes.vision.image_size, self.folder.config.get("resize_imgs_with_padding")
        if given is not None and list(given) != [side, side]:
            raise ValueError(f"{self.path / CONFIG}: resize_imgs_with_padding is {given}, its VLM needs {[side, side]}")
        with torch.device("meta"):
            return SmolVLAModel(sizes), entries

    def with_statistics(self, actions: Mapping[str, Any], state: Mapping[str, Any]) -> SmolVLACheckpoint:
        """Return it with other statistics, by name and dimension."""
        tensors = {**to_tensors(ACTION, actions), **to_tensors(STATE, state)}
        return replace(self, folder=replace(self.folder, tensors=(tensors, tensors)))

    def write(
        self, folder: Path, weights: Mapping[str, Tensor], options: Mapping[str, Any], config: Mapping[str, Any]
    ) -> list[str]:
        """Write a folder in this layout, see :meth:`LeRobotFolder.write`."""
        files = self.folder.write(folder, weights, options, config)
        if not self.vlm:
            return files
        place = Path(self.folder.config["vlm_model_name"]).name

        def write() -> None:
            (folder / place).mkdir(exist_ok=True)
            (folder / place / CONFIG).write_text(json.dumps(self.vlm, indent=2) + "\n")

        in_first(weights.values(), write)
        return [*files, f"{place}/{CONFIG}"]


def is_smolvla(folder: Path) -> bool:
    """Tell whether a local folder is a checkpoint of SmolVLA, published or ours; raises nothing."""
    return is_type(folder, FAMILY)


def is_unused(key: str) -> bool:
    """Tell whether the network reads no tensor of that name: the VLM's ``lm_head``."""
    return key.startswith(UNUSED)
