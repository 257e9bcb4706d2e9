"""The step-bound way to collect: so many decisions in every environment."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.envs import EnvBase
from torchrl.envs.utils import ExplorationType, set_exploration_type

from vla_algos.advantages import Bootstrap, ends_for_good
from vla_algos.collectors.base import ChunkCollector, Hook
from vla_algos.policies import Policy
from vla_algos.progress import tell
from vla_common.keys import CRASHED, DONE, NEXT, STATE_VALUE
from vla_common.settings import Count, checked
from vla_envs.env import ENV_INDEX
from vla_envs.resume import load_state, save_state


class StepCollector(ChunkCollector):
    """Runs the policy for a fixed number of decisions per environment and yields them as ``[N, T]``.

    TorchRL's own :class:`~torchrl.collectors.Collector` would keep every observation twice (at the root
    and under ``"next"``) and needs a second pass of the critic over all of them. This one stores only what
    learning reads. ``("next", "state_value")`` is the value of the next decision where the episode continues; one
    further pass covers the final observations of the rollout and of those episodes whose end ``bootstrap`` looks
    beyond. For the others it is NaN, for crashed episodes 0.

    Args:
        env: a :class:`~vla_envs.env.VLAEnv`, with or without transforms (``TransformedEnv``), batch ``[N]``.
        policy: any TensorDictModule that writes ``action``, or a callable that does; it samples. Of one with
            ``loss_keys`` these entries are stored, of others all that they read and write (of a callable without
            ``in_keys`` and ``out_keys`` the action alone).
        decisions: ``T``, decisions per environment and batch.
        total_frames: stop after that many decisions over all environments; -1 for never.
        values: store the values of a policy that has ``state_value`` among its ``out_keys``.
        bootstrap: that of :func:`~vla_algos.advantages.gae`.
        stages: groups of slots that take turns: while the policy decides for one, simulators of the others work, in a
            fixed order. Rows stay slots. With more than 1, ``env`` has no transforms.
        step_hook: called with the outcome of every decision (batch ``[N]``); of every stage's, with ``env_index``,
            where there are several.

    Attributes:
        pre_collect_hook, post_collect_hook: TorchRL's, ``None`` at first: called before and with each batch.
    """

    @checked
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
        step_hook: Hook | None = None,
    ):
        super().__init__(env, policy, ExplorationType.RANDOM, values=values, stages=stages, step_hook=step_hook)
        self.decisions, self.bootstrap, self.total_frames = decisions, bootstrap, total_frames
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
        """Collect ``[N, T]`` from where the last one stopped, or of fresh episodes if ``env`` was used since."""
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
        finals = _FinalValues(partial(self._timed, "policy", self.policy), self.env.batch_size[0] // self.stages)
        for t, slots, outcome in self._staged_outcomes() if self._stages else self._outcomes(self._observation):
            stored = outcome.select(*self.stored_keys)
            if batch is None:  # a fresh one every time: the caller may keep the last batch
                batch = torch.empty_like(stored[:1].unsqueeze(1).expand(*self.env.batch_size, self.decisions))
            batch[slots, t] = stored
            if self.has_value:
                after = outcome[NEXT]
                wanted = after[DONE] & ~ends_for_good(after, self.bootstrap)  # beyond which the bootstrap looks
                if t == self.decisions - 1:
                    wanted = wanted | ~after[DONE]
                rows = (wanted & ~after[CRASHED]).squeeze(-1).nonzero().squeeze(-1)
                finals.add(t, slots, rows, after.select(*self.policy.in_keys))
            tell("collecting", t + 1, self.decisions)
        assert batch is not None  # there is at least one decision
        if self.has_value:
            values = torch.zeros_like(batch[STATE_VALUE])  # after each decision
            values[:, :-1] = batch[STATE_VALUE][:, 1:]
            values.masked_fill_(batch[NEXT, DONE], torch.nan)
            values.masked_fill_(batch[NEXT, CRASHED], 0.0)
            finals.write(values)
            batch[NEXT, STATE_VALUE] = values
        return batch

    def _outcomes(self, observation: TensorDictBase) -> Iterator[tuple[int, Tensor, TensorDictBase]]:
        """Make all decisions of a batch; yields their times, slots and outcomes."""
        slots = torch.arange(len(observation), device=observation.device)
        for t in range(self.decisions):
            outcome, observation = self._decide(observation)
            self._observation = observation
            yield t, slots, outcome

    def _staged_outcomes(self) -> Iterator[tuple[int, Tensor, TensorDictBase]]:
        """Do the same stage by stage.

        The next stage's outcome is received, and new episodes begin in it, before the present stage's decision is sent:
        otherwise these resets would wait behind its steps.
        """
        self._observation = None  # with fresh episodes, if this fails half-way
        turns = [(t, number) for t in range(self.decisions) for number in range(self.stages)]
        for place, (_, number) in enumerate(turns):
            slots = self._stages[number]
            decision = self._act(self.base_env.observe(slots))
            received = [self._receive_turn(*turns[place + 1 - self.stages])] if place + 1 >= self.stages else []
            self._call_env(self.base_env.async_step_send, decision, slots)
            for turn in received:
                yield self._finish_turn(*turn)
        for t, number in turns[len(turns) - self.stages + 1 :]:
            yield self._finish_turn(*self._receive_turn(t, number))
        self._observation = self.base_env.observe()
        self._remember()

    def _receive_turn(self, t: int, number: int) -> tuple[int, TensorDictBase, list[int]]:
        """Receive a stage's outcome, and have the simulators that ended an episode begin the next."""
        outcome = self._receive(self._stages[number])
        done = outcome[ENV_INDEX][outcome[NEXT, DONE].squeeze(-1)].tolist()
        self._begin_episodes(done)
        return t, outcome, done

    def _finish_turn(self, t: int, outcome: TensorDictBase, done: list[int]) -> tuple[int, Tensor, TensorDictBase]:
        self._await_episodes(done)
        return t, outcome[ENV_INDEX], outcome

    def reset(self) -> None:
        """Abandon the running episodes: the next batch starts with fresh ones."""
        self._observation = None

    def _forget_if_stale(self) -> None:
        if self._interactions != self.base_env.interactions:
            self.reset()

    def state_dict(self) -> OrderedDict:
        """Return counters, and the environment in the middle of its episodes: tensors, numbers and texts."""
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


