"""One simulator as a Gymnasium environment, and what it shares with many: spaces, episodes and checks."""

import contextlib
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.error import ClosedEnvironmentError, ResetNeeded
from gymnasium.vector.utils.shared_memory import read_from_shared_memory

from vla_common import keys
from vla_common.errors import unknown_name
from vla_common.settings import Count, Length, checked
from vla_envs.actions import refuse_actions
from vla_envs.registry import describe_error, find_benchmark, make_spec, option_types
from vla_envs.simulator import Episode, Simulator, SimulatorSpec, is_whole_number
from vla_envs.workers.answers import check_observation, remark_of
from vla_envs.workers.chunks import check_chunk_size, run_chunk
from vla_envs.workers.pool import SimulatorCrash

RESET_OPTIONS = (keys.TASK_ID, keys.TRIAL_ID)
_DECISIONS_PER_SECOND = 2  # of a recorded video, where actions have no duration
_MAX_SEED = 2**31
_HORIZONS = ("max_episode_steps", "step_lim")  # what benchmarks call it
_CHARACTERS = string.ascii_letters + string.digits + string.punctuation + " ’"


class SimulatorEnv(gymnasium.Env):
    """One simulator as a Gymnasium environment.

    Observations are a ``Dict`` with the names and units of :mod:`vla_common.keys`: ``images`` uint8 ``[H, W, 3]``,
    ``states`` float32 ``[S]``, ``task_descriptions`` text and, where the benchmark has them, ``wrist_images`` uint8
    ``[V, H, W, 3]``. Actions are float32 ``[A]`` in the simulator's units. An episode is terminated by success and
    truncated at the horizon. ``info`` has ``is_success``, ``task_id``, ``trial_id`` and ``episode_seed``; of chains of
    tasks ``subtasks``, how many are solved; and ``remark`` where the simulator has one on the episode.

    Where the benchmark executes a chunk of actions as one motion (RoboTwin), a step is such a chunk: ``chunk_size`` has
    to be given, actions are float32 ``[C, A]``, the reward is the sum over the executed actions, and ``info`` has
    ``step_mask``, which were executed (bool ``[C]``), and their ``step_rewards`` (float32 ``[C]``).

    Args:
        name: such as ``"metaworld/reach-v3"`` of :func:`vla_envs.list_envs`; or a
            :class:`~vla_envs.simulator.SimulatorSpec`, of a simulator that belongs to no registered benchmark:
            ``gymnasium.register("my/Toy-v0", "vla_envs.gym:SimulatorEnv", kwargs={"name": spec})``.
        render_mode: ``"rgb_array"``: ``render()`` returns the image of the last observation; or ``None``. (``"human"``
            of ``gymnasium.make`` shows them in a window, by ``pip install 'vla-torchrl[video]'``.)
        horizon: primitive actions until truncation; the benchmark's own if ``None``. (The ``max_episode_steps`` of
            ``gymnasium.make`` can only shorten an episode, and counts steps.)
        chunk_size: primitive actions per step, ``C``; for benchmarks that execute chunks as a whole, and no others.
        **options: as of :func:`~vla_envs.make.make_env`; none with a ``SimulatorSpec``.
    """

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012  Gymnasium declares it so

    @checked
    def __init__(
        self,
        name: str | SimulatorSpec,
        render_mode: Literal["rgb_array"] | None = None,
        horizon: Count | None = None,
        chunk_size: Length | None = None,
        **options: Any,
    ):
        spec = resolve_spec(name, horizon, options)
        if chunk_size is not None and spec.control_frequency is not None:
            raise ValueError("chunk_size is for many environments: gymnasium.make_vec(id, chunk_size=...)")
        self.render_mode, self.simulator_spec, self.chunk_size = render_mode, spec, chunk_size
        self.metadata = {**self.metadata, "render_fps": frames_per_second(spec, chunk_size)}
        self.observation_space = make_observation_space(spec)
        self.action_space = make_action_space(spec, chunk_size)
        self._episodes = EpisodeStream(spec)
        self._simulator: Simulator | None = None
        self._episode: Episode | None = None  # the running one
        self._observation: dict[str, Any] | None = None  # the last one
        self._elapsed = 0
        self._closed = False

    @property
    def task_description(self) -> str:
        """The instruction of the last observation; ``call("task_description")`` asks many environments."""
        if self._observation is None:
            raise ResetNeeded("there is no instruction yet: call reset() first")
        return self._observation[keys.TASK_DESCRIPTIONS]

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Start an episode.

        Args:
            seed: restarts the random stream; after it, the same resets give the same episodes.
            options: ``task_id`` and ``trial_id`` choose the episode; what is left out is drawn. With a ``seed`` and
                both of them the episode is ``Episode(task_id, trial_id, seed)``, the same that
                :func:`vla_envs.make_env` runs.

        Raises:
            ValueError: an unknown option, or a task that does not exist.
            SimulatorCrash: the simulator failed, or returned something wrong; the next reset makes a new one.
        """
        check_open(self.simulator_spec, self._closed)
        super().reset(seed=seed)
        self._episode = self._episodes.next(self.np_random, seed, options or {})
        if self._simulator is None:
            self.simulator_spec.check()
            self._simulator = self.simulator_spec.make()
        self._elapsed = 0
        with self._blamed(self._episode):
            self._simulator.reset(self._episode)
            observation = self._observe(self._simulator)
        return observation, make_info(self.simulator_spec, self._episode, remark=remark_of(self._simulator))

    def step(self, action: np.ndarray) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """Execute one primitive action, or one chunk of them where the benchmark does that, and render.

        Raises:
            ValueError: an action of the wrong shape or type, not finite, or absurdly far out of bounds.
            SimulatorCrash: the simulator failed, or returned something wrong; the episode is over.
        """
        spec, episode = self.simulator_spec, self._episode
        check_open(spec, self._closed)
        if episode is None or self._simulator is None:
            raise ResetNeeded("no episode is running: call reset() first")
        assert self.action_space.shape is not None
        action = check_actions(spec, action, self.action_space.shape)
        chunk = action if self.chunk_size else action[None]
        with self._blamed(episode):
            outcomes = list(run_chunk(spec, self._simulator, chunk, self._elapsed))
            observation = self._observe(self._simulator)
        self._elapsed += len(outcomes)
        last = outcomes[-1]
        truncated = not last.success and (self._elapsed >= spec.max_episode_steps or last.ends_episode)
        if last.success or truncated:
            self._episode = None
        info = make_info(spec, episode, last.success, last.subtasks, remark_of(self._simulator))
        rewards = np.zeros(len(chunk), np.float32)  # the numbers that make_vec and make_env give, too
        rewards[: len(outcomes)] = [outcome.reward for outcome in outcomes]
        if self.chunk_size:
            info[keys.STEP_MASK], info[keys.STEP_REWARDS] = np.arange(len(chunk)) < len(outcomes), rewards
        return observation, float(rewards.sum()), last.success, truncated, info

    def render(self) -> np.ndarray | None:
        """Return the image of the last observation, uint8 ``[H, W, 3]``, if the mode is ``"rgb_array"``."""
        if self.render_mode != "rgb_array" or self._observation is None:
            return None
        return self._observation[keys.IMAGES]

    def close(self) -> None:
        """Free the simulator; after that the environment refuses to be used."""
        if self._simulator is not None:
            self._simulator.close()
        self._simulator = self._episode = None
        self._closed = True

    @contextlib.contextmanager
    def _blamed(self, episode: Episode) -> Iterator[None]:
        """Name the episode in which a simulator fails; the next reset makes a new simulator."""
        try:
            yield
        except Exception as error:
            failed, self._simulator, self._episode = self._simulator, None, None
            with contextlib.suppress(Exception):  # what it was that failed is the news
                assert failed is not None
                failed.close()
            raise SimulatorCrash(
                f"{describe_error(error)}, while running {self.simulator_spec.describe(episode)}"
            ) from error

    def _observe(self, simulator: Simulator) -> dict[str, Any]:
        seen = simulator.observe()
        states = check_observation(self.simulator_spec, seen)
        self._observation = {  # copies: the next observation may be written into the same memory
            keys.IMAGES: np.array(seen.images),
            keys.STATES: np.array(states),
            keys.TASK_DESCRIPTIONS: seen.task_description,
        }
        if seen.wrist_images is not None:
            self._observation[keys.WRIST_IMAGES] = np.array(seen.wrist_images)
        return dict(self._observation)


def resolve_spec(name: str | SimulatorSpec, horizon: int | None, options: dict[str, Any]) -> SimulatorSpec:
    """Describe the simulator of a name.

    TorchRL's ``GymEnv`` tries ``frameskip`` first, and leaves it out when a ``TypeError`` refuses it in these words.
    """
    if "frameskip" in options:
        raise TypeError("unexpected keyword argument 'frameskip'")
    if isinstance(name, str) and horizon is not None:  # as an option, where there is one: it is a deviation
        known = option_types(find_benchmark(name)[0])
        options.update({option: horizon for option in _HORIZONS if option in known})
    spec = make_spec(name, **options)
    if spec.batched:
        raise ValueError(f"{spec.id} leaves its images on the GPU: take make_env, or type backend='processes'")
    return spec if horizon is None else replace(spec, max_episode_steps=horizon)


def frames_per_second(spec: SimulatorSpec, chunk_size: int | None) -> float:
    """Return how fast frames are shown: in real time, one for each step."""
    if spec.control_frequency is not None:
        return spec.control_frequency / (chunk_size or 1)
    check_chunk_size(spec, chunk_size)
    return _DECISIONS_PER_SECOND


class EpisodeStream:
    """The episodes of one environment, drawn from its random numbers or chosen by the options of a reset."""

    def __init__(self, spec: SimulatorSpec):
        self._spec = spec
        self._seed: int | None = None  # of its episodes

    def next(self, random: np.random.Generator, seed: int | None, options: Mapping[str, Any]) -> Episode:
        """Return the next episode, of ``task_id`` and ``trial_id`` of the options; what is left out is drawn.

        A ``seed`` is that of this and later episodes, whose caller has restarted ``random``; without any, one is drawn.
        """
        spec = self._spec
        for name in options:
            if name not in RESET_OPTIONS:
                raise unknown_name("reset option", name, RESET_OPTIONS)
        if seed is not None:
            self._seed = seed
        elif self._seed is None:
            self._seed = int(random.integers(_MAX_SEED))
        # Both are always drawn, so that fixing one does not change the other.
        tasks, trials = len(spec.tasks), spec.initial_states or _MAX_SEED
        drawn = int(random.integers(tasks)), int(random.integers(trials))
        task_id, trial_id = options.get(keys.TASK_ID, drawn[0]), options.get(keys.TRIAL_ID, drawn[1])
        whole = is_whole_number(task_id) and is_whole_number(trial_id)  # 3.7 is no task
        evaluation = spec.evaluation_trials or range(0)
        if not whole or not 0 <= task_id < tasks or not (0 <= trial_id < trials or trial_id in evaluation):
            also = f" and {evaluation[0]} to {evaluation[-1]}" if evaluation else ""
            raise ValueError(
                f"{spec.id} has task_id 0 to {tasks - 1} and trial_id 0 to {trials - 1}{also}, "
                f"got task_id={task_id!r} and trial_id={trial_id!r}"
            )
        return Episode(int(task_id), int(trial_id), self._seed)


def make_info(
    spec: SimulatorSpec, episode: Episode, success: bool = False, subtasks: int = 0, remark: str = ""
) -> dict[str, Any]:
    """Return ``info`` of a step, or of a reset."""
    return {
        "is_success": success,
        **({keys.SUBTASKS: subtasks} if spec.chain_length > 1 else {}),
        keys.TASK_ID: episode.task_id,
        keys.TRIAL_ID: episode.trial_id,
        "episode_seed": episode.seed,
        **({"remark": remark} if remark else {}),
    }


def check_actions(
    spec: SimulatorSpec, actions: np.ndarray, expected: Sequence[int], running: np.ndarray | None = None
) -> np.ndarray:
    """Return actions as float32; ``ValueError`` for another shape or type, and as :func:`refuse_actions`."""
    actions = np.asarray(actions)
    if actions.shape != tuple(expected) or not np.issubdtype(actions.dtype, np.floating):
        raise ValueError(
            f"{spec.id} takes actions of float32 {list(expected)}, got {actions.dtype} {list(actions.shape)}"
        )
    actions = actions.astype(np.float32)
    refuse_actions(spec, actions[None] if running is None else actions, running)
    return actions


def check_open(spec: SimulatorSpec, closed: bool) -> None:
    """Refuse an environment that is closed."""
    if closed:
        raise ClosedEnvironmentError(f"this environment ({spec.id}) is closed: make a new one")


def make_observation_space(spec: SimulatorSpec) -> spaces.Dict:
    """Describe what one environment shows; sentences have further letters if those of its tasks do."""
    texts = "".join(text for task in spec.tasks for text in (task.instruction, *task.instructions))
    letters = _CHARACTERS + "".join(sorted({*texts} - {*_CHARACTERS}))
    entries: dict[str, spaces.Space[Any]] = {
        keys.IMAGES: spaces.Box(0, 255, (*spec.image_shape, 3), np.uint8),
        keys.STATES: spaces.Box(-np.inf, np.inf, (spec.state_dim,), np.float32),
        keys.TASK_DESCRIPTIONS: InstructionSpace(keys.MAX_INSTRUCTION, charset=letters),
    }
    if spec.wrist_image_shape is not None:
        entries[keys.WRIST_IMAGES] = spaces.Box(0, 255, (*spec.wrist_image_shape, 3), np.uint8)
    return spaces.Dict(entries)


def make_action_space(spec: SimulatorSpec, chunk_size: int | None = None) -> spaces.Box:
    """Describe one primitive action, float32 ``[A]``, or a chunk of them, ``[C, A]``, in the simulator's units."""
    low, high = (np.array(bounds, np.float32) for bounds in (spec.action_low, spec.action_high))
    if chunk_size is not None:
        low, high = np.tile(low, (chunk_size, 1)), np.tile(high, (chunk_size, 1))
    return spaces.Box(low, high)


class InstructionSpace(spaces.Text):
    """Text that ``AsyncVectorEnv`` keeps up to date.

    Gymnasium 1.4 decodes a ``Text`` in shared memory once, at the start; this one is decoded when it is looked at.
    """


class _SharedTexts(Sequence):
    """The current texts of all environments, in shared memory; a copy is a plain tuple."""

    def __init__(self, space: spaces.Text, memory: Any, n: int):
        self._arguments = space, memory, n

    def _decode(self) -> tuple[str, ...]:
        texts: Any = read_from_shared_memory.dispatch(spaces.Text)(*self._arguments)
        return texts

    def __getitem__(self, index: Any) -> Any:
        return self._decode()[index]

    def __len__(self) -> int:
        return self._arguments[-1]

    def __deepcopy__(self, _: Any) -> tuple[str, ...]:
        return self._decode()


@read_from_shared_memory.register(InstructionSpace)
def _read_instructions(space: InstructionSpace, shared_memory: Any, n: int = 1) -> _SharedTexts:
    return _SharedTexts(space, shared_memory, n)
