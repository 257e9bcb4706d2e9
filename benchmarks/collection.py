"""Episodes per minute, worked off as a queue or run to the horizon: ``python benchmarks/collection.py RUN``.

*Queue*: :class:`~vla_algos.collectors.EpisodeCollector`, a slot that finishes takes the next episode. *Horizon*: all
environments run until the horizon, then all are reset, as frameworks do that collect a fixed number of steps. Both run
the same episodes with the same sampling policy, in turns. CPU seconds include those of the simulators.

``python benchmarks/collection.py --collectors metaworld/MT50``: memory and time of a batch of
:class:`~vla_algos.collectors.StepCollector` and of TorchRL's ``Collector`` (``compact_obs`` and not), in turns. Without
``compact_obs`` the values are those that TorchRL's ``GAE`` asks the critic for.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from statistics import median

import torch
from omegaconf import OmegaConf
from torch import Tensor
from torchrl.collectors import Collector
from torchrl.envs import TransformedEnv
from torchrl.objectives.value import GAE

from vla_algos import gae
from vla_algos.collectors import EpisodeCollector, StepCollector
from vla_common.keys import NEXT, STATE_VALUE, SUCCESS
from vla_envs import EpisodeQueue, InstructionsToBytes, VLAEnv, evaluation_episodes, make_env
from vla_policies import SmallVLA, VLAPolicy, load_policy

_TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds() -> float:
    """CPU time of this process and of its running children, the simulators."""
    total = sum(os.times()[:2])
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        if int(fields[1]) == os.getpid():
            total += (int(fields[11]) + int(fields[12])) / _TICKS
    return total


def queue(env: VLAEnv, policy: VLAPolicy, episodes: list) -> tuple[float, float]:
    """Success and idle share of the slots' time."""
    collector = EpisodeCollector(env, policy, episodes)
    success = [bool(episode[NEXT, SUCCESS][-1]) for episode in collector.iterator()]
    return sum(success) / len(success), collector.stats()["time/idle_fraction"]


def horizon(env: VLAEnv, policy: VLAPolicy, episodes: list) -> tuple[float, float]:
    """The same, with all slots busy until the horizon."""
    decisions = -(-env.simulator_spec.max_episode_steps // env.chunk_size)
    solved = 0
    for start in range(0, len(episodes), env.num_envs):
        env.set_episodes(EpisodeQueue(episodes[start : start + env.num_envs]))
        batch = StepCollector(env, policy, decisions).rollout()
        solved += int(batch[NEXT, SUCCESS][:, -1].sum())
    return solved / len(episodes), 0.0


def collectors(id: str, num_envs: int, decisions: int, repetitions: int) -> None:
    """Print what a batch takes, and how long, in milliseconds per decision of one environment."""
    env = TransformedEnv(make_env(id, num_envs, image_size=224, seed=0), InstructionsToBytes())
    torch.manual_seed(0)
    policy = SmallVLA.make(env.base_env.simulator_spec).eval()
    settings = {"frames_per_batch": num_envs * decisions, "total_frames": -1}
    estimator = GAE(gamma=0.99, lmbda=0.95, value_network=policy.get_value_operator(), deactivate_vmap=True)
    ways = {
        "StepCollector": iter(StepCollector(env, policy, decisions)),
        "Collector(compact_obs=True)": iter(Collector(env, policy, **settings, compact_obs=True)),
        "Collector(compact_obs=False)": iter(Collector(env, policy, **settings)),
    }
    rows: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    sizes: dict[str, float] = {}
    for _ in range(repetitions + 1):
        for name, batches in ways.items():
            env.reset()
            started = time.perf_counter()
            batch = next(batches)
            collected = time.perf_counter()
            with torch.no_grad():
                if name == "StepCollector":
                    gae(batch)
                elif name == "Collector(compact_obs=False)":
                    estimator(batch.exclude(STATE_VALUE))
            rows[name].append((collected - started, time.perf_counter() - collected))
            sizes[name] = sum(x.numel() * x.element_size() for x in batch.values(True, True) if isinstance(x, Tensor))
    per_decision = 1000 / (num_envs * decisions)
    print(f"{id}, {num_envs} x {decisions} decisions, 224 pixels, {repetitions} repetitions, medians\n")
    print(f"{'':<28}  MB per batch  ms/decision  ms/decision of advantages")
    for name, results in rows.items():
        collect, estimate = (per_decision * median(column) for column in zip(*results[1:], strict=True))
        print(f"{name:<28}  {sizes[name] / 1e6:12.1f}  {collect:11.2f}  {estimate:25.2f}")
    env.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, nargs="?", help="folder that recipes/grpo.py or recipes/ppo.py wrote")
    parser.add_argument("--episodes", type=int, default=128)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--collectors", metavar="ID", help="environment to compare collectors in")
    parser.add_argument("--envs", type=int, default=8)
    parser.add_argument("--decisions", type=int, default=12)
    arguments = parser.parse_args()
    if arguments.collectors:
        collectors(arguments.collectors, arguments.envs, arguments.decisions, arguments.repetitions)
        return
    if arguments.run is None:
        parser.error("name a run's folder, or --collectors with an environment")
    policy = load_policy(arguments.run / "policy").eval()
    settings = OmegaConf.to_container(OmegaConf.load(arguments.run / "config.yaml").env)
    envs = {
        queue: make_env(**settings, chunk_size=policy.chunk_size),
        horizon: make_env(**settings, chunk_size=policy.chunk_size, ignore_terminations=True),
    }
    spec = envs[queue].simulator_spec
    number = -(-arguments.episodes // envs[queue].num_envs) * envs[queue].num_envs  # whole rounds of the horizon way
    episodes = evaluation_episodes(spec, -(-number // len(spec.tasks)), seed=9_200_000)[:number]
    rows: dict = {way: [] for way in envs}
    for repetition in range(arguments.repetitions + 1):
        for way, env in envs.items():
            torch.manual_seed(repetition)
            wall, cpu = time.perf_counter(), cpu_seconds()
            success, idle = way(env, policy, episodes)
            if repetition:  # the first one warms up
                rows[way].append((time.perf_counter() - wall, cpu_seconds() - cpu, success, idle))
    print(f"{spec.id}, {number} episodes, {envs[queue].num_envs} slots, {arguments.repetitions} repetitions, medians\n")
    print(f"{'':<8}  episodes/min  CPU s/episode  success    idle")
    medians = {way: [median(column) for column in zip(*results, strict=True)] for way, results in rows.items()}
    for way, (wall, cpu, success, idle) in medians.items():
        print(
            f"{way.__name__:<8}  {60 * number / wall:12.0f}  {cpu / number:13.3f}  {100 * success:6.1f}%  "
            f"{100 * idle:5.1f}%"
        )
    ratios = [medians[horizon][column] / medians[queue][column] for column in (0, 1)]
    print(f"\nqueue: {ratios[0]:.2f} times the episodes per minute, {ratios[1]:.2f} times per CPU second")
    for env in envs.values():
        env.close()


if __name__ == "__main__":
    main()
