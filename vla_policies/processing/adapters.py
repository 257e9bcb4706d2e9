"""Where a benchmark and the OpenVLA family meet: cameras, gripper, action dimensions.

A model of this family predicts actions in the units of its training data, with the gripper as that data had it; a
simulator wants its own order, number and signs. An :class:`Adapter` holds the difference for one benchmark, and is the
same for OpenVLA and OpenVLA-OFT. Statistics are not its business: they belong to the checkpoint
(:mod:`vla_policies.processing.normalization`).

Sources: the action spaces of the simulators, and the conversions that the published checkpoints were evaluated with.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase
from torch import Tensor

from vla_common import keys
from vla_policies.processing.images import resize_exact
from vla_policies.processing.normalization import ActionStatistics

_MODEL_IMAGE = (224, 224)


@dataclass(frozen=True)
class Gripper:
    """A gripper that is either closed or open, whatever number the model predicts.

    Attributes:
        dimension: where it is in the model's action.
        model: what means closed and open to the model; above the middle is open, the middle itself is closed.
        simulator: what means closed and open to the simulator.
    """

    dimension: int
    model: tuple[float, float]
    simulator: tuple[float, float]


@dataclass(frozen=True)
class Adapter:
    """How policies of the OpenVLA family act in one benchmark.

    Attributes:
        benchmark: its name in :data:`ADAPTERS`.
        model_action_dim: ``A`` of the model.
        dimensions: those of the model's action that the simulator takes, in its order.
        gripper: its conversion, or ``None`` where model and simulator mean the same.
        state_dim: ``S`` of the observation.
        image_size: height and width of ``images``.
        wrist_images: number, height and width of ``wrist_images``.
        instruction: one of the benchmark's.
    """

    benchmark: str
    model_action_dim: int
    dimensions: tuple[int, ...]
    gripper: Gripper | None
    state_dim: int
    image_size: tuple[int, int]
    wrist_images: tuple[int, int, int]
    instruction: str

    @property
    def action_dim(self) -> int:
        """``A`` of the simulator."""
        return len(self.dimensions)

    @property
    def max_images(self) -> int:
        """Cameras of the benchmark, the largest ``num_images_in_input``."""
        return 1 + self.wrist_images[0]

    def check_statistics(self, statistics: ActionStatistics) -> None:
        """Refuse statistics of a robot with another number of action dimensions.

        Raises:
            ValueError: they do not fit the benchmark.
        """
        if len(statistics.action) != self.model_action_dim:
            raise ValueError(
                f"the statistics {statistics.key!r} are of actions with {len(statistics.action)} dimensions and "
                f"{self.benchmark} needs {self.model_action_dim}; set unnorm_key to a data set of {self.benchmark}"
            )

    def images(self, tensordict: TensorDictBase, num_images: int = 1) -> Tensor:
        """The cameras that the model looks at: uint8 ``[N, num_images, H, W, 3]``, third-person first, then the wrists.

        Cameras of different sizes are each resized to what the model sees (224), exactly as the checkpoint would.

        Raises:
            ValueError: the observation has fewer cameras.
        """
        cameras = self.cameras(tensordict, num_images)
        if len({camera.shape for camera in cameras}) > 1:
            cameras = [resize_exact(camera, _MODEL_IMAGE) for camera in cameras]
        return torch.stack(cameras, dim=1)

    def cameras(self, tensordict: TensorDictBase, num_images: int) -> list[Tensor]:
        """The first ``num_images`` cameras as observed, uint8 ``[N, H, W, 3]`` each: third-person, then the wrists.

        Raises:
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
        """Proprioception float32 ``[N, S]`` in the simulator's units, which the checkpoint's statistics normalise.

        Raises:
            ValueError: the observation has none, or of another size.
        """
        states = tensordict.get(keys.STATES, None)
        if states is None or states.shape[-1] != self.state_dim:
            found = "none" if states is None else f"{states.shape[-1]} numbers"
            raise ValueError(f"states of {self.benchmark} have {self.state_dim} numbers, the observation has {found}")
        return states.to(torch.float32)

    def to_simulator(self, actions: Tensor) -> Tensor:
        """Actions ``[..., A_model]``, un-normalised, to actions ``[..., A]`` of the simulator."""
        self._check(actions, self.model_action_dim, "the model")
        if self.gripper is not None:
            actions = _switch(actions, self.gripper.dimension, self.gripper.model, self.gripper.simulator)
        return actions[..., list(self.dimensions)]

    def to_model(self, actions: Tensor) -> Tensor:
        """Inverse of :meth:`to_simulator` for learning from demonstrations; dimensions that it drops become 0."""
        self._check(actions, self.action_dim, "the simulator")
        full = actions.new_zeros(*actions.shape[:-1], self.model_action_dim)
        full[..., list(self.dimensions)] = actions
        if self.gripper is not None:
            full = _switch(full, self.gripper.dimension, self.gripper.simulator, self.gripper.model)
        return full

    def example(self, batch_size: int = 1) -> TensorDict:
        """Observations ``[batch_size]`` of the benchmark's shapes, made up, to call a policy without a simulator."""
        generator = torch.Generator().manual_seed(0)
        wrists, *wrist_size = self.wrist_images
        observation = {
            keys.IMAGES: (batch_size, *self.image_size, 3),
            **({keys.WRIST_IMAGES: (batch_size, wrists, *wrist_size, 3)} if wrists else {}),
        }
        texts = NonTensorStack(*(NonTensorData(self.instruction) for _ in range(batch_size)))
        return TensorDict(
            {
                **{
                    key: torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
                    for key, shape in observation.items()
                },
                keys.STATES: torch.zeros(batch_size, self.state_dim),
                keys.TASK_DESCRIPTIONS: texts,
            },
            batch_size=[batch_size],
        )

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


