"""WorkerPool: simulators in processes of their own, with time-outs and restart of those that die or hang."""

import logging
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vla_envs.simulator import Episode, SimulatorSpec
from vla_envs.workers.answers import undeclared_instruction
from vla_envs.workers.calls import MAX_FAILURES_IN_A_ROW, MAX_LOST_IN_A_ROW, Calls, SimulatorCrash
from vla_envs.workers.process import WorkerProcess, close_all, wait
from vla_envs.workers.shared_memory import SharedArrays

_logger = logging.getLogger(__name__)


def count_workers(num_envs: int, num_workers: int | None) -> int:
    """Return how many processes share ``num_envs`` simulators; one per available core if ``None``."""
    if num_workers is None:
        num_workers = min(num_envs, len(os.sched_getaffinity(0)))
    if not 1 <= num_workers <= num_envs:
        raise ValueError(f"num_workers must be between 1 and num_envs={num_envs}, got {num_workers}")
    return num_workers


@dataclass(eq=False)
class _Exchange:
    asked: dict[int, list[int]] = field(default_factory=dict)  # the slots of each worker whose answer is awaited
    errors: dict[int, str] = field(default_factory=dict)  # of the guilty slots


@dataclass(eq=False)
class Pending:
    """A step or a reset of some slots that is under way, for the other half of it."""

    slots: list[int]
    running: list[int]  # those whose episode is not lost
    exchange: _Exchange | None  # none if no worker was asked, because the simulator is broken


