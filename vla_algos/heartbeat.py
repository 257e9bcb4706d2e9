"""Processes that work together hear of one that is lost: of a dead one at once, of a stopped one after a time-out.

A thread of each process sends a sign of life to the first process every few seconds, and the first one to all others,
over connections of their own: what they tell each other waits for hours, because a process may have long work to do
alone (a warm start, saving), and a process that is alive is waited for. Exchanges of weights, which wait for minutes,
say nothing of who is lost. Whoever notices a loss tells the others.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any

from torch.distributed import Store

TIMEOUT = 120.0  # seconds; the longest call that may hold Python's lock, in which a process gives no sign of life
GRACE = 5.0  # seconds that the main thread has to end in an orderly way
START = 600.0  # seconds for all processes to come
_KEY = "vla_heartbeat"


class ProcessLost(RuntimeError):
    """The processes can no longer work together; the message names the one that has failed."""


class FirstFailed(ProcessLost):
    """The first process has failed, which prints its error itself."""


@dataclass
class _Peer:
    """Another process, as this one knows it.

    Attributes:
        connection: to it.
        name: number, host and process id.
        heard: when its last sign of life came.
        unread: the beginning of a message.
        waits: number, among those of a group, and name of the collective in which it waits, and for how many seconds.
        left: has said that it is through.
    """

    connection: socket.socket
    name: str
    heard: float
    unread: bytes = b""
    waits: tuple[int, str, float] | None = None
    left: bool = False


class Heartbeat:
    """Tells the processes of a run of each other, while used as a context manager; in the main thread of each.

    A process is lost when it raises, when it ends without having left this context, when it gives no sign of life for
    ``timeout`` seconds, or when all wait in different collectives as long. Then :class:`ProcessLost` is raised in the
    main threads of all others; one that does not end by it within seconds, because it waits in a collective, prints the
    same line and is ended. A process that was stopped and continues after the others have given it up ends at once,
    before its main thread executes another line: another run may have taken its place.

    Args:
        store: tells the others where the first process listens.
        rank: number of this process.
        world_size: number of processes.
        address: where the others find the first process; ``None``: where torchrun and SLURM have all meet.
        timeout: seconds without a sign of life; the environment variable ``VLA_HEARTBEAT_TIMEOUT`` unless given,
            otherwise 120.

    Attributes:
        lost: what is wrong; ``None`` while nothing is.

    Raises:
        ProcessLost: not all processes came within ten minutes.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        timeout: float | None = None,
        address: str | None = None,
    ):
        self.rank, self.world_size = rank, world_size
        self.timeout = float(os.environ.get("VLA_HEARTBEAT_TIMEOUT", TIMEOUT)) if timeout is None else timeout
        self.lost: str | None = None
        self._known = threading.Event()  # what is lost
        self._told = False  # the main thread
        self._of_first = False  # by its own words
        self._closed = threading.Event()
        self._lock = threading.RLock()  # the signal handler may find its own thread inside
        self._interval = min(5.0, self.timeout / 10)
        self._waits: tuple[int, str, float] | None = None
        self._collectives: Counter[tuple[int, ...] | None] = Counter()  # by who takes part
        self._name = f"process {rank} of {world_size} ({socket.gethostname()}, pid {os.getpid()})"
        self._address = address
        self._peers = self._meet_all(store) if rank == 0 else [self._meet_first(store)]
        self._sent = 0.0
        self._round_ended = time.monotonic()

    def __enter__(self) -> Heartbeat:
        self._before = signal.signal(signal.SIGCONT, self._on_continue)
        threading.Thread(target=self._watch, name="heartbeat", daemon=True).start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Say goodbye, or what went wrong."""
        if isinstance(error, Exception):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # of torchrun, before the error is printed
        failed = isinstance(error, (Exception, KeyboardInterrupt)) and self.lost is None
        said = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"[:500] if failed else None
        with self._lock:
            self._closed.set()
            for peer in self._watched():
                _send(peer, {"left": said})
                _shut(peer)
        signal.signal(signal.SIGCONT, self._before)

    # ---- of the main thread

    @contextlib.contextmanager
    def waiting(self, where: str, among: tuple[int, ...] | None = None) -> Iterator[None]:
        """Say that this process waits for the others in a collective of that name; raises if one is lost.

        Args:
            where: the name.
            among: for which of the others; ``None`` for all. Each such group counts its collectives.
        """
        self.check()
        self._collectives[among] += 1
        self._waits = (self._collectives[among], where, time.monotonic())
        try:
            yield
        finally:
            self._waits = None

    def check(self, patience: float = 0.0) -> None:
        """Raise if a process is lost.

        Args:
            patience: seconds to wait for the news, after a collective has failed.

        Raises:
            ProcessLost: says which.
        """
        if self._known.wait(patience):
            self._told = True
            raise (FirstFailed if self._of_first else ProcessLost)(self.lost)

    def _on_continue(self, *_: int | FrameType | None) -> None:
        """Find out, having been stopped, whether the others are still there; the thread asks for it too."""
        with self._lock:
            if not self._closed.is_set():
                self._round()
            if not self._closed.is_set() and not self._told:  # whoever is told already may be on the way out
                self.check()

    # ---- of the thread

    def _watch(self) -> None:
        while not self._closed.is_set():
            poll = select.poll()
            for peer in self._watched():
                poll.register(peer.connection, select.POLLIN)
            poll.poll(1000 * self._interval)
            with self._lock:
                if self._closed.is_set():
                    return
                self._round()
            if self.lost is not None:
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGCONT)
                if not self._closed.wait(GRACE):
                    self._end()

    def _round(self) -> None:
        now = time.monotonic()
        stopped = now - self._round_ended > self.timeout / 2  # this process itself was: the others have all their time
        if self.lost is None:
            for peer in self._watched():
                peer.heard = now if stopped else peer.heard
                self._read(peer)
            self._find_silent(now)
            self._find_deadlock()
            if now - self._sent >= self._interval:
                self._sent = now
                waits = self._waits and (*self._waits[:2], now - self._waits[2])
                for peer in self._watched():
                    _send(peer, {"waits": waits})
        if stopped and self.lost is not None:
            self._end()
        self._round_ended = time.monotonic()

    def _watched(self) -> list[_Peer]:
        return [peer for peer in self._peers if not peer.left]

    def _read(self, peer: _Peer) -> None:
        ended = False
        peer.connection.setblocking(False)
        try:
            while received := peer.connection.recv(65536):
                peer.unread += received
            ended = True
        except BlockingIOError:
            pass
        except OSError:
            ended = True
        *lines, peer.unread = peer.unread.split(b"\n")
        for line in lines:
            self._hear(peer, json.loads(line))
        if ended and not peer.left:
            self._lose(f"{peer.name} has ended without a word: it was killed (out of memory?), or its network failed")

    def _hear(self, peer: _Peer, message: dict[str, Any]) -> None:
        peer.heard = time.monotonic()
        if "lost" in message:
            self._lose(message["lost"])
        elif "left" not in message:
            peer.waits = message["waits"] and tuple(message["waits"])
        elif message["left"] is None:
            peer.left = True
            peer.connection.close()
        else:
            self._of_first = self.lost is None and self.rank > 0  # who hears of the first process alone
            self._lose(f"{peer.name} has failed: {message['left']}")

    def _find_silent(self, now: float) -> None:
        for peer in self._watched():
            if now - peer.heard > self.timeout:
                self._lose(
                    f"{peer.name} has given no sign of life for {self.timeout:.0f} s: it was stopped, or its machine "
                    "or network failed"
                )

    def _find_deadlock(self) -> None:
        """Find out, in the first process, whether all wait for each other, for different things."""
        if self.rank or not self._waits or len(self._watched()) < len(self._peers):
            return
        number, name, since = self._waits
        waits = [(number, name, time.monotonic() - since), *(peer.waits for peer in self._peers)]
        known = [each for each in waits if each is not None]
        if len(known) < len(waits) or min(seconds for *_, seconds in known) < self.timeout:
            return
        if len({each[:2] for each in known}) > 1:
            where = ", ".join(f"process {rank} in {name}" for rank, (_, name, _) in enumerate(known))
            self._lose(f"the processes wait for each other: {where}; all must make the same calls in the same order")

    def _lose(self, what: str) -> None:
        if self.lost is None:
            self.lost = what
            for peer in self._watched():
                _send(peer, {"lost": what})
            self._known.set()

    def _end(self) -> None:
        with contextlib.suppress(OSError):
            os.write(2, f"\nerror: {self.lost}\n".encode())
        os._exit(1)

    # ---- meeting

    def _meet_all(self, store: Store) -> list[_Peer]:
        token = secrets.token_hex()
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        with socket.create_server(("", 0), family=family, dualstack_ipv6=both, backlog=self.world_size) as server:
            store.set(_KEY, json.dumps([self._address, server.getsockname()[1], token]))
            peers: dict[int, _Peer] = {}
            deadline = time.monotonic() + START
            while len(peers) < self.world_size - 1:
                server.settimeout(max(0.01, deadline - time.monotonic()))
                try:
                    connection, _ = server.accept()
                except TimeoutError as error:
                    missing = sorted(set(range(1, self.world_size)) - peers.keys())
                    raise ProcessLost(
                        f"processes {missing} of {self.world_size} have not come within {START:.0f} s"
                    ) from error
                with contextlib.suppress(OSError, ValueError):  # somebody else's
                    given, rank, name = _receive(connection)
                    if given == token:
                        peers[rank] = _Peer(connection, name, time.monotonic())
        for peer in peers.values():
            _send(peer, [self._name])
        return [peers[rank] for rank in sorted(peers)]

    def _meet_first(self, store: Store) -> _Peer:
        deadline = time.monotonic() + START
        while True:
            try:
                # What processes before a restart have left in the store is answered by nobody, until it is overwritten.
                address, port, token = json.loads(store.get(_KEY))
                at = (address or os.environ["MASTER_ADDR"], port)
                return self._greet(at, token, max(0.01, deadline - time.monotonic()))
            except (RuntimeError, OSError, ValueError) as error:
                if time.monotonic() > deadline or not isinstance(error, (OSError, ValueError)):
                    raise ProcessLost(f"{self._name} cannot reach process 0: {error}") from error
            time.sleep(0.2)

    def _greet(self, at: tuple[str, int], token: str, timeout: float) -> _Peer:
        connection = socket.create_connection(at, timeout)
        _send_line(connection, [token, self.rank, self._name])
        (name,) = _receive(connection, timeout)
        return _Peer(connection, name, time.monotonic())


def _receive(connection: socket.socket, timeout: float = 10.0) -> list[Any]:
    """Read a line; a greeting is short and comes at once, with nothing behind it."""
    connection.settimeout(timeout)
    line = b""
    while not line.endswith(b"\n"):
        received = connection.recv(1)
        if not received or len(line) > 1000:
            raise ConnectionError("the connection has ended")
        line += received
    return json.loads(line)


def _send_line(connection: socket.socket, message: Any) -> None:
    connection.settimeout(1.0)  # who has read nothing for hours is lost
    connection.sendall(json.dumps(message).encode() + b"\n")


def _send(peer: _Peer, message: Any) -> None:
    with contextlib.suppress(OSError):  # reading tells
        _send_line(peer.connection, message)


def _shut(peer: _Peer) -> None:
    """Close a connection when the other has read everything: what is unread on this side would tear it down."""
    with contextlib.suppress(OSError):
        peer.connection.shutdown(socket.SHUT_WR)
        peer.connection.settimeout(1.0)
        while peer.connection.recv(65536):
            pass
    peer.connection.close()
