"""For how long does training wait while a checkpoint is saved, and how long until it is on the disk?

A policy with AdamW, whose weights are changed and saved again and again (:class:`vla_algos.run.saving.Saver`): the
small policy of the tests, and a synthetic one with about 250 MB of weights and optimizer states. By one process, or by
several (gloo, on the CPU) that have the weights in parts. Everything is written into a temporary folder and deleted.

    python benchmarks/checkpoints.py
    python benchmarks/checkpoints.py --processes 2 --folder /mnt/network_disk
"""

import argparse
import multiprocessing
import os
import socket
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vla_algos import distributed
from vla_algos.run.saving import Saver
from vla_policies import VLAPolicy
from vla_policies.sharding import shard
from vla_policies.small import SmallVLA, SmallVLAConfig

SIZES = {"action_low": (-1.0,) * 4, "action_high": (1.0,) * 4, "state_dim": 4, "chunk_size": 5}


class Matrices(VLAPolicy):
    """A number of matrices of 17 MB."""

    def __init__(self, number: int):
        super().__init__()
        self.matrices = nn.ParameterList(nn.Parameter(torch.randn(2048, 2048)) for _ in range(number))

    def forward(self, tensordict: Any) -> Any:
        """Do nothing."""
        return tensordict


def measure(policy: VLAPolicy, saves: int, folder: Path) -> None:
    """Save again and again; prints medians of the seconds, and bytes."""
    if distributed.world_size() > 1:
        shard(policy, distributed.device_mesh(distributed.world_size()))
    optimizer, waited, whole = torch.optim.AdamW(policy.parameters(), lr=1e-3), [], []
    for parameter in policy.parameters():
        parameter.grad = torch.ones_like(parameter)
    saver, parts = Saver(folder), {"policy": policy, "optimizer": optimizer}
    for iteration in range(saves):
        optimizer.step()
        started = time.perf_counter()
        saver.save(iteration, parts, {}, None)
        waited.append(time.perf_counter() - started)
        saver.wait()
        whole.append(time.perf_counter() - started)
    size = sum(path.stat().st_size for path in (folder / "latest").rglob("*") if path.is_file())
    wait, total = statistics.median(waited[1:]), statistics.median(whole[1:])
    started = time.perf_counter()
    Saver(folder).restore(parts)
    print(
        f"{type(policy).__name__}, {size / 1e6:.1f} MB, processes: {distributed.world_size()}; training waits "
        f"{wait:.3f} s of {total:.3f} s ({wait / total:.0%}), resuming takes {time.perf_counter() - started:.3f} s"
    )


def both(saves: int, folder: Path) -> None:
    measure(SmallVLA(SmallVLAConfig(**SIZES)), saves, folder / "small")
    measure(Matrices(5), saves, folder / "large")


def _one(rank: int, processes: int, port: int, saves: int, folder: Path) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(processes), "LOCAL_RANK": str(rank)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ["TORCHELASTIC_RUN_ID"] = "benchmark"
    with distributed.process_group():
        both(saves, folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--saves", type=int, default=11, help="the first is not counted")
    parser.add_argument("--folder", type=Path, help="where to write; the folder for temporary files unless given")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as temporary:
        if arguments.processes == 1:
            both(arguments.saves, Path(temporary))
            return
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        context = multiprocessing.get_context("spawn")
        running = [
            context.Process(target=_one, args=(rank, arguments.processes, port, arguments.saves, Path(temporary)))
            for rank in range(arguments.processes)
        ]
        for process in running:
            process.start()
        for process in running:
            process.join()


if __name__ == "__main__":
    main()
