"""Several processes that train one policy, on one machine or on many: launch, groups, collectives, even minibatches.

Each runs the whole recipe with its share of the environments. What is computed from all of their data goes through the
collectives below; a process that is alone gets its own data back. Only rank 0 writes. All processes must make the same
calls in the same order. When one dies, torchrun or ``srun --kill-on-bad-exit`` ends the others; when one is stopped,
the time-outs below do.

Collectives use the *control group* (gloo, on the CPU), in which a process waits for hours for another that has work to
do alone; within a :func:`subgroup`, such as the processes of one role, that of these. Weights and gradients of sharded
policies go over the groups of :func:`device_mesh` (NCCL on GPUs), which all reach within ten minutes.
"""

import contextlib
import ctypes
import io
import os
import pickle
import signal
import socket
from collections.abc import Collection, Iterator, Sequence
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from submitit.slurm.slurm import SlurmJobEnvironment
from tensordict import TensorDictBase
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from vla_common.keys import NEXT, STEP_MASK

T = TypeVar("T")
_START = timedelta(minutes=10)  # for all processes to come
_CONTROL_TIMEOUT = timedelta(hours=2)  # to wait for a process that has work to do alone
_DATA_TIMEOUT = timedelta(minutes=10)  # for an exchange of weights
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_some: tuple[int, ...] | None = None  # of all processes, those that the functions below concern; None for all
_groups: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup] = {}  # by what for, of some; () is all
_ENDED = "vla_ended"
_STOPPING = (signal.SIGUSR2, signal.SIGINT)  # with SIGTERM, see vla_algos.run.run


@contextlib.contextmanager
def process_group(members: Sequence[int] | None = None) -> Iterator[bool]:
    """Join the processes that torchrun or a SLURM job has started together; nothing happens where there is one.

    They find each other by torchrun's variables, otherwise by those of the SLURM step. Each process uses the GPU of its
    ``LOCAL_RANK``, if there are several; a ``ValueError`` if these are too few. Only rank 0 prints. A process whose
    torchrun dies dies with it.

    Args:
        members: which of them work together, by the numbers that their launcher gives them: the first of ``members``
            is rank 0 of these. The others wait here until these have ended. ``None``: all, in its order.

    Yields:
        Whether this process is one of the members, which have something to do.
    """
    if processes_started() == 1:
        before = dist.is_initialized()
        try:
            yield True
        finally:
            if dist.is_initialized() and not before:  # by device_mesh
                dist.destroy_process_group()
        return
    store, own_rank, processes = _meet()
    if torch.cuda.is_available():
        _choose_gpu(int(os.environ["LOCAL_RANK"]), torch.cuda.device_count())
    # After a restart torchrun's store still has what the processes before it have written.
    store = dist.PrefixStore(f"attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    if members is not None:
        if own_rank not in members:
            _stand_by(store)
            yield False
            return
        own_rank, processes = members.index(own_rank), len(members)
        os.environ["RANK"] = str(own_rank)
    try:
        _join(store, own_rank, processes)
        _groups["control", ()] = _new_group(None, "control")
        with contextlib.nullcontext() if is_main() else contextlib.redirect_stdout(io.StringIO()):
            yield True
        if is_main():
            store.set(_ENDED, "")
    except BaseException:
        with contextlib.suppress(RuntimeError):  # the store is gone
            store.set(_ENDED, "")
        raise
    finally:
        _groups.clear()
    # Not after an error: a process that has failed must not wait for the others.
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


def _meet() -> tuple[dist.Store, int, int]:
    """Return a store, the number of this process and how many there are; in a step of SLURM as with torchrun."""
    if _by_torchrun():
        _die_with_parent()
    else:
        step = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_STEP_NUM_TASKS", "LOCAL_RANK": "SLURM_LOCALID"}
        per_node = str(processes_per_node())
        os.environ |= {name: os.environ[of_slurm] for name, of_slurm in step.items()} | {"LOCAL_WORLD_SIZE": per_node}
    one_node = processes_started() == processes_per_node()
    for library in ("GLOO", "NCCL") if one_node else ():  # which would listen on the address of the machine's name
        os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return next(iter(dist.rendezvous("env://", timeout=_START)))
    if not _by_torchrun():
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1" if one_node else SlurmJobEnvironment().hostnames[0])
        os.environ.setdefault("MASTER_PORT", str(20000 + int(os.environ["SLURM_JOB_ID"]) % 40000))
    host, port, number = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), int(os.environ["RANK"])
    return _own_store(host, port, number, one_node), number, processes_started()


