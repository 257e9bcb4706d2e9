"""What a policy needs of a checkpoint folder of LeRobot, whatever its network is."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

from torch import Tensor

from vla_policies.checkpoint.report import NOT_SAID, describe_weights
from vla_policies.flow.heads import StoredHeads
from vla_policies.lerobot.folder import ACTION, STATE, LeRobotFolder
from vla_policies.lerobot.statistics import to_tensors


@dataclass(frozen=True)
class LeRobotCheckpoint:
    """A checkpoint folder without its weights; a family adds ``empty_model``.

    ``kinds``: LeRobot's ``type`` of it, see :meth:`LeRobotFolder.read`; ``steps_entry``: where its config says how many
    steps lead to an action.
    """

    folder: LeRobotFolder

    kinds: ClassVar[Mapping[str, str]]
    steps_entry: ClassVar[str] = "num_steps"

    @classmethod
    def read(cls, folder: str | Path) -> Self:
        """Read a folder, or download ``hf:NAME`` first; errors of :meth:`LeRobotFolder.read`."""
        return cls(LeRobotFolder.read(folder, cls.kinds))

    @property
    def path(self) -> Path:
        return self.folder.path

    @property
    def options(self) -> Mapping[str, Any]:
        """What the policy that was saved here was set to."""
        return self.folder.options

    @property
    def horizon(self) -> int:
        """Actions that are denoised together."""
        return int(self.folder.config.get("chunk_size", 50))

    @property
    def settings(self) -> dict[str, Any]:
        """What the config says of a policy's settings: how many actions are executed, and steps to make them."""
        said = ("num_action_chunks", "n_action_steps"), ("num_steps", self.steps_entry)
        return {name: self.folder.config[entry] for name, entry in said if entry in self.folder.config}

    @property
    def other_files(self) -> dict[str, Any]:
        """What else belongs to it, by name."""
        return {}

    @cached_property
    def heads(self) -> StoredHeads:
        """Value head and noise network; headers only."""
        return StoredHeads.read(self.path, {})

    def describe(self) -> dict[str, str]:
        """Return facts of it for a report."""
        config, options = self.folder.config, self.options
        return {
            "type": config["type"],
            "benchmark": options.get("benchmark", f"{NOT_SAID}; set benchmark"),
            "cameras": ", ".join(self.folder.cameras),
            "chunk": f"{self.horizon} actions, of which {config.get('n_action_steps')} are executed",
            "tokenizer": "yes",
            "LoRA adapter": "yes" if options.get("lora_adapter") else "no",
            "weights": describe_weights(self.folder.weights),
            "heads": self.heads.describe(),
        }

    def check_statistics(self) -> None:
        """Refuse (ValueError) a folder without statistics, which another robot does not need."""
        self.folder.statistics()

    def with_statistics(self, actions: Mapping[str, Any], state: Mapping[str, Any]) -> Self:
        """Return it with other statistics, by name and dimension."""
        tensors = {**to_tensors(ACTION, actions), **to_tensors(STATE, state)}
        config = copy.deepcopy(dict(self.folder.config))
        for part, name in (("output_features", ACTION), ("input_features", STATE)):
            config[part][name]["shape"] = list(tensors[f"{name}.mean"].shape)  # which LeRobot cuts actions by
        return replace(self, folder=replace(self.folder, config=config, tensors=(tensors, tensors)))

    def write(self, folder: Path, weights: Mapping[str, Tensor], options: Mapping[str, Any]) -> list[str]:
        """Write a folder in this layout, see :meth:`LeRobotFolder.write`."""
        config = {"n_action_steps": options["num_action_chunks"], self.steps_entry: options["num_steps"]}
        if "use_peft" in self.folder.config:  # LeRobot would look for an adapter beside whole weights
            config["use_peft"] = False
        return self.folder.write(folder, weights, options, config, self.other_files)
