"""Memory of a worker process with one world and with more.

``python -m benchmarks.worker_memory metaworld/MT50 [--worlds 4]`` makes worlds in this process, each of the next task,
runs five actions and two frames in each, and prints the proportional set size in GB.
"""

import argparse
import os

import numpy as np
import psutil

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
        print(f"{chosen.id} {number + 1} worlds {psutil.Process().memory_full_info().pss / 1e9:.3f} GB", flush=True)
    os._exit(0)  # simulators that are torn down in another order than they were made may crash


if __name__ == "__main__":
    main()
