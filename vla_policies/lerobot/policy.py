"""Flow policies that load LeRobot's checkpoints: cameras by name, its images, words, statistics and steps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from tensordict import TensorDictBase
from torch import Tensor

from vla_common import keys
from vla_common.plain import parse_json
from vla_policies.checkpoint.settings import SettingError
from vla_policies.flow.config import VLMFlowConfig
from vla_policies.flow.heads import save_heads
from vla_policies.flow.vlm import VLMFlowPolicy
from vla_policies.lerobot.checkpoint import LEROBOT, LeRobotCheckpoint, check_type
from vla_policies.lerobot.statistics import NO_STATISTICS
from vla_policies.processing.adapters import get_adapter, published_settings
from vla_policies.processing.images import interpolate_with_pad
from vla_policies.processing.normalization import summarise
from vla_policies.processing.prompts import PromptTokens, read_tokenizer

_HORIZON = 50  # of published checkpoints


@dataclass(frozen=True, kw_only=True)
class LeRobotConfig(VLMFlowConfig):
    """Settings of a :class:`LeRobotPolicy`, in addition to those of a :class:`VLMFlowConfig`.

    ``num_action_chunks`` and ``num_steps`` are the checkpoint's unless they are set.

    Attributes:
        cameras: LeRobot's names of the cameras that the policy looks at, the third-person one first, then wrist
            cameras; ``None`` for those that LeRobot's data sets of the benchmark have.
        new_statistics: the checkpoint's are of another robot, or it has none, as lerobot/smolvla_base: to be had of
            ``demonstrations.statistics=demonstrations``.
    """

    cameras: tuple[str, ...] | None = None
    new_statistics: bool = False


class LeRobotPolicy(VLMFlowPolicy):
    """A flow policy of a :class:`LeRobotCheckpoint`; a family adds its network.

    Attributes:
        checkpoint_class: what reads its folders.
        centred: images are padded on both sides, not on the left and top.
    """

    checkpoint_class: ClassVar[type[Any]]
    centred: ClassVar[bool]
    config_class: ClassVar[type[LeRobotConfig]] = LeRobotConfig
    checkpoint_settings: ClassVar[tuple[str, ...]] = ("cameras",)
    summed_times, resize_rounds = False, True

    config: LeRobotConfig
    folder: LeRobotCheckpoint

    def __init__(self, model: Any, folder: LeRobotCheckpoint, config: LeRobotConfig):
        names = config.cameras or published_settings(config.benchmark, LEROBOT).get("cameras")
        if not names:
            raise SettingError(
                f"cameras: LeRobot's names of the cameras of {config.benchmark} are not known; set them, the "
                "third-person camera first, such as cameras=[observation.images.image]"
            )
        order = folder.order_cameras(names, chosen=config.cameras is not None)
        adapter = get_adapter(config.benchmark, LEROBOT)
        super().__init__(model, folder, config, adapter, horizon=folder.horizon, images=len(names))
        self.camera_order = order
        self.statistics = NO_STATISTICS
        if not config.new_statistics:
            self.statistics = folder.statistics()
            self.statistics.check(self.state_dim, self.action_dim)
        longest = folder.max_prompt_length if config.max_prompt_length is None else config.max_prompt_length
        self.prompts = LinePrompts(folder.tokenizer, longest)

    @classmethod
    def read_checkpoint(cls, path: Path) -> Any:
        return cls.checkpoint_class.read(path)

    @classmethod
    def recognises(cls, folder: Path) -> bool:
        try:
            return bool(check_type(folder, cls.checkpoint_class.kinds))
        except (OSError, ValueError):
            return False

    def decision_sizes(self) -> tuple[int, int]:
        cameras = self.config.cameras or (self.folder.cameras if self.folder else ())
        return len(cameras) or 1, self.folder.horizon if self.folder else _HORIZON

    @classmethod
    def infer_settings(cls, checkpoint: LeRobotCheckpoint, settings: dict[str, Any], stored: bool) -> dict[str, Any]:
        return {**checkpoint.settings, **settings}

    def write_checkpoint(self, folder: Path, weights: Mapping[str, Tensor], options: Mapping[str, Any]) -> list[str]:
        files = self.folder.write(folder, weights, options)
        return [*files, save_heads(folder, self.heads(), self.parameters())]

    # ---- observations

    def pixels(self, tensordict: TensorDictBase) -> Tensor:
        images = tensordict.get(keys.MODEL_IMAGES, None)
        if keys.IMAGES in tensordict:
            images = self.kept_images(self.cameras(tensordict))
        return self._resized(images.unbind(1)) * 2 - 1

    def _resized(self, cameras: Sequence[Tensor]) -> Tensor:
        """Return cameras as LeRobot resizes them: float32 ``[N, n, 3, h, w]`` from 0 to 1."""
        size = self.model_image_size
        return torch.stack([interpolate_with_pad(camera, size, centred=self.centred) for camera in cameras], dim=1)

    def cameras(self, tensordict: TensorDictBase) -> list[Tensor]:
        """Return the cameras in the order of the checkpoint's, see :class:`ModelImages`."""
        cameras = super().cameras(tensordict)
        return [cameras[index] for index in self.camera_order]

    def resize_cameras(self, cameras: Sequence[Tensor]) -> Tensor:
        """Return what the model sees rounded to 8 bits, unlike LeRobot: cameras of several sizes are kept as that."""
        return (self._resized(cameras) * 255).round().to(torch.uint8).permute(0, 1, 3, 4, 2)

    # ---- actions

    def to_simulator(self, actions: Tensor, states: Tensor) -> Tensor:
        return self.adapter.to_simulator(self.statistics.unnormalize("actions", actions))

    def to_model(self, actions: Tensor, states: Tensor) -> Tensor:
        return self.statistics.normalize("actions", self.adapter.to_model(actions))

    def take_statistics(self, name: str, actions: Tensor, states: Tensor, step_mask: Tensor) -> None:
        """Replace the checkpoint's statistics, which have no ``name``."""
        found = summarise(self.adapter.to_model(actions)[step_mask]), summarise(self.adapter.joints.states(states))
        self.folder, self.config = self.folder.with_statistics(*found), replace(self.config, new_statistics=False)
        self.statistics = self.folder.statistics()


class LinePrompts(PromptTokens):
    """Instructions, each ended by a line break or with the state (pi0.5), to at most ``max_length`` tokens.

    ``files`` are those of a tokenizer's folder, ``tokenizer.json`` and ``tokenizer_config.json``, else ValueError.
    """

    def __init__(self, files: Mapping[str, bytes], max_length: int):
        self._tokenizer = read_tokenizer(files["tokenizer.json"], "tokenizer.json")
        named = parse_json(files.get("tokenizer_config.json", b"{}")).get("pad_token")
        text = named.get("content") if isinstance(named, dict) else named
        padding = None if text is None else self._tokenizer.token_to_id(text)
        if padding is None:
            raise ValueError(f"tokenizer_config.json names no pad_token of the tokenizer ({text!r}); copy it again")
        super().__init__(max_length, int(padding))

    def tokenize(self, text: str, listed: bool = False) -> list[int]:
        return self._tokenizer.encode(text if listed or text.endswith("\n") else f"{text}\n").ids