def _own_store(host: str, port: int, number: int, one_node: bool) -> dist.Store:
    """Join the store of process 0, which listens on the address that the others have, and on no other."""
    processes, listening = processes_started(), None
    if number == 0:
        family, _, _, _, (address, *_) = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # Other machines cannot reach Debian's 127.0.1.1 for a machine's name: then on any address.
        address = str(address) if one_node or not str(address).startswith("127.") else ""
        listening = socket.create_server((address, port), family=family, backlog=processes).detach()
    return dist.TCPStore(host, port, processes, number == 0, _START, multi_tenant=True, master_listen_fd=listening)


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
    """Have the kernel kill this process when torchrun dies, by SIGKILL: even one that is stopped or waits."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died in between
        os.kill(os.getpid(), signal.SIGKILL)


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
def subgroup(ranks: Sequence[int]) -> Iterator[None]:
    """Have all functions of this module concern some of the processes: inside, these are all that there are.

    All of ``ranks``, ascending and counted over all processes, must enter, and no other may. Inside they count from 0.
    """
    global _some
    before, some = _some, tuple(ranks)
    whole = tuple(range(dist.get_world_size())) if dist.is_initialized() else (0,)
    _some = None if some == whole else some
    try:
        yield
    finally:
        _some = before


def make_role_groups(actors: Sequence[int], rollouts: Sequence[int], shards: int) -> None:
    """Make the groups that roles need: ranks that learn, ``shards`` of which share a copy, and ranks that collect.

    All processes call it alike. Afterwards each role may be a :func:`subgroup`, :func:`device_mesh` arranges the
    actors, or one process that is none, and :func:`weight_group` has the sender of weights and the receivers.
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


def _new_group(ranks: Sequence[int] | None, what: str) -> dist.ProcessGroup:
    timeout, backend = (_CONTROL_TIMEOUT, "gloo") if what == "control" else (_DATA_TIMEOUT, None)
    return dist.new_group(ranks and list(ranks), timeout=timeout, backend=backend, group_desc=what)


def weight_group() -> dist.ProcessGroup:
    """Return the group of the first actor and those that collect and do not learn; in other processes an empty one."""
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
    return _groups.get(("control", ())) if _some is None else _groups["control", _some]


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

    ``device`` is the type of what they compute on, ``None`` for GPUs where there are some. A process that is alone
    joins a group of one, which :func:`process_group` ends. A ``ValueError`` if they cannot be arranged so.
    """
    check_shards(shards, world_size())
    if not dist.is_initialized():
        _join(dist.HashStore(), 0, 1)
    ranks = torch.tensor(range(world_size()) if _some is None else _some).reshape(-1, shards)
    groups = [_own_group(what, way.tolist()) for what, way in (("replicas", ranks.T), ("shards", ranks))]
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    return DeviceMesh.from_group(groups, device or kind, ranks, mesh_dim_names=("replicas", "shards"))


def check_shards(shards: int | Literal["all"], processes: int) -> None:
    """Refuse (ValueError) shards that so many processes cannot be arranged in; says which can be."""
    if shards != "all" and (shards < 1 or processes % shards):
        possible = " or ".join(str(number) for number in range(1, processes + 1) if processes % number == 0)
        raise ValueError(
            f"sharding.shards={shards} does not divide the number of processes, {processes}: take {possible} or all, "
            f"or start others: torchrun --nproc-per-node={shards}, or launcher.tasks_per_node={shards}"
        )


def _own_group(what: str, lists: Sequence[Sequence[int]]) -> dist.ProcessGroup:
    """Return the group in which this process is; init_device_mesh would give it another time-out."""
    own = dist.get_rank()
    if _some is not None:
        return _groups[what, next(tuple(each) for each in lists if own in each)]
    made = [(each, _new_group(each, what)) for each in lists]  # by all processes
    return next(group for each, group in made if own in each)


def per_rank(total: int, what: str, processes: int | None = None) -> int:
    """Return this process's part of a number of the configuration, which is typed as ``what`` and is for the whole run.

    So many ``processes`` share it, all if ``None``; a ``ValueError`` if it cannot be divided evenly.
    """
    processes = world_size() if processes is None else processes
    if total % processes:
        more = -(-total // processes) * processes
        raise ValueError(f"{what}={total} cannot be shared by {processes} processes; try {what}={more}")
    return total // processes


def all_gather_object(mine: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return what each process, or each of a ``group``, has, in the order of their ranks; on the CPU, and small."""
    if group is None and world_size() == 1:
        return [mine]
    group = group or _group()
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, mine, group=group)
    return gathered


