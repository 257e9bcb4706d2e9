"""The two ways to collect: so many decisions in every environment, or a queue of whole episodes."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, TypeVar, cast, get_args

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torchrl.collectors import BaseCollector
from torchrl.envs import EnvBase
from torchrl.envs.utils import ExplorationType, set_exploration_type

from vla_algos import parallel
from vla_algos.acting import Policy, as_module, load_weights, loss_keys
from vla_algos.advantages import Bootstrap
from vla_common import timeline
from vla_common.keys import (
    ACTION,
    ACTION_LOG_PROB,
    ACTIONS_CLIPPED,
    CRASHED,
    DONE,
    EPISODE_LEN,
    EPISODE_RETURN,
    GROUP_ID,
    NEXT,
    REWARD,
    STATE_VALUE,
    STEP_MASK,
    STEP_REWARDS,
    SUBTASKS,
    SUCCESS,
    SUCCESS_AT_END,
    TASK_ID,
    TERMINATED,
    TRIAL_ID,
    TRUNCATED,
)
from vla_common.settings import Count
from vla_envs.env import ENV_INDEX, VLAEnv, base_env
from vla_envs.episodes import EpisodeQueue, QueuedEpisode
from vla_envs.resume import load_state, load_transforms, save_state, transforms_state
from vla_envs.simulator import Episode
from vla_envs.stages import check_stages

OUTCOME_KEYS = (
    REWARD,
    STEP_REWARDS,
    STEP_MASK,
    TERMINATED,
    TRUNCATED,
    DONE,
    SUCCESS,
    SUCCESS_AT_END,
    CRASHED,
    EPISODE_RETURN,
    EPISODE_LEN,
    ACTIONS_CLIPPED,
    SUBTASKS,  # where episodes are chains of tasks
)
WHAT_HAPPENED = (ACTION, TASK_ID, TRIAL_ID, GROUP_ID, *((NEXT, key) for key in OUTCOME_KEYS))
"""What is kept of a decision that nothing is learnt from."""

T = TypeVar("T")
Hook = Callable[[TensorDictBase], None]


class _ChunkCollector(BaseCollector):
    """What both collectors share: one decision of the policy in every environment, what is kept of it, and counters.

    The policy acts under ``torch.no_grad()``. It reads and writes TensorDicts on the environment's device; one
    that computes elsewhere moves its inputs itself. It is the very module that was passed, no copy of it: whoever
    trains that has nothing to synchronise.
    """

    init_random_frames = 0  # TorchRL's Trainer reads it
    calls: list[tuple[int, float]]
    """Environments and seconds of each call of the policy in the last batch."""

    def __init__(
        self,
        env: EnvBase,
        policy: Policy,
        exploration: ExplorationType,
        *,
        values: bool,
        stages: int,
        halves: bool = False,
        on_decision: Hook | None,
        pre_collect_hook: Callable[[], None] | None,
        post_collect_hook: Hook | None,
    ):
        super().__init__(pre_collect_hook=pre_collect_hook, post_collect_hook=post_collect_hook)
        self.base_env = base_env(env)  # under the transforms: it has the episodes
        self.env, self.policy, self.exploration = env, as_module(policy, env), exploration
        self.on_decision = on_decision
        self.stages = stages
        self._stages = _divide(env, stages) if stages != 1 or halves else []
        self.has_value = values and STATE_VALUE in self.policy.out_keys
        written = [ACTION, ACTION_LOG_PROB] if ACTION_LOG_PROB in self.policy.out_keys else [ACTION]
        root_keys = [*loss_keys(self.policy), *written, TASK_ID, TRIAL_ID, GROUP_ID]
        root_keys += [STATE_VALUE] if self.has_value else []
        declared = set(env.full_reward_spec.keys())
        outcome_keys = [(NEXT, key) for key in OUTCOME_KEYS if key != SUBTASKS or key in declared]
        self.stored_keys = [*dict.fromkeys(root_keys), *outcome_keys]
        self._remember()
        self._frames, self._iter = 0, -1  # the names that BaseCollector.stats() reads
        self._begin_times()

    def _decide(self, observation: TensorDictBase) -> tuple[TensorDictBase, TensorDictBase]:
        """Make one decision in every environment; returns its outcome, and the observations of the next one."""
        decision = self._act(observation)
        outcome, following = self._timed("env", self.env.step_and_maybe_reset, decision)
        self._remember()
        if self.on_decision is not None:
            self.on_decision(outcome)
        # Only what the environment wrote is passed on: nothing of this decision may reach the next one.
        return outcome, following.select(*self._observation_keys)

    def _act(self, observation: TensorDictBase, stage: int = 0) -> TensorDictBase:
        """Have the policy decide."""
        self._check_alone()
        with torch.no_grad(), set_exploration_type(self.exploration):
            return self._call_policy(observation, stage)

    def _call_policy(self, observation: TensorDictBase, stage: int = 0) -> TensorDictBase:
        started, rows = perf_counter(), len(observation)
        decision = self._timed("policy", self.policy, observation, stage=stage)
        self.calls.append((rows, perf_counter() - started))
        return decision

    # ---- the halves of a decision in some slots; nothing but these is done while others are under way

    def _send(self, decision: TensorDictBase, slots: Sequence[int]) -> None:
        """Have simulators execute the decisions of some slots."""
        self._alone(self.base_env.async_step_send, decision, slots)

    def _hear(self, slots: Sequence[int], stage: int) -> TensorDictBase:
        """Wait for what came of the decisions that were sent together for some slots."""
        outcome = self._timed("wait", self._alone, self.base_env.async_step_recv, slots, stage=stage)
        if self.on_decision is not None:
            self.on_decision(outcome)
        return outcome

    def _begin_episodes(self, slots: Sequence[int]) -> None:
        """Have simulators begin the next episodes in some slots."""
        if slots:
            self._alone(self.base_env.async_reset_send, None, slots)

    def _await_episodes(self, slots: Sequence[int], stage: int) -> None:
        """Wait until the episodes have begun that were begun together in some slots."""
        if slots:
            self._timed("wait", self._alone, self.base_env.async_reset_recv, slots, stage=stage)

    def _alone(self, function: Callable[..., T], *args: Any) -> T:
        """Do something with the environment, and remember that it was us."""
        self._check_alone()
        result = function(*args)
        self._interactions = self.base_env.interactions
        return result

    def _check_alone(self) -> None:
        if self._interactions != self.base_env.interactions:
            raise RuntimeError(
                f"somebody else has used the environment between two decisions of {type(self).__name__}, which cannot "
                "go on in its episodes; evaluate between batches, or in another make_env(...)"
            )

    def _begin_times(self) -> None:
        """Begin to count the seconds of a batch, and to note how long each call of the policy takes."""
        self._seconds = {"env": 0.0, "policy": 0.0, "rollout": 0.0}
        self.calls = []
        if self._stages:
            self._seconds["wait"] = 0.0
            self._worked = self.base_env.simulator_seconds

    @contextmanager
    def _rollout_timed(self) -> Iterator[None]:
        """Count a part of a batch as a whole; where both work at a time, simulators tell for how long they did."""
        started = perf_counter()
        yield
        self._seconds["rollout"] += perf_counter() - started
        if self._stages:
            self._seconds["env"] = self.base_env.simulator_seconds - self._worked

    def _reset(self) -> TensorDictBase:
        observation = self._timed("env", self.env.reset)
        self._remember()
        self._observation_keys = list(observation.keys())
        return observation

    def _remember(self) -> None:
        """Remember how the environment was left: which episodes run, and that nobody else has used it."""
        self._interactions, self._episodes = self.base_env.interactions, list(self.base_env.current_episodes)
        self._unstarted = np.array(getattr(self.base_env, "unstarted", np.zeros(len(self._episodes), bool)))

    def _timed(self, what: str, function: Callable[..., T], *args: Any, stage: int = 0) -> T:
        started = perf_counter()
        with timeline.span("env" if what == "wait" else what, stage=stage):
            result = function(*args)
        self._seconds[what] += perf_counter() - started
        return result

    def stats(self) -> dict[str, int | float | bool]:
        """Return TorchRL's counters, the seconds of the last batch by part, and the restarts so far.

        ``time/rollout`` is the whole of it, ``time/policy`` in calls of the policy, ``time/env`` in the simulators.
        Where they work beside the policy it is that of the busiest worker, and ``time/wait`` was waited for them.
        """
        return {
            **super().stats(),
            **{f"time/{part}": seconds for part, seconds in self._seconds.items()},
            "env/worker_restarts": self.base_env.worker_restarts,
        }

    def begin_anew(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Have the counters go on, of what collectors of another number of processes have collected; nothing else does.

        Args:
            states: of the collectors of all of them.
        """
        self._frames = sum(state["frames"] for state in states) if parallel.is_main() else 0  # they add up
        self._iter = max(state["batches"] for state in states) - 1

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed torch (the policy samples from it) and the environment; returns the next seed."""
        torch.manual_seed(seed)
        return self.env.set_seed(seed, static_seed=static_seed)

    def update_policy_weights_(
        self,
        policy_or_weights: nn.Module | TensorDictBase | Mapping[str, Any] | None = None,
        *,
        worker_ids: Any = None,
        weights_dict: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Copy weights into the policy; without arguments there is nothing to do, it acts with its own.

        Args:
            policy_or_weights: a module of the same kind, its weights as a TensorDict, or its ``state_dict``.
            worker_ids: there are none.
            weights_dict: the same under ``"policy"``.
            **kwargs: of :class:`~torchrl.collectors.BaseCollector`.

        Raises:
            ValueError: workers or other models are named, or weights do not fit.
        """
        if worker_ids is not None:
            raise ValueError(f"worker_ids is {worker_ids}, but the policy of {type(self).__name__} is in this process")
        if weights_dict is not None:
            if policy_or_weights is not None or list(weights_dict) != ["policy"]:
                raise ValueError(
                    f"there is one model, 'policy', and no other: got {list(weights_dict)} in weights_dict"
                )
            policy_or_weights = weights_dict["policy"]
        super().update_policy_weights_(policy_or_weights, **kwargs)

    def _maybe_fallback_update(self, policy_or_weights: Any = None, *, model_id: str | None = None) -> None:
        if model_id not in (None, "policy"):
            raise ValueError(f"there is one model, 'policy', and no {model_id!r}")
        if policy_or_weights is not None:
            load_weights(self.policy, policy_or_weights)

    def start(self) -> None:
        """Refuse: a batch is collected when it is asked for, by the policy of that moment."""
        raise NotImplementedError(
            f"{type(self).__name__} does not run by itself: iterate over it, or use TorchRL's "
            "Collector(env, policy, replay_buffer=...), which starts a thread"
        )

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Do nothing: between two batches nothing runs."""
        yield

    def shutdown(self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True) -> None:
        """Close the environment (unless told not to); may be called again."""
        if close_env and not self.env.is_closed:
            self.env.close(raise_if_closed=raise_on_error)


class StepCollector(_ChunkCollector):
    """Runs the policy for a fixed number of decisions per environment and yields them as ``[N, T]``.

    TorchRL's own :class:`~torchrl.collectors.Collector` would keep every observation twice (at the root
    and under ``"next"``) and needs a second pass of the critic over all of them. This one stores only what
    learning reads and gets ``("next", "state_value")`` almost for free: where the episode continues it is the
    value of the next decision; one further pass covers the final observations of the rollout and of those
    episodes whose end ``bootstrap`` looks beyond. For the others, and nobody may read it, it is NaN; a crashed
    episode has no future, 0.

    Args:
        env: a :class:`~vla_envs.env.VLAEnv`, with or without transforms (``TransformedEnv``), batch ``[N]``.
        policy: any TensorDictModule that writes ``action``, or a callable that does; it samples. Of one with
            ``loss_keys`` these entries are stored, of others all that they read and write (of a callable without
            ``in_keys`` and ``out_keys`` the action alone).
        decisions: ``T``, decisions per environment and batch.
        total_frames: stop after that many decisions over all environments; -1 for never.
        values: store the values of a policy that has ``state_value`` among its ``out_keys``.
        bootstrap: that of :func:`~vla_algos.advantages.gae`.
        stages: groups of slots that take turns: while the policy decides for one, simulators of the others work. Policy
            calls, and which episode is whose, have a fixed order, so that a batch does not depend on who was faster.
            Rows stay slots. With more than 1, ``env`` is a :class:`~vla_envs.env.VLAEnv` without transforms.
        on_decision: called with the outcome of every decision (batch ``[N]``), for progress bars; of every stage's,
            with ``env_index``, where there are several.
        pre_collect_hook: TorchRL's hook, called before a batch.
        post_collect_hook: TorchRL's hook, called with each batch.
    """

    def __init__(
        self,
        env: EnvBase,
        policy: Policy,
        decisions: Count,
        total_frames: int = -1,
        *,
        values: bool = True,
        bootstrap: Bootstrap = "truncation",
        stages: Count = 1,
        on_decision: Hook | None = None,
        pre_collect_hook: Callable[[], None] | None = None,
        post_collect_hook: Hook | None = None,
    ):
        if decisions < 1:
            raise ValueError(f"decisions is {decisions}, must be at least 1")
        if bootstrap not in get_args(Bootstrap):
            raise ValueError(f"bootstrap is {bootstrap!r}, must be one of {', '.join(get_args(Bootstrap))}")
        super().__init__(
            env,
            policy,
            ExplorationType.RANDOM,
            values=values,
            stages=stages,
            on_decision=on_decision,
            pre_collect_hook=pre_collect_hook,
            post_collect_hook=post_collect_hook,
        )
        self.decisions, self.bootstrap = decisions, bootstrap
        self.total_frames = total_frames
        self.frames_per_batch = self.requested_frames_per_batch = env.batch_size.numel() * decisions
        self._observation: TensorDictBase | None = None

    def iterator(self) -> Iterator[TensorDictBase]:
        """Yield batches ``[N, T]`` until ``total_frames`` is reached."""
        while self.total_frames < 0 or self._frames < self.total_frames:
            if self.pre_collect_hook is not None:
                self.pre_collect_hook()
            batch = self.rollout()
            if self.post_collect_hook is not None:
                self.post_collect_hook(batch)
            yield batch

    @torch.no_grad()
    def rollout(self) -> TensorDictBase:
        """Collect one batch ``[N, T]``, continuing where the last one stopped.

        If somebody else has used the environment since, such as an evaluation, that is nowhere: it begins with fresh
        episodes, as after :meth:`reset`.
        """
        self._begin_times()
        with self._rollout_timed():
            batch = self._collect()
        self._frames += batch.numel()
        self._iter += 1
        return batch

    def _collect(self) -> TensorDictBase:
        self._forget_if_stale()
        if self._observation is None:
            self._observation = self._reset()
        batch: TensorDictBase | None = None
        finals = _FinalValues(self._call_policy, self.env.batch_size[0])
        for t, slots, outcome in self._staged_outcomes() if self._stages else self._outcomes(self._observation):
            stored = outcome.select(*self.stored_keys)
            if batch is None:  # a fresh one every time: the caller may keep the last batch
                batch = torch.empty_like(stored[:1].unsqueeze(1).expand(*self.env.batch_size, self.decisions))
            batch[slots, t] = stored
            if self.has_value:
                after = outcome[NEXT]
                wanted = self._worth_something(after)
                if t == self.decisions - 1:
                    wanted = wanted | ~after[DONE]
                rows = (wanted & ~after[CRASHED]).squeeze(-1).nonzero().squeeze(-1)
                finals.add(t, slots, rows, after.select(*self.policy.in_keys))
        assert batch is not None  # there is at least one decision
        if self.has_value:
            batch[NEXT, STATE_VALUE] = self._next_values(batch, finals)
        return batch

    def _outcomes(self, observation: TensorDictBase) -> Iterator[tuple[int, Tensor, TensorDictBase]]:
        """Make all decisions of a batch; yields their times, slots and outcomes."""
        slots = torch.arange(len(observation))
        for t in range(self.decisions):
            outcome, observation = self._decide(observation)
            self._observation = observation
            yield t, slots, outcome

    def _staged_outcomes(self) -> Iterator[tuple[int, Tensor, TensorDictBase]]:
        """Do the same stage by stage: while the policy decides for one, simulators of the others work.

        What the next stage's simulators have done is heard, and new episodes are begun where it ended one, before the
        present stage's decision is sent: otherwise these resets would wait behind its steps.
        """
        self._observation = None  # with fresh episodes, if this fails half-way
        turns = [(t, number) for t in range(self.decisions) for number in range(self.stages)]
        for place, (_, number) in enumerate(turns):
            slots = self._stages[number]
            decision = self._act(self.base_env.observe(slots), number)
            heard = [self._hear_turn(*turns[place + 1 - self.stages])] if place + 1 >= self.stages else []
            self._send(decision, slots)
            for turn in heard:
                yield self._finish_turn(*turn)
        for t, number in turns[len(turns) - self.stages + 1 :]:
            yield self._finish_turn(*self._hear_turn(t, number))
        self._observation = self.base_env.observe()
        self._remember()

    def _hear_turn(self, t: int, number: int) -> tuple[int, int, TensorDictBase, list[int]]:
        """Hear what a stage's simulators did, and have those that ended an episode begin the next."""
        outcome = self._hear(self._stages[number], number)
        done = outcome[ENV_INDEX][outcome[NEXT, DONE].squeeze(-1)].tolist()
        self._begin_episodes(done)
        return t, number, outcome, done

    def _finish_turn(
        self, t: int, number: int, outcome: TensorDictBase, done: list[int]
    ) -> tuple[int, Tensor, TensorDictBase]:
        self._await_episodes(done, number)
        return t, outcome[ENV_INDEX], outcome

    def _worth_something(self, after: TensorDictBase) -> Tensor:
        """Find the ends of episodes, bool ``[N, 1]``, beyond which :attr:`bootstrap` looks."""
        if self.bootstrap == "none":
            return torch.zeros_like(after[DONE])
        return after[DONE] if self.bootstrap == "any_done" else after[TRUNCATED] & ~after[TERMINATED]

    def _next_values(self, batch: TensorDictBase, finals: _FinalValues) -> Tensor:
        """Value of the observation after each decision, ``[N, T, 1]`` or ``[N, T, C]``."""
        values = torch.zeros_like(batch[STATE_VALUE])
        values[:, :-1] = batch[STATE_VALUE][:, 1:]
        values.masked_fill_(batch[NEXT, DONE], torch.nan)
        values.masked_fill_(batch[NEXT, CRASHED], 0.0)
        found = finals.finish()
        if found is not None:
            values[finals.slots, finals.times] = found
        return values

    def reset(self) -> None:
        """Abandon the running episodes: the next batch starts with fresh ones."""
        self._observation = None

    def _forget_if_stale(self) -> None:
        if self._interactions != self.base_env.interactions:
            self.reset()

    def state_dict(self) -> OrderedDict:
        """Return counters, and the environment in the middle of its episodes: tensors, numbers and texts.

        Right after :meth:`reset` no episode is running, and the state is that of the episode sampler and of the
        transforms.
        """
        self._forget_if_stale()
        return OrderedDict(
            frames=self._frames, batches=self._iter + 1, environment=save_state(self.env, self._observation)
        )

    def load_state_dict(self, state_dict: OrderedDict) -> None:
        """Restore what :meth:`state_dict` returned; the next batch continues in the middle of the same episodes."""
        self._frames, self._iter = state_dict["frames"], state_dict["batches"] - 1
        self._observation = load_state(self.env, state_dict["environment"])
        self._remember()
        if self._observation is not None:
            self._observation_keys = list(self._observation.keys())

    def begin_anew(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Begin with fresh episodes, after those of collectors of another number of processes; counters go on.

        What transforms of the environment have gathered is not kept: it is of slots that are others now.

        Args:
            states: of the collectors of all of them.

        Raises:
            ValueError: the episodes cannot go on so, or are of another stream.
        """
        super().begin_anew(states)
        episodes = self.base_env.episodes
        if not hasattr(episodes, "begin_anew"):
            raise ValueError(
                f"{type(episodes).__name__} has no begin_anew(states): its episodes cannot go on in another number of "
                "processes; resume with as many"
            )
        episodes.begin_anew([state["environment"]["env"]["sampler"] for state in states])
        self.reset()


class EpisodeCollector(_ChunkCollector):
    """Works off a queue of episodes and yields each as ``[T]``, in the order of the queue.

    The ``N`` slots of the environment share one queue: a slot that finishes takes the next episode at once,
    none waits for the slowest. Stopping after the first so many finished episodes instead would favour short,
    that is successful, ones. The queue may grow while it is worked off (:meth:`extend`, also from
    ``on_episode``). Iterate again after extending an exhausted one. While it iterates the environment takes
    its episodes from the queue, and nobody else may use it; it has its own source back afterwards, and another
    collector in it begins with fresh episodes.

    An episode whose simulator dies runs again, up to ``max_attempts`` times, and is then yielded with ``crashed``
    in its last decision; one that could not even begin, which the environment has tried several times, at once.

    Where a step fails altogether (:class:`~vla_envs.workers.pool.SimulatorCrash`), and where the caller stops early,
    episodes without a result go back to the queue: iterating again runs them, and nothing is yielded twice.

    Concatenated episodes are TorchRL's flat layout (``traj_format="cat"``): ``done`` ends each.

    Args:
        env: a :class:`~vla_envs.env.VLAEnv`, with or without transforms (``TransformedEnv``).
        policy: as in :class:`StepCollector`.
        episodes: the first content of the queue.
        exploration: ``RANDOM`` samples, ``DETERMINISTIC`` is greedy.
        for_learning: store what the loss reads; else only identities, actions and outcomes.
        max_attempts: runs of an episode whose simulator dies before it counts as crashed.
        stages: as in :class:`StepCollector`. Results differ from those of one stage by the rounding of other batches,
            and sampled ones by their random numbers.
        overlap_resets: a slot whose episode ended sits out one decision while its simulator begins the next one;
            without it all slots of the stage wait. Of a stage those slots decide that have an episode.
        on_episode: called with the index in the queue and each finished episode, in the order of finishing.
        on_decision: called with the outcome of every decision (batch ``[N]``; idle slots have task id -1; with
            ``stages`` or ``overlap_resets`` of those that decided, with ``env_index``).
        pre_collect_hook: TorchRL's hook, called before each iteration over the queue.
        post_collect_hook: TorchRL's hook, called with each episode that is yielded.

    Attributes:
        attempts: by index in the queue, how often an episode was run.
        errors: by index in the queue, why its last attempt crashed, where that is known.
        deciding: the episode, or ``None``, of each row of the last decision.
        decided: how many decisions each of these episodes has made before, while the policy decides.

    Example:
        >>> collector = EpisodeCollector(env, policy, evaluation_episodes(env.simulator_spec))  # doctest: +SKIP
        >>> success = [episode["next", "success"][-1].item() for episode in collector]  # doctest: +SKIP
    """

    def __init__(
        self,
        env: EnvBase,
        policy: Policy,
        episodes: Iterable[Episode] = (),
        *,
        exploration: ExplorationType = ExplorationType.RANDOM,
        for_learning: bool = True,
        max_attempts: int = 3,
        stages: Count = 1,
        overlap_resets: bool = False,
        on_episode: Callable[[int, TensorDictBase], None] | None = None,
        on_decision: Hook | None = None,
        pre_collect_hook: Callable[[], None] | None = None,
        post_collect_hook: Hook | None = None,
    ):
        if max_attempts < 1:
            raise ValueError(f"max_attempts is {max_attempts}, must be at least 1")
        super().__init__(
            env,
            policy,
            exploration,
            values=False,  # whole episodes are compared by their returns
            stages=stages,
            halves=overlap_resets,
            on_decision=on_decision,
            pre_collect_hook=pre_collect_hook,
            post_collect_hook=post_collect_hook,
        )
        if not for_learning:
            self.stored_keys = [key for key in self.stored_keys if key in WHAT_HAPPENED]
        self.total_frames = -1
        self.max_attempts, self.on_episode = max_attempts, on_episode
        self.queue = EpisodeQueue(episodes)
        self.attempts: Counter[int] = Counter()
        self.errors: dict[int, str] = {}
        self.remarks: dict[int, str] = {}
        self.deciding: list[QueuedEpisode | None] = []
        self.decided: list[int] = []
        self.overlap_resets = overlap_resets
        self._next_index = 0  # of the episode that is yielded next
        self._finished: dict[int, TensorDictBase] = {}  # by queue index, until it is their turn
        self._slot_time = self._idle_time = 0  # decisions of slots in this iteration, and those without an episode

    def __len__(self) -> int:
        """Count the episodes that are still to be yielded."""
        return len(self.queue) - self._next_index

    def extend(self, episodes: Iterable[Episode]) -> None:
        """Append episodes to the queue."""
        self.queue.extend(episodes)

    def clear(self) -> None:
        """Forget the episodes that are still to be yielded, after a failure; not while it iterates."""
        self.queue.clear()
        self._finished.clear()
        self._next_index = len(self.queue)

    def iterator(self) -> Iterator[TensorDictBase]:
        """Yield the episodes of the queue, in its order, until there are no more.

        Raises:
            RuntimeError: slots stay without an episode although some have no result: somebody else took them.
        """
        if self.pre_collect_hook is not None:
            self.pre_collect_hook()
        self._begin_times()
        self._slot_time = self._idle_time = 0
        self.deciding = []
        running = _RunningEpisodes(self.env.batch_size[0])
        own_episodes = self.base_env.episodes
        self.base_env.set_episodes(self.queue)
        decisions = self._staged_decisions(running) if self._stages else self._decisions(running)
        try:
            while len(self):
                with self._rollout_timed():
                    while self._next_index not in self._finished:
                        next(decisions)
                episode = self._finished.pop(self._next_index)
                self._next_index += 1
                if self.post_collect_hook is not None:
                    self.post_collect_hook(episode)
                yield episode
        finally:
            # Whoever stops early may continue later: what was running, or was taken to run, will run again.
            self.queue.give_back_all()
            self.base_env.set_episodes(own_episodes)
        self._iter += 1

    def _decisions(self, running: _RunningEpisodes) -> Iterator[None]:
        """Make decisions in all slots at a time, without end."""
        observation, slots = self._reset(), list(range(self.env.batch_size[0]))
        while True:
            self._next_deciding()
            self.decided = running.lengths(slots)
            outcome, observation = self._decide(observation)
            self._book(running, outcome, slots, len(slots))
            yield

    def _staged_decisions(self, running: _RunningEpisodes) -> Iterator[None]:
        """Do the same stage by stage: while the policy decides for one, simulators of the others work.

        With ``overlap_resets`` a slot whose episode ended sits out the next decision of its stage, while its simulator
        begins another one: no slot waits for that. Which decision is whose depends on what came of those before alone.
        """
        self._reset()
        stages = [_Stage(slots) for slots in self._stages]
        for stage in stages:
            stage.ready = [slot for slot in stage.slots if self._episodes[slot] is not None]
        idle_rounds = 0
        while True:
            for number, stage in enumerate(stages):
                self._take_turn(stage, number, running)
                yield
            taken = [slot for stage in stages for slot in [*stage.deciding, *stage.beginning]]
            running_any = any(self.base_env.current_episodes[slot] is not None for slot in taken)
            idle_rounds = 0 if running_any else idle_rounds + 1
            if idle_rounds > 1:  # a queue that grew is taken in one round
                raise self._starved()

    def _take_turn(self, stage: _Stage, number: int, running: _RunningEpisodes) -> None:
        """Book the last decision of a stage, begin the episodes that follow, and send the next decision."""
        env, ready = self.base_env, stage.ready
        if stage.deciding:
            self.deciding, self._deciding_unstarted = stage.episodes, stage.unstarted
            outcome = self._hear(stage.deciding, number)
            done = self._book(running, outcome, stage.deciding, len(stage.slots))
            ready = [slot for slot in stage.deciding if slot not in done]
        elif not ready:  # all sit out, or have no episode
            self._slot_time += len(stage.slots)
            self._idle_time += len(stage.slots)
        begun, stage.beginning = stage.beginning, []
        wanting = [slot for slot in stage.slots if slot not in ready and slot not in begun]
        if stage.deciding or self.queue.waiting:
            self._begin_episodes(wanting)
            stage.beginning = wanting
        if not self.overlap_resets:
            begun, stage.beginning = begun + stage.beginning, []
        self._await_episodes(begun, number)
        stage.ready = []
        stage.deciding = sorted([*ready, *(slot for slot in begun if env.current_episodes[slot] is not None)])
        if stage.deciding:
            stage.episodes = [cast("QueuedEpisode | None", env.current_episodes[slot]) for slot in stage.deciding]
            stage.unstarted = np.array(env.unstarted)[stage.deciding]
            self.deciding, self.decided = stage.episodes, running.lengths(stage.deciding)
            self._send(self._act(env.observe(stage.deciding), number), stage.deciding)

    def _next_deciding(self) -> None:
        """Note which episodes the next step decides in, which may replace them."""
        idle_before = bool(self.deciding) and not any(self.deciding)
        self.deciding = cast("list[QueuedEpisode | None]", self._episodes)  # all from our queue
        self._deciding_unstarted = self._unstarted
        if not any(self.deciding) and (idle_before or not self.queue.waiting):  # a queue that grew is taken in one step
            raise self._starved()

    def _starved(self) -> RuntimeError:
        return RuntimeError(
            f"{len(self)} episodes have no result, but no slot of the environment takes one: {self.queue.waiting} "
            "wait in the queue; leave set_episodes and the queue to the collector while it iterates"
        )

    def _book(self, running: _RunningEpisodes, outcome: TensorDictBase, slots: Sequence[int], among: int) -> list[int]:
        """Store a decision of some slots, ``among`` so many; those that end their episode hand it over.

        Returns:
            The slots of these.
        """
        idle = among - len(slots) + self.deciding.count(None)
        self._slot_time += among
        self._idle_time += idle
        self._frames += among - idle
        running.append(outcome.select(*self.stored_keys), torch.tensor(slots))
        done = outcome[NEXT, DONE].squeeze(-1).nonzero().flatten().tolist()
        for row in done:
            slot, episode = slots[row], self.deciding[row]
            decisions = running.take(slot)
            if episode is None:
                continue
            index = episode.queue_index
            self.attempts[index] += 1
            if decisions[NEXT, CRASHED][-1]:
                self.errors[index] = getattr(self.base_env, "errors", {}).get(slot, "")
                if self.attempts[index] < self.max_attempts and not self._deciding_unstarted[row]:
                    self.queue.give_back(episode)
                    continue
            if remark := getattr(self.base_env, "step_remarks", {}).get(slot):
                self.remarks[index] = remark
            self.queue.done(episode)
            self._finished[index] = decisions
            if self.on_episode is not None:
                self.on_episode(index, decisions)
        return [slots[row] for row in done]

    def reset(self) -> None:
        """Do nothing: between two iterations no episode is running."""

    def stats(self) -> dict[str, int | float | bool]:
        """Return every collector's numbers, and the share of this iteration's decisions of slots without an episode."""
        return {**super().stats(), "time/idle_fraction": self._idle_time / max(1, self._slot_time)}

    def state_dict(self) -> OrderedDict:
        """Return counters, and the state of the environment's transforms.

        The queue is not in it: it is empty whenever an iteration is through.
        """
        return OrderedDict(frames=self._frames, batches=self._iter + 1, transforms=transforms_state(self.env))

    def load_state_dict(self, state_dict: OrderedDict) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._frames, self._iter = state_dict["frames"], state_dict["batches"] - 1
        load_transforms(self.env, state_dict["transforms"])


@dataclass
class _Stage:
    """A group of slots of the queue, and what is under way for them."""

    slots: list[int]
    ready: list[int] = field(default_factory=list)  # before the first decision
    deciding: list[int] = field(default_factory=list)  # whose decision is under way
    beginning: list[int] = field(default_factory=list)  # whose next episode begins; they sit out the decision
    episodes: list[QueuedEpisode | None] = field(default_factory=list)  # of the decision
    unstarted: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))  # which of them could not be started


def _divide(env: EnvBase, stages: int) -> list[list[int]]:
    """List the slots of each stage, or say why there cannot be so many."""
    check_stages(stages, env.batch_size.numel(), 1)
    if not hasattr(type(env), "stage_slots"):
        raise ValueError(
            f"stages={stages} and overlap_resets take a VLAEnv without transforms, not {type(env).__name__}: "
            "transforms are of all slots at once; have the policy transform what it sees, or leave both out"
        )
    return cast(VLAEnv, env).stage_slots(stages)


class _FinalValues:
    """Values of observations that no decision follows.

    ``N`` of them are evaluated as soon as there are so many: no more frames are kept, and that is the batch that the
    memory is known to suffice for. The actions are thrown away; the greedy mode leaves the random state alone.
    """

    def __init__(self, policy: Callable[[TensorDictBase], TensorDictBase], num_envs: int):
        self.slots: list[int] = []
        self.times: list[int] = []
        self._policy, self._num_envs = policy, num_envs
        self._waiting: list[TensorDictBase] = []
        self._values: list[Tensor] = []

    def add(self, time: int, slots: Tensor, rows: Tensor, observations: TensorDictBase) -> None:
        """Note some ``rows`` of the observations ``[k]`` after decision ``time`` in ``slots`` ``[k]``."""
        if rows.numel():
            self.slots += slots[rows].tolist()
            self.times += [time] * len(rows)
            self._waiting += observations[rows].unbind(0)
        while len(self._waiting) >= self._num_envs:
            self._evaluate()

    def finish(self) -> Tensor | None:
        """Return the values of all, ``[k, 1]`` or ``[k, C]``; ``None`` if there were none."""
        if self._waiting:
            self._evaluate()
        return torch.cat(self._values) if self._values else None

    def _evaluate(self) -> None:
        rows, self._waiting = self._waiting[: self._num_envs], self._waiting[self._num_envs :]
        with set_exploration_type(ExplorationType.DETERMINISTIC):
            self._values.append(self._policy(torch.stack(rows))[STATE_VALUE])


class _RunningEpisodes:
    """The decisions so far of the episode in each slot: one buffer ``[N, T]`` with a cursor per slot."""

    def __init__(self, num_envs: int):
        self._num_envs = num_envs
        self._cursor = torch.zeros(num_envs, dtype=torch.int64)
        self._buffer: TensorDictBase | None = None

    def append(self, decisions: TensorDictBase, slots: Tensor) -> None:
        """Add a decision ``[k]`` to each of some slots ``[k]``."""
        if self._buffer is None:
            self._buffer = self._room(decisions.unsqueeze(1), 16)
        elif int(self._cursor.max()) == (length := self._buffer.shape[1]):
            buffer = self._room(self._buffer[:, :1], 2 * length)
            buffer[:, :length] = self._buffer  # what is beyond takes no memory before it is written
            self._buffer = buffer
        self._buffer[slots, self._cursor[slots]] = decisions
        self._cursor[slots] += 1

    def lengths(self, slots: Sequence[int]) -> list[int]:
        """Count the decisions of some slots."""
        return self._cursor[slots].tolist()

    def take(self, slot: int) -> TensorDictBase:
        """Take the decisions ``[T]`` of a slot, which then starts anew."""
        assert self._buffer is not None  # nothing is taken before something was appended
        decisions = self._buffer[slot, : int(self._cursor[slot])].clone()
        self._cursor[slot] = 0
        return decisions

    def _room(self, like: TensorDictBase, length: int) -> TensorDictBase:
        return torch.empty_like(like[:1].expand(self._num_envs, length))
