"""One worker process as its parent sees it: it dies with its parent, and no message to it waits without end."""

import contextlib
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future
from functools import cache
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

from vla_envs.probe import import_path
from vla_envs.rendering.gpus import worker_environment

_ONE_THREAD = {"OMP_NUM_THREADS": "1", "LP_NUM_THREADS": "1"}  # one core per worker; Mesa's rasteriser included
_PIECE = 1 << 20  # bytes that are read at once
# Before anything is imported, which may take a while, the worker asks the kernel to kill it when its parent ends. That
# reaches it if it is stopped, too, or does not listen. 1 is PR_SET_PDEATHSIG of linux/prctl.h.
_PROGRAM = """
import ctypes, os, runpy, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[3]):
    sys.exit()  # it has ended in the meantime
runpy.run_module("vla_envs.workers.worker", run_name="__main__")
"""


class WorkerProcess:
    """A program of its own in a process group of its own, its connection and the time by which it has to answer.

    Messages are those of :class:`multiprocessing.connection.Connection`, which the worker has; this side never blocks.
    Several may be under way; they are answered in order. ``memory`` is the file of the shared arrays, ``settings`` the
    first message, ``start_timeout`` the seconds that its first answer may take on top, and ``progress`` returns a
    number that changes whenever the process gets further.
    """

    def __init__(self, memory: int, settings: dict[str, Any], start_timeout: float, progress: Callable[[], int]):
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        environment = {**os.environ, **_ONE_THREAD, **worker_environment(settings["index"], settings["gpus"])}
        environment["PYTHONPATH"] = import_path()
        command = [sys.executable, "-P", "-c", _PROGRAM, str(theirs.fileno()), str(memory), str(os.getpid())]
        with theirs:
            self._popen = _in_lasting_thread(
                lambda: subprocess.Popen(
                    command,
                    pass_fds=(theirs.fileno(), memory),
                    stdin=subprocess.DEVNULL,  # nothing a simulator asks can ever wait for an answer
                    env=environment,
                    process_group=0,
                )
            )
        self.pid = self._popen.pid
        self._ending = os.pidfd_open(self.pid)  # tells its end even if a child that it leaves holds the connection
        self._start_timeout = start_timeout  # until the first answer
        self.allowed, self.deadline = 0.0, float("inf")
        self._timeouts: deque[float] = deque()  # of the messages under way
        self.answered = False
        self._silent = False  # has closed its connection: its end is awaited
        self._progress = progress
        self._seen = (0, 0, 0)  # how far it was when last looked at
        self._outgoing, self._incoming = bytearray(), bytearray()
        self._write(settings)

    def send(self, command: str, arguments: tuple, timeout: float) -> None:
        """Send a message that has to be answered within ``timeout`` seconds after the answer to the one before."""
        self._timeouts.append(timeout)
        if len(self._timeouts) == 1:
            self._allow(timeout + self._start_timeout)
        self._write((command, arguments))
        if len(self._timeouts) == 1:
            self._seen = self._state()

    def receive(self) -> Any:
        """Return the next answer, or ``None`` as long as it is not complete; ``EOFError`` if the process has ended."""
        self._flush()
        answer = self._read()
        if answer is None and self._end() is not None:
            answer = self._read()  # what it has said before it ended
            if answer is None:
                raise EOFError
        if answer is not None:
            self._timeouts.popleft()
            if self._timeouts:  # it turns to the next one
                self._allow(self._timeouts[0])
                self._seen = self._state()
        return answer

    def hangs(self) -> bool:
        """Tell whether its time is up; one that has got further gets as much time again."""
        if time.monotonic() < self.deadline:
            return False
        before, self._seen = self._seen, self._state()
        if self._seen == before:
            return True
        self.deadline = time.monotonic() + self.allowed
        return False

    def how_it_ended(self) -> str:
        """Say why it is no more."""
        end = self._end()
        if end.si_code == os.CLD_EXITED:
            return f"died (exit status {end.si_status})"
        return f"died ({signal.Signals(end.si_status).name})"

    def watch(self, poll: select.poll) -> None:
        """Have ``poll`` return when there is something to do."""
        if not self._silent:
            poll.register(self._socket, select.POLLIN | (select.POLLOUT if self._outgoing else 0))
        poll.register(self._ending, select.POLLIN)

    def kill(self) -> None:
        """End the process, even a stopped one, and all that it has started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)  # its number is not given away before it is waited for
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(timeout=5.0)  # longer only if a driver does not let it go
        self.forget()

    def forget(self) -> None:
        """Close this process's ends; a forked child leaves the worker to its parent."""
        self._socket.close()
        ending, self._ending = self._ending, -1  # a second time its number may be another file's
        if ending >= 0:
            os.close(ending)

    def _allow(self, seconds: float) -> None:
        self.allowed, self.deadline = seconds, time.monotonic() + seconds

    def _write(self, message: Any) -> None:
        data = pickle.dumps(message)
        header = struct.pack("!i", len(data)) if len(data) < 1 << 31 else struct.pack("!iQ", -1, len(data))
        self._outgoing += header
        self._outgoing += data
        self._flush()

    def _state(self) -> tuple[int, int, int]:
        return self._progress(), len(self._outgoing), len(self._incoming)

    def _flush(self) -> None:
        with contextlib.suppress(OSError):  # full; or the worker is dead, which is noticed when its answer is awaited
            while self._outgoing:
                sent = self._socket.send(memoryview(self._outgoing)[:_PIECE])
                del self._outgoing[:sent]

    def _read(self) -> Any:
        with contextlib.suppress(OSError):  # nothing there
            while piece := self._socket.recv(_PIECE):
                self._incoming += piece
            self._silent = True
        body = self._body()
        if body is None:
            return None
        answer = pickle.loads(memoryview(self._incoming)[body])
        self._incoming = self._incoming[body.stop :]
        self._start_timeout, self.answered = 0.0, True
        return answer

    def _body(self) -> slice | None:
        data, start = self._incoming, 4
        if len(data) < start:
            return None
        (length,) = struct.unpack_from("!i", data)
        if length < 0:
            if len(data) < 12:
                return None
            (length,), start = struct.unpack_from("!Q", data, 4), 12
        return slice(start, start + length) if len(data) >= start + length else None

    def _end(self) -> Any:
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # other code has waited for it
            return SimpleNamespace(si_code=os.CLD_EXITED, si_status=0)


