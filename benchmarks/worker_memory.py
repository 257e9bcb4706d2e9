"""Memory of a worker process with one world and with more.

``python -m benchmarks.worker_memory metaworld/MT50 [--worlds 4]`` makes worlds in this process, each of the next task,
runs five actions and two frames in each, and prints the proportional set size (``Pss`` of ``smaps_rollup``) in GB.
"""

import argparse
import os
from pathlib import Path

import numpy as np

from vla_envs import Episode, make_spec
from vla_envs.workers.chunks import executes_chunks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("id", help="such as metaworld/MT50")
    parser.add_argument("--worlds", type=int, default=4)
    chosen = parser.parse_args()
    spec = make_spec(chosen.id)
    worlds = []
    for number in range(chosen.worlds):
        world = spec.make()
        world.reset(Episode(number % len(spec.tasks), 0))
        world.observe()
        if not executes_chunks(world):
            for _ in range(5):
                world.step(np.zeros(spec.action_dim))
        world.observe()
        worlds.append(world)
        print(f"{chosen.id} {number + 1} worlds {memory():.3f} GB", flush=True)
    os._exit(0)  # simulators that are torn down in another order than they were made may crash


def memory() -> float:
    """Return the proportional set size of this process in GB."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1e6


if __name__ == "__main__":
    main()
