"""Collecting and learning in turns, or side by side: what goes from the processes that collect to those that learn."""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase, is_non_tensor

from vla_algos import parallel
from vla_algos.groups import Group
from vla_algos.run.checkpoints import CheckpointError, random_state, set_random_state
from vla_algos.run.resume import ResumableRun
from vla_algos.run.roles import Roles
from vla_algos.run.seeds import seed_everything
from vla_algos.weight_sync import TrainedWeightSyncScheme
from vla_common.texts import decode
from vla_common.timeline import span
from vla_envs.instructions import Instructions
from vla_policies import VLAPolicy
from vla_policies.sharding import gathered

B = TypeVar("B")
R = TypeVar("R")
_COLLECTING = 17  # with a run's seed, of the random numbers of collecting where they are apart


class Turns:
    """Has this process collect, or learn, or both, iteration after iteration.

    Batch ``t`` is learnt from in iteration ``t``, and collected by the weights after update ``t - 1 - lag`` always: in
    iteration ``t`` batch ``t + lag`` is collected and batch ``t`` learnt from. Where none does both and ``lag`` is
    at least 1, these happen at the same time, elsewhere one after the other; that changes no number. With
    ``lag`` 0 the random numbers of the ``i``-th process that collects and of the ``i``-th that learns are one sequence,
    which goes with the batch and comes back with the weights; with more they are two, in whichever processes.

    Args:
        policy: acts, and is trained.
        seed: of the run.
        lag: updates between the weights that have collected a batch and those that learn from it.
        roles: of the processes.
    """

    optional = True  # in a checkpoint: a run that is plain has none

    def __init__(self, policy: VLAPolicy, seed: int, lag: int, roles: Roles):
        self.policy, self.seed, self.lag, self.roles = policy, seed, lag, roles
        self._sync: TrainedWeightSyncScheme | None = None  # where nobody does both
        self._waiting: deque[Any] = deque()  # batches, of a process that learns; None where it has no rows
        self._ahead = 0  # how many they are, in all processes
        self._random: dict[str, Any] | None = None  # of collecting, where this process learns with others

    @property
    def is_plain(self) -> bool:
        """Whether each process learns at once from what it has collected: nothing is kept over an interruption."""
        return not self.lag and not self.roles.apart

    # ---- what a run does with it

    def begin(self) -> None:
        """Set out from the weights that a run begins with."""
        self._part_random_numbers()
        self._bring()

    def __call__(
        self,
        run: ResumableRun,
        iteration: int,
        last: int,
        collect: Callable[[], B],
        learn: Callable[[B | None], R],
        join: Callable[[list[B]], B],
    ) -> R:
        """Do an iteration.

        Args:
            run: may be told to stop in between.
            iteration: its number, from 1.
            last: number of the last one.
            collect: returns a batch: rows, or a list; called where this process collects.
            learn: learns from this process's part of a batch, ``None`` where it has no rows; called where it learns.
            join: makes one batch of several.

        Returns:
            What ``learn`` has returned, in every process.
        """

        def collected() -> B | None:
            if not self.roles.collects:
                return None
            with span("collect", iteration=iteration + self._ahead):
                return collect()

        def collecting(guarded: Callable[[Callable[[], B | None]], B | None]) -> B | None:
            self.policy.eval()
            self.policy.start_iteration(iteration + self._ahead)
            with self.acting():  # a signal must not break it off: those that share the policy wait for each other
                return guarded(collected)

        def learnt() -> R | None:
            if not self.roles.learns:
                return None
            if self.lag:
                self.policy.start_iteration(iteration)
            with parallel.among(self.roles.actors), span("learn", iteration=iteration):
                return learn(self._waiting.popleft())

        while self._ahead < min(self.lag, last + 1 - iteration):
            self._deliver(collecting(run.interruptible), join)
        more = iteration + self._ahead <= last
        if self.roles.apart and self.lag:
            if more and not self.roles.learns:
                done: Any = collecting(partial(run.apart, interruptible=True))
            else:
                done = run.apart(learnt)
            if more:
                self._deliver(done, join)
        else:
            if more:
                self._deliver(collecting(run.interruptible), join)
            done = run.apart(learnt) if self.roles.apart else learnt()
        self._ahead -= 1
        if self.roles.apart:
            done = parallel.broadcast_object(done if self.roles.learns else None, self.roles.actors[0])
        self._bring()
        return done

    def metrics(self) -> dict[str, float]:
        """Return what the last transfer of weights took, where there was one."""
        transfer = None if self._sync is None else self._sync.transfer
        return {} if transfer is None else transfer.metrics()

    @contextlib.contextmanager
    def acting(self) -> Iterator[None]:
        """Have what it takes to act: the whole policy where this process acts, and the random numbers of collecting.

        All processes enter it. Who learns while others act gathers nothing, for which there may be no room.
        """
        only_learns = self.roles.apart and self.roles.learns
        with contextlib.nullcontext() if only_learns else gathered(self.policy), self._collecting():
            yield

    @contextlib.contextmanager
    def _collecting(self) -> Iterator[None]:
        """Draw the random numbers of collecting, where they are not those of learning."""
        if self._random is None:
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
        return {
            "roles": self._places,
            "ahead": self._ahead,
            "waiting": [_plain(batch) for batch in self._waiting],
            "random": self._random,
        }

    @property
    def _places(self) -> list[list[int]]:
        return [list(self.roles.actors), list(self.roles.rollouts)]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`.

        Raises:
            CheckpointError: of a run whose processes had other roles.
        """
        if state["roles"] != self._places:
            raise CheckpointError(
                f"that run had actors {state['roles'][0]} and rollouts {state['roles'][1]}, and batches that wait for "
                "them: resume with its placement, or with resume=elastic (weights and optimizer go on, with fresh "
                "episodes)"
            )
        self._ahead, self._random = state["ahead"], state["random"]
        self._waiting = deque(_unplain(batch) for batch in state["waiting"])
        while self._ahead > self.lag:  # it was larger: the oldest weights are those that may not be learnt from
            self._ahead -= 1
            if self._waiting:
                self._waiting.popleft()

    def begin_anew(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Go on in other processes, or with the first lag: what waited in the others is collected anew."""
        self._part_random_numbers(torch.initial_seed())

    # ---- from one to the other

    def _deliver(self, batch: Any, join: Callable[[list[Any]], Any]) -> None:
        """Give what was collected to the processes that learn."""
        self._ahead += 1
        if all(targets == (rank,) for rank, targets in self.roles.transfers.items()):  # each keeps its own
            self._waiting.append(batch)
            return
        with span("deliver"):
            shares: list[Any] = [None] * parallel.world_size()
            if self.roles.collects:
                targets, rows = self.roles.transfers[self.roles.rank], len(batch)
                for place, target in enumerate(targets):
                    start, stop = (rows * each // len(targets) for each in (place, place + 1))
                    shares[target] = _sent(batch[start:stop]) if start < stop else None
            come = [share for share in self._given(shares, self.roles.rollouts, self.roles.actors) if share is not None]
            if self.roles.learns:
                self._waiting.append(join(come) if come else None)

    def _bring(self) -> None:
        """Bring the weights from the processes that learn to those that collect."""
        if not self.roles.apart:
            return
        parallel.barrier()  # which may wait for longer than the group of the weights
        with span("weights"):
            if self._sync is None:
                self._connect()
            elif self.roles.learns:
                self._sync.send()
            else:
                self._sync.receive()
            if not self.lag:  # with the random numbers
                self._given([None] * parallel.world_size(), self.roles.actors, self.roles.rollouts)

    def _connect(self) -> None:
        """Find those who get the weights, and send them for the first time."""
        self._sync = TrainedWeightSyncScheme(parallel.weight_group())
        begin = self._sync.init_on_sender if self.roles.learns else self._sync.init_on_receiver
        begin(model_id="policy", model=self.policy)
        self._sync.connect()

    def _given(self, shares: list[Any], source: Sequence[int], target: Sequence[int]) -> list[Any]:
        """Exchange shares; with ``lag`` 0 the random numbers of each of ``source`` go on in its partner."""
        given: list[tuple[Any, dict[str, Any] | None]] = [(share, None) for share in shares]
        partner = dict(zip(source, target, strict=False)).get(self.roles.rank)
        if not self.lag and self.roles.apart and partner is not None:
            given[partner] = (shares[partner], _of_device(random_state()))
        come = parallel.all_to_all(given)
        for _, numbers in come:
            if numbers is not None:
                set_random_state(numbers)
        return [share for share, _ in come]

    def _part_random_numbers(self, *more: int) -> None:
        """Give collecting a sequence of its own, of the seed, the process, and ``more`` where the run had begun."""
        if not (self.lag and self.roles.collects):
            return
        sequence = np.random.SeedSequence([self.seed, _COLLECTING, self.roles.rollouts.index(self.roles.rank), *more])
        learning = random_state()
        seed_everything(int(sequence.generate_state(1)[0]))
        if self.roles.learns:
            self._random = random_state()
            set_random_state(learning)


def _of_device(state: dict[str, Any]) -> dict[str, Any]:
    """Return a random state for another process, which has another GPU."""
    if state["cuda"]:
        state["cuda"] = [state["cuda"][torch.cuda.current_device()]] * len(state["cuda"])
    return state


def _sent(batch: Any) -> Any:
    """Return rows as another process gets them: in host memory, as it has other GPUs, and without those beside them."""
    if isinstance(batch, Group):
        return Group(tuple(_sent(episode) for episode in batch.episodes), batch.crashed)
    return batch.cpu().clone() if isinstance(batch, TensorDictBase) else [_sent(each) for each in batch]


def _plain(batch: Any) -> Any:
    """Turn a batch into dictionaries and lists of tensors, numbers and texts."""
    if is_non_tensor(batch):  # a stack of texts is a TensorDictBase too
        return {"texts": decode(batch), "rows": list(batch.batch_size)}
    if isinstance(batch, TensorDictBase):
        entries = {key: _plain(value) for key, value in batch.items()}
        return {"rows": list(batch.batch_size), "entries": entries}
    if isinstance(batch, Group):
        return {"episodes": [_plain(episode) for episode in batch.episodes], "lost": batch.crashed}
    return [_plain(each) for each in batch] if isinstance(batch, (list, tuple)) else batch


def _unplain(batch: Any) -> Any:
    if isinstance(batch, list):
        return [_unplain(each) for each in batch]
    if not isinstance(batch, dict):
        return batch
    if "episodes" in batch:
        return Group(tuple(_unplain(each) for each in batch["episodes"]), batch["lost"])
    if "texts" in batch:
        return _texts(batch["texts"], batch["rows"])
    return TensorDict({key: _unplain(value) for key, value in batch["entries"].items()}, batch["rows"])


def _texts(texts: Sequence[str], shape: Sequence[int]) -> Any:
    if len(shape) == 1:
        return Instructions.of(texts)
    length = math.prod(shape[1:])
    rows = (texts[start : start + length] for start in range(0, len(texts), length))
    return torch.stack([_texts(row, shape[1:]) for row in rows])
