"""pi0 and pi0.5 in LeRobot's layout: openpi's networks, with LeRobot's images, prompts, statistics and cameras."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from vla_policies.checkpoint.weights import Entry
from vla_policies.lerobot.checkpoint import LeRobotCheckpoint
from vla_policies.lerobot.policy import LeRobotConfig, LeRobotPolicy
from vla_policies.pi0.checkpoint import EMBEDDINGS, LM_HEAD, is_unused, model_weights
from vla_policies.pi0.model import Pi0Model, Pi0ModelConfig, published_sizes, stays_float32

_VISION_HEADS = "vision_heads"  # of our options, where it is not SigLIP so400m


class LeRobotPi0Checkpoint(LeRobotCheckpoint):
    """A checkpoint folder without its weights."""

    kinds: ClassVar[Mapping[str, str]] = {
        "pi0": "pi0_new_line_processor",
        "pi05": "pi05_prepare_state_tokenizer_processor_step",
    }
    steps_entry: ClassVar[str] = "num_inference_steps"

    def empty_model(self) -> tuple[Pi0Model, dict[str, Entry]]:
        # As LeRobot: names of the other kind, and a projection that pi0.5 has no use for.
        pi05, time, other = self.config["type"] == "pi05", "action_time_mlp_", "time_mlp_"
        if pi05:
            time, other = other, time
        entries = {
            f"{time}{key.removeprefix(other)}" if key.startswith(other) else key: entry
            for key, entry in model_weights(self.model_weights).items()
            if not (pi05 and key.startswith("state_proj."))
        }
        shapes = {key: entry.shape for key, entry in entries.items()}
        with torch.device("meta"):
            return Pi0Model(Pi0ModelConfig.from_shapes(shapes, self.options.get(_VISION_HEADS))), entries

    def write(self, folder: Path, weights: Mapping[str, Tensor], options: Mapping[str, Any]) -> list[str]:
        """Write the token embeddings as the head that LeRobot asks for, and by their own name where they had it.

        LeRobot reads the one that comes last in the file.
        """
        stored = dict(weights)
        embeddings = stored.pop(EMBEDDINGS)
        if EMBEDDINGS in self.model_weights:
            stored[EMBEDDINGS] = embeddings
        return super().write(folder, {**stored, LM_HEAD: embeddings}, options)


class LeRobotPi0(LeRobotPolicy):
    """pi0 and pi0.5 of LeRobot's checkpoints, which tell which one it is.

    Example:
        >>> policy = LeRobotPi0.from_pretrained("checkpoints/pi0-libero-finetuned", benchmark="libero")
    """

    family: ClassVar[str] = "pi0_lerobot"
    vlm_name, centred = "PaliGemma", True

    model: Pi0Model
    folder: LeRobotPi0Checkpoint

    checkpoint_class = LeRobotPi0Checkpoint
    unused = staticmethod(is_unused)
    needs_float32 = staticmethod(stays_float32)

    def __init__(self, model: Pi0Model, folder: LeRobotPi0Checkpoint, config: LeRobotConfig):
        super().__init__(model, folder, config)
        self.lists_states = model.config.pi05

    @classmethod
    def published_model(cls, **_: Any) -> Pi0Model:
        return Pi0Model(published_sizes(pi05=False))

    def write_checkpoint(self, folder: Path, weights: Mapping[str, Tensor], options: Mapping[str, Any]) -> list[str]:
        heads = {_VISION_HEADS: self.model.config.vision.heads}
        return super().write_checkpoint(folder, weights, {**options, **heads})

    def decision_sizes(self) -> tuple[int, int]:
        images, horizon = super().decision_sizes()
        return images, horizon + (0 if self.model.config.pi05 else 1)
