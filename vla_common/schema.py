"""What a benchmark's cameras, states, actions and gripper are: environments declare it, policies read it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from vla_common.registry import benchmarks


@dataclass(frozen=True)
class Gripper:
    """The entry of an action that opens and closes the gripper, in the simulator's numbers."""

    dimension: int  # where it is in the action
    closed: float
    opened: float


@dataclass(frozen=True)
class BenchmarkSchema:
    """How a benchmark looks, feels and moves.

    Attributes:
        image_size: height and width of ``images`` in the benchmark's own protocol.
        wrist_images: number, height and width of ``wrist_images``; ``(0, 0, 0)`` without wrist cameras.
        states: what each number of ``states`` is, with its unit: ``("x (m)", ...)``.
        actions: what each number of an action is.
        gripper: of the action; ``None`` where it has none or two.
        instruction: one of the benchmark's, as an example.
        families: by policy family, what that family has to know to act here: keyword arguments of its adapter, such as
            ``{"openvla": {"dimensions": (0, 1, 2, 6)}}``. A family that is not named takes its defaults.
    """

    image_size: tuple[int, int]
    states: tuple[str, ...]
    actions: tuple[str, ...]
    instruction: str
    wrist_images: tuple[int, int, int] = (0, 0, 0)
    gripper: Gripper | None = None
    families: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def state_dim(self) -> int:
        """``S``."""
        return len(self.states)

    @property
    def action_dim(self) -> int:
        """``A``."""
        return len(self.actions)


class EnvironmentShape(Protocol):
    """What a new policy is made for; :class:`vla_envs.SimulatorSpec` is one."""

    @property
    def id(self) -> str:
        """Its name, such as ``"metaworld/MT50"``."""

    @property
    def benchmark(self) -> str:
        """What stands before the slash of :attr:`id`."""

    @property
    def tasks(self) -> Sequence[Any]:
        """Its tasks, each with an ``instruction``; and ``instructions``, where that is a pattern."""

    @property
    def action_low(self) -> tuple[float, ...]:
        """Lower bounds of a primitive action, ``A`` numbers."""

    @property
    def action_high(self) -> tuple[float, ...]:
        """Upper bounds of a primitive action, ``A`` numbers."""

    @property
    def state_dim(self) -> int:
        """Length ``S`` of ``states``."""

    @property
    def image_shape(self) -> tuple[int, int]:
        """Height and width of ``images``, pixels."""

    @property
    def wrist_image_shape(self) -> tuple[int, int, int] | None:
        """Number, height and width of ``wrist_images``; ``None`` without wrist cameras."""


def get_schema(benchmark: str) -> BenchmarkSchema:
    """Return the schema of a registered benchmark; a ``ValueError`` offers the nearest names."""
    return benchmarks.get(benchmark, example="libero").schema
