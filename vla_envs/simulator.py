"""One simulated world: the protocol that every benchmark implements, in numpy and without batching."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from pkgutil import resolve_name
from typing import Any, Literal, Protocol, get_args

import numpy as np

Perturbation = Literal["start", "camera", "light", "distractors"]  # kinds of stress that need a benchmark's help


def is_whole_number(value: Any) -> bool:
    """Tell whether it is an integer; ``True`` and ``False`` are none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


@dataclass(frozen=True)
class Episode:
    """The identity of an episode: it fixes the initial state and the pixels completely.

    Attributes:
        task_id: index into ``SimulatorSpec.tasks``.
        trial_id: which initial state of the task, ``>= 0``.
        seed: selects a family of trials; training and evaluation use different families.
        group_id: of the runs that are compared with each other (GRPO); does not influence the world.
    """

    task_id: int
    trial_id: int
    seed: int = 0
    group_id: int = field(default=0, compare=False)


@dataclass
class Observation:
    """What a policy sees.

    Attributes:
        images: uint8 ``[H, W, 3]``, third-person or head camera, upright, RGB.
        states: float32 ``[S]``, proprioception.
        task_description: the instruction alone, without any prompt template.
        wrist_images: uint8 ``[V, H, W, 3]`` or ``None`` where the benchmark has no wrist camera.
    """

    images: np.ndarray
    states: np.ndarray
    task_description: str
    wrist_images: np.ndarray | None = None


@dataclass
class Outcome:
    """What one primitive action did.

    Attributes:
        reward: the reward of this action.
        success: whether the task counts as solved in the state after this action; of a chain, all of its tasks.
        ends_chunk: the rest of the chunk is not executed, because what it was decided for is over: a task of a chain.
        ends_episode: the benchmark gives up here, solved or not: the episode is truncated.
        subtasks: how many tasks of the episode's chain have been solved since its reset, 0 to ``spec.chain_length``.
    """

    reward: float
    success: bool
    ends_chunk: bool = False
    ends_episode: bool = False
    subtasks: int = 0


class Simulator(Protocol):
    """One world. ``step`` never renders, ``observe`` does: a decision costs C steps and one frame.

    It may have a text ``remark`` on the running episode, such as that another seed runs in the place of an unstable
    one; and, for the kinds of stress in ``spec.perturbs``, a method ``perturb(kind, strength, random)``: it changes the
    episode that was just reset (:mod:`vla_envs.stress`), or returns ``False`` for another reset and draw (``"start"``).
    """

    spec: "SimulatorSpec"

    def reset(self, episode: Episode) -> None:
        """Put the world into the initial state that ``episode`` determines."""

    def step(self, action: np.ndarray) -> Outcome:
        """Execute a primitive action, float32 ``[A]``, in the units of ``spec``; clip it if ``spec.clips_actions``."""

    def observe(self) -> Observation:
        """Render the current state."""

    def close(self) -> None:
        """Free the world and its graphics memory."""


class ChunkSimulator(Simulator, Protocol):
    """One world in which a chunk of actions is one motion: ``execute`` is called; ``step`` is not, and may be missing.

    Such a benchmark has no ``control_frequency``, and another chunk size is another environment.
    """

    def execute(self, chunk: np.ndarray) -> Sequence[Outcome]:
        """Execute a chunk, float32 ``[C, A]``: what each executed action did, the first ``1`` to ``C``.

        What comes after an outcome that ends the chunk or the episode does not count. The horizon never lies within the
        chunk: only the actions up to it are given.
        """


@dataclass(frozen=True)
class Task:
    """One task of a benchmark suite.

    Attributes:
        name: the benchmark's own name, such as ``"reach-v3"``.
        instruction: the sentence that the policy is given, or its pattern where it differs between episodes.
        group: the benchmark's difficulty or suite group, for tables by group; may be empty.
        instructions: where ``instruction`` is a pattern, every sentence that an episode may have, or the longest ones,
            as far as they are known before a simulator starts: a policy refuses what it cannot take before any work.
        sentence_per_episode: whether each episode has its own, so that ``instructions`` are the longest ones only.
    """

    name: str
    instruction: str
    group: str = ""
    instructions: tuple[str, ...] = field(default=(), repr=False)
    sentence_per_episode: bool = False


