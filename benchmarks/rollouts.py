"""How fast are rollouts? This library's environment beside what the field uses, in one run.

All contenders simulate the same task with the same cameras, image size, render quality, chunk length, number of
environments and actions. Beside ``VLAEnv``, whose environments are spread over ``--workers`` processes and which draws
one frame per chunk, and ``bare simulators``, which do the same work without any communication, these are:

* Meta-World (``metaworld_peers.py``): Gymnasium's ``AsyncVectorEnv`` over Meta-World's own class, with a frame per
  primitive action, or behind a wrapper that executes a chunk and renders once; TorchRL's ``ParallelEnv`` and this
  library's ``gymnasium.make_vec`` likewise.
* LIBERO (``libero_peers.py``): LIBERO's own ``SubprocVectorEnv``, which draws both cameras after every action, and
  TorchRL's ``LiberoWrapper`` with ``ParallelEnv`` and ``MultiAction``. Resets and memory are measured as well.
* ManiSkill on a CPU (``maniskill_peers.py``): the same environment with one worker process, and ManiSkill's own
  ``step`` in this process, which draws a frame after every action.
* CALVIN (``calvin_peers.py``): the same simulator in this process, which draws both cameras after every action, as
  calvin_env's own ``PlayTableSimEnv`` does.
* RoboTwin (``robotwin_peers.py``): RoboTwin's own ``VectorEnv``, with a thread for each world. A chunk is one motion
  there, so that *a step* is the chunk's time divided by its actions. Memory is measured as well.

The *ideal* is cores / (C x CPU time of a physics step + CPU time of a frame), measured on one simulator in
this process. Repetitions are interleaved; the table shows medians, and ratios are taken within a repetition.
CPU time counts all processes and their threads. When other programs use the machine, wall times mean little
by themselves: compare CPU times, and VLAEnv's wall time with that of the bare simulators.

Mesa's software rasteriser takes ``LP_NUM_THREADS`` threads per process: 1 for VLAEnv, and
``--peer-raster-threads`` for the others. 0, 1 and 2 cost the same CPU time and draw the same pixels.

    python benchmarks/rollouts.py --quality fast --output rollouts.json
    python benchmarks/rollouts.py --env libero/spatial --envs 2
    python benchmarks/rollouts.py --env maniskill/PutOnPlateInScene25Main-v3 --envs 4
    python benchmarks/rollouts.py --env calvin/D --envs 4
    python benchmarks/rollouts.py --env robotwin/place_empty_cup --envs 2
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("MUJOCO_GL", "egl")
os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import torch
from timing import Contender

from vla_common import keys
from vla_envs import Episode, Simulator, SimulatorSpec, WorkerPool, make_env, make_spec
from vla_envs.workers.chunks import executes_chunks, run_chunk

HORIZON = 500  # of every episode; Meta-World's own, past which it raises


def env_options(options: argparse.Namespace) -> dict[str, Any]:
    if options.benchmark == "robotwin":
        return {"seeds": "range", "step_lim": HORIZON, "render_quality": options.quality}
    return {
        "image_size": options.size,
        "max_episode_steps": HORIZON,
        **({} if options.benchmark == "calvin" else {"render_quality": options.quality}),
        **({"task_ids": [options.task]} if options.benchmark == "libero" else {}),
    }


def spec_of(options: argparse.Namespace) -> SimulatorSpec:
    return make_spec(options.env, **env_options(options))


def vla_env(options: argparse.Namespace, workers: int, name: str = "VLAEnv") -> Contender:
    env = make_env(
        options.env,
        options.envs,
        options.chunk,
        num_workers=workers,
        ignore_terminations=True,  # every contender executes every action
        step_timeout=300.0,
        **env_options(options),
    )
    state = {}

    def start() -> None:
        state["td"] = env.reset()

    def run(actions: np.ndarray, times: int) -> None:
        state["td"][keys.ACTION] = torch.from_numpy(actions)
        for _ in range(times):
            env.step(state["td"])

    return Contender(name, start, run, env.close, options.decisions)


def bare_simulators(options: argparse.Namespace) -> Contender:
    pool = WorkerPool(spec_of(options), options.workers, options.workers, options.chunk)

    def run(actions: np.ndarray, times: int) -> None:
        share = -(-times * options.envs // options.workers)  # of each process, which has one simulator
        pool.map("rollouts:run_bare", [share] * options.workers, actions=actions[0])

    return Contender("bare simulators", lambda: None, run, pool.close, options.decisions)


def run_bare(simulator: Simulator, decisions: int, actions: np.ndarray) -> None:
    """Chunks and frames in a worker process; ``actions`` is float32 ``[C, A]``."""
    for decision in range(decisions):
        if decision % (HORIZON // len(actions)) == 0:
            simulator.reset(Episode(0, 0))
        execute(simulator, actions)
        simulator.observe()


def execute(simulator: Simulator, actions: np.ndarray) -> None:
    """Execute a chunk, float32 ``[C, A]``, as a worker does."""
    for _ in run_chunk(simulator.spec, simulator, actions, 0, ignore_terminations=True):
        pass


class SingleSimulator:
    """CPU time of one physics step and of one frame, without any batching."""

    def __init__(self, options: argparse.Namespace):
        self.simulator = spec_of(options).make()
        self.step: list[float] = []
        self.render: list[float] = []

    def measure(self, actions: np.ndarray, steps: int = 300, frames: int = 25) -> None:
        self.simulator.reset(Episode(0, 0))
        self.simulator.observe()
        if executes_chunks(self.simulator):
            chunks = steps // len(actions)
            self.step.append(_cpu_of(partial(execute, self.simulator, actions), chunks) / len(actions))
        else:
            self.step.append(_cpu_of(partial(self.simulator.step, actions[0]), steps))
        self.render.append(_cpu_of(self.simulator.observe, frames))


def _cpu_of(function: Callable[[], Any], times: int) -> float:
    start = time.process_time()
    for _ in range(times):
        function()
    return (time.process_time() - start) / times


def peers_of(options: argparse.Namespace) -> tuple[list[Contender], dict[str, Any]]:
    """What the field runs on a benchmark, and what else is measured of it before anything starts."""
    if options.benchmark == "libero":
        from libero_peers import memory, peers

        return peers(options), {"memory_mb_per_env": memory(options)}
    if options.benchmark == "maniskill":
        from maniskill_peers import frame_per_action

        return [vla_env(options, 1, "VLAEnv, one worker"), frame_per_action(options)], {}
    if options.benchmark == "calvin":
        from calvin_peers import frame_per_action

        return [frame_per_action(options)], {}
    if options.benchmark == "robotwin":
        from robotwin_peers import memory, vector_env

        costs = {"memory_mb": memory(options, spec_of(options))}
        return [vector_env(options)], costs
    from metaworld_peers import peers

    return peers(options), {}


def actions_of(options: argparse.Namespace) -> np.ndarray:
    """Small actions, float32 ``[N, C, A]``: nothing is knocked over, all contenders simulate the same gentle motion."""
    shape, random = (options.envs, options.chunk, spec_of(options).action_dim), np.random.default_rng(0)
    if options.benchmark != "robotwin":
        return random.uniform(-0.3, 0.3, shape).astype(np.float32)
    # Joint positions, a walk that begins where RoboTwin's arms stand; 500 physics steps.
    actions = random.normal(0, 0.05, shape).cumsum(1).astype(np.float32)
    actions[..., [6, 13]] = 1  # open grippers
    return actions


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure everything; returns what ``--output`` writes."""
    actions = actions_of(options)
    # Processes inherit LP_NUM_THREADS. Gymnasium's are forked, hence before this process opens a graphics context.
    os.environ["LP_NUM_THREADS"] = options.peer_raster_threads
    peers, costs = peers_of(options)
    for peer in peers:
        peer.start()
    os.environ["LP_NUM_THREADS"] = "1"
    single, ours = SingleSimulator(options), vla_env(options, options.workers)
    contenders = [ours, *peers, bare_simulators(options)]
    try:
        for repetition in range(options.repetitions + 1):
            print(f"repetition {repetition} of {options.repetitions}, 0 warms up", flush=True)
            single.measure(actions[0])
            for contender in contenders:
                contender.measure(actions)
            if repetition == 0:
                for samples in (single.step, single.render, *(s for c in contenders for s in (c.wall, c.cpu))):
                    samples.clear()
    finally:
        for contender in contenders:
            with suppress(OSError):  # a process that died is what the error being raised is about
                contender.close()
    if options.benchmark == "libero":  # last: its own renderer takes the graphics display of this process with it
        from libero_peers import resets

        costs["reset"] = resets(options)
    return {**_summary(options, single, contenders), **costs}


