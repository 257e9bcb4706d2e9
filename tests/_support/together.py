"""Work in several processes that know of each other, as torchrun starts them."""

import multiprocessing
import os
import socket

import torch

from vla_algos import parallel


def together(work, folder, *arguments, processes=2, ends=(0, 0), each=lambda running: None, patience=240):
    """The results of ``work(*arguments)`` in processes that know of each other, by rank; ``each`` sees them end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    running = [
        context.Process(target=_one, args=(rank, processes, port, folder, work, arguments), daemon=True)
        for rank in range(processes)
    ]
    try:
        for process in running:
            process.start()
        each(running)
        for process in running:
            process.join(patience)
        assert [process.exitcode for process in running] == list(ends)
    finally:
        for process in running:
            process.kill()
    found = [folder / f"{rank}.pt" for rank in range(processes)]
    return [torch.load(path, weights_only=False) if path.exists() else None for path in found]


def _one(rank, processes, port, folder, work, arguments):
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(processes), "LOCAL_RANK": str(rank)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ["TORCHELASTIC_RUN_ID"] = "test"
    with parallel.process_group():
        torch.save(work(*arguments), folder / f"{rank}.pt")