def all_gather(mine: TensorDictBase | None) -> TensorDictBase | None:
    """Join the rows of all processes, one process after the other, on the CPU; ``None`` has none."""
    if world_size() == 1:
        return mine
    parts = [part for part in all_gather_object(None if mine is None else mine.cpu()) if part is not None]
    return torch.cat(parts) if parts else None


def all_to_all(mine: Sequence[T]) -> list[T]:
    """Give each process what this one has for it, and return what they have for this one, both by their numbers.

    On the CPU, from one to the other: no third process gets it.
    """
    if world_size() == 1:
        return list(mine)
    given = [torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8) for value in mine]
    lengths = torch.tensor([len(each) for each in given])
    coming = torch.empty_like(lengths)
    dist.all_to_all_single(coming, lengths, group=_group())
    received = torch.empty(int(coming.sum()), dtype=torch.uint8)
    counts = coming.tolist(), lengths.tolist()
    dist.all_to_all_single(received, torch.cat(given), *counts, group=_group())
    return [pickle.loads(each.numpy().tobytes()) for each in received.split(counts[0])]


def local_rows(whole: TensorDictBase, count: int) -> TensorDictBase:
    """Return the ``count`` rows that this process had given to :func:`all_gather`."""
    start = sum(all_gather_object(count)[: rank()])
    return whole[start : start + count]


def broadcast_object(value: T, source: int = 0) -> T:
    """Return the value of one process, rank 0 unless another is named."""
    if world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, group_src=source, group=_group())
    return box[0]


def barrier() -> None:
    """Wait until all processes are here."""
    all_gather_object(None)


# ---- minibatches of which each process works off as many decisions as any other


