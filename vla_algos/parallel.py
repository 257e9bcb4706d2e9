"""Several processes that train one policy, on one machine or on many: who is there, and what they tell each other.

Each runs the whole recipe with its share of the environments. What is computed from all of their data (advantages,
gradients, metrics, results of an evaluation) goes through the functions below; a process that is alone tells nobody
anything, and gets its own data back. Only the first process writes.

All processes must make the same calls in the same order, from the same functions.

Where processes have roles (:mod:`vla_algos.placement`), :func:`among` has these functions concern those of one role.

There are two kinds of groups. What is told here goes over the *control group* (gloo, on the CPU), in which a process
waits for hours for another that has work to do alone. Weights and gradients of sharded policies go over the groups of
:func:`device_mesh` (NCCL on GPUs), which all reach at about the same time: ten minutes.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import pickle
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from submitit.slurm.slurm import SlurmJobEnvironment
from tensordict import TensorDictBase
from torch.distributed.device_mesh import DeviceMesh

from vla_algos.heartbeat import START, Heartbeat, ProcessLost

T = TypeVar("T")
_CONTROL_TIMEOUT = timedelta(hours=2)  # to wait for a process that is alive and has work to do alone
_DATA_TIMEOUT = timedelta(minutes=10)  # for an exchange of weights
_PATIENCE = 3.0  # seconds; after a connection has broken, until it is known whose
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_heartbeat: Heartbeat | None = None
_control: dist.ProcessGroup | None = None
_some: tuple[int, ...] | None = None  # of all processes, whom the functions below concern; None for all
_groups: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup] = {}  # of some, by what for
_ENDED = "vla_ended"
_STOPPING = (signal.SIGUSR2, signal.SIGINT)  # with SIGTERM, see vla_algos.run.resume


@contextlib.contextmanager
def process_group(members: Sequence[int] | None = None) -> Iterator[bool]:
    """Join the processes that torchrun or a SLURM job has started together; nothing happens where there is one.

    They find each other by torchrun's variables, otherwise by those of the SLURM step. Each process uses the GPU of its
    ``LOCAL_RANK``, if there are several. Numbers on the CPU are exchanged by gloo, those on GPUs by NCCL. Only the
    first process prints.

    A process whose torchrun dies dies with it, and all hear of one that is lost: see
    :class:`~vla_algos.heartbeat.Heartbeat`. An error that came of it, wherever it was raised, becomes the news of it.

    Args:
        members: which of them work together, by the numbers that their launcher gives them: the first of ``members``
            is process 0 of these. The others wait here until these have ended. ``None``: all, in its order.

    Yields:
        Whether this process is one of the members, which have something to do.

    Raises:
        ValueError: there are fewer GPUs than processes.
        ProcessLost: another one has failed, has died or was stopped.
    """
    global _heartbeat, _control
    if processes_started() == 1:
        before = dist.is_initialized()
        try:
            yield True
        finally:
            if dist.is_initialized() and not before:  # by device_mesh
                dist.destroy_process_group()
        return
    if _by_torchrun():
        _die_with_parent()
        _find_agent()
    else:
        _name_as_torchrun_does()
    if torch.cuda.is_available():
        _choose_gpu(int(os.environ["LOCAL_RANK"]), torch.cuda.device_count())
    store, own_rank, processes = next(iter(dist.rendezvous("env://", timeout=timedelta(seconds=START))))
    # After a restart torchrun's store still has what the processes before it have written.
    store = dist.PrefixStore(f"attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    if members is not None:
        if own_rank not in members:
            _stand_by(store)
            yield False
            return
        own_rank, processes = members.index(own_rank), len(members)
        os.environ["RANK"] = str(own_rank)
    address = _own_address() if own_rank == 0 and members is not None and _node() else None
    with Heartbeat(store, own_rank, processes, address=address) as _heartbeat:
        try:
            _join(store, own_rank, processes)
            _control = dist.new_group(backend="gloo", timeout=_CONTROL_TIMEOUT, group_desc="control")
            with contextlib.nullcontext() if is_main() else contextlib.redirect_stdout(io.StringIO()):
                yield True
            if is_main():
                store.set(_ENDED, "")
        except BaseException as error:
            if members is not None:  # the others wait
                with contextlib.suppress(RuntimeError):  # the store is gone
                    store.set(_ENDED, "")
            if not isinstance(error, Exception):
                raise
            if lost := lost_behind(error):
                raise lost from error
            raise
        finally:
            _heartbeat = _control = None
            _groups.clear()
        # Not after an error: a process that has failed must not wait for anybody.
        dist.destroy_process_group()


def _join(store: dist.Store, own_rank: int, processes: int) -> None:
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=store, rank=own_rank, world_size=processes, timeout=_DATA_TIMEOUT)


def _stand_by(store: dist.Store) -> None:
    """Wait until the members have ended, or torchrun ends this process.

    In a SLURM job the store may be this process's, and it gets the signals that all get: members stop by them, save,
    and need the store meanwhile.
    """
    for number in _STOPPING if _by_torchrun() else (*_STOPPING, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(RuntimeError):  # the store is gone
        store.wait([_ENDED], timedelta(days=365))


def _node() -> int:
    """Return the number of this machine among those of the launcher."""
    return int(os.environ.get("GROUP_RANK" if _by_torchrun() else "SLURM_NODEID", "0"))


def _own_address() -> str:
    """Return the address of this machine in the network in which it reaches the first one."""
    with socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), START) as connection:
        return str(connection.getsockname()[0])


def processes_started() -> int:
    """Count the processes that torchrun or SLURM has started together, this one among them."""
    return int(os.environ.get("WORLD_SIZE" if _by_torchrun() else "SLURM_STEP_NUM_TASKS", "1"))


def processes_per_node() -> int:
    """Count how many of :func:`processes_started` there are on each node."""
    if _by_torchrun():
        return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return processes_started() // int(os.environ.get("SLURM_STEP_NUM_NODES", "1"))


def _by_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def _die_with_parent() -> None:
    """Have the kernel kill this process when torchrun dies, which could no longer end it.

    By SIGKILL, because a second run may begin at once: it also ends a process that is stopped or waits in a collective,
    and nothing is written after it. Checkpoints are whole at any time.
    """
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died in between
        os.kill(os.getpid(), signal.SIGKILL)


def _find_agent() -> None:
    """Raise if torchrun has died before its process came here; nobody would come to the meeting."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        try:
            socket.create_connection(address, START).close()
        except OSError as error:
            raise ProcessLost(f"torchrun, which has started this process, is gone from {address}: {error}") from error


