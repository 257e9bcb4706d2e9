"""What benchmarks of rollouts share: CPU time and memory of all processes, and something to time."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psutil


@dataclass
class Contender:
    """Something to time.

    Attributes:
        name: for the table.
        start: begins new episodes.
        run: executes the same chunks, float32 ``[N, C, A]``, a number of times in every world.
        close: ends its processes.
        decisions: how often to run them per repetition.
        wall, cpu: samples in seconds per decision of one environment.
    """

    name: str
    start: Callable[[], Any]
    run: Callable[[np.ndarray, int], Any]
    close: Callable[[], Any]
    decisions: int
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def measure(self, actions: np.ndarray) -> None:
        self.start()
        self.run(actions, 1)  # warms up
        cpu, wall = cpu_time_of_all(), time.perf_counter()
        self.run(actions, self.decisions)
        scale = 1 / (self.decisions * len(actions))
        self.wall.append((time.perf_counter() - wall) * scale)
        self.cpu.append((cpu_time_of_all() - cpu) * scale)


def cpu_time_of_all() -> float:
    """CPU seconds so far of this process and of all its living descendants, threads included."""
    own = psutil.Process()
    times = [process.cpu_times() for process in (own, *own.children(recursive=True))]
    return sum(each.user + each.system for each in times)


def memory_of_descendants() -> float:
    """Megabytes of all living descendants of this process; what several share counts once."""
    return sum(process.memory_full_info().pss for process in psutil.Process().children(recursive=True)) / 1e6
