"""Which GPU a worker process draws with: they take turns on those that were chosen, or else on all that CUDA shows.

GPUs have the numbers that CUDA shows them to this process by: of ``CUDA_VISIBLE_DEVICES=4,5`` they are 0 and 1.
"""

import os
from collections.abc import Iterable, Sequence

WORKER = "VLA_TORCHRL_WORKER"  # number of this worker process, which the pool sets
_drawing: dict[str, int] = {}  # by graphics library: the process that draws with it
GPUS = "VLA_TORCHRL_GPUS"  # numbers of the GPUs that were chosen for all workers, likewise; empty for none


def check_gpus(gpus: Sequence[int], shown: int) -> None:
    """Refuse GPUs that are not among the ``shown``, the number that CUDA shows to this process."""
    named, visible = f"gpus={show(gpus)}", os.environ.get("CUDA_VISIBLE_DEVICES")
    because = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible})"
    if not shown:
        raise ValueError(
            f"{named}: CUDA shows no GPU to this process{because}; leave out env.gpus (null) and placement.env, and "
            "simulators are drawn as this machine can"
        )
    if not all(0 <= gpu < shown for gpu in gpus):
        there = "GPU 0 alone" if shown == 1 else f"GPUs 0 to {shown - 1}"
        raise ValueError(
            f"{named}: CUDA shows {there} to this process{because}; type env.gpus={show(range(shown))} or "
            f"placement.env={'0' if shown == 1 else f'0-{shown - 1}'}, or fewer"
        )
    if not gpus or len(set(gpus)) != len(gpus):
        raise ValueError(f"{named}: name each GPU once; type env.gpus={show(dict.fromkeys(gpus or [0]))}")


def visible_names(visible: str | None) -> list[str]:
    """List the GPUs that a value of ``CUDA_VISIBLE_DEVICES`` names, by number or otherwise."""
    return [name.strip() for name in (visible or "").split(",") if name.strip()]


def worker_environment(worker: int, gpus: Sequence[int] | None) -> dict[str, str]:
    """Return the variables that tell a worker process its number, and the GPUs that were chosen, if any."""
    return {WORKER: str(worker), GPUS: ",".join(map(str, gpus or ()))}


def chosen_gpus() -> tuple[int, ...]:
    """Return the GPUs that were chosen for the workers of which this process is one; none if none were."""
    return tuple(int(number) for number in os.environ.get(GPUS, "").split(",") if number)


def gpu_of_worker(shown: int) -> int:
    """Return the number of the GPU that this process draws with, of as many as CUDA shows it."""
    turns = chosen_gpus() or range(shown)
    return turns[int(os.environ.get(WORKER, 0)) % len(turns)]


def show(gpus: Iterable[int]) -> str:
    """Write GPUs as they are typed, such as ``[4,5]``."""
    return f"[{','.join(map(str, gpus))}]"


def refuse_fork(library: str) -> None:
    """Note that this process draws with a library; its forks cannot: they wait for threads that they do not have."""
    if _drawing.setdefault(library, os.getpid()) != os.getpid():
        raise RuntimeError(
            f"this process was forked from one that draws with {library}, which a fork cannot use: start it with "
            'context="spawn" (AsyncVectorEnv(..., context="spawn"), ParallelEnv(..., mp_start_method="spawn")), or let '
            'gymnasium.make_vec(..., vectorization_mode="vector_entry_point") start all processes'
        )
