"""Functions that are run on many items in the workers of a pool, such as the recording of demonstrations."""

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

MAX_FAILURES_IN_A_ROW = 3  # of an episode that cannot be started, of a worker that dies before it does anything
MAX_LOST_IN_A_ROW = 10  # different episodes, over all slots, without one step that works: the simulator is broken


class SimulatorCrash(RuntimeError):
    """A simulator is broken: it lost one episode after the other; the message names the last one and its error."""


def reason(error: str) -> str:
    """Return the one line of a worker's error that says why: the last that is not indented."""
    return next((line for line in reversed(error.splitlines()) if line.strip() and not line[0].isspace()), "")


class Calls:
    """One function on many items: the arguments of :meth:`~vla_envs.workers.pool.WorkerPool.map`."""

    def __init__(
        self,
        pool: Any,
        function: str,
        items: Sequence[Any],
        arguments: Mapping[str, Any],
        timeout: float,
        on_result: Callable[[Any], object] | None,
        on_error: Callable[[Any, str], object] | None,
    ):
        self._pool, self._function, self._items, self._arguments = pool, function, items, arguments
        self._timeout, self._on_result, self._on_error = timeout, on_result, on_error
        self._results: list[Any] = [None] * len(items)
        self._waiting = deque(range(len(items)))
        self._running: dict[int, int] = {}  # the item of each worker
        self._failures: Counter[int] = Counter()
        self._succeeded = self._lost = 0

    def run(self) -> list[Any]:
        """Run until all items have a result, or were given up."""
        try:
            while self._waiting or self._running:
                for worker in range(self._pool.num_workers):
                    if self._waiting and worker not in self._running:
                        index = self._running[worker] = self._waiting.popleft()
                        call = (self._function, self._items[index], self._arguments)
                        self._pool.process(worker).send("call", call, self._timeout)
                for worker, answer, error in self._pool.answers(self._running):
                    self._take(worker, answer, error)
        except BaseException:
            self._pool.abandon(self._running)
            raise
        return self._results

    def _take(self, worker: int, answer: Any, error: str | None) -> None:
        index = self._running.pop(worker)
        if error is None and answer[0]:
            self._pool.failures[worker] = 0
            self._succeeded += 1
            self._results[index] = answer[1] if self._on_result is None else self._on_result(answer[1])
            return
        if error is not None:
            failure = f"simulator worker {worker}: {error}, in {self._function}({self._items[index]!r})"
            self._pool.replace(worker, failure)
            if self._on_error is None and self._pool.failures[worker] >= MAX_FAILURES_IN_A_ROW:
                self._pool.failures[worker] = 0
                raise SimulatorCrash(f"{failure}; this was failure {MAX_FAILURES_IN_A_ROW} in a row")
        else:
            failure = f"{self._function} failed in a worker of {self._pool.spec.id}:\n{answer[1]}"
            if self._on_error is None:
                raise RuntimeError(failure)
            self._pool.restarts += 1
        self._failures[index] += 1
        if self._on_error is None or self._failures[index] < MAX_FAILURES_IN_A_ROW:
            self._waiting.appendleft(index)
            return
        self._lost += 1
        self._on_error(self._items[index], failure)
        if not self._succeeded and self._lost == min(MAX_LOST_IN_A_ROW, len(self._items)):
            raise SimulatorCrash(f"{reason(failure)}; all of the first {self._lost} failed like this")
