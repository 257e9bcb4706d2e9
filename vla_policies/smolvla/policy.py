"""SmolVLA: a flow-matching Vision-Language-Action policy of 450 M parameters that loads LeRobot's checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.nn import functional as F

from vla_common import keys
from vla_policies.checkpoint.settings import SettingError
from vla_policies.flow.heads import save_heads
from vla_policies.flow.prefix import PrefixCache
from vla_policies.flow.vlm import Observed, VLMFlowPolicy
from vla_policies.lerobot.folder import LEROBOT
from vla_policies.lerobot.prompts import LinePrompts
from vla_policies.memory import DecisionMemory
from vla_policies.processing.adapters import get_adapter, published_settings
from vla_policies.processing.images import interpolate_with_pad
from vla_policies.processing.normalization import summarise
from vla_policies.smolvla.checkpoint import FAMILY, SmolVLACheckpoint, is_smolvla, is_unused
from vla_policies.smolvla.config import SmolVLAConfig
from vla_policies.smolvla.inspection import decision_memory, describe_checkpoint, make_meta_model
from vla_policies.smolvla.model import EXPERT, SmolVLAModel, stays_float32


class SmolVLA(VLMFlowPolicy):
    """The VLM reads images and prompt once, then the state, whose projection is trained with the action expert.

    Keys and values of images and prompt are kept for an update; those of the state are computed with their gradient.

    Example:
        >>> policy = SmolVLA.from_pretrained("checkpoints/smolvla-libero", benchmark="libero")
    """

    family: ClassVar[str] = FAMILY
    config_class: ClassVar[type[SmolVLAConfig]] = SmolVLAConfig
    checkpoint_settings: ClassVar[tuple[str, ...]] = ("cameras",)
    vlm_name, expert_prefix = "the VLM", EXPERT
    summed_times, resize_rounds = False, True

    model: SmolVLAModel
    config: SmolVLAConfig
    folder: SmolVLACheckpoint

    def __init__(self, model: SmolVLAModel, folder: SmolVLACheckpoint, config: SmolVLAConfig):
        names = config.cameras or published_settings(config.benchmark, LEROBOT).get("cameras")
        if not names:
            raise SettingError(
                f"cameras: LeRobot's names of the cameras of {config.benchmark} are not known; set them, the "
                "third-person camera first, such as cameras=[observation.images.image]"
            )
        order = folder.folder.order_cameras(names, chosen=config.cameras is not None)
        adapter = get_adapter(config.benchmark, LEROBOT)
        super().__init__(model, folder, config, adapter, horizon=folder.horizon, num_images=len(names))
        self.camera_order = order
        self.statistics = folder.folder.statistics()
        self.statistics.check(self.state_dim, self.action_dim)
        longest = folder.folder.max_prompt_length if config.max_prompt_length is None else config.max_prompt_length
        self.prompts = LinePrompts(folder.folder.tokenizer, longest)

    recognises = staticmethod(is_smolvla)
    describe = staticmethod(describe_checkpoint)
    read_checkpoint = staticmethod(SmolVLACheckpoint.read)
    meta_model = staticmethod(make_meta_model)
    unused = staticmethod(is_unused)
    needs_float32 = staticmethod(stays_float32)

    @classmethod
    def infer_settings(cls, checkpoint: SmolVLACheckpoint, settings: dict[str, Any], stored: bool) -> dict[str, Any]:
        return {**checkpoint.settings, **settings}

    def write_checkpoint(self, folder: Path, weights: Mapping[str, Tensor], options: Mapping[str, Any]) -> list[str]:
        config = {"n_action_steps": self.chunk_size, "num_steps": self.flow.num_steps}
        files = self.folder.write(folder, weights, options, config)
        return [*files, save_heads(folder, self.heads(), self.noise_level, self.parameters())]

    def decision_memory(self) -> DecisionMemory:
        return decision_memory(self.model, self.config, self.folder, self.prefix_is_frozen)

    @property
    def vlm(self) -> nn.Module:
        return self.model.vlm

    @property
    def image_tokens(self) -> int:
        return self.model.config.image_tokens

    @property
    def padding(self) -> int:
        return self.prompts.padding

    # ---- observations

    def prompt_tokens(self, task_descriptions: Sequence[str], states: Tensor | None = None) -> Tensor:
        return self.prompts(task_descriptions).to(self.device)

    def observe(self, tensordict: TensorDictBase) -> Observed:
        states = self.statistics.normalize("state", self.adapter.states(tensordict))
        state = F.pad(states, (0, self.model.config.state_dim - self.state_dim))
        prefix, pooled = self.read_prefix(tensordict)
        return Observed(self.model.add_state(prefix, state), state, pooled)

    def compute_prefix(self, tensordict: TensorDictBase, tokens: Tensor, valid: Tensor, output: bool) -> PrefixCache:
        images = tensordict.get(keys.MODEL_IMAGES, None)
        if keys.IMAGES in tensordict:
            images = self.kept_images(self.cameras(tensordict))
        return self.model.prefix(self._pixels(images.unbind(1)) * 2 - 1, tokens, valid, output=output)

    def _pixels(self, cameras: Sequence[Tensor]) -> Tensor:
        """Return cameras as LeRobot resizes them: float32 ``[N, n, 3, h, w]`` from 0 to 1."""
        return torch.stack(
            [interpolate_with_pad(camera, self.model_image_size, centred=False) for camera in cameras], dim=1
        )

    def cameras(self, tensordict: TensorDictBase) -> list[Tensor]:
        """Return the cameras in the order of the checkpoint's, see :class:`ModelImages`."""
        cameras = self.adapter.cameras(tensordict, self.num_images)
        return [cameras[index] for index in self.camera_order]

    def resize_cameras(self, cameras: Sequence[Tensor]) -> Tensor:
        """Return what the model sees rounded to 8 bits, unlike LeRobot: cameras of several sizes are kept as that."""
        return (self._pixels(cameras) * 255).round().to(torch.uint8).permute(0, 1, 3, 4, 2)

    # ---- flow

    def velocity(self, observed: Observed, noisy: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
        return self.model.velocity(observed.prefix, noisy, time)

    def to_simulator(self, actions: Tensor, states: Tensor) -> Tensor:
        return self.adapter.to_simulator(self.statistics.unnormalize("actions", actions))

    def to_model(self, actions: Tensor, states: Tensor) -> Tensor:
        return self.statistics.normalize("actions", self.adapter.to_model(actions))

    def take_statistics(self, name: str, actions: Tensor, states: Tensor, step_mask: Tensor) -> None:
        """Replace the checkpoint's statistics, which have no ``name``."""
        found = summarise(self.adapter.to_model(actions)[step_mask]), summarise(states)
        self.folder = self.folder.with_statistics(*found)
        self.statistics = self.folder.folder.statistics()
