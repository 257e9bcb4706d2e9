"""pi0 and pi0.5: flow-matching Vision-Language-Action policies that load openpi's PyTorch checkpoints."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from tensordict import TensorDictBase
from torch import Tensor

from vla_policies.checkpoint.settings import SettingError
from vla_policies.flow import memory
from vla_policies.flow.heads import save_heads
from vla_policies.flow.prefix import PrefixCache
from vla_policies.flow.vlm import VLMFlowPolicy
from vla_policies.memory import DecisionMemory
from vla_policies.pi0.checkpoint import Pi0Checkpoint, is_pi0, is_unused
from vla_policies.pi0.config import Pi0Config
from vla_policies.pi0.model import EXPERT, Pi0Model, published_sizes, stays_float32
from vla_policies.pi0.presets import FAMILY, get_adapter, get_preset
from vla_policies.pi0.prompts import Pi0Prompts
from vla_policies.processing.images import resize_with_pad
from vla_policies.processing.normalization import summarise

_HORIZON = 50  # as published


class Pi0(VLMFlowPolicy):
    """Both variants; the checkpoint tells which one it is.

    How it composes with ``TensorDictSequential``: :class:`~vla_policies.policy.VLAPolicy`.

    Example:
        >>> policy = Pi0.from_pretrained("checkpoints/pi05-libero", benchmark="libero", config_name="pi05_libero")
    """

    family: ClassVar[str] = FAMILY
    config_class: ClassVar[type[Pi0Config]] = Pi0Config
    checkpoint_settings: ClassVar[tuple[str, ...]] = (
        *("config_name", "adapt_to_pi", "num_images_in_input", "action_horizon"),
    )
    needed_settings: ClassVar[Mapping[str, str]] = {"benchmark": "libero", "config_name": "pi05_libero"}
    vlm_name, expert_prefix = "PaliGemma", EXPERT

    model: Pi0Model
    config: Pi0Config

    def __init__(self, model: Pi0Model, folder: Pi0Checkpoint, config: Pi0Config):
        preset = get_preset(config.config_name)
        if folder.config.get("extra_delta_transform") is False:  # converted from LeRobot's layout; openpi's names
            preset = replace(preset, relative=(), state_in_prompt=folder.config.get("discrete_state_input") is True)
        if preset.pi05 != model.config.pi05:
            kind = "pi0.5" if model.config.pi05 else "pi0"
            raise ValueError(f"the checkpoint is of {kind}, config_name is {config.config_name!r}; set its own")
        if preset.benchmark != config.benchmark:
            raise ValueError(f"{config.config_name} is for {preset.benchmark}, not for {config.benchmark!r}")
        adapter = get_adapter(config.config_name, config.adapt_to_pi)
        horizon = config.action_horizon
        if horizon is None:
            horizon = folder.config.get("action_horizon", preset.horizon)
        super().__init__(model, folder, config, adapter, horizon=horizon, num_images=config.num_images_in_input)
        self.preset = preset
        self.statistics = folder.select_statistics(config.norm_stats_id, quantiles=preset.pi05)
        self.statistics.check(self.state_dim, self.action_dim)
        longest = (200 if preset.pi05 else 48) if config.max_prompt_length is None else config.max_prompt_length
        self.prompts = Pi0Prompts(folder.tokenizer, longest)

    recognises = staticmethod(is_pi0)
    read_checkpoint = staticmethod(Pi0Checkpoint.read)
    unused = staticmethod(is_unused)
    needs_float32 = staticmethod(stays_float32)

    @classmethod
    def published_model(cls, config_name: str | None = None, **_: Any) -> Pi0Model:
        if not config_name:
            raise SettingError("config_name: which variant is it? such as pi0_libero or pi05_libero")
        return Pi0Model(published_sizes(get_preset(config_name).pi05))

    def write_checkpoint(self, folder: Path, weights: Mapping[str, Tensor], options: Mapping[str, Any]) -> list[str]:
        entries = {"action_horizon": self.horizon, "vision_heads": self.model.config.vision.heads}
        files = self.folder.write(folder, weights, options, {**entries, "model_type": self.family})
        return [*files, save_heads(folder, self.heads(), self.noise_level, self.parameters())]

    def value_widths(self) -> tuple[int, ...]:
        name = getattr(self.config, "config_name", None)
        return (get_preset(name).value_head if name else None) or super().value_widths()

    def decision_memory(self) -> DecisionMemory:
        config, name = self.config, getattr(self.config, "config_name", None)
        tokens = config.action_horizon or (get_preset(name).horizon if name else _HORIZON)
        tokens += 0 if self.model.config.pi05 else 1
        return memory.decision_memory(self.model, config, self.prefix_is_frozen, config.num_images_in_input, tokens)

    # ---- observations

    def prompt_tokens(self, task_descriptions: Sequence[str], states: Tensor | None = None) -> Tensor:
        if not self.preset.state_in_prompt:
            return self.prompts(task_descriptions).to(self.device)
        if states is None:
            raise ValueError(f"prompts of {self.config.config_name} list the state; pass states")
        states = self.adapter.joints.states(states)
        return self.prompts(task_descriptions, self.statistics.normalize("state", states)).to(self.device)

    def compute_prefix(self, tensordict: TensorDictBase, tokens: Tensor, valid: Tensor, output: bool) -> PrefixCache:
        images = self.model_images(tensordict).permute(0, 1, 4, 2, 3).float() / 127.5 - 1.0
        return self.model.prefix(images, tokens, valid, output=output)

    def cameras(self, tensordict: TensorDictBase) -> list[Tensor]:
        return self.adapter.cameras(tensordict, self.config.num_images_in_input)

    def resize_cameras(self, cameras: Sequence[Tensor]) -> Tensor:
        return torch.stack([resize_with_pad(camera, self.model_image_size) for camera in cameras], dim=1)

    # ---- flow

    def to_simulator(self, actions: Tensor, states: Tensor) -> Tensor:
        actions = self.statistics.unnormalize("actions", actions)
        return self.adapter.to_simulator(actions + self._offset(states))

    def to_model(self, actions: Tensor, states: Tensor) -> Tensor:
        return self.statistics.normalize("actions", self.adapter.to_model(actions) - self._offset(states))

    def take_statistics(self, name: str, actions: Tensor, states: Tensor, step_mask: Tensor) -> None:
        """``name`` becomes the ``norm_stats_id``; as openpi's, statistics are of relative actions."""
        relative = self.adapter.to_model(actions) - self._offset(states)
        entry = {"actions": summarise(relative[step_mask]), "state": summarise(self.adapter.joints.states(states))}
        self.folder = replace(self.folder, statistics={**self.folder.statistics, name: entry})
        self.config = replace(self.config, norm_stats_id=name)
        self.statistics = self.folder.select_statistics(name, quantiles=self.preset.pi05)
        self.statistics.check(self.state_dim, self.action_dim)

    def _offset(self, states: Tensor) -> Tensor:
        """Return what relative actions are relative to, ``[N, 1, A]``: the model's states, as openpi adapts them."""
        offset = states.new_zeros(len(states), 1, self.action_dim)
        relative = list(self.preset.relative)
        offset[:, 0, relative] = self.adapter.joints.states(states)[:, relative]
        return offset
