"""What ``rollouts.py`` compares ManiSkill on a CPU with: ManiSkill's own step."""

import argparse
import os

import numpy as np
from timing import Contender


def frame_per_action(options: argparse.Namespace) -> Contender:
    """ManiSkill's environment of the variant or task: one world in this process takes every world's turn."""
    from vla_envs import make_spec
    from vla_envs.maniskill.spec import BUILT_IN, CONTROL_MODE
    from vla_envs.rendering.vulkan import choose_driver, has_gpu

    os.environ["LP_NUM_THREADS"] = options.peer_raster_threads
    choose_driver()
    import mani_skill.envs  # noqa: F401  registers the tasks
    from mani_skill.utils.registration import make

    from vla_envs.maniskill.scene import PutOnPlate

    name, backend = options.env.partition("/")[2], "gpu" if has_gpu() else "cpu"
    if name in BUILT_IN:
        world = make(
            name,
            obs_mode="rgb",
            control_mode=CONTROL_MODE,
            reward_mode="sparse",
            sensor_configs={"height": options.size, "width": options.size},
            sim_backend="physx_cpu",
            render_backend=backend,
        )
    else:
        of_spec = make_spec(options.env, render_quality=options.quality).options
        shader = {"shader_pack": of_spec["shader"]}
        world = PutOnPlate(splits=of_spec["splits"], reward_mode="dense", render_backend=backend, sensor_configs=shader)

    def run(actions: np.ndarray, times: int) -> None:
        for _ in range(times):
            for chunk in actions:
                for action in chunk:
                    world.step(action)

    def start() -> None:
        world.reset(options={} if name in BUILT_IN else {"episode_id": 0})

    return Contender("ManiSkill, frame per action", start, run, world.close, options.decisions)
