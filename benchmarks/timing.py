"""What benchmarks of rollouts share: CPU time and memory of all processes, and something to time."""

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np


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
    ticks = sum(int(fields[11]) + int(fields[12]) for _, fields in _family())  # user and system
    return ticks / os.sysconf("SC_CLK_TCK")


def memory_of_descendants() -> float:
    """Megabytes of all living descendants of this process; what several share counts once."""
    total = 0
    for process, _ in _family():
        if process != os.getpid():
            lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
            total += next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 1000


def _family() -> Iterator[tuple[int, list[str]]]:
    """This process and its descendants, with the fields of ``/proc/PID/stat`` from the third on."""
    processes = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                processes[int(entry.name)] = (entry / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):  # ended meanwhile
                continue
    waiting = [os.getpid()]
    while waiting:
        parent = waiting.pop()
        yield parent, processes[parent]
        waiting.extend(child for child, fields in processes.items() if int(fields[1]) == parent)