def assign_rows(owners: Tensor, processes: int) -> Tensor:
    """Return which process works off each row ``[R]``: its owner ``[R]``, but for the surplus of those that have most.

    Shares differ by one row at most; the larger ones are those of the processes that own most: as few rows move as can.
    """
    counts = torch.bincount(owners, minlength=processes)
    shares = torch.full_like(counts, len(owners) // processes)
    shares[counts.argsort(descending=True, stable=True)[: len(owners) % processes]] += 1
    surplus = torch.cat([(owners == rank).nonzero().flatten()[int(shares[rank]) :] for rank in range(processes)])
    workers = owners.clone()
    workers[surplus] = torch.arange(processes).repeat_interleave((shares - counts).clamp(min=0))
    return workers


class BalancedMinibatches:
    """Rows of a batch that lies in several processes, in passes: as many in each, for every minibatch.

    Only the surplus of a minibatch moves, with all its entries, over the CPU. A process that has rows for fewer passes
    than others fills up with passes that are to count nothing. All processes ask for the same minibatches; a
    ``ValueError`` if their rows do not fit together.

    ``samples`` are this process's rows ``[D]``, or ``None``, and are read when their pass comes; ``counts`` are rows of
    each process, and on ``device`` passes are wanted. Of ``computed``, entries that the policy has added, one that some
    process lacks is left out, and one that is longer in some process, as of the longest prompt, gets zeros elsewhere.
    """

    def __init__(
        self,
        samples: TensorDictBase | None,
        counts: Sequence[int],
        device: torch.device,
        computed: Collection[Any] = (),
    ):
        self._device, self._rank, self._processes = device, rank(), len(counts)
        self._first = sum(counts[: self._rank])
        self._owners = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
        self.samples = samples if counts[self._rank] else None
        if len(counts) > 1:
            self.samples = _alike(self.samples, computed)
            # For passes that count nothing: an own row, or where there is none the first of all.
            own = None if self.samples is None else self.samples[torch.tensor([0])]
            if not all(counts):
                giver = next(rank for rank, count in enumerate(counts) if count)
                given = broadcast_object(own if own is None else own.cpu(), giver)
                own = given if own is None else own
            assert own is not None  # some process has rows
            self._filling = own
        self._decisions = self._moved = self._busiest = 0  # rows of minibatches; of each, of the process with most

    def metrics(self) -> dict[str, float]:
        """Return ``train/imbalance`` and ``train/moved`` of the minibatches so far; nothing of one process."""
        if self._processes == 1 or not self._decisions:
            return {}
        return {
            "train/imbalance": self._busiest * self._processes / self._decisions,
            "train/moved": self._moved / self._decisions,
        }

    def passes(self, rows: Tensor, size: int | None) -> Iterator[tuple[TensorDictBase, bool, bool]]:
        """Yield this process's parts of a minibatch, each with whether it counts, and whether it is the last.

        ``rows``, int64 ``[R]``, are of the batches of all processes, joined; parts have at most ``size``, if given.
        """
        owners = self._owners[rows]
        workers = assign_rows(owners, self._processes)
        busiest = int(torch.bincount(workers, minlength=self._processes).max())
        self._decisions += len(rows)
        self._moved += int((owners != workers).sum())
        self._busiest += busiest
        own = rows[(owners == self._rank) & (workers == self._rank)] - self._first
        arrived = self._exchange(rows, owners, workers)
        size = size or busiest
        for start in range(0, busiest, size):
            parts = [] if self.samples is None else [self.samples[own[start : start + size]]]
            if arrived is not None:
                come = slice(max(0, start - len(own)), max(0, start + size - len(own)))
                parts.append(arrived[come])
            parts = [part.to(self._device) for part in parts if len(part)]
            part = torch.cat(parts) if len(parts) > 1 else parts[0] if parts else self._filling.to(self._device)
            yield part, bool(parts), start + size >= busiest

    def _exchange(self, rows: Tensor, owners: Tensor, workers: Tensor) -> TensorDictBase | None:
        """Send the surplus, and return what has come, in the order of the processes."""
        if torch.equal(owners, workers):
            return None
        sent: list[TensorDictBase | None] = [None] * self._processes
        for other in set(workers.tolist()) - {self._rank}:
            leaving = rows[(owners == self._rank) & (workers == other)] - self._first
            if len(leaving):
                assert self.samples is not None  # it owns these rows
                sent[other] = self.samples[leaving].cpu()
        come = [part for part in all_to_all(sent) if part is not None]
        return torch.cat(come) if come else None


def masked(part: TensorDictBase) -> TensorDictBase:
    """Return rows of which nothing was executed: a loss that reads ``step_mask`` gets exactly 0 from them."""
    part = part.copy()
    part[NEXT, STEP_MASK] = torch.zeros_like(part[NEXT, STEP_MASK])
    return part


def _alike(samples: TensorDictBase | None, computed: Collection[Any]) -> TensorDictBase | None:
    """Give the rows of all processes the same entries of the same shapes; all must call it."""
    # One row says it: others may lie on a disk.
    entries = () if samples is None else samples[torch.tensor([0])].items(True, True)
    own = {key: (entry.dtype, tuple(entry.shape[1:])) for key, entry in entries}
    shapes = [each for each in all_gather_object(own) if each]
    if samples is None:
        return None
    shared = set(own).intersection(*shapes)
    changed = samples.exclude(*(set(own) - shared))
    for key in sorted(shared, key=str):
        kinds = list(dict.fromkeys(each[key] for each in shapes))
        if len(kinds) == 1:
            continue
        if len({(dtype, len(shape)) for dtype, shape in kinds}) > 1 or key not in computed:
            first, other, *_ = (f"{dtype} {list(shape)}" for dtype, shape in kinds)
            raise ValueError(
                f"{key!r} of a decision is {first} in one process and {other} in another: environment and policy must "
                "have the same settings in all of them"
            )
        largest = [max(sizes) for sizes in zip(*(shape for _, shape in kinds), strict=True)]
        missing = [size - has for size, has in zip(largest, changed[key].shape[1:], strict=True)]
        changed[key] = F.pad(changed[key], [side for count in reversed(missing) for side in (0, count)])
    return changed