def wait(processes: Collection[WorkerProcess], timeout: float) -> None:
    """Wait until a process has something to say, can be sent more, or has ended."""
    if any(process._body() is not None for process in processes):  # read, but not returned yet
        return
    poll = select.poll()
    for process in processes:
        process.watch(poll)
    poll.poll(max(0.0, 1e3 * timeout) if timeout != float("inf") else None)


def close_all(processes: Collection[WorkerProcess], timeout: float = 5.0) -> None:
    """Have processes free what they have, and kill those that take longer than ``timeout`` seconds in all."""
    deadline, left = time.monotonic() + timeout, list(processes)
    for process in left:
        process.send("close", (), timeout)
    while left and time.monotonic() < deadline:
        wait(left, deadline - time.monotonic())
        for process in list(left):
            try:
                process.receive()
            except EOFError:
                left.remove(process)
    for process in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    for process in processes:
        process.kill()


def _in_lasting_thread(function: Callable[[], subprocess.Popen]) -> subprocess.Popen:
    """Call a function in a thread that lasts as long as this process.

    A worker asks the kernel to be killed when its parent ends, and the kernel means the thread that started it.
    """
    result: Future = Future()
    _jobs().put((result, function))
    return result.result()


@cache
def _jobs() -> SimpleQueue[tuple[Future, Callable[[], Any]]]:
    jobs: SimpleQueue[tuple[Future, Callable[[], Any]]] = SimpleQueue()
    threading.Thread(target=_work, args=(jobs,), name="starts simulator workers", daemon=True).start()
    return jobs


def _work(jobs: SimpleQueue[tuple[Future, Callable[[], Any]]]) -> None:
    while True:
        result, function = jobs.get()
        try:
            result.set_result(function())
        except BaseException as error:
            result.set_exception(error)
        del result, function


os.register_at_fork(after_in_child=_jobs.cache_clear)  # threads stay with the parent
