"""What ``rollouts.py`` compares ManiSkill on a CPU with: ManiSkill's own step."""

from __future__ import annotations

import argparse
import os

import numpy as np
from timing import Contender


def frame_per_action(options: argparse.Namespace) -> Contender:
    """ManiSkill's ``gymnasium`` environment of the variant: one world in this process takes every world's turn."""
    from vla_envs.maniskill.vulkan import choose_driver, has_gpu

    os.environ["LP_NUM_THREADS"] = options.peer_raster_threads
    choose_driver()
    from vla_envs.maniskill.scene import PutOnPlate

    variant = options.env.partition("/")[2]
    world = PutOnPlate(variant=variant, reward_mode="dense", render_backend="gpu" if has_gpu() else "cpu")

    def run(actions: np.ndarray, times: int) -> None:
        for _ in range(times):
            for chunk in actions:
                for action in chunk:
                    world.step(action)

    def start() -> None:
        world.reset(options={"episode_id": 0})

    return Contender("ManiSkill, frame per action", start, run, world.close, options.decisions)
