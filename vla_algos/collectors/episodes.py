"""The episode-bound way to collect: a queue of whole episodes, which the slots work off."""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.envs import EnvBase
from torchrl.envs.utils import ExplorationType

from vla_algos.collectors.base import OUTCOME_KEYS, ChunkCollector, Hook
from vla_algos.policies import Policy
from vla_common.keys import CRASHED, DONE, NEXT
from vla_common.settings import Count, checked
from vla_envs import Episode, EpisodeQueue, SimulatorCrash
from vla_envs.episodes import QueuedEpisode
from vla_envs.resume import load_transforms, transforms_state


class EpisodeCollector(ChunkCollector):
    """Works off a queue of episodes and yields each as ``[T]``, in the order of the queue.

    The ``N`` slots of the environment share one queue: a slot that finishes takes the next episode at once. Stopping
    after the first so many finished episodes instead would favour short, that is successful, ones. The queue may grow
    meanwhile (:meth:`extend`, also from ``on_episode``); iterate again after extending an exhausted one. While it
    iterates the environment takes its episodes from the queue alone; it has its own source back afterwards, and another
    collector in it begins with fresh episodes.

    An episode whose simulator dies runs again, up to ``max_attempts`` times, and is then yielded with ``crashed``
    in its last decision; one that could not even begin, which the environment has tried several times, at once.
    After :class:`~vla_envs.workers.pool.SimulatorCrash`, and where the caller stops early, episodes without a result go
    back to the queue: iterating again runs them, and nothing is yielded twice.

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
        step_hook: called with the outcome of every decision (batch ``[N]``; idle slots have task id -1; with
            ``stages`` or ``overlap_resets`` of those that decided, with ``env_index``).

    Attributes:
        pre_collect_hook, post_collect_hook: TorchRL's, ``None`` at first: called before each iteration over the queue,
            and with each episode that is yielded.
        attempts: by index in the queue, how often an episode was run.
        errors: by index in the queue, why its last attempt crashed, where that is known.
        deciding: the episode, or ``None``, of each row of the last decision.
        decided: how many decisions each of these episodes has made before, while the policy decides.

    Example:
        >>> collector = EpisodeCollector(env, policy, evaluation_episodes(env.simulator_spec))  # doctest: +SKIP
        >>> success = [episode["next", "success"][-1].item() for episode in collector]  # doctest: +SKIP
    """

    @checked
    def __init__(
        self,
        env: EnvBase,
        policy: Policy,
        episodes: Iterable[Episode] = (),
        *,
        exploration: ExplorationType = ExplorationType.RANDOM,
        for_learning: bool = True,
        max_attempts: Count = 3,
        stages: Count = 1,
        overlap_resets: bool = False,
        on_episode: Callable[[int, TensorDictBase], None] | None = None,
        step_hook: Hook | None = None,
    ):
        super().__init__(
            env,
            policy,
            exploration,
            values=False,  # whole episodes are compared by their returns
            stages=stages,
            halves=overlap_resets,
            step_hook=step_hook,
        )
        if not for_learning:
            self.stored_keys = [key for key in self.stored_keys if key in OUTCOME_KEYS]
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
        """Yield the episodes of the queue, in its order; a ``RuntimeError`` if it was changed outside meanwhile."""
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
        except SimulatorCrash:
            if self._stages:
                self.base_env.drop_under_way()  # what the others sent
            raise
        finally:
            # A caller that stops early may continue later: what was running, or was taken to run, will run again.
            self.queue.give_back_all()
            self.base_env.set_episodes(own_episodes)
        self._iter += 1

    def _decisions(self, running: "_RunningEpisodes") -> Iterator[None]:
        """Make decisions in all slots at a time, without end."""
        observation, slots = self._reset(), list(range(self.env.batch_size[0]))
        while True:
            idle_before = bool(self.deciding) and not any(self.deciding)
            # Those that the next step decides in, which may replace them; all are from our queue.
            self.deciding = cast("list[QueuedEpisode | None]", self._episodes)
            self._deciding_unstarted = self._unstarted
            if not any(self.deciding) and (idle_before or not self.queue.waiting):  # one that grew is taken in one step
                raise self._starved()
            self.decided = running.lengths(slots)
            outcome, observation = self._decide(observation)
            self._book(running, outcome, slots, len(slots))
            yield

    def _staged_decisions(self, running: "_RunningEpisodes") -> Iterator[None]:
        """Do the same stage by stage; the order of decisions depends on outcomes alone, not on time."""
        self._reset()
        stages = [_Stage(slots, [slot for slot in slots if self._episodes[slot] is not None]) for slots in self._stages]
        idle_rounds = 0
        while True:
            for stage in stages:
                self._take_turn(stage, running)
                yield
            taken = [slot for stage in stages for slot in [*stage.deciding, *stage.beginning]]
            idle = all(self.base_env.current_episodes[slot] is None for slot in taken)
            idle_rounds = idle_rounds + 1 if idle else 0
            if idle_rounds > 1:  # a queue that grew is taken in one round
                raise self._starved()

    def _take_turn(self, stage: "_Stage", running: "_RunningEpisodes") -> None:
        """Book the last decision of a stage, begin the episodes that follow, and send the next decision."""
        env, ready, begun = self.base_env, self._book_turn(stage, running), stage.beginning
        wanting = [slot for slot in stage.slots if slot not in ready and slot not in begun]
        stage.beginning = wanting if stage.deciding or self.queue.waiting else []
        self._begin_episodes(stage.beginning)
        if not self.overlap_resets:
            begun, stage.beginning = begun + stage.beginning, []
        self._await_episodes(begun)
        stage.ready = []
        stage.deciding = sorted([*ready, *(slot for slot in begun if env.current_episodes[slot] is not None)])
        if stage.deciding:
            stage.episodes = [cast("QueuedEpisode | None", env.current_episodes[slot]) for slot in stage.deciding]
            stage.unstarted = np.array(env.unstarted)[stage.deciding]
            self.deciding, self.decided = stage.episodes, running.lengths(stage.deciding)
            self._call_env(env.async_step_send, self._act(env.observe(stage.deciding)), stage.deciding)

    def _book_turn(self, stage: "_Stage", running: "_RunningEpisodes") -> list[int]:
        """Receive and book the decision of a stage that is under way; returns the slots that decide again."""
        if stage.deciding:
            self.deciding, self._deciding_unstarted = stage.episodes, stage.unstarted
            done = self._book(running, self._receive(stage.deciding), stage.deciding, len(stage.slots))
            return [slot for slot in stage.deciding if slot not in done]
        if not stage.ready:  # all sit out, or have no episode
            self._slot_time += len(stage.slots)
            self._idle_time += len(stage.slots)
        return stage.ready

    def _starved(self) -> RuntimeError:
        return RuntimeError(
            f"{len(self)} episodes have no result, but no slot of the environment takes one: {self.queue.waiting} "
            "wait in the queue; leave set_episodes and the queue to the collector while it iterates"
        )

    def _book(
        self, running: "_RunningEpisodes", outcome: TensorDictBase, slots: Sequence[int], total: int
    ) -> list[int]:
        """Store a decision of some of ``total`` slots; those that end their episode hand it over, and are returned."""
        idle = total - len(slots) + self.deciding.count(None)
        self._slot_time += total
        self._idle_time += idle
        self._frames += total - idle
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
        """Return counters, and the state of the environment's transforms; the queue is empty after an iteration."""
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
        """Take the decisions ``[T]`` of a slot, which is empty then."""
        assert self._buffer is not None  # nothing is taken before something was appended
        decisions = self._buffer[slot, : int(self._cursor[slot])].clone()
        self._cursor[slot] = 0
        return decisions

    def _room(self, like: TensorDictBase, length: int) -> TensorDictBase:
        return torch.empty_like(like[:1].expand(self._num_envs, length))
