"""The step-bound collector: T decisions in each of N environments, whatever the episodes do."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from time import perf_counter

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torchrl.collectors import BaseCollector
from torchrl.envs import EnvBase
from torchrl.envs.utils import ExplorationType, set_exploration_type

from vla_keys import (
    ACTION,
    ACTION_LOG_PROB,
    DONE,
    EPISODE_LEN,
    EPISODE_RETURN,
    GROUP_ID,
    LOST,
    NEXT,
    REWARD,
    STATE_VALUE,
    STEP_MASK,
    STEP_REWARDS,
    SUCCESS,
    SUCCESS_AT_END,
    TASK_ID,
    TERMINATED,
    TRIAL_ID,
    TRUNCATED,
)

OUTCOME_KEYS = (
    REWARD,
    STEP_REWARDS,
    STEP_MASK,
    TERMINATED,
    TRUNCATED,
    DONE,
    SUCCESS,
    SUCCESS_AT_END,
    LOST,
    EPISODE_RETURN,
    EPISODE_LEN,
)


class StepCollector(BaseCollector):
    """Runs the policy for a fixed number of decisions per environment and yields them as ``[N, T]``.

    TorchRL's own :class:`~torchrl.collectors.Collector` would keep every observation twice (at the root
    and under ``"next"``) and needs a second pass of the critic over all of them. This one stores only what
    learning reads and gets ``("next", "state_value")`` almost for free: where the episode goes on it is the
    value of the next decision; one further pass covers the final observations of truncated episodes
    and of the rollout. Terminated and lost episodes have no future: their next value is 0.

    The policy acts under ``torch.no_grad()`` and ``ExplorationType.RANDOM``. It reads and writes
    TensorDicts on the environment's device; one that computes elsewhere moves its inputs itself.

    Args:
        env: environments with the keys of the data contract, batch ``[N]``.
        policy: a policy with ``in_keys``, ``out_keys`` and ``loss_keys``. Without ``state_value`` among its
            ``out_keys`` no values are stored.
        decisions: ``T``, decisions per environment and batch.
        total_frames: stop after that many decisions over all environments; -1 for never.
        on_decision: called with the outcome of every decision (batch ``[N]``), for progress bars.
        pre_collect_hook: TorchRL's hook, called before a batch.
        post_collect_hook: TorchRL's hook, called with each batch.
    """

    def __init__(
        self,
        env: EnvBase,
        policy: TensorDictModuleBase,
        decisions: int,
        total_frames: int = -1,
        *,
        on_decision: Callable[[TensorDictBase], None] | None = None,
        pre_collect_hook: Callable[[], None] | None = None,
        post_collect_hook: Callable[[TensorDictBase], None] | None = None,
    ):
        if decisions < 1:
            raise ValueError(f"decisions is {decisions}, must be at least 1")
        super().__init__(pre_collect_hook=pre_collect_hook, post_collect_hook=post_collect_hook)
        self.env, self.policy, self.decisions = env, policy, decisions
        self.on_decision = on_decision
        self.total_frames = total_frames
        self.frames_per_batch = self.requested_frames_per_batch = env.batch_size.numel() * decisions
        self.has_value = STATE_VALUE in policy.out_keys
        root_keys = [*policy.loss_keys, ACTION, ACTION_LOG_PROB, TASK_ID, TRIAL_ID, GROUP_ID]
        root_keys += [STATE_VALUE] if self.has_value else []
        self.stored_keys = [*dict.fromkeys(root_keys), *((NEXT, key) for key in OUTCOME_KEYS)]
        self._frames, self._iter = 0, -1  # the names that BaseCollector.stats() reads
        self._seconds = {"env": 0.0, "policy": 0.0}
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
        """Collect one batch ``[N, T]``, going on where the last one stopped."""
        self._seconds = {"env": 0.0, "policy": 0.0}
        if self._observation is None:
            self._observation = self._timed("env", self.env.reset)
            self._observation_keys = list(self._observation.keys())
        batch = None
        cut_short: list[tuple[int, Tensor, TensorDictBase]] = []  # decision, slots, final observations
        for t in range(self.decisions):
            with set_exploration_type(ExplorationType.RANDOM):
                decision = self._timed("policy", self.policy, self._observation)
            outcome, following = self._timed("env", self.env.step_and_maybe_reset, decision)
            # Only what the environment wrote goes on: nothing of this decision may reach the next one.
            self._observation = following.select(*self._observation_keys)

            stored = outcome.select(*self.stored_keys)
            if batch is None:  # a fresh one every time: the caller may keep the last batch
                batch = torch.empty_like(stored.unsqueeze(1).expand(len(stored), self.decisions))
            batch[:, t] = stored
            if self.has_value:
                after = outcome[NEXT]
                goes_on = ~after[DONE] if t == self.decisions - 1 else torch.zeros_like(after[DONE])
                needs_value = (goes_on | (after[TRUNCATED] & ~after[TERMINATED])) & ~after[LOST]
                slots = needs_value.squeeze(-1).nonzero().squeeze(-1)
                if slots.numel():
                    cut_short.append((t, slots, after.select(*self.policy.in_keys)[slots]))
            if self.on_decision is not None:
                self.on_decision(outcome)
        if self.has_value:
            batch[NEXT, STATE_VALUE] = self._next_values(batch, cut_short)
        self._frames += batch.numel()
        self._iter += 1
        return batch

    def _next_values(
        self, batch: TensorDictBase, cut_short: list[tuple[int, Tensor, TensorDictBase]]
    ) -> Tensor:
        """Value of the observation after each decision, ``[N, T, 1]``."""
        values = torch.zeros_like(batch[STATE_VALUE])
        values[:, :-1] = batch[STATE_VALUE][:, 1:]
        values.masked_fill_(batch[NEXT, DONE], 0.0)
        if not cut_short:
            return values
        rows = torch.cat([slots for _, slots, _ in cut_short])
        times = torch.cat([torch.full_like(slots, t) for t, slots, _ in cut_short])
        observations = [row for _, _, finals in cut_short for row in finals.unbind(0)]
        # The sampled actions are thrown away; the greedy mode leaves the random state alone. Never more
        # than N rows at once: that is the size the memory is known to suffice for.
        n = batch.shape[0]
        with set_exploration_type(ExplorationType.DETERMINISTIC):
            finals = [
                self._timed("policy", self.policy, torch.stack(observations[i : i + n]))[STATE_VALUE]
                for i in range(0, len(observations), n)
            ]
        values[rows, times] = torch.cat(finals)
        return values

    def _timed(self, what: str, function: Callable, *args):
        started = perf_counter()
        result = function(*args)
        self._seconds[what] += perf_counter() - started
        return result

    def stats(self) -> dict[str, int | float | bool]:
        """TorchRL's counters, the seconds of the last batch by part, and the restarts so far."""
        return {
            **super().stats(),
            **{f"time/{part}": seconds for part, seconds in self._seconds.items()},
            "env/worker_restarts": getattr(self.env, "worker_restarts", 0),
        }

    def reset(self) -> None:
        """Abandon the running episodes: the next batch starts with fresh ones."""
        self._observation = None

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed torch (the policy samples from it) and the environment; returns the next seed."""
        torch.manual_seed(seed)
        return self.env.set_seed(seed, static_seed=static_seed)

    def shutdown(
        self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True
    ) -> None:
        """Close the environment (unless told not to); may be called again."""
        if close_env and not self.env.is_closed:
            self.env.close(raise_if_closed=raise_on_error)

    def state_dict(self) -> OrderedDict:
        """Counters and the state of the episode sampler, plain numbers throughout.

        The simulators' states are not in it: after loading, the running episodes are given up and the
        sampler goes on with the next ones.
        """
        state = OrderedDict(frames=self._frames, batches=self._iter + 1)
        if hasattr(self.env, "episodes"):
            state["episodes"] = self.env.episodes.state_dict()
        return state

    def load_state_dict(self, state_dict: OrderedDict) -> None:
        """Restore what :meth:`state_dict` returned; the next batch starts with a reset."""
        self._frames, self._iter = state_dict["frames"], state_dict["batches"] - 1
        if "episodes" in state_dict:
            self.env.episodes.load_state_dict(state_dict["episodes"])
        self.reset()