@dataclass(frozen=True)
class SimulatorSpec:
    """Everything there is to know about a benchmark without starting its simulator.

    Attributes:
        id: what was passed to ``make_env``, such as ``"metaworld/MT50"``.
        entry_point: ``"module:class"`` of the :class:`Simulator`; imported only where it runs.
        tasks: the tasks of the suite, ``task_id`` is the index.
        trials: number of evaluation trials per task in the benchmark's protocol.
        image_shape: ``(H, W)`` of ``images``.
        state_dim: ``S``.
        action_low, action_high: bounds of a primitive action, ``A`` numbers each.
        max_episode_steps: horizon in primitive actions.
        control_frequency: primitive actions per simulated second; ``None`` of a :class:`ChunkSimulator`.
        clips_actions: whether the simulator clips actions to the bounds (counted as ``actions_clipped``). False where
            they are the usual range of new policies, and what is outside is executed as it is.
        wrist_image_shape: ``(V, H, W)`` of ``wrist_images`` or ``None``.
        initial_states: number of initial states per task where they are few; training and evaluation then share them.
            ``None``: as many as are asked for.
        evaluation_trials: trials that evaluations run, where the benchmark has other initial states for them; training
            draws from those below ``initial_states``.
        chain_length: tasks that an episode asks for one after the other; of more than 1, ``Outcome.subtasks`` counts.
        pays_once: a reward is for what its action has brought about, not for a state: ``relative_reward`` is refused.
        center_crop: whether the images are the middle of the cameras' already, so that a policy does not crop them
            again; ``None`` where the benchmark has no such option.
        gripper_dims: dimensions of an action that open and close a gripper; disturbances of demonstrations leave them
            alone unless they are asked for.
        neutral_action: the action that moves nothing, ``A`` numbers, or a function of ``states``, float32 ``[S]``, that
            worker processes can import; ``None`` where it is not known.
        batched: ``"module:class"`` of what simulates all worlds in this process, on CUDA; empty for worker processes.
        protocol: under which results are measured, in a line, where there are several; shown with every result.
        protocol_deviations: what differs from the benchmark's own protocol, or from the one named; shown likewise.
        options: what else the simulator reads of its ``spec`` (camera, render quality, ...).
        perturbs: the kinds of stress that the simulator's ``perturb`` knows.
        stress: strengths by kind under which episodes run, none of them 0; set by :func:`vla_envs.stress.stressed`.
    """

    id: str
    entry_point: str
    tasks: tuple[Task, ...]
    trials: int
    image_shape: tuple[int, int]
    state_dim: int
    action_low: tuple[float, ...]
    action_high: tuple[float, ...]
    max_episode_steps: int
    control_frequency: int | None
    clips_actions: bool = True
    wrist_image_shape: tuple[int, int, int] | None = None
    initial_states: int | None = None
    evaluation_trials: range | None = None
    chain_length: int = 1
    pays_once: bool = False
    center_crop: bool | None = None
    gripper_dims: tuple[int, ...] = ()
    neutral_action: tuple[float, ...] | Callable[[np.ndarray], np.ndarray] | None = None
    batched: str = ""
    protocol: str = ""
    protocol_deviations: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    perturbs: tuple[Perturbation, ...] = ()
    stress: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        bounds = list(zip(self.action_low, self.action_high, strict=False))
        in_range = all(is_whole_number(dim) and 0 <= dim < self.action_dim for dim in self.gripper_dims)
        rest, known = self.neutral_action, True
        if rest is not None and not callable(rest):
            known = len(rest) == self.action_dim and bool(np.isfinite(rest).all())
        for name, right, what in (
            ("tasks", bool(self.tasks) and all(task.instruction for task in self.tasks), "one or more, with sentences"),
            ("trials", is_whole_number(self.trials) and self.trials > 0, "a whole number, at least 1"),
            ("max_episode_steps", is_whole_number(self.max_episode_steps) and self.max_episode_steps > 0, "at least 1"),
            ("action_high", len(self.action_high) == self.action_dim, f"{self.action_dim} numbers like action_low"),
            ("action_low", all(low < high for low, high in bounds), f"below action_high, {self.action_high!r}"),
            ("chain_length", is_whole_number(self.chain_length) and self.chain_length > 0, "a whole number from 1"),
            ("gripper_dims", in_range, f"dimensions of an action, 0 to {self.action_dim - 1}, or () for no gripper"),
            (
                "neutral_action",
                known,
                f"the {self.action_dim} numbers of an action that does nothing, a function of the states, or None",
            ),
            ("perturbs", {*self.perturbs} <= {*get_args(Perturbation)}, f"some of {get_args(Perturbation)}"),
            ("protocol", isinstance(self.protocol, str) and "\n" not in self.protocol, "one line of text, or ''"),
        ):
            if not right:
                raise ValueError(f"{self.id}: {name} is {getattr(self, name)!r}, must be {what}")

    @property
    def benchmark(self) -> str:
        """What stands before the slash of the ``id``."""
        return self.id.partition("/")[0]

    @property
    def action_dim(self) -> int:
        """``A``."""
        return len(self.action_low)

    def task_of(self, episode: Episode) -> Task:
        """Return the task of an episode; ``ValueError`` if there is no such task, or the trial is negative."""
        if not 0 <= episode.task_id < len(self.tasks):
            raise ValueError(f"{self.id} has tasks 0 to {len(self.tasks) - 1}, got task_id={episode.task_id}")
        if episode.trial_id < 0:
            raise ValueError(f"trial_id counts from 0, got trial_id={episode.trial_id}")
        return self.tasks[episode.task_id]

    def simulator_class(self) -> Any:
        """Import the benchmark: the class of its :class:`Simulator`."""
        return resolve_name(self.entry_point)

    def describe(self, episode: Episode) -> str:
        """Name an episode in a message."""
        return f"{self.id} task {self.tasks[episode.task_id].name} trial {episode.trial_id} seed {episode.seed}"

    def make(self) -> Simulator:
        """Import the benchmark and build one world."""
        simulator = self.simulator_class()(self)
        return resolve_name("vla_envs.stress:Stressed")(simulator) if self.stress else simulator

    def check(self) -> None:
        """Raise early what :meth:`make` would raise: a simulator class may have a static method ``check(spec)``."""
        check = getattr(self.simulator_class(), "check", None)
        if check is not None:
            check(self)

    def check_gpus(self, gpus: Sequence[int]) -> None:
        """Raise early a ``ValueError`` if these GPUs cannot be drawn with, or not all worlds be simulated on them.

        A simulator class that draws with :mod:`vla_envs.rendering` has a static method ``check_gpus(spec, gpus)``.
        """
        check = getattr(self.simulator_class(), "check_gpus", None)
        if check is None:
            raise ValueError(
                f"gpus=[{','.join(map(str, gpus))}]: {self.id} cannot be told which GPU to draw with; leave out "
                "env.gpus (null) and placement.env"
            )
        check(self, gpus)
