"""What ``rollouts.py`` compares ManiSkill on a CPU with: one process, and ManiSkill's own step."""

from __future__ import annotations

import argparse
import os
from typing import Any

import numpy as np
import torch
from timing import Contender

import vla_keys as keys
from vla_envs import make_env


def peers(options: argparse.Namespace) -> list[Contender]:
    return [one_process(options), frame_per_action(options)]


def one_process(options: argparse.Namespace) -> Contender:
    """VLAEnv whose worlds are all in one worker process."""
    env = make_env(
        options.env,
        options.envs,
        options.chunk,
        num_workers=1,
        ignore_terminations=True,
        step_timeout=600.0,
        image_size=options.size,
        max_episode_steps=10**6,
    )
    state: dict[str, Any] = {}

    def start() -> None:
        state["td"] = env.reset()

    def run(actions: np.ndarray, times: int) -> None:
        state["td"][keys.ACTION] = torch.from_numpy(actions)
        for _ in range(times):
            env.step(state["td"])

    return Contender("VLAEnv, one worker", start, run, env.close, options.decisions)


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