def _summary(options: argparse.Namespace, single: SingleSimulator, contenders: Sequence[Contender]) -> dict[str, Any]:
    ours, bare = contenders[0], contenders[-1]
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
        "share_of_bare_simulators_in_wall_time": ratio(bare.wall, ours.wall),
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
        f"\n{settings['env']}, {settings['envs']} environments, chunk {settings['chunk']}, "
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
    for name, size in result.get("memory_mb", {}).items():
        print(f"memory of {name}: {size:.0f} MB")
    if "reset" in result:
        ours, hard = result["reset"]["ours_cpu_ms"], result["reset"]["hard_cpu_ms"]
        print(f"\nreset with frames: {ours:.0f} CPU ms, hard reset {hard:.0f}: {hard / ours:.1f} times as long")
        sizes = result["memory_mb_per_env"]
        alone = next(iter(sizes.values()))
        for name, size in sizes.items():
            print(f"memory per environment, {name}: {size:.0f} MB ({size / alone:.0%})")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--env", default="metaworld/pick-place-v3", help="a task, also of libero/, maniskill/ or robotwin/; or calvin/D"
    )
    parser.add_argument("--task", type=int, default=0, help="number of the task, for LIBERO")
    parser.add_argument("--envs", type=int, default=8)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="processes of VLAEnv")
    parser.add_argument("--chunk", type=int, help="primitive actions; 5, for LIBERO 8, for RoboTwin 25")
    parser.add_argument(
        "--size", type=int, help="image size in pixels; 224, for LIBERO 256, for CALVIN 200; not for RoboTwin"
    )
    parser.add_argument("--quality", choices=["benchmark", "fast"], default="benchmark")
    parser.add_argument("--decisions", type=int, default=10, help="per repetition")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--peer-raster-threads", default="1", metavar="N", help="LP_NUM_THREADS of the others")
    parser.add_argument("--output", type=Path, help="write the result as JSON")
    options = parser.parse_args()
    options.benchmark = options.env.partition("/")[0]
    options.chunk = options.chunk or {"libero": 8, "robotwin": 25}.get(options.benchmark, 5)
    options.size = options.size or {"libero": 256, "calvin": 200, "robotwin": 240}.get(options.benchmark, 224)
    if (options.decisions + 1) * options.chunk >= HORIZON:
        parser.error(f"(decisions + 1) x chunk must stay below {HORIZON} steps, the horizon of the episodes here")
    if options.quality != "benchmark" and not options.env.startswith(("metaworld/", "maniskill/PutOn", "robotwin/")):
        parser.error(
            f"--quality {options.quality} is for Meta-World, plate-25 and RoboTwin; on {options.env} leave it out"
        )
    return options


if __name__ == "__main__":
    arguments = parse()
    outcome = run(arguments)
    show(outcome)
    if arguments.output:
        arguments.output.write_text(json.dumps(outcome, indent=2) + "\n")
