"""Random numbers of a run: their seeds, at the start and of each process from where they part, and their states."""

import random
from typing import Any

import numpy as np
import torch
from torchrl.checkpoint import GlobalRNGState

from vla_algos import distributed

_PROCESSES = 1_000_003  # added to the run's seed for the random numbers of each further process


def seed_everything(seed: int) -> None:
    """Seed Python's, numpy's and torch's global generators."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def seed_rank(seed: int) -> None:
    """Give each process random numbers of its own from here on; the first keeps those that it has."""
    if not distributed.is_main():
        seed_everything(seed + _PROCESSES * distributed.rank())


def random_state() -> dict[str, Any]:
    """Return the states of all random number generators, as tensors and numbers."""
    return GlobalRNGState().state_dict()


def set_random_state(state: dict[str, Any]) -> None:
    """Restore :func:`random_state`; states of GPUs that are not here are left out."""
    cuda = state.get("torch_cuda", [])[: torch.cuda.device_count()]
    others = {name: each for name, each in state.items() if name != "torch_cuda"}
    GlobalRNGState().load_state_dict({**others, "torch_cuda": cuda} if cuda else others)