class WorkerPool:
    """``num_envs`` simulators, spread over ``num_workers`` processes that share arrays with this one.

    Workers are started as programs of their own, so that they never import torch nor the caller's script. Of a worker
    that dies or hangs only the episode that it was working on is lost: a new worker repeats what the others of its
    slots had executed, to the bit.

    Steps and resets come in halves as well: ``step_send`` and ``reset_send`` return at once. What is seen depends on
    the order in which the other halves are called, never on which worker was faster.

    Args:
        spec: what to simulate.
        num_envs: number of simulators; each has a slot, ``0 .. num_envs - 1``.
        num_workers: number of processes, at most ``num_envs``.
        chunk_size: primitive actions per message.
        ignore_terminations, step_timeout, start_timeout, gpus: as of :func:`~vla_envs.make.make_env`.

    Attributes:
        device: where images are drawn, and stay.
        arrays: the shared arrays; rows are slots.
        texts: the current instruction of each slot.
        executed: the chunks of actions, float32 ``[C, A]``, that each slot's episode was given.
        unstarted: slots whose episode could not be started, ``MAX_FAILURES_IN_A_ROW`` times.
        errors, remarks: by slot, why its last lost episode was lost, and what its simulator says of the running one.
        restarts: how often a worker or a simulator had to be started again.
    """

    device = "cpu"

    def __init__(
        self,
        spec: SimulatorSpec,
        num_envs: int,
        num_workers: int,
        chunk_size: int,
        *,
        ignore_terminations: bool = False,
        step_timeout: float = 60.0,
        start_timeout: float = 120.0,
        gpus: Sequence[int] | None = None,
    ):
        self._memory: int | None = None
        self._owner = os.getpid()
        if spec.entry_point.startswith("__main__:"):
            raise ValueError(
                f"worker processes cannot import {spec.entry_point.replace(':', '.')}: put the simulator into a module "
                'of its own and type entry_point="module:Class"'
            )
        spec.check()
        self.spec = spec
        self.arrays, self._memory = SharedArrays.create(spec, num_envs, chunk_size)
        self.arrays.busy[:] = -1
        self.texts = [spec.tasks[0].instruction] * num_envs  # a policy reads those of idle slots too
        self.episodes: dict[int, Episode] = {}  # by slot
        self.executed: list[list[np.ndarray]] = [[] for _ in range(num_envs)]
        self.unstarted: set[int] = set()
        self.errors: dict[int, str] = {}
        self.remarks: dict[int, str] = {}
        self.restarts = 0
        self._told_of_instruction = False
        self._told: set[str] = set()  # tracebacks that were logged
        self._raised: dict[int, str] = {}  # by slot, what the simulator raised last in its episode
        self._has_worked = False  # a step ever has
        self._lost: set[int] = set()  # slots whose episode is over because its simulator failed
        self._displaced: set[int] = set()  # whose simulator went with its worker, and whose episode can continue
        self._failed: dict[Any, tuple[str, str]] = {}  # by episode, the error, and what was raised, since a step worked
        self._losses = 0  # since then
        self.step_timeout, self.start_timeout = step_timeout, start_timeout
        self._settings = {"spec": spec, "num_envs": num_envs, "chunk_size": chunk_size, "gpus": gpus}
        self._settings["ignore_terminations"] = ignore_terminations
        self._slots = [list(range(worker, num_envs, num_workers)) for worker in range(num_workers)]
        self._processes: list[WorkerProcess | None] = [None] * num_workers
        self._under_way: list[deque[_Exchange]] = [deque() for _ in range(num_workers)]  # by worker, in their order
        self.failures = [0] * num_workers  # in a row, of workers that did not say on what
        for worker in range(num_workers):
            self._start(worker)

    @property
    def num_workers(self) -> int:
        """Number of processes; slot ``s`` is simulated by number ``s % num_workers``."""
        return len(self._slots)

    def reset(self, episodes: Mapping[int, Episode]) -> None:
        """Start ``episodes`` in the given slots and render them. A failure is tried again in a new simulator.

        An episode that fails ``MAX_FAILURES_IN_A_ROW`` times is given up: it shows zeros, and the next step reports it.
        """
        self.reset_recv(self.reset_send(episodes))

    def restore(self, running: Mapping[int, tuple[Episode, Sequence[np.ndarray]]]) -> None:
        """Start episodes as :meth:`reset` does and execute chunks of actions, to where each of them was."""
        self.reset_recv(self._restore_send(running))

    def reset_send(self, episodes: Mapping[int, Episode]) -> Pending:
        """Begin a :meth:`reset`; :meth:`reset_recv` is the other half."""
        return self._restore_send({slot: (episode, ()) for slot, episode in episodes.items()})

    def reset_recv(self, pending: Pending) -> None:
        """Wait for the reset that :meth:`reset_send` has begun."""
        self.unstarted |= self._begin(pending.slots, MAX_FAILURES_IN_A_ROW, pending.exchange)
        for slot in self.unstarted & set(pending.slots):
            self._blank(slot)

    def _restore_send(self, running: Mapping[int, tuple[Episode, Sequence[np.ndarray]]]) -> Pending:
        for slot, (episode, chunks) in running.items():
            self.episodes[slot], self.executed[slot] = episode, list(chunks)
            self.remarks.pop(slot, None)
            self._raised.pop(slot, None)
        self._lost -= running.keys()
        self.unstarted -= running.keys()
        slots = list(running)
        return Pending(slots, slots, self._begin_send(slots))

    def give_up(self, episodes: Mapping[int, Episode]) -> None:
        """Have episodes in the given slots that could not be started, without trying."""
        for slot, episode in episodes.items():
            self.episodes[slot], self.executed[slot] = episode, []
            self._blank(slot)
            self.errors[slot] = "it could not be started before this run was resumed"
        self._lost |= episodes.keys()
        self.unstarted |= episodes.keys()
        self._displaced -= episodes.keys()

    def step(self, slots: Sequence[int]) -> list[int]:
        """Execute ``arrays.actions`` in the given slots; afterwards ``arrays`` have the outcomes, zero of all others.

        Returns the slots whose episode is lost because its simulator failed; raises as :meth:`check`.
        """
        self.check()
        return self.step_recv(self.step_send(slots, set(range(len(self.texts))).difference(slots)))

    def step_send(self, slots: Sequence[int], idle: Iterable[int] = ()) -> Pending:
        """Have some slots execute ``arrays.actions``; the outcomes of ``idle`` slots are to be zero."""
        self.arrays.clear_outcomes([*slots, *idle])  # a worker writes only what it executes
        running = [slot for slot in slots if slot not in self._lost]
        for slot in running:
            self.executed[slot].append(self.arrays.actions[slot].copy())
        try:
            exchange = self._post("step", {slot: None for slot in running if slot not in self._displaced})
        except BaseException:
            self._lost |= set(running)
            raise
        return Pending(list(slots), running, exchange)

    def step_recv(self, pending: Pending) -> list[int]:
        """Wait for the step that :meth:`step_send` has begun, and return what :meth:`step` does."""
        slots, running = pending.slots, pending.running
        assert pending.exchange is not None  # of a step there always is one
        try:
            self.check()
            for slot, error in self._finish(pending.exchange).items():
                self._lose(slot, error)
            self._begin([slot for slot in running if slot in self._displaced], 1)
        except BaseException:  # what this step did was not seen
            self._lost |= set(running)
            raise
        crashed = [slot for slot in slots if slot in self._lost]
        self.arrays.clear_outcomes(crashed)  # a simulator that failed in mid-chunk has written half of it
        if len(crashed) < len(slots):
            self._failed, self._losses, self._has_worked = {}, 0, True
        return crashed

    def drop(self, pending: Pending) -> None:
        """Wait for a step or a reset that is not wanted any more; its episodes are over."""
        try:
            if pending.exchange is not None:
                self._finish(pending.exchange)
        finally:
            self._lost |= set(pending.slots)
            self._displaced -= self._lost

    def check(self) -> None:
        """Raise :class:`SimulatorCrash` if ``MAX_LOST_IN_A_ROW`` episodes were lost and no step has worked since.

        ``MAX_FAILURES_IN_A_ROW`` are enough where no step ever has, and the simulator raised the same in each of them.
        """
        raised = {raised for _, raised in self._failed.values()}
        alike = len(self._failed) >= MAX_FAILURES_IN_A_ROW and len(raised) == 1 and "" not in raised
        is_mistake = alike and not self._has_worked
        if not is_mistake and not self._is_broken():
            return
        (error, _), count = list(self._failed.values())[-1], max(self._losses, len(self._failed))
        self._failed, self._losses = {}, 0
        if is_mistake:
            raise SimulatorCrash(
                f"{error}. All of the first {count} episodes ended like this: repair {self.spec.entry_point}, and try "
                "it with vla_envs.check_simulator"
            )
        raise SimulatorCrash(
            f"{error}. It was the last of {count} in a row without a step that worked: run `python -m vla_envs` to "
            "check the simulator; if the machine is only slow, pass a larger step_timeout"
        )

    def map(
        self,
        function: str,
        items: Sequence[Any],
        *,
        timeout: float = 600.0,
        on_result: Callable[[Any], object] | None = None,
        on_error: Callable[[Any, str], object] | None = None,
        **arguments: Any,
    ) -> list[Any]:
        """Run ``function(simulator, item, **arguments)`` for each item in the next free worker.

        Args:
            function: ``"module:name"``. It gets a simulator of its own, which has no slot.
            items: picklable values; results come back in their order.
            timeout: seconds per item.
            on_result: called with each result, in the order of finishing; what it returns comes back instead.
            on_error: called with an item that failed ``MAX_FAILURES_IN_A_ROW`` times, each in a new simulator, and with
                the last error; its result is ``None``.
            **arguments: further arguments of the function, picklable.

        Raises:
            RuntimeError: the function raised, and there is no ``on_error``; the message holds the worker's traceback.
            SimulatorCrash: workers died or hung ``MAX_FAILURES_IN_A_ROW`` times. With ``on_error``: the first
                ``MAX_LOST_IN_A_ROW`` items failed, or all.
        """
        if any(self._under_way):
            raise RuntimeError("steps or resets are under way: receive them first, or reset the environment")
        return Calls(self, function, items, arguments, timeout, on_result, on_error).run()

    def close(self) -> None:
        """Stop all workers; in a forked child, leave them to its parent."""
        processes = [process for process in self._processes if process is not None]
        self._processes = [None] * len(self._processes)
        if os.getpid() == self._owner:
            close_all(processes)
        for process in processes:
            process.forget()
        if self._memory is not None:
            os.close(self._memory)
            self._memory = None

    def __del__(self) -> None:
        if getattr(self, "_memory", None) is not None:
            self.close()

    def _begin_send(self, slots: Collection[int]) -> _Exchange | None:
        self._displaced |= set(slots)
        if not slots or self._is_broken():
            return None
        return self._post("begin", {slot: (self.episodes[slot], self.executed[slot]) for slot in slots})

    def _begin(self, slots: Collection[int], tries: int, exchange: _Exchange | None = None) -> set[int]:
        """Start the episodes of some slots and repeat what they had executed; returns those that were given up."""
        failures: Counter[int] = Counter()
        while True:
            for slot, error in self._finish(exchange).items() if exchange is not None else ():
                failures[slot] += 1
                if failures[slot] >= tries:
                    self._lose(slot, error)
            waiting = [slot for slot in slots if slot in self._displaced]
            if not waiting:
                break
            if (exchange := self._begin_send(waiting)) is None:
                for slot in waiting:
                    self._lose(slot)
                break
        given_up = {slot for slot in slots if slot in self._lost}
        if len(given_up) < len(slots):  # the simulator works: others began, so that the states of these are bad
            for episode in (self.episodes[slot] for slot in given_up):
                if self._failed.pop((episode.task_id, episode.trial_id, episode.seed), None) is not None:
                    self._losses -= 1
        return given_up

    def _lose(self, slot: int, error: str | None = None) -> None:
        """Give an episode up; without an error it never had a chance."""
        self._lost.add(slot)
        self._displaced.discard(slot)
        self.errors[slot] = error or "not tried, because the simulator is broken"
        if error is not None:
            episode = self.episodes[slot]
            self._failed[episode.task_id, episode.trial_id, episode.seed] = error, self._raised.get(slot, "")
            self._losses += 1

    def _is_broken(self) -> bool:
        """Tell whether too many episodes were lost; the same one again and again counts as well, at some point."""
        most = MAX_LOST_IN_A_ROW * MAX_FAILURES_IN_A_ROW * len(self.texts)
        return len(self._failed) >= MAX_LOST_IN_A_ROW or self._losses >= most

    def _blank(self, slot: int) -> None:
        for array in (self.arrays.images, self.arrays.wrist_images, self.arrays.states):
            array[slot] = 0
        task = self.spec.tasks[self.episodes[slot].task_id]
        self.texts[slot] = task.instructions[0] if task.instructions else task.instruction

    def _post(self, command: str, items: Mapping[int, Any]) -> _Exchange:
        exchange = _Exchange()
        try:
            for worker, slots in enumerate(self._slots):
                if mine := [slot for slot in slots if slot in items]:
                    exchange.asked[worker] = mine
                    self._under_way[worker].append(exchange)
                    self.process(worker).send(command, ({slot: items[slot] for slot in mine},), self.step_timeout)
        except BaseException:
            self.abandon(exchange.asked)
            raise
        return exchange

    def _finish(self, exchange: _Exchange) -> dict[int, str]:
        """Wait for all answers to a message; returns the errors of the guilty slots."""
        try:
            while exchange.asked:
                for worker, answer, error in self.answers(exchange.asked):
                    self._take_answer(worker, answer, error)
        except BaseException:
            self.abandon(exchange.asked)
            raise
        return exchange.errors

    def _take_answer(self, worker: int, answer: Any, error: str | None) -> None:
        """Note the answer to the first of a worker's messages, or that there will be none."""
        exchange = self._under_way[worker][0]
        if error is not None or not answer[0]:
            busy = int(self.arrays.busy[worker])
            blamed = [busy] if busy >= 0 else exchange.asked[worker]
            self._raised = {slot: text for slot, text in self._raised.items() if slot not in blamed}
            failure = self._report(worker, error or answer[1], blamed)
            self.replace(worker, failure)
            if busy >= 0 or self.failures[worker] >= MAX_FAILURES_IN_A_ROW:
                self.failures[worker] = 0
                exchange.errors |= dict.fromkeys(blamed, failure)
            return
        self._under_way[worker].popleft()
        del exchange.asked[worker]
        self.failures[worker] = 0
        texts, failed, remarks = answer[1]
        for slot, text in texts.items():
            self.texts[slot] = text
            wrong = undeclared_instruction(self.spec, self.episodes[slot], text)
            if wrong is not None and not self._told_of_instruction:
                _logger.warning("%s: %s", self._describe(slot), wrong)
                self._told_of_instruction = True
        for slot, remark in remarks.items():
            if self.remarks.get(slot) != remark:
                _logger.warning("%s: %s", self._describe(slot), remark)
                self.remarks[slot] = remark
        self._displaced -= texts.keys()
        self._displaced |= failed.keys()
        self.restarts += len(failed)
        for slot, traceback in failed.items():
            is_known = self._raised.get(slot) == traceback  # once more the same is no news
            exchange.errors[slot] = self._report(worker, traceback, [slot], is_known)
            self._raised[slot] = traceback

    def answers(self, asked: Iterable[int]) -> list[tuple[int, Any, str | None]]:
        """Wait for events: ``(worker, (ok, answer), None)``, or an error if it died or ran out of time."""
        processes = {worker: self.process(worker) for worker in asked}
        wait(processes.values(), min(process.deadline for process in processes.values()) - time.monotonic())
        events: list[tuple[int, Any, str | None]] = []
        for worker, process in processes.items():
            try:
                if (answer := process.receive()) is not None:
                    events.append((worker, answer, None))
                elif process.hangs():
                    events.append((worker, None, f"gave no answer for {process.allowed:.0f} s"))
            except EOFError:
                events.append((worker, None, process.how_it_ended()))
        return events

    def abandon(self, workers: Iterable[int]) -> None:
        """Start workers again whose answer is not awaited any more: it must not be taken for a later one."""
        for worker in list(workers):
            self.process(worker).kill()
            for exchange in self._under_way[worker]:
                del exchange.asked[worker]
            self._under_way[worker].clear()
            self._displaced |= {slot for slot in self._slots[worker] if slot in self.episodes} - self._lost
            self._start(worker)
            self.arrays.busy[worker] = -1

    def replace(self, worker: int, failure: str) -> None:
        """Kill a worker that failed and start another."""
        started, busy = self.process(worker).answered, int(self.arrays.busy[worker])
        self.abandon([worker])
        self.restarts += 1
        self.failures[worker] += 1
        if busy < 0 and not started:
            self._failed["start", self.restarts] = failure, ""

    def _report(self, worker: int, error: str, slots: Sequence[int], is_known: bool = False) -> str:
        """Log an error, and its traceback once, with the episodes that are to blame; returns all but that in a line."""
        lines = error.strip().splitlines()
        last = max((number for number, line in enumerate(lines) if line.startswith('  File "')), default=len(lines))
        start = next((number for number in range(last, len(lines)) if lines[number][:1] != " "), 0)
        traceback, error = lines[:start], " ".join(map(str.strip, lines[start:]))
        names = "; ".join(self._describe(slot) for slot in slots)
        message = f"simulator worker {worker}: {error}, while running {names}"
        shown = [] if "\n".join(traceback) in self._told else traceback
        self._told.add("\n".join(traceback))
        if not is_known:
            _logger.warning("%s", "\n".join([f"{message}. Started again, counted in env/worker_restarts.", *shown]))
        return message

    def _describe(self, slot: int) -> str:
        return self.spec.describe(self.episodes[slot]) if slot in self.episodes else f"slot {slot}"

    def process(self, worker: int) -> WorkerProcess:
        """Return a worker's process."""
        process = self._processes[worker]
        if os.getpid() != self._owner:
            raise RuntimeError(
                f"this environment ({self.spec.id}) belongs to process {self._owner}, from which this one was forked; "
                "make another one here with make_env"
            )
        if process is None:
            raise RuntimeError(f"this environment ({self.spec.id}) is closed; make a new one with make_env")
        return process

    def _start(self, worker: int) -> None:
        assert self._memory is not None
        arrays, settings = self.arrays, {**self._settings, "index": worker}
        self._processes[worker] = WorkerProcess(
            self._memory, settings, self.start_timeout, lambda: int(arrays.progress[worker])
        )
