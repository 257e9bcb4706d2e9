"""SmolVLA: a flow-matching Vision-Language-Action policy of 450 M parameters that loads LeRobot's checkpoints."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from tensordict import TensorDictBase
from torch import Tensor

from vla_policies.checkpoint.layout import CONFIG
from vla_policies.checkpoint.settings import read_options
from vla_policies.checkpoint.weights import Entry
from vla_policies.flow.vlm import Observed
from vla_policies.lerobot.checkpoint import LeRobotCheckpoint
from vla_policies.lerobot.policy import LeRobotPolicy
from vla_policies.lerobot.processors import inside
from vla_policies.smolvla.model import VLM, SmolVLAModel, SmolVLAModelConfig, published_sizes, stays_float32

FAMILY = "smolvla"
STEP = "smolvla_new_line_processor"
UNUSED = f"{VLM}lm_head."


@dataclass(frozen=True)
class SmolVLACheckpoint(LeRobotCheckpoint):
    """A checkpoint folder without its weights."""

    kinds: ClassVar[Mapping[str, str]] = {FAMILY: STEP}

    vlm: Mapping[str, Any] = field(default_factory=dict)  # config.json of its VLM, empty for SmolVLM2-500M

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a folder as :meth:`LeRobotCheckpoint.read` does.

        The ``config.json`` of a VLM other than SmolVLM2-500M is in a folder called ``vlm_model_name``, in this one.
        """
        found = super().read(path)
        place = path / inside(found.config.get("vlm_model_name", FAMILY))
        return replace(found, vlm=read_options(place, CONFIG))

    def empty_model(self) -> tuple[SmolVLAModel, dict[str, Entry]]:
        entries = self.model_weights
        try:
            sizes = SmolVLAModelConfig.from_shapes({key: entry.shape for key, entry in entries.items()}, self.vlm)
        except ValueError as error:
            name = self.config.get("vlm_model_name", "VLM")
            raise ValueError(
                f"{self.path}: {error}; put the config.json of {name} into {self.path / Path(name).name}, if it is "
                "another VLM"
            ) from error
        side, given = sizes.vision.image_size, self.config.get("resize_imgs_with_padding")
        if given is not None and list(given) != [side, side]:
            raise ValueError(f"{self.path / CONFIG}: resize_imgs_with_padding is {given}, its VLM needs {[side, side]}")
        with torch.device("meta"):
            return SmolVLAModel(sizes), entries

    @property
    def other_files(self) -> dict[str, Any]:
        return {f"{inside(self.config['vlm_model_name'])}/{CONFIG}": self.vlm} if self.vlm else {}


class SmolVLA(LeRobotPolicy):
    """The VLM reads images and prompt once, then the state, whose projection is trained with the action expert.

    Keys and values of images and prompt are kept for an update; those of the state are computed with their gradient. A
    value head that reads the VLM does not see the state. :meth:`decision_memory` counts cross-attention as others.

    Example:
        >>> policy = SmolVLA.from_pretrained("checkpoints/smolvla-libero", benchmark="libero")
    """

    family: ClassVar[str] = FAMILY
    vlm_name, reads_state, centred = "the VLM", True, False

    model: SmolVLAModel
    folder: SmolVLACheckpoint

    checkpoint_class = SmolVLACheckpoint
    unused = staticmethod(lambda key: key.startswith(UNUSED))
    needs_float32 = staticmethod(stays_float32)

    @classmethod
    def published_model(cls, **_: Any) -> SmolVLAModel:
        return SmolVLAModel(published_sizes())

    def observe(self, tensordict: TensorDictBase) -> Observed:
        seen = super().observe(tensordict)
        return replace(seen, prefix=self.model.add_state(seen.prefix, seen.state))

    def velocity(self, observed: Observed, noisy: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
        return self.model.velocity(observed.prefix, noisy, time)
