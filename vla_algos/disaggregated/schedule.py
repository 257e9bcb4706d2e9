"""Collecting and learning in turns, or side by side: what goes from the processes that collect to those that learn."""

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from vla_algos import distributed
from vla_algos.disaggregated.placement import blocks
from vla_algos.disaggregated.roles import Roles
from vla_algos.disaggregated.weight_sync import WeightSync
from vla_algos.run.checkpoints import CheckpointError
from vla_algos.run.seeds import random_state, seed_everything, set_random_state
from vla_policies import VLAPolicy
from vla_policies.sharding import gathered

R = TypeVar("R")
_COLLECTING = 17  # with a run's seed, of the random numbers of collecting where they are apart


class Schedule:
    """Has this process collect, or learn, or both, iteration after iteration.

    Batch ``t`` is learnt from in iteration ``t``, and collected by the weights after update ``t - 1 - lag`` always: in
    iteration ``t`` batch ``t + lag`` is collected and batch ``t`` learnt from. Where no process does both and ``lag``
    is at least 1, these happen at the same time, elsewhere one after the other; that changes no number. With ``lag`` 0
    the random numbers of the ``i``-th rollout and of the ``i``-th actor are one sequence, which goes with the batch and
    comes back with the weights; with more they are two. The ``policy`` acts and is trained; ``seed`` is of the run, and
    ``roles`` are of the processes.
    """

    def __init__(self, policy: VLAPolicy, seed: int, lag: int, roles: Roles):
        self.policy, self.seed, self.lag, self.roles = policy, seed, lag, roles
        self._ranks = [list(roles.actors), list(roles.rollouts)]
        self._sync: WeightSync | None = None  # where no process does both
        self._waiting: deque[Any] = deque()  # batches, of a process that learns; None where it has no rows
        self._ahead = 0  # how many they are, in all processes
        self._random: dict[str, Any] | None = None  # of collecting, where this process learns with others

    # ---- what a run does with it

    def begin(self) -> None:
        """Set out from the weights that a run begins with; collecting gets random numbers of its own with ``lag``."""
        if self.lag and self.roles.collects:
            sequence = np.random.SeedSequence([self.seed, _COLLECTING, self.roles.rollouts.index(self.roles.rank)])
            learning = random_state()
            seed_everything(int(sequence.generate_state(1)[0]))
            if self.roles.learns:
                self._random = random_state()
                set_random_state(learning)
        self._bring_weights()

    def turn(
        self,
        iteration: int,
        last: int,
        collect: Callable[[], TensorDictBase],
        learn: Callable[[TensorDictBase | None], R],
    ) -> R:
        """Do an iteration, numbered from 1 to ``last``: collect a batch, and learn from one.

        ``collect`` returns a batch, and is called where this process collects; ``learn`` learns from its part of a
        batch, ``None`` where it has no rows, and is called where it learns. Returns everywhere what that has returned.
        """

        def collected() -> TensorDictBase | None:
            self.policy.eval()
            with self.acting():
                return collect() if self.roles.collects else None

        def learnt() -> R | None:
            if not self.roles.learns:
                return None
            with distributed.subgroup(self.roles.actors):
                return learn(self._waiting.popleft())

        while self._ahead < min(self.lag, last + 1 - iteration):
            self._deliver_batch(collected())
        more = iteration + self._ahead <= last
        if self.roles.disaggregated and self.lag:  # at the same time
            done: Any = collected() if more and not self.roles.learns else learnt()
            if more:
                self._deliver_batch(done)
        else:
            if more:
                self._deliver_batch(collected())
            done = learnt()
        self._ahead -= 1
        if self.roles.disaggregated:
            done = distributed.broadcast_object(done if self.roles.learns else None, self.roles.actors[0])
        self._bring_weights()
        return done

    def metrics(self) -> dict[str, float]:
        """Return what the last transfer of weights took, where there was one."""
        if self._sync is None:
            return {}
        return {"time/weight_sync": self._sync.seconds, "sync/megabytes": self._sync.bytes / 1e6}

    @contextlib.contextmanager
    def acting(self) -> Iterator[None]:
        """Gather the policy where this process acts, and draw the random numbers of collecting; all processes enter.

        A process that learns while others act gathers nothing: there may be no room.
        """
        only_learns = self.roles.disaggregated and self.roles.learns
        with contextlib.nullcontext() if only_learns else gathered(self.policy):
            if self._random is None:  # they are those of learning
                yield
                return
            learning = random_state()
            set_random_state(self._random)
            try:
                yield
            finally:
                self._random = random_state()
                set_random_state(learning)

    # ---- of a checkpoint

    def state_dict(self) -> dict[str, Any]:
        """Return the batches that wait, and random numbers: tensors, numbers and texts."""
        waiting = [
            None if batch is None else {"rows": list(batch.batch_size), "entries": batch.to_dict()}
            for batch in self._waiting
        ]
        return {"roles": self._ranks, "ahead": self._ahead, "waiting": waiting, "random": self._random}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`; ``CheckpointError`` for a run whose processes had other roles."""
        if state["roles"] != self._ranks:
            raise CheckpointError(
                f"that run had actors {state['roles'][0]} and rollouts {state['roles'][1]}, and batches that wait for "
                "them: resume with its placement"
            )
        self._ahead, self._random = state["ahead"], state["random"]
        batches = (None if each is None else TensorDict(each["entries"], each["rows"]) for each in state["waiting"])
        self._waiting = deque(batches)
        while self._ahead > self.lag:  # it was larger: the oldest weights are those that may not be learnt from
            self._ahead -= 1
            if self._waiting:
                self._waiting.popleft()

    # ---- from one to the other

    def _deliver_batch(self, batch: Any) -> None:
        self._ahead += 1
        transfers = self.roles.placement.batch_transfers()
        if all(targets == (rank,) for rank, targets in transfers.items()):  # each keeps its own
            self._waiting.append(batch)
            return
        shares: list[Any] = [None] * distributed.world_size()
        if self.roles.collects:
            targets = transfers[self.roles.rank]
            for target, rows in zip(targets, blocks(batch, len(targets)), strict=True):
                # Another process has other GPUs: rows go in host memory, copied out of the batch.
                shares[target] = rows.cpu().clone() if len(rows) else None
        come = [share for share in self._exchange(shares, self.roles.rollouts, self.roles.actors) if share is not None]
        if self.roles.learns:
            self._waiting.append(torch.cat(come) if come else None)

    def _bring_weights(self) -> None:
        if not self.roles.disaggregated:
            return
        distributed.barrier()  # which may wait for longer than the group of the weights
        if self._sync is None:
            self._sync = WeightSync(self.policy, distributed.weight_group(), receives=not self.roles.learns)
        self._sync.transfer()
        if not self.lag:  # with the random numbers
            self._exchange([None] * distributed.world_size(), self.roles.actors, self.roles.rollouts)

    def _exchange(self, shares: list[Any], source: Sequence[int], target: Sequence[int]) -> list[Any]:
        """Exchange shares; with ``lag`` 0 the random numbers of each of ``source`` continue in its partner."""
        given: list[tuple[Any, dict[str, Any] | None]] = [(share, None) for share in shares]
        partner = dict(zip(source, target, strict=False)).get(self.roles.rank)
        if not self.lag and self.roles.disaggregated and partner is not None:
            state = random_state()
            if states := state.get("torch_cuda"):  # the partner has another GPU
                state["torch_cuda"] = [states[torch.cuda.current_device()]] * len(states)
            given[partner] = (shares[partner], state)
        come = distributed.all_to_all(given)
        for _, numbers in come:
            if numbers is not None:
                set_random_state(numbers)
        return [share for share, _ in come]
