"""How fast are rollouts? This library's environment beside what the field uses, in one run.

All contenders simulate the same Meta-World task with the same camera, image size, render quality, chunk
length, number of environments and actions:

* ``VLAEnv``: this library, the environments spread over ``--workers`` processes, one frame per chunk;
* ``AsyncVectorEnv, every step``: Gymnasium's, over Meta-World's own class, a frame per primitive action;
* ``AsyncVectorEnv, per chunk``: the same behind a wrapper that executes a chunk and renders once;
* ``ParallelEnv, every step`` and ``per chunk``: TorchRL's, over ``GymWrapper`` of the same two;
* ``bare simulators``: chunks and frames in as many processes as ``VLAEnv`` has, without any communication.

The *ideal* is cores / (C x CPU time of a physics step + CPU time of a frame), measured on one simulator in
this process. Repetitions are interleaved; the table shows medians, and ratios are taken within a repetition.
CPU time counts all processes and their threads. When other programs use the machine, wall times mean little
by themselves: compare CPU times, and VLAEnv's wall time with that of the bare simulators.

Mesa's software rasteriser takes ``LP_NUM_THREADS`` threads per process: 1 for VLAEnv, and
``--peer-raster-threads`` for the others. 0, 1 and 2 cost the same CPU time and draw the same pixels.

    python benchmarks/rollouts.py --quality fast --output rollouts.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("MUJOCO_GL", "egl")
os.environ["OMP_NUM_THREADS"] = "1"

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv
from torchrl.envs import GymWrapper, ParallelEnv

import vla_keys as keys
from vla_envs import Episode, Simulator, WorkerPool, make_env, make_spec

HORIZON = 500  # Meta-World's own, past which it raises
CAMERA = "corner4"


class PeerEnv(gymnasium.Env):
    """Meta-World as it is commonly wrapped: its own class, its own renderer.

    Args:
        task: such as ``"pick-place-v3"``.
        size: pixels of a side.
        quality: ``"benchmark"`` or ``"fast"``, which switches off what VLAEnv's switches off.
        chunk: primitive actions per ``step``, after which one frame is rendered; ``None`` for one plain action.
    """

    def __init__(self, task: str, size: int, quality: str, chunk: int | None = None):
        from metaworld.env_dict import ENV_CLS_MAP

        self.world = ENV_CLS_MAP[task](
            render_mode="rgb_array", camera_name=CAMERA, width=size, height=size
        )
        if quality == "fast":
            self.world.model.vis.quality.shadowsize = 0
            self.world.model.vis.quality.offsamples = 0
        self.world._set_task_called, self.world._freeze_rand_vec = True, False
        self.chunk = chunk
        self.observation_space = spaces.Dict(
            {
                "image": spaces.Box(0, 255, (size, size, 3), np.uint8),
                "state": spaces.Box(-np.inf, np.inf, (4,)),
            }
        )
        self.action_space = spaces.Box(-1, 1, (4,) if chunk is None else (chunk, 4))

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        super().reset(seed=seed)
        return self._observe(self.world.reset()[0]), {}

    def step(self, action: np.ndarray) -> tuple[dict, float, bool, bool, dict]:
        reward = 0.0
        for primitive in action.reshape(-1, 4):
            observation, _, _, _, info = self.world.step(primitive)
            reward += info["success"]
        return self._observe(observation), reward, False, False, {}

    def _observe(self, observation: np.ndarray) -> dict[str, np.ndarray]:
        image = np.ascontiguousarray(self.world.render()[::-1, ::-1])  # corner4 hangs upside down
        return {"image": image, "state": observation[:4].astype(np.float32)}

    def close(self) -> None:
        self.world.close()


@dataclass
class Contender:
    """Something to time.

    Attributes:
        name: for the table.
        start: begins new episodes.
        run: executes the same chunks, float32 ``[N, C, A]``, a number of times in every world.
        close: ends its processes.
        decisions: how often to run them per repetition.
        wall, cpu: samples in seconds per decision of one environment.
    """

    name: str
    start: Callable[[], Any]
    run: Callable[[np.ndarray, int], Any]
    close: Callable[[], Any]
    decisions: int
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def measure(self, actions: np.ndarray) -> None:
        self.start()
        self.run(actions, 1)  # warms up
        cpu, wall = cpu_time_of_all(), time.perf_counter()
        self.run(actions, self.decisions)
        scale = 1 / (self.decisions * len(actions))
        self.wall.append((time.perf_counter() - wall) * scale)
        self.cpu.append((cpu_time_of_all() - cpu) * scale)


def vla_env(options: argparse.Namespace) -> Contender:
    env = make_env(
        f"metaworld/{options.task}",
        options.envs,
        options.chunk,
        num_workers=options.workers,
        ignore_terminations=True,  # every contender executes every action
        image_size=options.size,
        render_quality=options.quality,
        max_episode_steps=HORIZON,
    )
    state = {}

    def start() -> None:
        state["td"] = env.reset()

    def run(actions: np.ndarray, times: int) -> None:
        state["td"][keys.ACTION] = torch.from_numpy(actions)
        for _ in range(times):
            env.step(state["td"])

    return Contender("VLAEnv", start, run, env.close, options.decisions)


def bare_simulators(options: argparse.Namespace) -> Contender:
    spec = make_spec(
        f"metaworld/{options.task}",
        image_size=options.size,
        render_quality=options.quality,
        max_episode_steps=HORIZON,
    )
    pool = WorkerPool(spec, options.workers, options.workers, options.chunk)

    def run(actions: np.ndarray, times: int) -> None:
        share = -(-times * options.envs // options.workers)  # of each process, which has one simulator
        pool.map("rollouts:run_bare", [share] * options.workers, actions=actions[0])

    return Contender("bare simulators", lambda: None, run, pool.close, options.decisions)


def run_bare(simulator: Simulator, decisions: int, actions: np.ndarray) -> None:
    """Chunks and frames in a worker process; ``actions`` is float32 ``[C, A]``."""
    for decision in range(decisions):
        if decision % (HORIZON // len(actions)) == 0:
            simulator.reset(Episode(0, 0))
        for action in actions:
            simulator.step(action)
        simulator.observe()


def async_vector_env(options: argparse.Namespace, chunk: int | None) -> Contender:
    make = partial(PeerEnv, options.task, options.size, options.quality, chunk)
    env = AsyncVectorEnv([make] * options.envs)

    def run(actions: np.ndarray, times: int) -> None:
        for _ in range(times):
            for action in actions.swapaxes(0, 1) if chunk is None else [actions]:
                env.step(action)

    name = f"AsyncVectorEnv, {_mode(chunk)}"
    return Contender(name, partial(env.reset, seed=0), run, env.close, _decisions(options, chunk))


def parallel_env(options: argparse.Namespace, chunk: int | None) -> Contender:
    env = ParallelEnv(options.envs, partial(_wrapped_peer, options.task, options.size, options.quality, chunk))
    state = {}

    def start() -> None:
        state["td"] = env.reset()

    def run(actions: np.ndarray, times: int) -> None:
        tensors = torch.from_numpy(actions)
        for _ in range(times):
            for action in tensors.unbind(1) if chunk is None else [tensors]:
                env.step(state["td"].set("action", action))

    return Contender(f"ParallelEnv, {_mode(chunk)}", start, run, env.close, _decisions(options, chunk))


def _wrapped_peer(*arguments: Any) -> GymWrapper:
    return GymWrapper(PeerEnv(*arguments))


def _mode(chunk: int | None) -> str:
    return "every step" if chunk is None else "per chunk"


def _decisions(options: argparse.Namespace, chunk: int | None) -> int:
    """Who renders every step takes long enough with fewer decisions."""
    return max(2, options.decisions // options.chunk) if chunk is None else options.decisions


class SingleSimulator:
    """CPU time of one physics step and of one frame, without any batching."""

    def __init__(self, options: argparse.Namespace):
        spec = make_spec(
            f"metaworld/{options.task}",
            image_size=options.size,
            render_quality=options.quality,
            max_episode_steps=HORIZON,
        )
        self.simulator = spec.make()
        self.step: list[float] = []
        self.render: list[float] = []

    def measure(self, action: np.ndarray, steps: int = 300, frames: int = 25) -> None:
        self.simulator.reset(Episode(0, 0))
        self.simulator.observe()
        self.step.append(_cpu_of(partial(self.simulator.step, action), steps))
        self.render.append(_cpu_of(self.simulator.observe, frames))


def _cpu_of(function: Callable[[], Any], times: int) -> float:
    start = time.process_time()
    for _ in range(times):
        function()
    return (time.process_time() - start) / times


def cpu_time_of_all() -> float:
    """CPU seconds so far of this process and of all its living descendants, threads included."""
    parents, ticks = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):  # ended meanwhile
                continue
            parents[int(entry.name)] = int(fields[1])
            ticks[int(entry.name)] = int(fields[11]) + int(fields[12])  # user and system
    family, waiting = 0, [os.getpid()]
    while waiting:
        parent = waiting.pop()
        family += ticks[parent]
        waiting.extend(child for child, its_parent in parents.items() if its_parent == parent)
    return family / os.sysconf("SC_CLK_TCK")


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure everything; returns what ``--output`` writes."""
    # Small actions: nothing is knocked over, every contender simulates the same gentle motion.
    shape = (options.envs, options.chunk, 4)
    actions = np.random.default_rng(0).uniform(-0.3, 0.3, shape).astype(np.float32)
    # Processes inherit LP_NUM_THREADS. Gymnasium's are forked, hence before this process opens a graphics context.
    os.environ["LP_NUM_THREADS"] = options.peer_raster_threads
    peers = [make(options, chunk) for make in (async_vector_env, parallel_env) for chunk in (None, options.chunk)]
    for peer in peers:
        peer.start()
    os.environ["LP_NUM_THREADS"] = "1"
    single, ours = SingleSimulator(options), vla_env(options)
    contenders = [ours, *peers, bare_simulators(options)]
    try:
        for repetition in range(options.repetitions + 1):
            print(f"repetition {repetition} of {options.repetitions}, 0 warms up", flush=True)
            single.measure(actions[0, 0])
            for contender in contenders:
                contender.measure(actions)
            if repetition == 0:
                for samples in (single.step, single.render, *(s for c in contenders for s in (c.wall, c.cpu))):
                    samples.clear()
    finally:
        for contender in contenders:
            with suppress(OSError):  # a process that died is what the error being raised is about
                contender.close()
    ideal = options.chunk * np.array(single.step) + np.array(single.render)  # CPU seconds, per repetition
    cores = min(options.workers, len(os.sched_getaffinity(0)))

    def ratio(first: Sequence[float], second: Sequence[float]) -> float:
        return statistics.median(np.divide(first, second))

    return {
        "settings": {name: value for name, value in vars(options).items() if name != "output"},
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "step_cpu_ms": 1e3 * statistics.median(single.step),
        "render_cpu_ms": 1e3 * statistics.median(single.render),
        "ideal_decisions_per_s": cores / statistics.median(ideal),
        "share_of_ideal_in_wall_time": ratio(ideal / cores, ours.wall),
        "share_of_ideal_in_cpu_time": ratio(ideal, ours.cpu),
        "share_of_bare_simulators_in_wall_time": ratio(contenders[-1].wall, ours.wall),
        "contenders": [
            {
                "name": contender.name,
                "wall_ms_per_decision": 1e3 * statistics.median(contender.wall),
                "cpu_ms_per_decision": 1e3 * statistics.median(contender.cpu),
                "decisions_per_s": 1 / statistics.median(contender.wall),
                "env_steps_per_s": options.chunk / statistics.median(contender.wall),
                "wall_over_ours": ratio(contender.wall, ours.wall),
                "cpu_over_ours": ratio(contender.cpu, ours.cpu),
            }
            for contender in contenders
        ],
    }


