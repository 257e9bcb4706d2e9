"""Where a benchmark and a family of policies meet: cameras, gripper, action dimensions.

A model predicts actions in the units of its training data, with the gripper as that data had it; a simulator wants its
own order, number and signs. An :class:`Adapter` converts between the two, as the benchmark's
:class:`~vla_common.schema.BenchmarkSchema` says.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase
from torch import Tensor

from vla_common import keys
from vla_common.schema import get_schema
from vla_policies.processing.joints import JointSpace
from vla_policies.processing.model_images import CAMERAS
from vla_policies.processing.normalization import ActionStatistics

PUBLISHED = "published"  # of a family's entry: settings, see published_settings


@dataclass(frozen=True)
class GripperConversion:
    """A gripper that is either closed or open, whatever number the model predicts.

    ``dimension`` is that of the model's action; ``model`` and ``simulator`` are the numbers for closed and open. Above
    the middle is open, the middle itself is closed.
    """

    dimension: int
    model: tuple[float, float]
    simulator: tuple[float, float]


@dataclass(frozen=True)
class Adapter:
    """How policies of a family act in one benchmark.

    Attributes:
        benchmark: its name.
        model_action_dim: ``A`` of the model.
        dimensions: those of the model's action that the simulator takes, in its order.
        gripper: its conversion, or ``None`` where model and simulator mean the same.
        state_dim: ``S`` of the observation.
        max_images: cameras of the benchmark, the largest ``num_images_in_input``.
        joints: of the model, where they are not the simulator's.
    """

    benchmark: str
    model_action_dim: int
    dimensions: tuple[int, ...]
    gripper: GripperConversion | None
    state_dim: int
    max_images: int
    joints: JointSpace

    @classmethod
    def from_schema(
        cls,
        benchmark: str,
        *,
        model_action_dim: int | None = None,
        dimensions: tuple[int, ...] | None = None,
        gripper: tuple[float, float] | None = None,
        joints: Mapping[str, Sequence[int]] | None = None,
    ) -> "Adapter":
        """Build the adapter of a registered benchmark; attributes that are ``None`` are the simulator's.

        ``gripper`` is what means closed and open to the model (``None``: the number passes through), ``joints``
        transforms by name (:mod:`vla_policies.processing.joints`). ValueError: no such benchmark, transform or gripper.
        """
        schema = get_schema(benchmark)
        dimensions = tuple(range(schema.action_dim)) if dimensions is None else tuple(dimensions)
        conversion = None
        if gripper is not None:
            if schema.gripper is None:
                raise ValueError(f"the schema of {benchmark} has no gripper to convert to {gripper}; leave gripper out")
            closed, opened = gripper
            simulator = (schema.gripper.closed, schema.gripper.opened)
            conversion = GripperConversion(dimensions[schema.gripper.dimension], (closed, opened), simulator)
        return cls(
            benchmark=benchmark,
            model_action_dim=schema.action_dim if model_action_dim is None else model_action_dim,
            dimensions=dimensions,
            gripper=conversion,
            state_dim=schema.state_dim,
            max_images=1 + schema.wrist_images[0],
            joints=JointSpace.from_names(joints or {}, min(schema.state_dim, schema.action_dim)),
        )

    @property
    def action_dim(self) -> int:
        """``A`` of the simulator."""
        return len(self.dimensions)

    def check_statistics(self, statistics: ActionStatistics) -> None:
        """Refuse statistics of a robot with another number of action dimensions, with a ValueError."""
        if len(statistics.action) != self.model_action_dim:
            raise ValueError(
                f"the statistics {statistics.key!r} are of actions with {len(statistics.action)} dimensions and "
                f"{self.benchmark} needs {self.model_action_dim}; set unnorm_key to a data set of {self.benchmark}"
            )

    def camera_keys(self, num_images: int) -> tuple[str, ...]:
        """Return the entries that so many cameras are in, the third-person one first; ValueError if there are fewer."""
        if num_images > self.max_images:
            raise ValueError(
                f"num_images_in_input is {num_images} and {self.benchmark} has {self.max_images} cameras; set it as "
                "the checkpoint was trained, and choose a benchmark that has them"
            )
        return CAMERAS[: min(num_images, 2)]

    def cameras(self, tensordict: TensorDictBase, num_images: int) -> list[Tensor]:
        """Return ``num_images`` cameras as observed, uint8 ``[N, H, W, 3]`` each: third-person, then the wrists.

        ValueError: the observation has fewer cameras.
        """
        cameras = [tensordict.get(keys.IMAGES)]
        wrists = tensordict.get(keys.WRIST_IMAGES, None)
        if wrists is not None:
            cameras += wrists.unbind(1)
        if not 1 <= num_images <= len(cameras):
            raise ValueError(
                f"num_images_in_input is {num_images} and {self.benchmark} observes {len(cameras)} images; "
                f"set num_images_in_input to 1..{len(cameras)}, as the checkpoint was trained"
            )
        return cameras[:num_images]

    def states(self, tensordict: TensorDictBase) -> Tensor:
        """Return proprioception float32 ``[N, S]`` as the model counts it; ValueError if there is none of that size."""
        states = tensordict.get(keys.STATES, None)
        if states is None or states.shape[-1] != self.state_dim:
            found = "none" if states is None else f"{states.shape[-1]} numbers"
            raise ValueError(f"states of {self.benchmark} have {self.state_dim} numbers, the observation has {found}")
        return self.joints.states(states.to(torch.float32))

    def to_simulator(self, actions: Tensor) -> Tensor:
        """Convert un-normalised actions ``[..., A_model]`` to actions ``[..., A]`` of the simulator."""
        self._check(actions, self.model_action_dim, "the model")
        if self.gripper is not None:
            actions = _switch(actions, self.gripper.dimension, self.gripper.model, self.gripper.simulator)
        return self.joints.to_simulator(actions[..., list(self.dimensions)])

    def to_model(self, actions: Tensor) -> Tensor:
        """Invert :meth:`to_simulator` for learning from demonstrations; dimensions that it drops become 0."""
        self._check(actions, self.action_dim, "the simulator")
        full = actions.new_zeros(*actions.shape[:-1], self.model_action_dim)
        full[..., list(self.dimensions)] = self.joints.to_model(actions)
        if self.gripper is not None:
            full = _switch(full, self.gripper.dimension, self.gripper.simulator, self.gripper.model)
        return full

    def _check(self, actions: Tensor, dimensions: int, whose: str) -> None:
        if actions.shape[-1] != dimensions:
            got = actions.shape[-1]
            raise ValueError(f"actions of {whose} in {self.benchmark} have {dimensions} dimensions, got {got}")


def _switch(actions: Tensor, dimension: int, source: tuple[float, float], target: tuple[float, float]) -> Tensor:
    """Replace closed and open of one convention by those of another; exactly in the middle is closed."""
    closed, opened = source
    middle = (closed + opened) / 2
    value = actions[..., dimension]
    is_open = value > middle if opened > closed else value < middle
    actions = actions.clone()
    actions[..., dimension] = torch.where(is_open, target[1], target[0]).to(actions.dtype)
    return actions


def get_adapter(benchmark: str, family: str = "openvla") -> Adapter:
    """Build the adapter of a family from its entry in the schema; ValueError offers the nearest benchmarks."""
    known = get_schema(benchmark).families.get(family, {})
    return Adapter.from_schema(benchmark, **{name: value for name, value in known.items() if name != PUBLISHED})


def published_settings(benchmark: str, family: str) -> dict[str, Any]:
    """Return settings of a family's published checkpoints of a benchmark that their files do not say."""
    return dict(get_schema(benchmark).families.get(family, {}).get(PUBLISHED, {}))


def make_example(benchmark: str, batch_size: int = 1) -> TensorDict:
    """Make up observations ``[batch_size]`` of a registered benchmark, to call a policy without a simulator."""
    schema, generator = get_schema(benchmark), torch.Generator().manual_seed(0)
    wrists, *wrist_size = schema.wrist_images
    shapes: dict[str, tuple[int, ...]] = {keys.IMAGES: (batch_size, *schema.image_size, 3)}
    if wrists:
        shapes[keys.WRIST_IMAGES] = (batch_size, wrists, *wrist_size, 3)
    example = TensorDict(batch_size=[batch_size])
    for key, shape in shapes.items():
        example.set(key, torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator))
    example.set(keys.STATES, torch.zeros(batch_size, schema.state_dim))
    texts = NonTensorStack(*(NonTensorData(schema.instruction) for _ in range(batch_size)))
    return example.set(keys.TASK_DESCRIPTIONS, texts)