class _FinalValues:
    """Values of observations that no decision follows.

    ``size`` of them, as a stage has, are evaluated as soon as there are so many: no more frames are kept, and the
    memory is known to suffice. The actions are thrown away; the greedy mode leaves the random state alone.
    """

    def __init__(self, policy: Callable[[TensorDictBase], TensorDictBase], size: int):
        self._slots: list[int] = []
        self._times: list[int] = []
        self._policy, self._size = policy, size
        self._waiting: list[TensorDictBase] = []
        self._values: list[Tensor] = []

    def add(self, time: int, slots: Tensor, rows: Tensor, observations: TensorDictBase) -> None:
        """Note some ``rows`` of the observations ``[k]`` after decision ``time`` in ``slots`` ``[k]``."""
        if rows.numel():
            self._slots += slots[rows].tolist()
            self._times += [time] * len(rows)
            self._waiting += observations[rows].unbind(0)
        while len(self._waiting) >= self._size:
            self._evaluate()

    def write(self, values: Tensor) -> None:
        """Write the values of all into ``[N, T, 1]`` or ``[N, T, C]``, by slot and time."""
        if self._waiting:
            self._evaluate()
        if self._values:
            values[self._slots, self._times] = torch.cat(self._values)

    def _evaluate(self) -> None:
        rows, self._waiting = self._waiting[: self._size], self._waiting[self._size :]
        with set_exploration_type(ExplorationType.DETERMINISTIC):
            self._values.append(self._policy(torch.stack(rows))[STATE_VALUE])