def show(result: dict[str, Any]) -> None:
    settings = result["settings"]
    print(
        f"\n{settings['task']}, {settings['envs']} environments, chunk {settings['chunk']}, "
        f"{settings['size']} px, quality {settings['quality']}; VLAEnv with {settings['workers']} workers\n"
        f"{result['machine']}; LP_NUM_THREADS of the others: {settings['peer_raster_threads']}; "
        f"medians of {settings['repetitions']} repetitions\n"
    )
    columns = ["decisions/s", "env steps/s", "wall ms", "CPU ms", "wall/ours", "CPU/ours"]
    print(f"{'':<28}" + "".join(f"{column:>13}" for column in columns))
    for row in result["contenders"]:
        print(
            f"{row['name']:<28}{row['decisions_per_s']:>13.1f}{row['env_steps_per_s']:>13.1f}"
            f"{row['wall_ms_per_decision']:>13.2f}{row['cpu_ms_per_decision']:>13.2f}"
            f"{row['wall_over_ours']:>13.2f}{row['cpu_over_ours']:>13.2f}"
        )
    print(
        f"{'ideal':<28}{result['ideal_decisions_per_s']:>13.1f}   "
        f"(one step {result['step_cpu_ms']:.2f}, one frame {result['render_cpu_ms']:.2f} CPU ms)\n\n"
        f"VLAEnv reaches {result['share_of_ideal_in_cpu_time']:.0%} of the ideal in CPU time and "
        f"{result['share_of_ideal_in_wall_time']:.0%} in wall time; in wall time it has "
        f"{result['share_of_bare_simulators_in_wall_time']:.0%} of the speed of the bare simulators.\n"
        "Milliseconds are per decision of one environment."
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="pick-place-v3")
    parser.add_argument("--envs", type=int, default=8)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="processes of VLAEnv")
    parser.add_argument("--chunk", type=int, default=5)
    parser.add_argument("--size", type=int, default=224, help="image size in pixels")
    parser.add_argument("--quality", choices=["benchmark", "fast"], default="benchmark")
    parser.add_argument("--decisions", type=int, default=10, help="per repetition")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--peer-raster-threads", default="1", metavar="N", help="LP_NUM_THREADS of the others")
    parser.add_argument("--output", type=Path, help="write the result as JSON")
    options = parser.parse_args()
    if (options.decisions + 1) * options.chunk >= HORIZON:
        parser.error(f"(decisions + 1) x chunk must stay below Meta-World's horizon of {HORIZON} steps")
    return options


if __name__ == "__main__":
    arguments = parse()
    outcome = run(arguments)
    show(outcome)
    if arguments.output:
        arguments.output.write_text(json.dumps(outcome, indent=2) + "\n")
