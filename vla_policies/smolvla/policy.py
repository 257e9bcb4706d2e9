"""SmolVLA: a flow-matching Vision-Language-Action policy of 450 M parameters that loads LeRobot's checkpoints."""

from dataclasses import replace
from typing import Any, ClassVar

from tensordict import TensorDictBase
from torch import Tensor

from vla_policies.flow import memory
from vla_policies.flow.vlm import Observed
from vla_policies.lerobot.policy import LeRobotPolicy
from vla_policies.memory import DecisionMemory
from vla_policies.smolvla.checkpoint import FAMILY, UNUSED, SmolVLACheckpoint
from vla_policies.smolvla.model import EXPERT, SmolVLAModel, published_sizes, stays_float32


class SmolVLA(LeRobotPolicy):
    """The VLM reads images and prompt once, then the state, whose projection is trained with the action expert.

    Keys and values of images and prompt are kept for an update; those of the state are computed with their gradient. A
    value head that reads the VLM does not see the state.

    Example:
        >>> policy = SmolVLA.from_pretrained("checkpoints/smolvla-libero", benchmark="libero")
    """

    family: ClassVar[str] = FAMILY
    vlm_name, expert_prefix, centred = "the VLM", EXPERT, False

    model: SmolVLAModel
    folder: SmolVLACheckpoint

    checkpoint_class = SmolVLACheckpoint
    unused = staticmethod(lambda key: key.startswith(UNUSED))
    needs_float32 = staticmethod(stays_float32)

    @classmethod
    def published_model(cls, **_: Any) -> SmolVLAModel:
        return SmolVLAModel(published_sizes())

    def decision_memory(self) -> DecisionMemory:
        """Return what it takes; layers of the expert that cross are counted as the others."""
        images, horizon = self.decision_sizes()
        return memory.decision_memory(self.model, self.config, self.prefix_is_frozen, images, horizon, state=True)

    def observe(self, tensordict: TensorDictBase) -> Observed:
        seen = super().observe(tensordict)
        return replace(seen, prefix=self.model.add_state(seen.prefix, seen.state))

    def velocity(self, observed: Observed, noisy: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
        return self.model.velocity(observed.prefix, noisy, time)
