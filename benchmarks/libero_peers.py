"""LIBERO as the field runs it, for ``rollouts.py``; its resets and its memory."""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from timing import Contender, memory_of_descendants
from torchrl.envs import EnvBase, LiberoEnv, LiberoWrapper, MultiAction, ParallelEnv, TransformedEnv

from vla_envs import Episode, Task, WorkerPool, make_spec
from vla_envs.libero.package import find_assets, import_libero, initial_states, task_file

CAMERAS = ["agentview", "robot0_eye_in_hand"]


def peers(options: argparse.Namespace) -> list[Contender]:
    """LIBERO's own environment, which draws both cameras after every action, and TorchRL's over it, in chunks."""
    # Their processes import LIBERO by themselves, which asks a question unless it finds its paths; TorchRL writes them.
    os.environ["LIBERO_CONFIG_PATH"] = tempfile.mkdtemp()
    assert "libero_spatial" in LiberoEnv.available_envs
    return [_subprocesses(options), _parallel_env(options)]


def _prepare() -> Any:
    """LIBERO, told where its assets are."""
    envs = import_libero()
    import libero.libero as libero

    libero._assets_path_cache = str(find_assets())
    return envs


def _own_env(chosen: Task, size: int) -> Any:
    envs = _prepare()
    file = str(task_file(chosen.group, chosen.name))
    return envs.OffScreenRenderEnv(bddl_file_name=file, camera_names=CAMERAS, camera_heights=size, camera_widths=size)


def _subprocesses(options: argparse.Namespace) -> Contender:
    envs, chosen = _prepare(), _task(options)
    env = envs.SubprocVectorEnv([partial(_own_env, chosen, options.size)] * options.envs)
    states = initial_states(chosen.group, chosen.name)

    def start() -> None:
        env.reset()
        env.set_init_state([states[0]] * options.envs)

    def run(actions: np.ndarray, times: int) -> None:
        for _ in range(times):
            for action in actions.swapaxes(0, 1):
                env.step(action)

    return Contender("SubprocVectorEnv, every step", start, run, env.close, _few(options))


def _parallel_env(options: argparse.Namespace) -> Contender:
    env = ParallelEnv(options.envs, partial(_torchrl_env, _task(options), options.size))
    state = {}

    def start() -> None:
        state["td"] = env.reset()

    def run(actions: np.ndarray, times: int) -> None:
        for _ in range(times):
            env.step(state["td"].set("action", torch.from_numpy(actions)))

    return Contender("TorchRL LiberoWrapper, MultiAction", start, run, env.close, _few(options))


def _torchrl_env(chosen: Task, size: int) -> EnvBase:
    states = initial_states(chosen.group, chosen.name)
    env = LiberoWrapper(
        _own_env(chosen, size), init_states=states, init_state_mode="fixed", wrist_camera=CAMERAS[1], settle_steps=0
    )
    return TransformedEnv(env, MultiAction())


def _task(options: argparse.Namespace) -> Task:
    return make_spec(options.env).tasks[options.task]


def _few(options: argparse.Namespace) -> int:
    """Who renders every step takes long enough with fewer decisions."""
    return max(1, options.decisions // options.chunk)


# ---- resets and memory


def resets(options: argparse.Namespace, times: int = 5) -> dict[str, float]:
    """CPU milliseconds of a reset with its frames: ours, and LIBERO's own (hard), both without settle steps."""
    simulator = make_spec(options.env, image_size=options.size, settle_steps=0).make()
    chosen = simulator.spec.tasks[options.task]
    states = initial_states(chosen.group, chosen.name)
    own = _own_env(chosen, options.size)

    def ours(trial: int) -> None:
        simulator.reset(Episode(options.task, trial))
        simulator.observe()

    def hard(trial: int) -> None:
        own.reset()
        own.set_init_state(states[trial])

    found = {name: [_cpu_of(reset, trial) for trial in range(times + 1)][1:] for name, reset in
             (("ours", ours), ("hard", hard))}  # fmt: skip
    own.close()
    simulator.close()
    return {f"{name}_cpu_ms": 1e3 * statistics.median(samples) for name, samples in found.items()}


def _cpu_of(function: Callable[[int], None], trial: int) -> float:
    start = time.process_time()
    function(trial)
    return time.process_time() - start


def memory(options: argparse.Namespace) -> dict[str, float]:
    """Megabytes per environment: one process each, and all in one process, of one task and of a task each."""
    spec = make_spec(options.env, image_size=options.size)
    found = {}
    for name, workers, tasks in (
        ("one process each", options.envs, 1),
        ("one process, one task", 1, 1),
        ("one process, a task each", 1, 10),
    ):
        before = memory_of_descendants()
        pool = WorkerPool(spec, options.envs, workers, options.chunk, step_timeout=300)
        pool.reset({slot: Episode(slot % tasks, 0) for slot in range(options.envs)})
        found[name] = (memory_of_descendants() - before) / options.envs
        pool.close()
    return found