def _name_as_torchrun_does() -> None:
    step = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_STEP_NUM_TASKS", "LOCAL_RANK": "SLURM_LOCALID"}
    os.environ |= {name: os.environ[of_slurm] for name, of_slurm in step.items()}
    os.environ["LOCAL_WORLD_SIZE"] = str(processes_per_node())
    os.environ.setdefault("MASTER_ADDR", SlurmJobEnvironment().hostnames[0])
    os.environ.setdefault("MASTER_PORT", str(20000 + int(os.environ["SLURM_JOB_ID"]) % 40000))


def _choose_gpu(local_rank: int, gpus: int) -> None:
    if gpus == 1:  # SLURM has bound one to each process
        return
    if local_rank >= gpus:
        raise ValueError(
            f"process {local_rank} of this machine has no GPU, there are {gpus}: start as many processes as GPUs "
            "(torchrun --nproc-per-node, launcher.tasks_per_node and launcher.gpus)"
        )
    torch.cuda.set_device(local_rank)


@contextlib.contextmanager
def among(ranks: Sequence[int]) -> Iterator[None]:
    """Have all functions of this module concern some of the processes: inside, these are all that there are.

    All of them must enter, and no other may. They are numbered from 0 within, in their order.

    Args:
        ranks: their numbers, ascending, counted over all processes.
    """
    global _some
    before, some = _some, tuple(ranks)
    everybody = tuple(range(dist.get_world_size())) if dist.is_initialized() else (0,)
    _some = None if some == everybody else some
    try:
        yield
    finally:
        _some = before


def make_groups(actors: Sequence[int], rollouts: Sequence[int], shards: int) -> None:
    """Make the groups that processes of different roles need among themselves; all processes call it alike.

    Afterwards each role may work :func:`among` themselves, :func:`device_mesh` arranges the actors, or one process that
    is none, and :func:`weight_group` has the sender of weights and those who get them.

    Args:
        actors: who learns; ``shards`` of them share one copy.
        rollouts: who collects.
        shards: see :func:`device_mesh`.
    """
    alone = [rank for rank in rollouts if rank not in actors]
    wanted: list[tuple[str, Sequence[int]]] = [("control", actors), ("control", rollouts)]
    if alone:
        wanted.append(("weights", (actors[0], *alone)))
    for some, size in [(actors, shards), *(((rank,), 1) for rank in alone)]:
        ranks = torch.tensor(some).reshape(-1, size)
        wanted += [("replicas", each) for each in ranks.T.tolist()] + [("shards", each) for each in ranks.tolist()]
    for what, each in wanted:
        if (what, tuple(each)) not in _groups:
            _groups[what, tuple(each)] = _new_group(each, what)


