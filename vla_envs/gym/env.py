"""One simulator as a Gymnasium environment."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np

from vla_common import keys
from vla_common.errors import unknown_name
from vla_common.settings import Length, check_settings
from vla_envs.gym.episodes import EpisodeStream, check_actions, closed, frames_per_second, make_info, resolve_spec
from vla_envs.gym.spaces import make_action_space, make_observation_space
from vla_envs.gym.window import Window, why_no_window
from vla_envs.registry import describe_error
from vla_envs.simulator import Episode, Simulator, SimulatorSpec
from vla_envs.workers.answers import check_observation, remark_of
from vla_envs.workers.chunks import run_chunk
from vla_envs.workers.pool import SimulatorCrash


class SimulatorEnv(gymnasium.Env):
    """One simulator as a Gymnasium environment.

    Observations are a ``Dict`` with the names and units of :mod:`vla_keys`: ``images`` uint8 ``[H, W, 3]``,
    ``states`` float32 ``[S]``, ``task_descriptions`` text and, where the benchmark has them, ``wrist_images``
    uint8 ``[V, H, W, 3]``. Actions are float32 ``[A]`` in the simulator's units. An episode is terminated by
    success and truncated at the horizon. ``info`` has ``is_success`` and the identity of the episode:
    ``task_id``, ``trial_id`` and ``episode_seed``; where episodes are chains of tasks (``chain_length`` of the
    specification is more than 1) also ``subtasks``, how many of them are solved since the reset; and ``remark`` where
    the simulator has one on the episode, such as another seed than the one asked for.

    Where the benchmark executes a chunk of actions as one motion (RoboTwin), a step is such a chunk: ``chunk_size`` has
    to be said, actions are float32 ``[C, A]``, the reward is the sum over the executed actions, and ``info`` has
    ``step_mask``, which were executed (bool ``[C]``), and their ``step_rewards`` (float32 ``[C]``). Another chunk size
    is another environment; so are single steps, which ``chunk_size=1`` takes.

    Args:
        name: such as ``"metaworld/reach-v3"``; :func:`vla_envs.list_envs` has them all. Or a
            :class:`~vla_envs.simulator.SimulatorSpec`, of a simulator that belongs to no registered benchmark.
        render_mode: ``"rgb_array"``: ``render()`` returns the image of the last observation; ``"human"``: a window
            shows each of them, by pygame (``pip install 'vla-torchrl[video]'``); or ``None``.
        horizon: primitive actions until truncation; the benchmark's own if ``None``. (The
            ``max_episode_steps`` of ``gymnasium.make`` can only shorten an episode, and counts steps.)
        chunk_size: primitive actions per step, ``C``; for benchmarks that execute chunks as a whole, and no others.
        **options: of the benchmark, for example ``image_size`` and ``render_quality`` of Meta-World; none beside a
            ``SimulatorSpec``, which has them.

    Raises:
        ValueError: an unknown name or option.

    Example:
        An id for a simulator of one's own:

        >>> gymnasium.register("my/Toy-v0", "vla_envs.gym:SimulatorEnv", kwargs={"name": spec})  # doctest: +SKIP
    """

    metadata = {"render_modes": ["human", "rgb_array"]}  # noqa: RUF012  Gymnasium declares it so

    def __init__(
        self,
        name: str | SimulatorSpec,
        render_mode: str | None = None,
        horizon: int | None = None,
        chunk_size: int | None = None,
        **options: Any,
    ):
        if belongs := [name for name in ("num_envs", "num_workers", "autoreset_mode") if name in options]:
            raise ValueError(f"{belongs[0]} is for many environments: gymnasium.make_vec(id, {belongs[0]}=...)")
        if render_mode is not None and render_mode not in self.metadata["render_modes"]:
            raise unknown_name("render_mode", render_mode, self.metadata["render_modes"])
        self.render_mode, self.simulator_spec = render_mode, resolve_spec(name, horizon, options)
        if chunk_size is not None:
            if self.simulator_spec.control_frequency is not None:
                raise ValueError("chunk_size is for many environments: gymnasium.make_vec(id, chunk_size=...)")
            check_settings("", {"chunk_size": chunk_size}, {"chunk_size": Length})
        self.chunk_size = chunk_size
        fps = frames_per_second(self.simulator_spec, chunk_size)
        works = [
            mode for mode in self.metadata["render_modes"] if mode != "human" or not why_no_window()
        ]  # for check_env
        self.metadata = {"render_modes": works, "render_fps": fps}  # a recorded video is in real time
        self.observation_space = make_observation_space(self.simulator_spec)
        self.action_space = make_action_space(self.simulator_spec, chunk_size)
        self._window = Window(fps) if render_mode == "human" else None
        self._episodes = EpisodeStream(self.simulator_spec)
        self._simulator: Simulator | None = None
        self._episode: Episode | None = None  # the running one
        self._observation: dict[str, Any] | None = None  # the last one
        self._elapsed = 0
        self._closed = False

    @property
    def task_description(self) -> str:
        """The instruction of the last observation; ``call("task_description")`` asks many environments."""
        if self._observation is None:
            raise gymnasium.error.ResetNeeded("there is no instruction yet: call reset() first")
        return self._observation[keys.TASK_DESCRIPTIONS]

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
            SimulatorCrash: the simulator failed, or returned something wrong; the message names the episode. The next
                reset makes a new simulator.
            gymnasium.error.ClosedEnvironmentError: after ``close``.
        """
        if self._closed:
            raise closed(self.simulator_spec)
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
            gymnasium.error.ResetNeeded: no episode is running.
            gymnasium.error.ClosedEnvironmentError: after ``close``.
        """
        if self._closed:
            raise closed(self.simulator_spec)
        if self._episode is None or self._simulator is None:
            raise gymnasium.error.ResetNeeded("no episode is running: call reset() first")
        spec, episode = self.simulator_spec, self._episode
        assert self.action_space.shape is not None
        action = check_actions(spec, action, self.action_space.shape)
        chunk = action if self.chunk_size else action[None]
        with self._blamed(episode):
            outcomes = list(run_chunk(spec, self._simulator, chunk, self._elapsed))
            observation = self._observe(self._simulator)
        self._elapsed += len(outcomes)
        last = outcomes[-1]
        terminated = last.success
        too_long = self._elapsed >= spec.max_episode_steps
        truncated = not terminated and (too_long or last.ends_episode)
        if terminated or truncated:
            self._episode = None
        info = make_info(spec, episode, last.success, last.subtasks, remark_of(self._simulator))
        rewards = np.zeros(len(chunk), np.float32)  # the numbers that make_vec and make_env give, too
        rewards[: len(outcomes)] = [outcome.reward for outcome in outcomes]
        if self.chunk_size:
            info[keys.STEP_MASK], info[keys.STEP_REWARDS] = np.arange(len(chunk)) < len(outcomes), rewards
        return observation, float(rewards.sum()), terminated, truncated, info

    def render(self) -> np.ndarray | None:
        """Return the image of the last observation, uint8 ``[H, W, 3]``, if the mode is ``"rgb_array"``."""
        if self.render_mode != "rgb_array" or self._observation is None:
            return None
        return self._observation[keys.IMAGES]

    def close(self) -> None:
        """Free the simulator; after that the environment refuses to be used."""
        if self._simulator is not None:
            self._simulator.close()
        if self._window is not None:
            self._window.close()
        self._simulator = self._episode = None
        self._closed = True

    @contextlib.contextmanager
    def _blamed(self, episode: Episode) -> Iterator[None]:
        """Name the episode in which a simulator fails, and make a new one for the next."""
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
        self._observation = {
            keys.IMAGES: np.array(seen.images),  # a copy: the next frame may be drawn into the same memory
            keys.STATES: states,
            keys.TASK_DESCRIPTIONS: seen.task_description,
        }
        if seen.wrist_images is not None:
            self._observation[keys.WRIST_IMAGES] = np.array(seen.wrist_images)
        if self._window is not None:
            self._window.show(self._observation[keys.IMAGES])
        return dict(self._observation)
