"""WorkerPool: simulators in processes of their own, with time-outs and restart of those that die or hang."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import wait
from typing import Any

from vla_envs.rendering.egl import WORKER
from vla_envs.simulator import Episode, SimulatorSpec
from vla_envs.workers.shared_memory import SharedArrays

_logger = logging.getLogger(__name__)
MAX_FAILURES_IN_A_ROW = 3
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "LP_NUM_THREADS": "1"}  # one core per worker; Mesa's rasteriser included


def count_workers(num_envs: int, num_workers: int | None) -> int:
    """Return how many processes share ``num_envs`` simulators; one per available core if nobody says.

    Raises:
        ValueError: there would be more of them than simulators.
    """
    if num_workers is None:
        num_workers = min(num_envs, len(os.sched_getaffinity(0)))
    if not 1 <= num_workers <= num_envs:
        raise ValueError(f"num_workers must be between 1 and num_envs={num_envs}, got {num_workers}")
    return num_workers


class SimulatorCrash(RuntimeError):
    """A simulator failed again and again; the message names benchmark, task, trial and seed."""


class WorkerPool:
    """``num_envs`` simulators, spread over ``num_workers`` processes that share arrays with this one.

    Workers are started as programs of their own, so that they never import torch nor the caller's script.

    Args:
        spec: what to simulate.
        num_envs: number of simulators; each has a slot, ``0 .. num_envs - 1``.
        num_workers: number of processes, at most ``num_envs``.
        chunk_size: primitive actions per message.
        ignore_terminations: continue after success.
        step_timeout: seconds that a worker may take before it turns to the next of its slots.
        start_timeout: seconds that the first answer of a new worker may take on top.

    Attributes:
        arrays: the shared arrays; rows are slots.
        texts: the current instruction of each slot.
        restarts: how often a worker or a simulator had to be started again.
    """

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
    ):
        self._memory: int | None = None
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
        self.episodes: list[Episode | None] = [None] * num_envs
        self.restarts = 0
        self._gone: set[int] = set()  # slots whose simulator went with its worker and has to be reset
        self.step_timeout, self.start_timeout = step_timeout, start_timeout
        self._settings = {
            "spec": spec,
            "num_envs": num_envs,
            "chunk_size": chunk_size,
            "ignore_terminations": ignore_terminations,
        }
        self._slots = [list(range(worker, num_envs, num_workers)) for worker in range(num_workers)]
        self._processes: list[_Process | None] = [None] * num_workers
        self._failures = [0] * num_workers
        for worker in range(num_workers):
            self._start(worker)

    def reset(self, episodes: dict[int, Episode]) -> None:
        """Start ``episodes`` in the given slots and render them. A failure is tried again in a new simulator.

        Raises:
            SimulatorCrash: it failed ``MAX_FAILURES_IN_A_ROW`` times.
        """
        for slot, episode in episodes.items():
            self.episodes[slot] = episode
        waiting = episodes
        while waiting:
            failed = self._exchange("reset", waiting)
            self._gone -= waiting.keys() - set(failed)
            waiting = {slot: episodes[slot] for slot in failed}

    def step(self, slots: Sequence[int]) -> list[int]:
        """Execute ``arrays.actions`` in the given slots, one message per worker.

        Afterwards ``arrays`` hold the outcomes; those of all other slots and of lost episodes are zero.

        Returns:
            The slots whose episode is lost because its simulator or worker failed.

        Raises:
            SimulatorCrash: a worker failed ``MAX_FAILURES_IN_A_ROW`` times without success in between.
        """
        outcomes = (self.arrays.rewards, self.arrays.successes, self.arrays.executed)
        for array in outcomes:
            array[:] = 0  # a worker writes only what it executes
        gone = [slot for slot in slots if slot in self._gone]
        crashed = gone + self._exchange("step", {slot: None for slot in slots if slot not in self._gone})
        for array in outcomes:
            array[crashed] = 0  # a simulator that failed in mid-chunk has written half of it
        return crashed

    def map(
        self,
        function: str,
        items: Sequence[Any],
        *,
        timeout: float = 600.0,
        on_result: Callable[[Any], object] | None = None,
        **arguments: Any,
    ) -> list[Any]:
        """Run ``function(simulator, item, **arguments)`` for each item in whichever worker is free.

        Args:
            function: ``"module:name"`` of the function. It gets a simulator of its own, apart from the slots.
            items: picklable values; results come back in their order.
            timeout: seconds per item.
            on_result: called with each result, in the order of finishing.
            **arguments: further arguments of the function, picklable.

        Raises:
            RuntimeError: the function raised; the message holds the worker's traceback.
            SimulatorCrash: workers died or hung ``MAX_FAILURES_IN_A_ROW`` times; before that the item runs again.
        """
        results: list[Any] = [None] * len(items)
        waiting, running = deque(range(len(items))), dict[int, int]()
        try:
            while waiting or running:
                for worker in range(len(self._slots)):
                    if waiting and worker not in running:
                        running[worker] = waiting.popleft()
                        call = (function, items[running[worker]], arguments)
                        self._alive(worker).send("call", call, timeout)
                for worker, answer, error in self._answers(running):
                    index = running.pop(worker)
                    if error is not None:
                        waiting.append(index)
                        self._replace(worker, f"{error}\n  in {function}({items[index]!r})")
                    elif answer[0]:
                        results[index] = answer[1]
                        self._failures[worker] = 0
                        if on_result is not None:
                            on_result(results[index])
                    else:
                        raise RuntimeError(f"{function} failed in a worker of {self.spec.id}:\n{answer[1]}")
        except BaseException:
            self._abandon(running)
            raise
        return results

    def close(self) -> None:
        """Stop all workers."""
        for process in self._processes:
            if process is not None:
                process.close()
        self._processes = [None] * len(self._processes)
        if self._memory is not None:
            os.close(self._memory)
            self._memory = None

    def __del__(self) -> None:
        if getattr(self, "_memory", None) is not None:
            self.close()

    def _exchange(self, command: str, items: dict[int, Any]) -> list[int]:
        """Send one message to every worker concerned and wait for all answers; returns the slots that failed."""
        asked: dict[int, list[int]] = {}
        failed: set[int] = set()
        try:
            for worker, slots in enumerate(self._slots):
                if mine := [slot for slot in slots if slot in items]:
                    message = {slot: items[slot] for slot in mine} if command == "reset" else mine
                    asked[worker] = mine
                    process = self._alive(worker)
                    process.send(command, (message,), self.step_timeout)
                    process.busy = mine[0]
            while asked:
                for worker, answer, error in self._answers(asked):
                    mine = asked.pop(worker)
                    if error is not None or not answer[0]:
                        failed |= set(mine)
                        busy = int(self.arrays.busy[worker])
                        blamed = [busy] if busy >= 0 else mine
                        self._replace(worker, self._blame(error or f"failed:\n{answer[1]}", blamed))
                        continue
                    texts, errors = answer[1]
                    for slot, text in texts.items():
                        self.texts[slot] = text
                    if errors:
                        failed |= errors.keys()
                        self.restarts += len(errors)
                        slot, traceback = next(iter(errors.items()))
                        self._count_failure(worker, self._blame(f"failed:\n{traceback.rstrip()}", [slot]))
                    elif command == "step":
                        self._failures[worker] = 0
        except BaseException:
            self._abandon(asked)
            raise
        return sorted(failed)

    def _answers(self, asked: Iterable[int]) -> list[tuple[int, Any, str | None]]:
        """Wait for events: ``(worker, (ok, answer), None)``, or an error if it died or ran out of time."""
        processes = {worker: self._alive(worker) for worker in asked}
        timeout = min(process.deadline for process in processes.values()) - time.monotonic()
        ready = wait([process.connection for process in processes.values()], max(0.0, timeout))
        events: list[tuple[int, Any, str | None]] = []
        for worker, process in processes.items():
            if process.connection in ready:
                try:
                    events.append((worker, process.receive(), None))
                except (EOFError, OSError):
                    events.append((worker, None, "died"))
            elif time.monotonic() >= process.deadline:
                busy = int(self.arrays.busy[worker])
                if busy not in (-1, process.busy):  # many slots take a while: it hangs if it does not get on
                    process.busy, process.deadline = busy, time.monotonic() + process.allowed
                    continue
                events.append((worker, None, f"gave no answer for {process.allowed:.0f} s"))
        return events

    def _abandon(self, workers: Iterable[int]) -> None:
        """Start workers again whose answer nobody waits for any more: it must not be taken for a later one."""
        for worker in workers:
            self._alive(worker).kill()
            self._gone |= set(self._slots[worker])
            self._start(worker)

    def _replace(self, worker: int, error: str) -> None:
        """Kill a worker that failed and start another; the episodes of all its slots are gone."""
        self._abandon([worker])
        self.arrays.busy[worker] = -1
        self.restarts += 1
        self._count_failure(worker, error)

    def _count_failure(self, worker: int, error: str) -> None:
        self._failures[worker] += 1
        message = f"simulator worker {worker} {error}"
        if self._failures[worker] >= MAX_FAILURES_IN_A_ROW:
            raise SimulatorCrash(
                f"{message}\n  This was failure {self._failures[worker]} in a row. Run `python -m vla_envs` to check "
                "the simulator; if the machine is only slow, pass a larger step_timeout."
            )
        _logger.warning("%s\n  Started again; the episode is lost and counted in env/worker_restarts.", message)

    def _blame(self, error: str, slots: Sequence[int]) -> str:
        return f"{error}\n  while running {'; '.join(self._describe(slot) for slot in slots)}"

    def _describe(self, slot: int) -> str:
        episode = self.episodes[slot]
        if episode is None:
            return f"slot {slot}"
        task = self.spec.tasks[episode.task_id].name
        return f"{self.spec.id} task {task} trial {episode.trial_id} seed {episode.seed}"

    def _alive(self, worker: int) -> _Process:
        process = self._processes[worker]
        if process is None:
            raise RuntimeError(f"this environment ({self.spec.id}) is closed; make a new one with make_env")
        return process

    def _start(self, worker: int) -> None:
        assert self._memory is not None
        self._processes[worker] = _Process(self._memory, {**self._settings, "index": worker}, self.start_timeout)


class _Process:
    """One worker process, its connection and the time by which it has to answer."""

    def __init__(self, memory: int, settings: dict[str, Any], start_timeout: float):
        self.connection, theirs = Pipe()
        environment = {**os.environ, **_ONE_THREAD, WORKER: str(settings["index"])}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        self._popen = subprocess.Popen(
            [sys.executable, "-m", "vla_envs.workers.worker", str(theirs.fileno()), str(memory)],
            pass_fds=(theirs.fileno(), memory),
            stdin=subprocess.DEVNULL,  # nothing a simulator asks can ever wait for an answer
            env=environment,
        )
        theirs.close()
        self._start_timeout = start_timeout  # until the first answer
        self.allowed, self.deadline = 0.0, float("inf")
        self.busy = -1  # the slot that it was working on when last looked at
        self.connection.send(settings)

    def send(self, command: str, arguments: tuple, timeout: float) -> None:
        """Send a message that has to be answered within ``timeout`` seconds."""
        self.allowed = timeout + self._start_timeout
        self.deadline = time.monotonic() + self.allowed
        with contextlib.suppress(OSError):  # a worker that is dead is noticed when its answer is awaited
            self.connection.send((command, arguments))

    def receive(self) -> tuple[bool, Any]:
        answer = self.connection.recv()
        self._start_timeout = 0.0
        return answer

    def kill(self) -> None:
        self._popen.kill()  # also ends a stopped process
        self._popen.wait()
        self.connection.close()

    def close(self) -> None:
        self.send("close", (), timeout=5.0)
        try:
            self._popen.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
        self.connection.close()
