"""pi0 and pi0.5: flow-matching Vision-Language-Action policies that load openpi's PyTorch checkpoints."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Ge, Le
from tensordict import TensorDictBase
from torch import Tensor

from vla_common.settings import Length
from vla_policies.checkpoint.settings import SettingError
from vla_policies.flow.config import VLMFlowConfig
from vla_policies.flow.heads import save_heads
from vla_policies.flow.vlm import VLMFlowPolicy
from vla_policies.pi0.checkpoint import TOKENIZERS, Pi0Checkpoint, is_pi0, is_unused
from vla_policies.pi0.model import Pi0Model, published_sizes, stays_float32
from vla_policies.pi0.presets import FAMILY, get_adapter, get_preset
from vla_policies.processing.images import resize_with_pad
from vla_policies.processing.normalization import summarise
from vla_policies.processing.prompts import PromptTokens, one_line

SLOTS = 3  # of the model, for images: base, left wrist, right wrist
BOS, PAD = 2, 0  # token ids of PaliGemma
_HORIZON = 50  # as published


@dataclass(frozen=True, kw_only=True)
class Pi0Config(VLMFlowConfig):
    """Settings of a :class:`Pi0`, in addition to those of a :class:`VLMFlowConfig`.

    Prompts have at most 48 tokens, and 200 for pi0.5, unless ``max_prompt_length`` says otherwise.

    Attributes:
        config_name: the published variant, see :func:`vla_policies.pi0.presets.list_presets`.
        adapt_to_pi: the checkpoint counts joints and grippers as pi's own robots do, not as the benchmark (openpi's
            setting of that name); ``None`` for what the published variant does. No file says it.
        norm_stats_id: data set whose statistics are used; may be left out if the checkpoint has one.
        action_horizon: actions that are denoised together; ``None`` for the checkpoint's or the preset's.
        num_images_in_input: cameras, the third-person one first, then wrist cameras; 3 at most.
    """

    config_name: str
    adapt_to_pi: bool | None = None
    norm_stats_id: str | None = None
    action_horizon: Length | None = None
    num_images_in_input: Annotated[int, Ge(1), Le(SLOTS)] = 1


class Pi0(VLMFlowPolicy):
    """Both variants; the checkpoint tells which one it is.

    Example:
        >>> policy = Pi0.from_pretrained("checkpoints/pi05-libero", benchmark="libero", config_name="pi05_libero")
    """

    family: ClassVar[str] = FAMILY
    config_class: ClassVar[type[Pi0Config]] = Pi0Config
    checkpoint_settings = ("config_name", "adapt_to_pi", "num_images_in_input", "action_horizon")
    needed_settings: ClassVar[Mapping[str, str]] = {"benchmark": "libero", "config_name": "pi05_libero"}
    vlm_name = "PaliGemma"

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
        horizon = config.action_horizon or folder.config.get("action_horizon", preset.horizon)
        super().__init__(model, folder, config, adapter, horizon=horizon, images=config.num_images_in_input)
        self.preset, self.lists_states = preset, preset.state_in_prompt
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
        return [*files, save_heads(folder, self.heads(), self.parameters())]

    def value_widths(self) -> tuple[int, ...]:
        name = getattr(self.config, "config_name", None)
        return (get_preset(name).value_head if name else None) or super().value_widths()

    def decision_sizes(self) -> tuple[int, int]:
        config, name = self.config, getattr(self.config, "config_name", None)
        horizon = config.action_horizon or (get_preset(name).horizon if name else _HORIZON)
        return config.num_images_in_input, horizon + (0 if self.model.config.pi05 else 1)

    # ---- observations

    def pixels(self, tensordict: TensorDictBase) -> Tensor:
        return self.model_images(tensordict).permute(0, 1, 4, 2, 3).float() / 127.5 - 1.0

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


class Pi0Prompts(PromptTokens):
    """Instructions (and, for some pi0.5 checkpoints, states) to at most ``max_length`` tokens.

    ``model`` is the content of the sentencepiece file, else ValueError.
    """

    def __init__(self, model: bytes, max_length: int):
        from sentencepiece import SentencePieceProcessor

        try:
            self._tokenizer = SentencePieceProcessor(model_proto=model)
        except RuntimeError as error:
            raise ValueError(f"{' or '.join(TOKENIZERS)} is no sentencepiece file ({error}); copy it again") from error
        if self._tokenizer.bos_id() != BOS:
            raise ValueError(f"the tokenizer is not PaliGemma's: <bos> is {self._tokenizer.bos_id()}, must be {BOS}")
        super().__init__(max_length, PAD)

    def tokenize(self, text: str, listed: bool = False) -> list[int]:
        # The line break is tokenised by itself, as the "start of answer".
        parts = [text] if listed else [one_line(text), "\n"]
        return [BOS, *(token for part in parts for token in self._tokenizer.encode(part))]
