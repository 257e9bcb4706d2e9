"""Many simulators in worker processes behind Gymnasium's vector interface: what ``gymnasium.make_vec`` makes."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium.utils import seeding
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from vla_common import keys
from vla_common.errors import unknown_name
from vla_common.settings import Count, Length, Positive, checked
from vla_envs.gym.env import (
    RESET_OPTIONS,
    EpisodeStream,
    check_actions,
    check_open,
    frames_per_second,
    make_action_space,
    make_info,
    make_observation_space,
    resolve_spec,
)
from vla_envs.simulator import Episode, SimulatorSpec
from vla_envs.workers.pool import WorkerPool, count_workers

_RESET_MASK = "reset_mask"


class SimulatorVectorEnv(VectorEnv):
    """``N`` simulators as a Gymnasium vector environment.

    Step by step it returns what Gymnasium's ``SyncVectorEnv`` returns over :class:`~vla_envs.gym.SimulatorEnv`, in each
    autoreset mode, from a :class:`~vla_envs.workers.pool.WorkerPool`: few processes for many simulators, none forked.

    With a ``chunk_size`` a step is a decision: actions are float32 ``[N, C, A]``, each simulator stops where its
    episode ends, one frame is drawn, the reward is the sum over the executed actions, and ``infos`` have ``step_mask``,
    which were executed (bool ``[N, C]``), and their ``step_rewards`` (float32 ``[N, C]``).

    A worker that dies or hangs is started again. The episode that it was working on is truncated, with ``crashed`` in
    its info, which no other episode has; its last observation is the one before. An episode that cannot be started is
    all zeros, and the next step says that it crashed.

    Args:
        name, render_mode, horizon, **options: as of :class:`~vla_envs.gym.SimulatorEnv`.
        num_envs: number of simulators, ``N``.
        max_episode_steps: ``horizon`` under Gymnasium's name.
        chunk_size: primitive actions per step, ``C``; one without a dimension of its own if ``None``, which is refused
            where chunks are executed as a whole.
        num_workers, step_timeout, start_timeout: as of :func:`~vla_envs.make.make_env`.
        autoreset_mode: of :class:`gymnasium.vector.AutoresetMode`.

    Raises:
        ValueError: an unknown name or option, or an impossible number.

    Example:
        >>> envs = gymnasium.make_vec("vla_envs:vla/MetaWorld-MT50-v0", 8, chunk_size=5)  # doctest: +SKIP
        >>> observations, infos = envs.reset(seed=0)  # doctest: +SKIP
    """

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012  Gymnasium declares it so

    closed = True  # until there is something to close

    @checked
    def __init__(
        self,
        name: str | SimulatorSpec,
        num_envs: Count = 1,
        render_mode: Literal["rgb_array"] | None = None,
        horizon: Count | None = None,
        max_episode_steps: Count | None = None,
        chunk_size: Length | None = None,
        num_workers: Count | None = None,
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
        step_timeout: Positive = 60.0,
        start_timeout: Positive = 120.0,
        **options: Any,
    ):
        num_workers = count_workers(num_envs, num_workers)
        spec = resolve_spec(name, max_episode_steps if horizon is None else horizon, options)
        self.simulator_spec, self.num_envs, self.render_mode = spec, num_envs, render_mode
        modes = [mode.value for mode in AutoresetMode]
        if autoreset_mode not in [*AutoresetMode, *modes]:
            raise unknown_name("autoreset_mode", str(autoreset_mode), modes)
        self.autoreset_mode = AutoresetMode(autoreset_mode)
        fps = frames_per_second(spec, chunk_size)
        self.metadata = {**self.metadata, "render_fps": fps, "autoreset_mode": self.autoreset_mode}
        self.single_observation_space = space = make_observation_space(spec)
        self._spaces = space.spaces
        self.single_action_space = make_action_space(spec, chunk_size)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.chunk_size = chunk_size
        self._pool = WorkerPool(
            spec, num_envs, num_workers, chunk_size or 1, step_timeout=step_timeout, start_timeout=start_timeout
        )
        self._streams = [EpisodeStream(spec) for _ in range(num_envs)]
        self._random = [seeding.np_random() for _ in range(num_envs)]  # with what it began from
        self._elapsed = np.full(num_envs, -1, np.int64)  # -1 before the first reset
        self._subtasks = np.zeros(num_envs, np.int64)  # of each environment's chain that are solved
        self._ended = np.zeros(num_envs, np.bool_)
        self.closed = False

    @property  # type: ignore[misc]  # it is not set, as in SyncVectorEnv
    def np_random(self) -> Any:
        """The random numbers that episodes are drawn from, one generator per environment."""
        return tuple(random for random, _ in self._random)

    @property
    def np_random_seed(self) -> Any:
        """What the random numbers of each environment were started from."""
        return tuple(seed for _, seed in self._random)

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Start an episode in each environment, or in those of a mask.

        Args:
            seed: of the first environment, ``seed + 1`` of the second and so on; or one for each; ``None`` continues.
            options: ``task_id`` and ``trial_id`` choose the episodes, for all environments or one for each;
                ``reset_mask``, bool ``[N]``, says which environments to reset.

        Raises:
            ValueError: an unknown option, a task that does not exist, or not as many as there are environments.
            SimulatorCrash: the simulator is broken: many episodes in a row crashed or could not be started.
        """
        check_open(self.simulator_spec, self.closed)
        if seed is None or isinstance(seed, (int, np.integer)):
            seed = [None if seed is None else int(seed) + slot for slot in range(self.num_envs)]
        if len(seed) != self.num_envs:
            raise ValueError(f"needs one seed, or one for each of {self.num_envs} environments, got {len(seed)}")
        options = dict(options or {})
        mask = self._check_mask(options.pop(_RESET_MASK, np.ones(self.num_envs, np.bool_)))
        infos = self._restart(np.flatnonzero(mask), seed, self._options_of_each(options))
        self._pool.check()
        return self._observations(), infos

    def step(self, actions: np.ndarray) -> tuple[dict[str, Any], np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Execute an action, or a chunk of them, in each environment and render.

        Raises:
            ValueError: actions of the wrong shape or type, not finite, or absurdly far out of bounds.
            SimulatorCrash: the simulator is broken.
            gymnasium.error.ResetNeeded: some environments run no episode and do not reset themselves.
        """
        check_open(self.simulator_spec, self.closed)
        ended = np.flatnonzero(self._ended)
        if (self._elapsed < 0).any():
            raise gymnasium.error.ResetNeeded("no episode is running: call reset() first")
        if len(ended) and self.autoreset_mode is AutoresetMode.DISABLED:
            raise gymnasium.error.ResetNeeded(
                f"the episodes of environments {ended.tolist()} have ended: call "
                f'reset(options={{"{_RESET_MASK}": terminated | truncated}}) first'
            )
        running, arrays = np.flatnonzero(~self._ended), self._pool.arrays
        rewards, terminated, truncated, outcomes = self._advance(running, actions)
        done = terminated | truncated
        infos: dict[str, Any] = {}
        if self.autoreset_mode is AutoresetMode.SAME_STEP:
            ended = np.flatnonzero(done)
            for slot in ended.tolist():
                final = {"final_obs": self._observations(slot), "final_info": outcomes.pop(slot)}
                infos = self._add_info(infos, final, slot)
        for slot, info in outcomes.items():
            infos = self._add_info(infos, info, slot)
        if self.chunk_size is not None:  # of all, nothing where an environment was only reset
            for key, array in ((keys.STEP_MASK, arrays.executed), (keys.STEP_REWARDS, arrays.rewards)):
                infos[key], infos[f"_{key}"] = array.copy(), np.ones(self.num_envs, np.bool_)
        self._ended = done
        infos = self._restart(ended, infos=infos)
        return self._observations(), rewards, terminated, truncated, infos

    def render(self) -> tuple[np.ndarray, ...] | None:
        """Return the images of the last observations, uint8 ``[H, W, 3]`` each."""
        return tuple(self._pool.arrays.images.copy()) if self.render_mode == "rgb_array" else None

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Return of each environment ``task_description``, ``episode``, ``simulator_spec`` or what it renders."""
        check_open(self.simulator_spec, self.closed)
        each = {
            "task_description": lambda: tuple(self._pool.texts),
            "episode": lambda: tuple(self._pool.episodes[i] if n >= 0 else None for i, n in enumerate(self._elapsed)),
            "simulator_spec": lambda: (self.simulator_spec,) * self.num_envs,
            "render": lambda: self.render() or (None,) * self.num_envs,
        }
        if name not in each:
            raise AttributeError(f"{unknown_name('attribute', name, each)}; simulators run in workers")
        return each[name](*args, **kwargs)

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Return an attribute of each environment, as :meth:`call` does."""
        return self.call(name)

    def close_extras(self, **kwargs: Any) -> None:
        """Stop the worker processes; options of ``AsyncVectorEnv`` change nothing."""
        self._pool.close()

    def _advance(
        self, running: np.ndarray, actions: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, dict[int, dict[str, Any]]]:
        """Execute actions: rewards, terminated and truncated of all environments, infos of those that run."""
        assert self.action_space.shape is not None
        spec, arrays = self.simulator_spec, self._pool.arrays
        actions = check_actions(spec, actions, self.action_space.shape, ~self._ended)
        arrays.actions[:] = actions.reshape(arrays.actions.shape)
        crashed = np.zeros(self.num_envs, np.bool_)
        crashed[self._pool.step(running.tolist())] = True
        self._elapsed += arrays.executed.sum(1)
        self._subtasks = np.where(arrays.executed.any(1), arrays.subtasks, self._subtasks)
        terminated = np.any(arrays.successes, 1)
        truncated = ~terminated & (crashed | np.any(arrays.ended, 1) | (self._elapsed >= spec.max_episode_steps))
        truncated[self._ended] = False
        infos = {}
        for slot in running.tolist():
            infos[slot] = self._info(slot, bool(terminated[slot]), int(self._subtasks[slot]))
            if crashed[slot]:
                infos[slot][keys.CRASHED] = True
        return arrays.rewards.sum(1).astype(np.float64), terminated, truncated, infos

    def _restart(
        self,
        slots: np.ndarray,
        seeds: Sequence[int | None] | None = None,
        options: Sequence[Mapping[str, Any]] | None = None,
        infos: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Start the next episodes in some environments; returns the infos with theirs added."""
        infos = infos or {}
        starting: dict[int, Episode] = {}
        for slot in slots.tolist():
            seed = seeds[slot] if seeds else None
            if seed is not None:
                self._random[slot] = seeding.np_random(seed)
            random, _ = self._random[slot]
            starting[slot] = self._streams[slot].next(random, seed, options[slot] if options else {})
        self._pool.reset(starting)
        for slot in starting:
            self._elapsed[slot] = self._subtasks[slot] = 0
            infos = self._add_info(infos, self._info(slot), slot)
        self._ended[slots] = False
        return infos

    def _info(self, slot: int, success: bool = False, subtasks: int = 0) -> dict[str, Any]:
        episode, remark = self._pool.episodes[slot], self._pool.remarks.get(slot, "")
        return make_info(self.simulator_spec, episode, success, subtasks, remark)

    def _observations(self, of: int | slice = slice(None)) -> dict[str, Any]:
        """Copy the shared arrays, which the next step overwrites."""
        texts, arrays = tuple(self._pool.texts)[of], self._pool.arrays
        return {
            key: texts if key == keys.TASK_DESCRIPTIONS else getattr(arrays, key)[of].copy() for key in self._spaces
        }

    def _check_mask(self, mask: Any) -> np.ndarray:
        found = (mask.shape, mask.dtype) if isinstance(mask, np.ndarray) else None
        if found != ((self.num_envs,), np.bool_) or not mask.any():
            got = f"{mask.dtype} {list(mask.shape)}" if found else type(mask).__name__
            raise ValueError(f"{_RESET_MASK} is a numpy array of bool [{self.num_envs}] with a True in it, got {got}")
        return mask

    def _options_of_each(self, options: Mapping[str, Any]) -> list[dict[str, Any]]:
        each: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        for name, value in options.items():
            if name not in RESET_OPTIONS:
                raise unknown_name("reset option", name, (*RESET_OPTIONS, _RESET_MASK))
            values = [value] * self.num_envs if np.ndim(value) == 0 else list(value)
            if len(values) != self.num_envs:
                raise ValueError(
                    f"needs one {name}, or one for each of {self.num_envs} environments, got {len(values)}"
                )
            for slot, one in enumerate(values):
                each[slot][name] = one
        return each