def _new_group(ranks: Sequence[int], what: str) -> dist.ProcessGroup:
    if what == "control":
        return dist.new_group(list(ranks), timeout=_CONTROL_TIMEOUT, backend="gloo", group_desc=what)
    return dist.new_group(list(ranks), timeout=_DATA_TIMEOUT, group_desc=what)


def weight_group() -> dist.ProcessGroup:
    """Return the group of the first actor and those that collect and do not learn; elsewhere that of nobody."""
    return next(group for (what, _), group in _groups.items() if what == "weights")


def rank() -> int:
    """Return the number of this process, from 0."""
    own = dist.get_rank() if dist.is_initialized() else 0
    return own if _some is None else _some.index(own)


def world_size() -> int:
    """Return how many processes there are."""
    if _some is not None:
        return len(_some)
    return dist.get_world_size() if dist.is_initialized() else 1


def _group() -> dist.ProcessGroup | None:
    return _control if _some is None else _groups["control", _some]


def cores() -> int:
    """Count the cores for this process: what SLURM gives it, or its share of what the processes of torchrun have."""
    here = len(os.sched_getaffinity(0))
    here = min(here, int(os.environ.get("SLURM_CPUS_PER_TASK", here)))
    return max(1, here // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))) if _by_torchrun() else here


def is_main() -> bool:
    """Tell whether this is the process that writes and prints."""
    return rank() == 0


def device_mesh(shards: int, device: str | None = None) -> DeviceMesh:
    """Arrange the processes as ``[replicas, shards]``: ``shards`` of them, one after the other, have a copy together.

    A process that is alone joins a group of one for it, which :func:`process_group` ends.

    Args:
        shards: how many.
        device: type of what they compute on; ``None`` for GPUs where there are some.

    Raises:
        ValueError: they cannot be arranged so.
    """
    processes = world_size()
    if shards < 1 or processes % shards:
        possible = [number for number in range(1, processes + 1) if processes % number == 0]
        raise ValueError(f"shards={shards} does not divide the {processes} processes; possible are {possible}")
    if not dist.is_initialized():
        _join(dist.HashStore(), 0, 1)
    ranks = torch.tensor(range(processes) if _some is None else _some).reshape(-1, shards)
    groups = [_own_group(what, way.tolist()) for what, way in (("replicas", ranks.T), ("shards", ranks))]
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    return DeviceMesh.from_group(groups, device or kind, ranks, mesh_dim_names=("replicas", "shards"))


def _own_group(what: str, lists: Sequence[Sequence[int]]) -> dist.ProcessGroup:
    """Return the group in which this process is; init_device_mesh would give it another time-out."""
    own = dist.get_rank()
    if _some is not None:
        return _groups[what, next(tuple(each) for each in lists if own in each)]
    made = [(each, _new_group(each, what)) for each in lists]  # by all processes
    return next(group for each, group in made if own in each)


def per_rank(total: int, what: str, processes: int | None = None) -> int:
    """Return this process's part of a number that the configuration gives for the whole run.

    Args:
        total: the number.
        what: its name, as it is typed.
        processes: how many share it; all if ``None``.

    Raises:
        ValueError: it cannot be divided evenly.
    """
    processes = world_size() if processes is None else processes
    if total % processes:
        more = -(-total // processes) * processes
        raise ValueError(f"{what}={total} cannot be shared by {processes} processes; try {what}={more}")
    return total // processes


def all_gather_object(mine: T) -> list[T]:
    """Return what each process has, in the order of their numbers; on the CPU, and small."""
    if world_size() == 1:
        return [mine]
    everybodys: list[Any] = [None] * world_size()
    call = _call()
    _exchange(dist.all_gather_object, everybodys, (call, mine), group=_group())
    _check_calls([there for there, _ in everybodys])
    return [value for _, value in everybodys]


def all_gather(mine: TensorDictBase | None) -> TensorDictBase | None:
    """Join the rows of all processes, one process after the other, on the CPU; ``None`` has none."""
    if world_size() == 1:
        return mine
    parts = [part for part in all_gather_object(None if mine is None else mine.cpu()) if part is not None]
    return torch.cat(parts) if parts else None


def all_to_all(mine: Sequence[T]) -> list[T]:
    """Give each process what this one has for it, and return what they have for this one, both by their numbers.

    On the CPU, from one to the other: nobody else gets it.
    """
    if world_size() == 1:
        return list(mine)
    call = _call()
    given = [torch.frombuffer(bytearray(pickle.dumps((call, value))), dtype=torch.uint8) for value in mine]
    lengths = torch.tensor([len(each) for each in given])
    coming = torch.empty_like(lengths)
    _exchange(dist.all_to_all_single, coming, lengths, group=_group())
    received = torch.empty(int(coming.sum()), dtype=torch.uint8)
    counts = coming.tolist(), lengths.tolist()
    _exchange(dist.all_to_all_single, received, torch.cat(given), *counts, group=_group())
    found = [pickle.loads(each.numpy().tobytes()) for each in received.split(counts[0])]
    _check_calls([there for there, _ in found])
    return [value for _, value in found]


def local_rows(everybodys: TensorDictBase, count: int) -> TensorDictBase:
    """Return the ``count`` rows that this process had given to :func:`all_gather`."""
    start = sum(all_gather_object(count)[: rank()])
    return everybodys[start : start + count]


def broadcast_object(value: T, source: int = 0) -> T:
    """Return the value of one process, the first unless another is named."""
    if world_size() == 1:
        return value
    call = _call()
    box = [(call, value)]
    _exchange(dist.broadcast_object_list, box, group_src=source, group=_group())
    [(theirs, value)] = box
    _check_calls([theirs, call])
    return value


def all_reduce_max(number: int) -> int:
    """Return the largest of the numbers that the processes give."""
    return max(all_gather_object(number))


def barrier() -> None:
    """Wait until all processes are here."""
    all_gather_object(None)


def _exchange(function: Callable[..., T], *arguments: Any, **named: Any) -> T:
    try:
        with _heartbeat.waiting(_call(), _some) if _heartbeat is not None else contextlib.nullcontext():
            return function(*arguments, **named)
    except (torch.OutOfMemoryError, ProcessLost):
        raise
    except RuntimeError as error:
        if _heartbeat is not None:
            _heartbeat.check(_PATIENCE)
        raise ProcessLost(
            f"process {rank()} of {world_size()} can no longer talk to the others; most likely one of them has failed: "
            "its own error, above or in its log, says why"
        ) from error


def lost_behind(error: BaseException) -> ProcessLost | None:
    """Return the loss of a process that an error came of; ``None`` for any other, and for one that says so itself.

    FSDP exchanges weights wherever a sharded policy computes, and what gloo or NCCL say of a process that is not there
    any more names nobody. Whoever handles errors of such work asks here first: ``raise lost from error``.
    """
    if _heartbeat is None or isinstance(error, ProcessLost):
        return None
    chain = list(_chain(error))
    if known := next((each for each in chain if isinstance(each, ProcessLost)), None):
        return ProcessLost(*known.args)
    of_exchange = next(filter(_of_exchange, chain), None)
    if of_exchange is None:
        return None
    try:
        _heartbeat.check(_PATIENCE)
    except ProcessLost as lost:
        return lost
    if not _of_gloo(of_exchange):  # NCCL's errors are of many kinds: it says which
        return None
    what = "has lost its connection to the others"
    if "timed out" in str(of_exchange).lower():
        what = (
            f"has waited for the others, which are alive, for {_DATA_TIMEOUT.seconds} s: all must make the same calls"
        )
    return ProcessLost(f"process {rank()} of {world_size()}, in an exchange of weights ({_place(error)}), {what}")


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _of_exchange(error: BaseException) -> bool:
    return isinstance(error, dist.DistError) or _of_gloo(error)


def _of_gloo(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and "gloo/transport/" in str(error)


def _place(error: BaseException) -> str:
    """Name the last function of ours that was on the way to an exchange."""
    frames = [(each.name, *os.path.split(each.filename)) for each in traceback.extract_tb(error.__traceback__)]
    own = [f"{name} of {file}" for name, folder, file in frames if f"{os.sep}vla_" in folder and file != "sharding.py"]
    return next(reversed(own), "called from outside of this library")


def _call() -> str:
    """Name the function of this module that was called, and the function that has called it."""
    frame = inner = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename == __file__:
        inner, frame = frame, frame.f_back
    return f"{inner.f_code.co_name} of {os.path.basename(frame.f_code.co_filename)}, {frame.f_code.co_name}"


def _check_calls(calls: Sequence[str]) -> None:
    """Raise if the processes have exchanged what does not belong together."""
    if len(set(calls)) > 1:
        raise ProcessLost(
            f"the processes do not make the same calls in the same order: {' and '.join(dict.fromkeys(calls))} have met"
        )


_RENAMED = {
    "from_main": "broadcast_object",
    "gather": "all_gather",
    "gather_objects": "all_gather_object",
    "largest": "all_reduce_max",
    "own_rows": "local_rows",
    "share": "per_rank",
    "wait_for_all": "barrier",
}


def __getattr__(name: str) -> Any:
    if name not in _RENAMED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(f"{name} is called {_RENAMED[name]} now", DeprecationWarning, stacklevel=2)
    return globals()[_RENAMED[name]]
