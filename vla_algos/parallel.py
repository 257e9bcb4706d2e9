"""Several processes that train one policy, on one machine or on many: who is there, and what they tell each other.

Each runs the whole recipe with its share of the environments. What is computed from all of their data (advantages,
gradients, metrics, results of an evaluation) goes through the functions below; a process that is alone tells nobody
anything, and gets its own data back. Only the first process writes.

All processes must make the same calls in the same order.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from submitit.slurm.slurm import SlurmJobEnvironment
from tensordict import TensorDictBase

T = TypeVar("T")
_TIMEOUT = timedelta(hours=2)  # for one process to wait for another: a whole evaluation may lie between them


class ProcessLost(RuntimeError):
    """The processes can no longer talk to each other; mostly because one has failed, whose error is the one to read."""


@contextlib.contextmanager
def process_group() -> Iterator[None]:
    """Join the processes that torchrun or a SLURM job has started together; nothing happens where there is one.

    They find each other by torchrun's variables, otherwise by those of the SLURM step. Each process uses the GPU of its
    ``LOCAL_RANK``, if there are several. Numbers on the CPU are exchanged by gloo, those on GPUs by NCCL. Only the
    first process prints.

    Raises:
        ValueError: there are fewer GPUs than processes.
    """
    if processes_started() == 1:
        yield
        return
    if not _by_torchrun():
        _name_as_torchrun_does()
    backend = "gloo"
    if torch.cuda.is_available():
        backend = "cpu:gloo,cuda:nccl"
        _choose_gpu(int(os.environ["LOCAL_RANK"]), torch.cuda.device_count())
    dist.init_process_group(backend, timeout=_TIMEOUT)
    with contextlib.nullcontext() if is_main() else contextlib.redirect_stdout(io.StringIO()):
        yield
    # Not after an error: a process that has failed must not wait for anybody.
    dist.destroy_process_group()


def processes_started() -> int:
    """Count the processes that torchrun or SLURM has started together, this one among them."""
    return int(os.environ.get("WORLD_SIZE" if _by_torchrun() else "SLURM_STEP_NUM_TASKS", "1"))


def _by_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def _name_as_torchrun_does() -> None:
    step = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_STEP_NUM_TASKS", "LOCAL_RANK": "SLURM_LOCALID"}
    os.environ |= {name: os.environ[of_slurm] for name, of_slurm in step.items()}
    on_each = processes_started() // int(os.environ.get("SLURM_STEP_NUM_NODES", "1"))
    os.environ["LOCAL_WORLD_SIZE"] = str(on_each)
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


def rank() -> int:
    """Return the number of this process, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Return how many processes there are."""
    return dist.get_world_size() if dist.is_initialized() else 1


def cores() -> int:
    """Count the cores for this process: what SLURM gives it, or its share of what the processes of torchrun have."""
    here = len(os.sched_getaffinity(0))
    here = min(here, int(os.environ.get("SLURM_CPUS_PER_TASK", here)))
    return max(1, here // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))) if _by_torchrun() else here


def is_main() -> bool:
    """Tell whether this is the process that writes and prints."""
    return rank() == 0


def per_rank(total: int, what: str) -> int:
    """Return this process's part of a number that the configuration gives for the whole run.

    Raises:
        ValueError: it cannot be divided evenly.
    """
    processes = world_size()
    if total % processes:
        more = -(-total // processes) * processes
        raise ValueError(f"{what}={total} cannot be shared by {processes} processes; try {what}={more}")
    return total // processes


def all_gather_object(mine: T) -> list[T]:
    """Return what each process has, in the order of their numbers; on the CPU, and small."""
    if world_size() == 1:
        return [mine]
    everybodys: list[Any] = [None] * world_size()
    _exchange(dist.all_gather_object, everybodys, mine)
    return everybodys


def all_gather(mine: TensorDictBase | None) -> TensorDictBase | None:
    """Join the rows of all processes, one process after the other, on the CPU; ``None`` has none."""
    if world_size() == 1:
        return mine
    parts = [part for part in all_gather_object(None if mine is None else mine.cpu()) if part is not None]
    return torch.cat(parts) if parts else None


def local_rows(everybodys: TensorDictBase, count: int) -> TensorDictBase:
    """Return the ``count`` rows that this process had given to :func:`all_gather`."""
    start = sum(all_gather_object(count)[: rank()])
    return everybodys[start : start + count]


def broadcast_object(value: T) -> T:
    """Return the value of the first process."""
    if world_size() == 1:
        return value
    box = [value]
    _exchange(dist.broadcast_object_list, box, src=0)
    return box[0]


def all_reduce_max(number: int) -> int:
    """Return the largest of the numbers that the processes give."""
    return max(all_gather_object(number))


def barrier() -> None:
    """Wait until all processes are here."""
    all_gather_object(None)


def broadcast(tensors: Iterable[torch.Tensor]) -> None:
    """Give all processes the tensors of the first, in place."""
    if world_size() > 1:
        _wait([partial(dist.broadcast, tensor, src=0, async_op=True) for tensor in tensors])


def sync_initial_weights(policy: torch.nn.Module) -> None:
    """Give all processes the trained weights and the buffers of the first one."""
    broadcast(parameter.data for parameter in policy.parameters() if parameter.requires_grad)
    values = broadcast_object([buffer.cpu() for buffer in policy.buffers()])
    for buffer, value in zip(policy.buffers(), values, strict=True):
        buffer.copy_(value)


def all_reduce_gradients(parameters: Sequence[torch.nn.Parameter]) -> None:
    """Add up the gradients of all processes, in place. A parameter without gradient in any of them keeps none.

    Each process has its share of a loss over all data, so that the sum is the gradient. (DistributedDataParallel
    averages, and wants every process to run a backward pass each time; here a minibatch may lie in one process.)
    """
    if world_size() == 1:
        return
    there = all_gather_object([parameter.grad is not None for parameter in parameters])
    used = [parameter for parameter, *anywhere in zip(parameters, *there, strict=True) if any(anywhere)]
    for parameter in used:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    _wait([partial(dist.all_reduce, parameter.grad, async_op=True) for parameter in used])


def _wait(starts: Sequence[Callable[[], Any]]) -> None:
    works = [_exchange(start) for start in starts]
    for work in works:
        _exchange(work.wait)


def _exchange(function: Callable[..., T], *arguments: Any, **named: Any) -> T:
    try:
        return function(*arguments, **named)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise ProcessLost(
            f"process {rank()} of {world_size()} can no longer talk to the others; most likely one of them has failed: "
            "its own error, above or in its log, says why"
        ) from error