_SEVEN = tuple(range(7))  # end-effector position 3, rotation 3, gripper 1

ADAPTERS = {
    adapter.benchmark: adapter
    for adapter in (
        Adapter(
            benchmark="metaworld",  # position and gripper effort, nothing turns the hand
            model_action_dim=7,
            dimensions=(0, 1, 2, 6),
            gripper=None,
            state_dim=4,
            image_size=(480, 480),
            wrist_images=(0, 0, 0),
            instruction="push the puck to the goal",
        ),
        Adapter(
            benchmark="libero",
            model_action_dim=7,
            dimensions=_SEVEN,
            gripper=Gripper(dimension=6, model=(0.0, 1.0), simulator=(1.0, -1.0)),
            state_dim=8,
            image_size=(256, 256),
            wrist_images=(1, 256, 256),
            instruction="put the bowl on the stove",
        ),
        Adapter(
            benchmark="maniskill",  # Bridge data, WidowX
            model_action_dim=7,
            dimensions=_SEVEN,
            gripper=Gripper(dimension=6, model=(0.0, 1.0), simulator=(-1.0, 1.0)),
            state_dim=8,
            image_size=(480, 640),
            wrist_images=(0, 0, 0),
            instruction="put carrot on plate",
        ),
        Adapter(
            benchmark="calvin",  # the gripper must be exactly 1 or -1
            model_action_dim=7,
            dimensions=_SEVEN,
            gripper=Gripper(dimension=6, model=(-1.0, 1.0), simulator=(-1.0, 1.0)),
            state_dim=7,
            image_size=(200, 200),
            wrist_images=(1, 84, 84),
            instruction="push the handle to open the drawer",
        ),
        Adapter(
            benchmark="robotwin",  # per arm six joint positions and the gripper's opening 0..1
            model_action_dim=14,
            dimensions=tuple(range(14)),
            gripper=None,
            state_dim=14,
            image_size=(240, 320),
            wrist_images=(2, 240, 320),
            instruction="place the empty cup on the coaster",
        ),
    )
}


def get_adapter(benchmark: str) -> Adapter:
    """The adapter of a benchmark.

    Raises:
        ValueError: there is none of that name; lists those there are.
    """
    if benchmark not in ADAPTERS:
        raise ValueError(f"no adapter for the benchmark {benchmark!r}; there are {sorted(ADAPTERS)}")
    return ADAPTERS[benchmark]


def make_metaworld_example(batch_size: int = 1) -> TensorDict:
    """Observations of Meta-World, see :meth:`Adapter.example`."""
    return ADAPTERS["metaworld"].example(batch_size)


def make_libero_example(batch_size: int = 1) -> TensorDict:
    """Observations of LIBERO, see :meth:`Adapter.example`."""
    return ADAPTERS["libero"].example(batch_size)


def make_maniskill_example(batch_size: int = 1) -> TensorDict:
    """Observations of ManiSkill, see :meth:`Adapter.example`."""
    return ADAPTERS["maniskill"].example(batch_size)


def make_calvin_example(batch_size: int = 1) -> TensorDict:
    """Observations of CALVIN, see :meth:`Adapter.example`."""
    return ADAPTERS["calvin"].example(batch_size)


def make_robotwin_example(batch_size: int = 1) -> TensorDict:
    """Observations of RoboTwin, see :meth:`Adapter.example`."""
    return ADAPTERS["robotwin"].example(batch_size)
