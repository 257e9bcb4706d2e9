"""The process that runs simulators; :mod:`vla_envs.workers.process` starts it, with its connection and the memory.

It imports numpy and the simulator, never torch.
"""

import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pkgutil import resolve_name
from typing import Any

import numpy as np

from vla_envs.simulator import Episode, Simulator, SimulatorSpec
from vla_envs.workers.answers import WrongAnswer, check_observation, remark_of
from vla_envs.workers.chunks import run_chunk
from vla_envs.workers.shared_memory import SharedArrays

_NO_SLOT = -1  # the simulator of calls
_OURS = ("__main__", "vla_envs.workers.worker", "vla_envs.workers.chunks", "vla_envs.simulator")
_Answer = tuple[dict[int, str], dict[int, str], dict[int, str]]


class Worker:
    """Several simulators, stepped one after the other.

    Each method answers one message with ``(texts, errors, remarks)``: the instruction, or else the traceback, of each
    slot it was asked for, and the remark on its episode, if any.
    """

    def __init__(self, index: int, spec: SimulatorSpec, arrays: SharedArrays, ignore_terminations: bool):
        self.index, self.spec, self.arrays = index, spec, arrays
        self.ignore_terminations = ignore_terminations
        self.simulators: dict[int, Simulator] = {}
        self.elapsed: dict[int, int] = {}

    def begin(self, items: dict[int, tuple[Episode, list[np.ndarray]]]) -> _Answer:
        """Begin an episode in each of some slots, and execute chunks of actions ``[C, A]`` in it."""
        return self._for_each(items, self._begin_one)

    def step(self, slots: dict[int, None]) -> _Answer:
        """Execute the chunks of actions that lie in the shared memory for some slots."""
        return self._for_each(slots, lambda slot, _: self._step_one(slot, self.arrays.actions[slot]))

    def call(self, function: str, item: Any, arguments: dict[str, Any]) -> Any:
        """Run ``function(simulator, item, **arguments)`` in this process."""
        work = resolve_name(function)
        try:
            return work(self._simulator(_NO_SLOT), item, **arguments)
        except Exception:
            self._drop(_NO_SLOT)
            raise

    def close(self) -> None:
        """Free all simulators."""
        for simulator in self.simulators.values():
            simulator.close()

    def _for_each(self, items: dict[int, Any], action: Callable[[int, Any], str]) -> _Answer:
        texts, errors, remarks, started = {}, {}, {}, time.perf_counter()
        for slot, item in items.items():
            self.arrays.busy[self.index] = slot  # for the parent, should this kill us
            try:
                texts[slot] = action(slot, item)
                if remark := remark_of(self.simulators[slot]):
                    remarks[slot] = remark
            except (Exception, SystemExit) as error:
                errors[slot] = _format(error)
                self._drop(slot)
            self.arrays.progress[self.index] += 1
        self.arrays.busy[self.index] = -1
        self.arrays.seconds[self.index] += time.perf_counter() - started
        return texts, errors, remarks

    def _drop(self, slot: int) -> None:
        """Close a simulator in an unknown state: the next episode builds a new one."""
        broken = self.simulators.pop(slot, None)
        if broken is not None:
            with contextlib.suppress(Exception, SystemExit):
                broken.close()

    def _begin_one(self, slot: int, item: tuple[Episode, list[np.ndarray]]) -> str:
        episode, chunks = item
        self._simulator(slot).reset(episode)
        self.elapsed[slot] = 0
        text = self._observe(slot)
        for chunk in chunks:
            self.arrays.clear_outcomes(slot)
            text = self._step_one(slot, chunk)  # with its frame: all is as it was the first time
            self.arrays.progress[self.index] += 1
        return text

    def _step_one(self, slot: int, chunk: np.ndarray) -> str:
        simulator, arrays = self.simulators[slot], self.arrays
        outcomes = run_chunk(
            self.spec, simulator, chunk, self.elapsed[slot], ignore_terminations=self.ignore_terminations
        )
        for position, outcome in enumerate(outcomes):
            arrays.rewards[slot, position] = outcome.reward
            arrays.successes[slot, position] = outcome.success
            arrays.ended[slot, position] = outcome.ends_episode
            arrays.subtasks[slot] = outcome.subtasks
            arrays.executed[slot, position] = True
            self.elapsed[slot] += 1
        return self._observe(slot)

    def _observe(self, slot: int) -> str:
        observation = self.simulators[slot].observe()
        self.arrays.states[slot] = check_observation(self.spec, observation)
        self.arrays.images[slot] = observation.images
        if observation.wrist_images is not None:
            self.arrays.wrist_images[slot] = observation.wrist_images
        return observation.task_description

    def _simulator(self, slot: int) -> Simulator:
        if slot not in self.simulators:
            self.simulators[slot] = self.spec.make()
        return self.simulators[slot]


def _format(error: BaseException) -> str:
    """Return a traceback that begins where ours ends: in the simulator's own code; of a wrong answer the message."""
    if isinstance(error, WrongAnswer):
        return str(error)
    where = error.__traceback__
    while where is not None and where.tb_next and where.tb_frame.f_globals["__name__"] in _OURS:
        where = where.tb_next
    return "".join(traceback.format_exception(error.with_traceback(where)))


def main() -> None:
    """Answer messages until one says ``close`` or the parent is gone."""
    connection, memory = Connection(int(sys.argv[1])), int(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business, which then closes us
    for file in (connection.fileno(), memory):
        os.set_inheritable(file, False)  # what a simulator starts has no part in them
    try:
        settings = connection.recv()
        arrays = SharedArrays.attach(memory, settings["spec"], settings["num_envs"], settings["chunk_size"])
        worker = Worker(settings["index"], settings["spec"], arrays, settings["ignore_terminations"])
        while True:
            command, arguments = connection.recv()
            try:
                connection.send((True, getattr(worker, command)(*arguments)))
            except Exception:
                connection.send((False, traceback.format_exc()))
            if command == "close":
                return
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the parent is gone


if __name__ == "__main__":
    main()
