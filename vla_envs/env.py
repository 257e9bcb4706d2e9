"""VLAEnv: many simulators as one batched TorchRL environment whose step is a chunk of primitive actions."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import astuple
from pkgutil import resolve_name
from typing import Any, cast

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import Binary, Bounded, Composite, NonTensor, Unbounded
from torchrl.envs import EnvBase, TransformedEnv

from vla_common import keys
from vla_envs.actions import refuse_actions, share_clipped
from vla_envs.episodes import EpisodeQueue, EpisodeSampler, unpack
from vla_envs.instructions import Instructions
from vla_envs.simulator import Episode, SimulatorSpec
from vla_envs.stages import TOGETHER, check_stages, divide
from vla_envs.workers.pool import Pending, WorkerPool

ENV_INDEX = "env_index"  # TorchRL's name for the slots of a part of the batch
NO_EPISODE = -1  # task_id, trial_id and group_id of an idle slot


class VLAEnv(EnvBase):
    """``N`` simulators; one step is one decision, a chunk of ``C`` primitive actions and one rendered frame.

    Keys and shapes are those of :mod:`vla_common.keys`. A world stops in the middle of a chunk when its episode ends
    (``step_mask``). A slot that resets takes the next episode from ``episodes``; without one it is idle: ``task_id`` is
    -1, it is never stepped, and each step reports it as truncated.

    A worker process that dies or hangs is replaced. The episode that it was working on is reported with ``crashed`` and
    truncated; its other episodes continue as if nothing had happened. An episode that cannot be started is
    :attr:`unstarted`: its observation is zero, and the next step reports it with ``crashed``, nothing executed.

    A step also comes in halves, as in TorchRL's ``AsyncEnvPool``: :meth:`async_step_send` and :meth:`async_step_recv`
    for some slots, so that a policy decides for others meanwhile. What is seen depends on the order of the calls alone.

    What a step did (``reward``, ``step_mask``, ``success``, ...) stands in the reward specification: under ``"next"``
    alone, never part of the next observation.

    Attributes:
        simulator_spec: the benchmark suite.
        num_envs: ``N``.
        pool: the simulators, for work that is not a rollout, such as recording demonstrations.
        episodes: source of episodes; replaced by :meth:`set_episodes`.
        current_episodes: the episode of each slot, ``None`` where idle.
        errors: why episodes crashed in the last step, by slot.
        step_remarks: what simulators said of the episodes of the last step, by slot.
        interactions: how often it was reset, stepped or loaded.
    """

    def __init__(
        self,
        spec: SimulatorSpec,
        num_envs: int,
        chunk_size: int,
        episodes: EpisodeSampler | EpisodeQueue,
        *,
        num_workers: int,
        ignore_terminations: bool = False,
        reward_coef: float = 1.0,
        relative_reward: bool = False,
        step_penalty: float = 0.0,
        step_timeout: float = 60.0,
        start_timeout: float = 120.0,
        gpus: Sequence[int] | None = None,
    ):
        if spec.batched:  # first, because it says so if there is no GPU
            where = {} if gpus is None else {"device": f"cuda:{gpus[0]}"}  # otherwise CUDA's current one
            pool = resolve_name(spec.batched)(spec, num_envs, chunk_size, ignore_terminations, **where)
        else:
            pool = WorkerPool(
                spec,
                num_envs,
                num_workers,
                chunk_size,
                ignore_terminations=ignore_terminations,
                step_timeout=step_timeout,
                start_timeout=start_timeout,
                gpus=gpus,
            )
        super().__init__(device=torch.device(pool.device), batch_size=torch.Size([num_envs]))
        self.simulator_spec, self.num_envs, self.chunk_size = spec, num_envs, chunk_size
        self.set_episodes(episodes)
        self.ignore_terminations = ignore_terminations
        self.reward_coef, self.relative_reward, self.step_penalty = reward_coef, relative_reward, step_penalty
        self._last_reward = np.zeros((num_envs, 1), np.float32)  # of the benchmark, times the coefficient
        self.current_episodes: list[Episode | None] = [None] * num_envs
        self.interactions = 0
        self.errors: dict[int, str] = {}
        self.step_remarks: dict[int, str] = {}
        self.pool: WorkerPool = pool
        self._texts: Instructions | None = None
        self._under_way: dict[tuple[int, ...], tuple[str, Pending, TensorDictBase | None]] = {}  # by slots, as sent
        self._make_specs()
        specs = [(key, each) for key, each in self.full_reward_spec.items() if key != keys.REWARD]
        self._statistics = {key: each.zero().cpu().numpy() for key, each in specs}  # of the running episodes
        self.is_closed = False

    def set_episodes(self, source: EpisodeSampler | EpisodeQueue) -> None:
        """Take episodes from another source from the next reset of a slot on; ``TypeError`` if it gives none.

        A ``TransformedEnv`` passes this on, but keeps an attribute ``episodes`` to itself: :func:`base_env` refuses it.
        """
        if not callable(getattr(source, "next", None)):
            raise TypeError(f"episodes come from an EpisodeSampler or an EpisodeQueue, got {type(source).__name__}")
        self.episodes = source

    def __repr__(self) -> str:
        spec, (height, width) = self.simulator_spec, self.simulator_spec.image_shape
        tasks = f"{len(spec.tasks)} tasks" if len(spec.tasks) > 1 else spec.tasks[0].name
        what = f"{self.num_envs} environments, {height} x {width} pixels, {spec.max_episode_steps} actions"
        lines = [f"VLAEnv({spec.id}: {tasks}, {what} in chunks of {self.chunk_size})"]
        return "\n  not the benchmark's: ".join([*lines, *spec.protocol_deviations])

    @property
    def worker_restarts(self) -> int:
        """How often a worker or simulator had to be started again."""
        return self.pool.restarts

    @property
    def remarks(self) -> dict[int, str]:
        """What simulators have said of the running episodes, by slot."""
        return dict(getattr(self.pool, "remarks", {}))  # none where all worlds are simulated together

    @property
    def unstarted(self) -> np.ndarray:
        """Which running episodes could not be started, three times, bool ``[N]``."""
        return np.isin(np.arange(self.num_envs), list(self.pool.unstarted)) & self._active()

    def _make_specs(self) -> None:
        n, c, spec = self.num_envs, self.chunk_size, self.simulator_spec

        def flag(*shape: int) -> Binary:
            return Binary(n=shape[-1], shape=(n, *shape), dtype=torch.bool)

        def images(*shape: int) -> Bounded:
            return Bounded(low=0, high=255, shape=(n, *shape, 3), dtype=torch.uint8)

        def number(*shape: int, dtype: torch.dtype = torch.float32) -> Unbounded:
            return Unbounded(shape=(n, *shape), dtype=dtype)

        observation = {
            keys.IMAGES: images(*spec.image_shape),
            keys.STATES: number(spec.state_dim),
            keys.TASK_DESCRIPTIONS: NonTensor(shape=(n,), example_data=spec.tasks[0].instruction),
            keys.TASK_ID: number(dtype=torch.int64),
            keys.TRIAL_ID: number(dtype=torch.int64),
            keys.GROUP_ID: number(dtype=torch.int64),
        }
        if spec.wrist_image_shape is not None:
            observation[keys.WRIST_IMAGES] = images(*spec.wrist_image_shape)
        self.observation_spec = Composite(observation, shape=(n,))
        low = torch.tensor(spec.action_low).expand(n, c, spec.action_dim)
        high = torch.tensor(spec.action_high).expand(n, c, spec.action_dim)
        self.action_spec = Bounded(low=low, high=high, dtype=torch.float32)
        outcome = {
            keys.REWARD: number(1),
            keys.STEP_REWARDS: number(c),
            keys.STEP_MASK: flag(c),
            keys.SUCCESS: flag(1),
            keys.SUCCESS_AT_END: flag(1),
            keys.EPISODE_RETURN: number(1),
            keys.EPISODE_LEN: number(1, dtype=torch.int64),
            keys.CRASHED: flag(1),
            keys.ACTIONS_CLIPPED: number(1),
        }
        if spec.chain_length > 1:
            outcome[keys.SUBTASKS] = number(1, dtype=torch.int64)
        self.reward_spec = Composite(outcome, shape=(n,))
        self.done_spec = Composite({key: flag(1) for key in (keys.DONE, keys.TERMINATED, keys.TRUNCATED)}, shape=(n,))

    def _reset(self, tensordict: TensorDictBase | None = None, **_: Any) -> TensorDictBase:
        self._check_open()
        mask = None if tensordict is None else tensordict.get("_reset", None)
        slots = range(self.num_envs) if mask is None else mask.view(-1).nonzero().view(-1).tolist()
        if mask is None:
            self.drop_under_way()
        else:
            self._check_idle(slots)
        self.pool.reset(self._take_episodes(slots))
        if mask is None:
            self.pool.check()  # otherwise the next step does: what ended before this reset is not to be lost
        return self.observe()

    def _take_episodes(self, slots: Sequence[int]) -> dict[int, Episode]:
        self.interactions += 1
        starting: dict[int, Episode] = {}
        for slot in slots:
            self.current_episodes[slot] = episode = self.episodes.next()
            if episode is not None:
                self.simulator_spec.task_of(episode)  # an error here, not in a worker
                starting[slot] = episode
        for array in [*self._statistics.values(), self._last_reward]:
            array[list(slots)] = 0
        return starting

    def observe(self, env_index: Sequence[int] | None = None) -> TensorDictBase:
        """Return the present observations, as ``reset`` does, or those of ``env_index`` alone."""
        slots = self._slots(env_index)
        self._check_idle(slots.tolist())
        return TensorDict(
            {**self._observe(slots), **{key: torch.zeros(len(slots), 1, dtype=torch.bool) for key in self.done_keys}},
            batch_size=[len(slots)],
            device=self.device,
        )

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        slots = self._slots(None)
        return self._outcome(slots, self.pool.step(self._take_actions(tensordict, slots)))

    def _take_actions(self, tensordict: TensorDictBase, slots: np.ndarray) -> list[int]:
        """Write the actions of some slots where simulators read them; returns the slots that have an episode."""
        self._check_open()
        self._check_idle(slots.tolist())
        self.interactions += 1
        active = self._active()[slots]
        self.pool.arrays.actions[slots] = self._checked(tensordict.get(keys.ACTION, None), slots, active)
        return slots[active].tolist()

    def _outcome(self, slots: np.ndarray, lost: Sequence[int]) -> TensorDictBase:
        arrays, active, crashed = self.pool.arrays, self._active()[slots], np.isin(slots, lost)
        self.errors = {slot: self.pool.errors.get(slot, "") for slot in lost}
        self.step_remarks = self.remarks  # the episode's last word: a reset forgets it

        now = {key: array[slots] for key, array in self._statistics.items()}
        executed, successes = arrays.executed[slots], arrays.successes[slots]
        steps = executed.sum(1, keepdims=True)
        last = np.take_along_axis(successes, np.maximum(steps - 1, 0), axis=1)
        rewards = self._training_rewards(slots, arrays.rewards[slots], executed, steps)
        now[keys.STEP_REWARDS], now[keys.STEP_MASK], now[keys.CRASHED] = rewards, executed, crashed[:, None]
        now[keys.ACTIONS_CLIPPED] = share_clipped(self.simulator_spec, arrays.actions[slots], executed)
        now[keys.EPISODE_RETURN] += rewards.sum(1, keepdims=True)
        now[keys.EPISODE_LEN] += steps
        now[keys.SUCCESS] |= successes.any(1, keepdims=True)
        now[keys.SUCCESS_AT_END] = np.where(steps > 0, last, now[keys.SUCCESS_AT_END])
        if keys.SUBTASKS in now:
            now[keys.SUBTASKS] = np.where(steps > 0, arrays.subtasks[slots, None], now[keys.SUBTASKS])
        for key, array in now.items():
            self._statistics[key][slots] = array
        ended = crashed | ~active
        terminated = now[keys.SUCCESS] & ~ended[:, None] & (not self.ignore_terminations)
        too_long = now[keys.EPISODE_LEN] >= self.simulator_spec.max_episode_steps
        too_long |= arrays.ended[slots].any(1, keepdims=True)
        truncated = ~terminated & (too_long | ended[:, None])
        return TensorDict(
            {
                **self._observe(slots),
                **{key: torch.from_numpy(array) for key, array in now.items()},
                keys.REWARD: torch.from_numpy(rewards.sum(1, keepdims=True)),
                keys.TERMINATED: torch.from_numpy(terminated),
                keys.TRUNCATED: torch.from_numpy(truncated),
                keys.DONE: torch.from_numpy(terminated | truncated),
            },
            batch_size=[len(slots)],
            device=self.device,
        )

    def async_step_send(self, tensordict: TensorDictBase, env_index: Sequence[int]) -> None:
        """Have the simulators of some slots execute a chunk each; :meth:`async_step_recv` is the other half.

        Args:
            tensordict: decisions ``[k]`` with ``action``; returned with what came of it.
            env_index: their slots.

        Raises:
            ValueError: a slot is named twice or does not exist, or actions are wrong.
            RuntimeError: something is under way for one of the slots; or all worlds are simulated together.
        """
        self._check_halves()
        slots = self._slots(env_index)
        active = self._take_actions(tensordict, slots)
        idle = [slot for slot in slots.tolist() if slot not in active]
        self._under_way[tuple(slots.tolist())] = ("step", self.pool.step_send(active, idle), tensordict)

    def async_step_recv(self, env_index: Sequence[int]) -> TensorDictBase:
        """Wait for slots that were sent together, and return what ``step`` does, ``[k]``.

        Raises:
            RuntimeError: no step is under way for exactly these slots.
            SimulatorCrash: the simulator is broken.
        """
        sent, pending, tensordict = self._sent("step", env_index)
        lost = self.pool.step_recv(pending)
        del self._under_way[sent]
        slots = np.array(sent)
        return tensordict.copy().update({"next": self._outcome(slots, lost), ENV_INDEX: torch.from_numpy(slots)})

    def async_reset_send(self, env_index: Sequence[int]) -> None:
        """Give some slots their next episodes, and have simulators begin them; raises as :meth:`async_step_send`."""
        self._check_halves()
        slots = self._slots(env_index)
        self._check_idle(slots.tolist())
        pending = self.pool.reset_send(self._take_episodes(slots.tolist()))
        self._under_way[tuple(slots.tolist())] = ("reset", pending, None)

    def async_reset_recv(self, env_index: Sequence[int]) -> TensorDictBase:
        """Wait for slots that were sent together, and return their observations ``[k]``."""
        sent, pending, _ = self._sent("reset", env_index)
        self.pool.reset_recv(pending)
        del self._under_way[sent]
        return self.observe(sent).set(ENV_INDEX, torch.tensor(sent))

    def stage_slots(self, stages: int) -> list[list[int]]:
        """Divide the slots into stages of which every worker has some; ``ValueError`` as :func:`check_stages`."""
        if self.simulator_spec.batched:
            raise ValueError(TOGETHER.format(id=self.simulator_spec.id))
        workers = self.pool.num_workers
        check_stages(stages, self.num_envs, workers)
        return divide(self.num_envs, workers, stages)

    @property
    def simulator_seconds(self) -> float:
        """For how long the busiest of the workers has worked so far."""
        return float(self.pool.arrays.seconds.max())

    def _slots(self, env_index: Sequence[int] | None) -> np.ndarray:
        if env_index is None:
            return np.arange(self.num_envs)
        slots = np.array([int(slot) for slot in env_index], np.int64)
        if len(set(slots.tolist())) < len(slots) or not all(0 <= slot < self.num_envs for slot in slots):
            raise ValueError(f"{ENV_INDEX} is {slots.tolist()}: must be different slots from 0 to {self.num_envs - 1}")
        return slots

    def _sent(self, kind: str, env_index: Sequence[int]) -> tuple[tuple[int, ...], Pending, Any]:
        slots = tuple(self._slots(env_index).tolist())
        if slots not in self._under_way or self._under_way[slots][0] != kind:
            raise RuntimeError(
                f"no {kind} is under way for exactly the slots {list(slots)}; under way are "
                f"{[f'a {what} of {list(sent)}' for sent, (what, *_) in self._under_way.items()] or 'none'}"
            )
        return slots, *self._under_way[slots][1:]

    def _check_idle(self, slots: Iterable[int]) -> None:
        if both := sorted({slot for sent in self._under_way for slot in sent}.intersection(slots)):
            raise RuntimeError(f"slots {both} are still processing what was sent: receive it first, or reset()")

    def _check_halves(self) -> None:
        self._check_open()
        if self.simulator_spec.batched:
            raise RuntimeError(TOGETHER.format(id=self.simulator_spec.id))

    def drop_under_way(self) -> None:
        """Forget what was sent and not received."""
        under_way, self._under_way = self._under_way, {}
        for _, pending, _ in under_way.values():
            self.pool.drop(pending)

    def state_dict(self, *_: Any, **__: Any) -> OrderedDict[str, Any]:
        """Return plain values and tensors to continue in the middle of the running episodes.

        No simulator's state is among them, but the actions since the reset: a simulator repeats them exactly.
        """
        self._check_idle(range(self.num_envs))
        state: OrderedDict[str, Any] = OrderedDict(sampler=self.episodes.state_dict())
        if any(episode is not None for episode in self.current_episodes):
            running = list(zip(self.current_episodes, self.pool.executed, strict=True))
            state["episodes"] = [None if episode is None else astuple(episode) for episode, _ in running]
            state["actions"] = [
                torch.from_numpy(np.stack(chunks)) if episode is not None and chunks else None
                for episode, chunks in running
            ]
            state["unstarted"] = torch.from_numpy(self.unstarted)
            state["statistics"] = {key: torch.from_numpy(array.copy()) for key, array in self._statistics.items()}
            state["last_reward"] = torch.from_numpy(self._last_reward.copy())
        return state

    def load_state_dict(self, state_dict: OrderedDict[str, Any], strict: bool = True, **_: Any) -> None:
        """Continue where :meth:`state_dict` was taken; :meth:`observe` has the observations of that moment.

        Args:
            state_dict: of an environment with as many slots, actions and the same episodes; else a ``ValueError``.
            strict: False loads nothing: so TorchRL's ``EnvCreator`` passes the state of one environment to all of its
                copies, which would then repeat the same episodes.

        Raises:
            SimulatorCrash: the simulator is broken. One episode that cannot be repeated is :attr:`unstarted`.
        """
        if not strict:
            return
        self._check_open()
        saved = state_dict.get("episodes", [None] * self.num_envs)
        if len(saved) != self.num_envs:
            raise ValueError(f"the saved run had {len(saved)} environments, this one has {self.num_envs}")
        mask = state_dict.get("statistics", {}).get(keys.STEP_MASK)
        if mask is not None and (size := mask.shape[1]) != self.chunk_size:
            raise ValueError(f"the saved run had chunk_size={size}, this one has {self.chunk_size}")
        self.interactions += 1
        self.drop_under_way()
        self.episodes.load_state_dict(state_dict["sampler"])
        self.current_episodes = [None if episode is None else unpack(episode) for episode in saved]
        if "episodes" not in state_dict:
            return
        running = {slot: episode for slot, episode in enumerate(self.current_episodes) if episode is not None}
        unstarted = state_dict.get("unstarted", torch.zeros(self.num_envs, dtype=torch.bool))
        chunks = [[] if saved is None else list(saved.numpy()) for saved in state_dict["actions"]]
        self.pool.give_up({slot: episode for slot, episode in running.items() if unstarted[slot]})
        self.pool.restore({slot: (episode, chunks[slot]) for slot, episode in running.items() if not unstarted[slot]})
        self.pool.check()
        for key, array in self._statistics.items():
            array[:] = state_dict["statistics"][key].numpy()
        self._last_reward[:] = state_dict["last_reward"].numpy()

    def _active(self) -> np.ndarray:
        return np.array([episode is not None for episode in self.current_episodes])

    def _training_rewards(
        self, slots: np.ndarray, rewards: np.ndarray, executed: np.ndarray, steps: np.ndarray
    ) -> np.ndarray:
        rewards = rewards * np.float32(self.reward_coef)
        if self.relative_reward:
            before = np.concatenate([self._last_reward[slots], rewards[:, :-1]], axis=1)
            last = np.take_along_axis(rewards, np.maximum(steps - 1, 0), axis=1)
            self._last_reward[slots] = np.where(steps > 0, last, self._last_reward[slots])
            rewards = rewards - before
        return (rewards - np.float32(self.step_penalty)) * executed

    def _observe(self, slots: np.ndarray) -> dict[str, Any]:
        """Copy rows of the shared arrays, which the next step overwrites."""
        arrays, episodes, texts = self.pool.arrays, self.current_episodes, self.pool.texts
        identities = [
            (e.task_id, e.trial_id, e.group_id) if e else (NO_EPISODE,) * 3 for e in map(episodes.__getitem__, slots)
        ]
        task_id, trial_id, group_id = torch.tensor(identities, dtype=torch.int64).view(-1, 3).unbind(1)
        told = [texts[slot] for slot in slots]
        if self._texts is None or self._texts.is_locked or self._texts.tolist() != told:  # costs 40 us per slot
            self._texts = Instructions.of(told, self.device)
        observation = {
            keys.IMAGES: torch.as_tensor(arrays.images[slots]),
            keys.STATES: torch.from_numpy(arrays.states[slots]),
            keys.TASK_DESCRIPTIONS: self._texts,
            keys.TASK_ID: task_id,
            keys.TRIAL_ID: trial_id,
            keys.GROUP_ID: group_id,
        }
        if self.simulator_spec.wrist_image_shape is not None:
            observation[keys.WRIST_IMAGES] = torch.from_numpy(arrays.wrist_images[slots])
        return observation

    def _checked(self, action: torch.Tensor | None, slots: np.ndarray, active: np.ndarray) -> np.ndarray:
        expected = (len(slots), self.chunk_size, self.simulator_spec.action_dim)
        if action is None:
            raise ValueError(f"there is no {keys.ACTION!r} to step with; write it, float32 {list(expected)}")
        if tuple(action.shape) != expected or action.dtype != torch.float32:
            raise ValueError(
                f"{self.simulator_spec.id} takes {keys.ACTION!r} of float32 {list(expected)} "
                f"[envs, chunk, action], got {action.dtype} {list(action.shape)}"
            )
        array = action.detach().cpu().numpy()
        actions, acting = self.pool.arrays.actions.copy(), np.zeros(self.num_envs, bool)
        actions[slots], acting[slots] = array, active
        refuse_actions(self.simulator_spec, actions, acting)  # which names the slots
        return array

    def _check_open(self) -> None:
        if self.is_closed:
            raise RuntimeError(f"this environment ({self.simulator_spec.id}) is closed; make a new one with make_env")

    def _set_seed(self, seed: int | None) -> None:
        """Restart the training episodes from ``seed``; a queue has a fixed order and stays."""
        if isinstance(self.episodes, EpisodeSampler) and seed is not None:
            self.episodes = self.episodes.reseeded(seed)

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Stop the worker processes."""
        self.pool.close()
        super().close(raise_if_closed=raise_if_closed)


def base_env(env: EnvBase) -> VLAEnv:
    """Find the :class:`VLAEnv` under the transforms of an environment; another class with its methods does as well.

    TypeError: there is none, or several. ValueError: ``episodes`` was set on the transformed one, where it is not read.
    """
    inner = env
    while isinstance(inner, TransformedEnv):
        if "episodes" in vars(inner):
            raise ValueError(
                "episodes= was set on a TransformedEnv, which keeps it to itself; type env.set_episodes(...) instead, "
                "on a new TransformedEnv or after del env.episodes"
            )
        inner = inner.base_env
    if not hasattr(type(inner), "set_episodes"):
        raise TypeError(
            f"this needs one VLAEnv, with or without transforms, not {type(inner).__name__}; type make_env(id, "
            "num_envs=N), which has worker processes of its own, or use TorchRL's collectors"
        )
    return cast(VLAEnv, inner)
