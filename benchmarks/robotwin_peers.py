"""RoboTwin's own ``VectorEnv``, for ``rollouts.py``, and the memory of worlds.

It runs in a process of its own, as nothing of this library's room may make it faster. mplib, which does not run under
numpy 2, is replaced as everywhere here; its TOPP is computed by toppra alone, as mplib does. It draws with the
rasteriser, too: the ray tracer, which it asks for, would take 100 times as long on a CPU.
"""

import argparse
import os
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from timing import Contender, memory_of_descendants

SEED = 10_000  # of the benchmark's episodes


def vector_env(options: argparse.Namespace) -> Contender:
    """RoboTwin's environment with a thread for each world; always all three cameras."""
    ours, theirs = get_context("spawn").Pipe()
    process = get_context("spawn").Process(target=_serve, args=(theirs, options.env, options.envs), daemon=True)
    process.start()
    theirs.close()

    def ask(*question: Any) -> Any:
        ours.send(question)
        return ours.recv()

    def run(actions: np.ndarray, times: int) -> None:
        ask("step", actions, times)

    def close() -> None:
        ours.send(("close",))
        process.join()

    return Contender("RoboTwin's VectorEnv", lambda: ask("reset"), run, close, options.decisions)


def _serve(connection: Connection, name: str, worlds: int) -> None:
    """Answer questions until told to close."""
    env = _make(name.partition("/")[2], worlds)
    while True:
        command, *arguments = connection.recv()
        if command == "close":
            connection.close()
            os._exit(0)  # SAPIEN's threads do not end by themselves
        if command == "reset":
            env.reset(env_seeds=[SEED] * worlds)
            env.get_obs()
        else:
            actions, times = arguments
            for _ in range(times):
                env.step(actions.astype(np.float64))
        connection.send(None)


def _make(task: str, worlds: int) -> Any:
    import yaml

    from vla_envs.rendering.vulkan import choose_driver
    from vla_envs.robotwin import package, planning

    class Planner(planning.Planner):
        """mplib's, which asks toppra alone."""

        def TOPP(self, path: np.ndarray, step: float = 0.1, verbose: bool = False) -> Any:  # noqa: N802
            from toppra import SplineInterpolator, algorithm, constraint

            joints = path.shape[1]
            limits = [
                constraint.JointVelocityConstraint(np.full(joints, planning.VELOCITY_LIMIT)),
                constraint.JointAccelerationConstraint(np.full(joints, planning.ACCELERATION_LIMIT)),
            ]
            spline = SplineInterpolator(np.linspace(0, 1, len(path)), path)
            moved = algorithm.TOPPRA(limits, spline, parametrizer="ParametrizeConstAccel").compute_trajectory()
            times = np.linspace(0, moved.duration, int(moved.duration / step))
            return times, moved(times), moved(times, 1), moved(times, 2), moved.duration

    planning.Planner = Planner  # type: ignore[misc]  # what the checkout finds for mplib's
    folder, assets = package.CHECKOUT.find(), package.find_assets()
    os.environ["ASSETS_PATH"] = str(assets)
    sys.path.insert(0, str(folder))
    choose_driver()
    with planning.stand_ins(), redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        from envs._base_task import Base_Task
        from robotwin.envs.vector_env import VectorEnv
    setup_scene = Base_Task.setup_scene

    def setup_scene_to_rasterise(task: Any, **options: Any) -> None:
        import sapien

        setup_scene(task, **options)
        sapien.render.set_camera_shader_dir("default")

    Base_Task.setup_scene = setup_scene_to_rasterise
    settings = yaml.safe_load(Path(folder, "task_config/demo_clean.yml").read_text())
    settings.update(task_name=task, planner_backend="mplib", step_lim=10_000)
    with planning.stand_ins():  # tasks are imported here
        return VectorEnv(settings, worlds, [SEED] * worlds)


def memory(options: argparse.Namespace, spec: Any) -> dict[str, float]:
    """Megabytes of a process with one world, and of each further world in it, once all three views were drawn."""
    from vla_envs import Episode, WorkerPool

    sizes = []
    for worlds in (1, 3):
        before = memory_of_descendants()
        pool = WorkerPool(spec, worlds, 1, options.chunk, step_timeout=300)
        pool.reset({slot: Episode(0, 0) for slot in range(worlds)})
        sizes.append(memory_of_descendants() - before)
        pool.close()
    return {"a process with one world": sizes[0], "each further world in it": (sizes[1] - sizes[0]) / 2}
