"""pi0 in LeRobot's layout: openpi's network by its names, with LeRobot's images, prompts, statistics and cameras."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from vla_policies.checkpoint.weights import Entry
from vla_policies.flow import memory
from vla_policies.flow.prefix import PrefixCache
from vla_policies.flow.vlm import Observed
from vla_policies.lerobot.checkpoint import LeRobotCheckpoint
from vla_policies.lerobot.folder import LeRobotFolder
from vla_policies.lerobot.policy import LeRobotPolicy
from vla_policies.memory import DecisionMemory
from vla_policies.pi0.checkpoint import EMBEDDINGS, LM_HEAD, UNUSED, model_weights
from vla_policies.pi0.inspection import published_sizes
from vla_policies.pi0.model import EXPERT, Pi0Model, Pi0ModelConfig, stays_float32

FAMILY = "pi0_lerobot"
_TYPE, _STEPS = "pi0", ("pi0_new_line_processor",)
_VISION_HEADS = "vision_heads"  # of our options, where it is not SigLIP so400m


class LeRobotPi0Checkpoint(LeRobotCheckpoint):
    """A checkpoint folder without its weights."""

    steps_entry: ClassVar[str] = "num_inference_steps"

    @classmethod
    def read(cls, folder: str | Path) -> LeRobotPi0Checkpoint:
        """Read a folder, or download ``hf:NAME`` first; errors of :meth:`LeRobotFolder.read`."""
        return cls(LeRobotFolder.read(folder, _TYPE, _STEPS))

    def empty_model(self) -> tuple[Pi0Model, dict[str, Entry]]:
        entries = self.folder.model_weights
        if EMBEDDINGS not in entries:  # where both are stored, nothing reads the head
            entries = model_weights(entries)
        shapes = {key: entry.shape for key, entry in entries.items()}
        with torch.device("meta"):
            return Pi0Model(Pi0ModelConfig.from_shapes(shapes, self.options.get(_VISION_HEADS))), entries

    def write(self, folder: Path, weights: Mapping[str, Tensor], options: Mapping[str, Any]) -> list[str]:
        """Write the token embeddings by the name that they had."""
        name = EMBEDDINGS if EMBEDDINGS in self.folder.model_weights else LM_HEAD
        stored = {name if key == EMBEDDINGS else key: tensor for key, tensor in weights.items()}
        return super().write(folder, stored, options)


def is_unused(key: str) -> bool:
    """Tell whether the network reads no tensor of that name: the language models' heads."""
    return key == LM_HEAD or key.startswith(UNUSED)


class LeRobotPi0(LeRobotPolicy):
    """pi0 of LeRobot's checkpoints; pi0.5 of LeRobot is not read.

    Example:
        >>> policy = LeRobotPi0.from_pretrained("checkpoints/pi0-libero-finetuned", benchmark="libero")
    """

    family: ClassVar[str] = FAMILY
    kind, vlm_name, expert_prefix, centred = _TYPE, "PaliGemma", EXPERT, True

    model: Pi0Model
    folder: LeRobotPi0Checkpoint

    checkpoint_class = LeRobotPi0Checkpoint
    unused = staticmethod(is_unused)
    needs_float32 = staticmethod(stays_float32)

    @classmethod
    def published_model(cls) -> Pi0Model:
        return Pi0Model(published_sizes(pi05=False))

    def write_checkpoint(self, folder: Path, weights: Mapping[str, Tensor], options: Mapping[str, Any]) -> list[str]:
        heads = {_VISION_HEADS: self.model.config.vision.heads}
        return super().write_checkpoint(folder, weights, {**options, **heads})

    def decision_memory(self) -> DecisionMemory:
        images, horizon = self.decision_sizes()
        frozen = self.prefix_is_frozen
        return memory.decision_memory(self.model, self.config, frozen, images, self.image_tokens, horizon + 1)

    @property
    def vlm(self) -> nn.Module:
        return self.model.paligemma

    @property
    def image_tokens(self) -> int:
        return self.model.config.vision.num_patches

    def observe(self, tensordict: TensorDictBase) -> Observed:
        state = self.padded_state(tensordict)
        prefix, pooled = self.read_prefix(tensordict)
        return Observed(prefix, state, pooled)

    def compute_prefix(self, tensordict: TensorDictBase, tokens: Tensor, valid: Tensor, output: bool) -> PrefixCache:
        return self.model.prefix(self.pixels(tensordict), None, tokens, valid, output=output)

    def velocity(self, observed: Observed, noisy: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
        return self.model.velocity(observed.prefix, noisy, time, observed.state)
