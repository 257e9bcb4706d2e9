"""Gymnasium view of the simulators: one primitive action per step, one world per environment.

Importing ``vla_envs`` registers the ids; a simulator is imported by the first ``reset``.

Example:
    >>> import gymnasium
    >>> env = gymnasium.make("vla_envs:vla/MetaWorld-reach-v0", image_size=224)  # "vla_envs:" imports us
    >>> observation, info = env.reset(seed=0)  # doctest: +SKIP
    >>> observation["images"].shape, observation["task_descriptions"]  # doctest: +SKIP
    ((224, 224, 3), 'Reach a goal position')

Each step renders a frame, because that is what Gymnasium's contract says. Training on chunks of actions is
several times faster with :func:`vla_envs.make_env`, which renders once per chunk.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils.shared_memory import read_from_shared_memory

from vla_common import keys
from vla_common.errors import unknown_name
from vla_envs.registry import find_benchmark, make_spec, option_types, refuse_options
from vla_envs.simulator import Episode, Simulator, SimulatorSpec

_CHARACTERS = string.ascii_letters + string.digits + string.punctuation + " ’"
_MAX_INSTRUCTION = 256  # characters; an instruction may be longer than its pattern
_MAX_SEED = 2**31


class InstructionSpace(spaces.Text):
    """Text that ``AsyncVectorEnv`` keeps up to date.

    Gymnasium 1.4 decodes a ``Text`` in shared memory once, when the vector environment is made, and returns
    that first (empty) text for ever. This space is read as a view that decodes when it is looked at.
    """


class _SharedTexts(Sequence):
    """The current texts of all environments, in the memory that they share; a copy of it is a plain tuple."""

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


class SimulatorEnv(gymnasium.Env):
    """One simulator as a Gymnasium environment.

    Observations are a ``Dict`` with the names and units of :mod:`vla_keys`: ``images`` uint8 ``[H, W, 3]``,
    ``states`` float32 ``[S]``, ``task_descriptions`` text and, where the benchmark has them, ``wrist_images``
    uint8 ``[V, H, W, 3]``. Actions are float32 ``[A]`` in the simulator's units. An episode is terminated by
    success and truncated at the horizon. ``info`` has ``is_success`` and the identity of the episode:
    ``task_id``, ``trial_id`` and ``episode_seed``.

    Args:
        name: such as ``"metaworld/reach-v3"``; :func:`vla_envs.list_envs` has them all. Or a
            :class:`~vla_envs.simulator.SimulatorSpec`, of a simulator that belongs to no registered benchmark.
        render_mode: ``"rgb_array"`` or ``None``. ``render()`` returns the image of the last observation.
        horizon: primitive actions until truncation; the benchmark's own if ``None``. (The
            ``max_episode_steps`` of ``gymnasium.make`` can only shorten an episode.)
        **options: of the benchmark, for example ``image_size`` and ``render_quality`` of Meta-World; none beside a
            ``SimulatorSpec``, which has them.

    Raises:
        ValueError: an unknown name or option.

    Example:
        An id for a simulator of one's own:

        >>> gymnasium.register("my/Toy-v0", "vla_envs.gym:SimulatorEnv", kwargs={"name": spec})  # doctest: +SKIP
    """

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012  Gymnasium declares it so

    def __init__(
        self,
        name: str | SimulatorSpec,
        render_mode: str | None = None,
        horizon: int | None = None,
        **options: Any,
    ):
        if render_mode is not None and render_mode not in self.metadata["render_modes"]:
            raise unknown_name("render_mode", render_mode, self.metadata["render_modes"])
        if isinstance(name, SimulatorSpec):
            refuse_options(name, options)
            spec = name
        else:
            if horizon is not None and "max_episode_steps" in option_types(find_benchmark(name)[0]):
                options["max_episode_steps"] = horizon  # so that it is among the deviations from the protocol
            spec = make_spec(name, **options)
        if horizon is not None:
            spec = replace(spec, max_episode_steps=horizon)
        self.render_mode, self.simulator_spec = render_mode, spec
        self.metadata = {**self.metadata, "render_fps": spec.control_frequency}  # a recorded video is in real time
        entries: dict[str, spaces.Space[Any]] = {
            keys.IMAGES: spaces.Box(0, 255, (*spec.image_shape, 3), np.uint8),
            keys.STATES: spaces.Box(-np.inf, np.inf, (spec.state_dim,), np.float32),
            keys.TASK_DESCRIPTIONS: InstructionSpace(_MAX_INSTRUCTION, charset=_CHARACTERS),
        }
        if spec.wrist_image_shape is not None:
            entries[keys.WRIST_IMAGES] = spaces.Box(0, 255, (*spec.wrist_image_shape, 3), np.uint8)
        self.observation_space = spaces.Dict(entries)
        self.action_space = spaces.Box(np.array(spec.action_low, np.float32), np.array(spec.action_high, np.float32))
        self._simulator: Simulator | None = None
        self._episode: Episode | None = None  # the running one
        self._episode_seed: int | None = None
        self._image: np.ndarray | None = None
        self._elapsed = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Start an episode.

        Args:
            seed: restarts the random stream; after it, the same resets give the same episodes.
            options: ``task_id`` and ``trial_id`` choose the episode; what is left out is drawn. With a
                ``seed`` and both of them the episode is ``Episode(task_id, trial_id, seed)``, the same that
                :func:`vla_envs.make_env` runs under this name.

        Raises:
            ValueError: an unknown option, or a task that does not exist.
        """
        super().reset(seed=seed)
        if seed is not None:
            self._episode_seed = seed
        elif self._episode_seed is None:
            self._episode_seed = int(self.np_random.integers(_MAX_SEED))
        self._episode = self._choose_episode(options or {}, self._episode_seed)
        if self._simulator is None:
            self.simulator_spec.check()
            self._simulator = self.simulator_spec.make()
        self._simulator.reset(self._episode)
        self._elapsed = 0
        return self._observe(self._simulator), self._info(self._episode, success=False)

    def step(self, action: np.ndarray) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """Execute one primitive action and render.

        Raises:
            ValueError: an action of the wrong shape or type, or one that is not finite.
            gymnasium.error.ResetNeeded: no episode is running.
        """
        if self._episode is None or self._simulator is None:
            raise gymnasium.error.ResetNeeded("no episode is running: call reset() first")
        episode, outcome = self._episode, self._simulator.step(self._checked(action))
        self._elapsed += 1
        terminated = outcome.success
        truncated = not terminated and self._elapsed >= self.simulator_spec.max_episode_steps
        if terminated or truncated:
            self._episode = None
        observation, info = self._observe(self._simulator), self._info(episode, outcome.success)
        return observation, outcome.reward, terminated, truncated, info

    def render(self) -> np.ndarray | None:
        """Return the image of the last observation, uint8 ``[H, W, 3]``."""
        return self._image if self.render_mode == "rgb_array" else None

    def close(self) -> None:
        """Free the simulator."""
        if self._simulator is not None:
            self._simulator.close()
        self._simulator = self._episode = None

    def _choose_episode(self, options: dict[str, Any], seed: int) -> Episode:
        for name in options:
            if name not in (keys.TASK_ID, keys.TRIAL_ID):
                raise unknown_name("reset option", name, (keys.TASK_ID, keys.TRIAL_ID))
        tasks = len(self.simulator_spec.tasks)
        # Both are always drawn, so that fixing one does not change the other.
        trials = self.simulator_spec.initial_states or _MAX_SEED
        drawn = int(self.np_random.integers(tasks)), int(self.np_random.integers(trials))
        task_id, trial_id = options.get(keys.TASK_ID, drawn[0]), options.get(keys.TRIAL_ID, drawn[1])
        if not 0 <= task_id < tasks or not 0 <= trial_id < trials:
            raise ValueError(
                f"{self.simulator_spec.id} has task_id 0 to {tasks - 1} and trial_id 0 to {trials - 1}, "
                f"got task_id={task_id!r} and trial_id={trial_id!r}"
            )
        return Episode(int(task_id), int(trial_id), seed)

    def _checked(self, action: np.ndarray) -> np.ndarray:
        action, expected = np.asarray(action), (self.simulator_spec.action_dim,)
        if action.shape != expected or not np.issubdtype(action.dtype, np.floating):
            raise ValueError(
                f"{self.simulator_spec.id} takes one action of float32 {list(expected)}, "
                f"got {action.dtype} {list(action.shape)}"
            )
        if not np.isfinite(action).all():
            raise ValueError(f"the action is not finite: {action.tolist()}")
        return action.astype(np.float32)

    def _observe(self, simulator: Simulator) -> dict[str, Any]:
        seen = simulator.observe()
        self._image = np.array(seen.images)  # a copy: the next frame may be drawn into the same memory
        observation = {
            keys.IMAGES: self._image,
            keys.STATES: seen.states,
            keys.TASK_DESCRIPTIONS: seen.task_description,
        }
        if seen.wrist_images is not None:
            observation[keys.WRIST_IMAGES] = np.array(seen.wrist_images)
        return observation

    @staticmethod
    def _info(episode: Episode, success: bool) -> dict[str, Any]:
        return {
            "is_success": success,
            keys.TASK_ID: episode.task_id,
            keys.TRIAL_ID: episode.trial_id,
            "episode_seed": episode.seed,
        }
