"""WorkerPool: simulators in processes of their own, with time-outs and restart of those that die or hang."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import wait
from typing import Any

from vla_envs.shared_memory import SharedArrays
from vla_envs.simulator import Episode, SimulatorSpec

_logger = logging.getLogger(__name__)
MAX_FAILURES_IN_A_ROW = 3
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "LP_NUM_THREADS": "1"}  # one core per worker; Mesa's rasteriser included


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
        ignore_terminations: go on after success.
        step_timeout: seconds that any answer of a worker may take.
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
        self.spec = spec
        self.arrays, self._memory = SharedArrays.create(spec, num_envs, chunk_size)
        self.arrays.busy[:] = -1
        self.texts = [""] * num_envs
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
            waiting = {slot: episodes[slot] for slot in self._exchange("reset", waiting)}
        self._gone -= set(episodes)

    def step(self, slots: Sequence[int]) -> list[int]:
        """Execute ``arrays.actions`` in the given slots, one message per worker.

        Returns:
            The slots whose episode is lost because its simulator or worker failed.

        Raises:
            SimulatorCrash: a worker failed ``MAX_FAILURES_IN_A_ROW`` times without success in between.
        """
        gone = [slot for slot in slots if slot in self._gone]
        return gone + self._exchange("step", {slot: None for slot in slots if slot not in self._gone})

    def map(
        self,
        function: str,
        items: Sequence[Any],
        *,
        timeout: float = 600.0,
        on_result: Callable[[Any], None] | None = None,
        **arguments: Any,
    ) -> list[Any]:
        """Run ``function(simulator, item, **arguments)`` for each item in whichever worker is free.

        Args:
            function: ``"module:name"`` of the function.
            items: picklable values; results come back in their order.
            timeout: seconds per item.
            on_result: called with each result, in the order of finishing.
            **arguments: further arguments of the function, picklable.

        Raises:
            RuntimeError: a call failed or took too long; the message holds the worker's traceback.
        """
        results: list[Any] = [None] * len(items)
        waiting, running = list(enumerate(items)), {}
        for worker in range(len(self._slots)):
            self._alive(worker)
        while waiting or running:
            for worker, process in enumerate(self._processes):
                if waiting and worker not in running:
                    index, item = waiting.pop(0)
                    process.send("call", (function, item, arguments))
                    running[worker] = index
            ready = wait([self._processes[worker].connection for worker in running], timeout)
            if not ready:
                raise RuntimeError(f"{function} took more than {timeout:.0f} s for an item; pass a larger timeout")
            for worker in [w for w in running if self._processes[w].connection in ready]:
                try:
                    ok, result = self._processes[worker].connection.recv()
                except (EOFError, ConnectionResetError):
                    ok, result = False, "the worker process died"
                if not ok:
                    raise RuntimeError(f"{function} failed in a worker of {self.spec.id}:\n{result}")
                results[running.pop(worker)] = result
                if on_result is not None:
                    on_result(result)
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
        asked: dict[int, dict[int, Any]] = {}
        failed: dict[int, str] = {}
        for worker, slots in enumerate(self._slots):
            mine = {slot: items[slot] for slot in slots if slot in items}
            if not mine:
                continue
            try:
                self._alive(worker).send(command, (mine if command == "reset" else list(mine),))
                asked[worker] = mine
            except (BrokenPipeError, ConnectionResetError):
                failed |= self._replace(worker, mine, "died")
        while asked:
            now = time.monotonic()
            deadlines = {worker: self._processes[worker].deadline for worker in asked}
            timeout = max(0.0, min(deadlines.values()) - now)
            ready = wait([self._processes[worker].connection for worker in asked], timeout)
            for worker in list(asked):
                process = self._processes[worker]
                if process.connection in ready:
                    mine = asked.pop(worker)
                    try:
                        ok, answer = process.receive(self.step_timeout)
                    except (EOFError, ConnectionResetError):
                        failed |= self._replace(worker, mine, "died")
                        continue
                    if not ok:
                        failed |= self._replace(worker, mine, f"failed:\n{answer}")
                        continue
                    texts, errors = answer
                    for slot, text in texts.items():
                        self.texts[slot] = text
                    if errors:
                        self.restarts += len(errors)
                        failed |= errors
                        slot, error = next(iter(errors.items()))
                        self._count_failure(worker, [slot], f"failed:\n{error}")
                    elif command == "step":
                        self._failures[worker] = 0
                elif time.monotonic() >= process.deadline:
                    failed |= self._replace(worker, asked.pop(worker), f"gave no answer for {self.step_timeout:.0f} s")
        return sorted(failed)

    def _replace(self, worker: int, slots: dict[int, Any], reason: str) -> dict[int, str]:
        """Kill and restart a worker. Every episode that it held is lost; returns those it was asked about."""
        process = self._processes[worker]
        process.kill()
        if process.returncode not in (None, 0) and reason == "died":
            reason = f"died with exit code {process.returncode}"
        self.restarts += 1
        self._gone |= set(self._slots[worker])
        busy = int(self.arrays.busy[worker])
        self.arrays.busy[worker] = -1
        self._count_failure(worker, [busy] if busy >= 0 else list(slots), reason)
        self._start(worker)
        return dict.fromkeys(slots, reason)

    def _count_failure(self, worker: int, slots: list[int], reason: str) -> None:
        self._failures[worker] += 1
        who = "; ".join(self._describe(slot) for slot in slots)
        message = f"simulator worker {worker} {reason.rstrip()}\n  while running {who}"
        if self._failures[worker] >= MAX_FAILURES_IN_A_ROW:
            raise SimulatorCrash(
                f"{message}\n  This was failure {self._failures[worker]} in a row. Run `python -m vla_envs` to check "
                "the simulator; if the machine is only slow, pass a larger step_timeout."
            )
        _logger.warning("%s\n  Started again; the episode is lost and counted in env/worker_restarts.", message)

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
        self._processes[worker] = _Process(
            self._memory, {**self._settings, "index": worker}, self.step_timeout, self.start_timeout
        )


class _Process:
    """One worker process, its connection and the time by which it has to answer."""

    def __init__(self, memory: int, settings: dict[str, Any], step_timeout: float, start_timeout: float):
        self.connection, theirs = Pipe()
        environment = {**_ONE_THREAD, **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._popen = subprocess.Popen(
            [sys.executable, "-m", "vla_envs.worker", str(theirs.fileno()), str(memory)],
            pass_fds=(theirs.fileno(), memory),
            stdin=subprocess.DEVNULL,  # nothing a simulator asks can ever wait for an answer
            env=environment,
        )
        theirs.close()
        self._timeout = step_timeout + start_timeout
        self.deadline = float("inf")
        self.connection.send(settings)

    def send(self, command: str, arguments: tuple) -> None:
        self.connection.send((command, arguments))
        self.deadline = time.monotonic() + self._timeout

    def receive(self, step_timeout: float) -> tuple[bool, Any]:
        answer = self.connection.recv()
        self._timeout = step_timeout  # the slow start is over
        return answer

    @property
    def returncode(self) -> int | None:
        return self._popen.returncode

    def kill(self) -> None:
        self._popen.kill()  # also ends a stopped process
        self._popen.wait()
        self.connection.close()

    def close(self) -> None:
        try:
            self.send("close", ())
            self._popen.wait(timeout=5.0)
        except (OSError, subprocess.TimeoutExpired):
            self._popen.kill()
            self._popen.wait()
        self.connection.close()
