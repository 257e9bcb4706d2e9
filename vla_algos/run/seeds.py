"""Seeds of a run: of all random generators at the start, and of each process from where they part."""

from __future__ import annotations

import random

import numpy as np
import torch

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
