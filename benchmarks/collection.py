"""Episodes per minute, worked off as a queue or run to the horizon: ``python benchmarks/collection.py RUN``.

*Queue*: :class:`~vla_algos.collectors.EpisodeCollector`, a slot that finishes takes the next episode; also with
``overlap_resets``, with two ``stages``, and with both. *Horizon*: all environments run until the horizon, then all are
reset, as frameworks do that collect a fixed number of steps. All run the same episodes with the same sampling policy,
in turns; ratios are to *horizon*. CPU seconds include those of the simulators.

``python benchmarks/collection.py --collectors metaworld/MT50``: memory and time of a batch of
:class:`~vla_algos.collectors.StepCollector` and of TorchRL's ``Collector`` (``compact_obs`` and not), in turns. Without
``compact_obs`` the values are those that TorchRL's ``GAE`` asks the critic for.

``python benchmarks/collection.py --pipeline metaworld/pick-place-v3``: one stage and two (``pipeline.stages``), one
after the other in each repetition. A policy of random actions sleeps as long as the simulators take, as a GPU would
work: in proportion to its batch, and as long for any batch.
"""

import argparse
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

import torch
from omegaconf import OmegaConf
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from timing import cpu_time_of_all
from torch import Tensor
from torchrl.collectors import Collector
from torchrl.envs import TransformedEnv
from torchrl.objectives.value import GAE

from vla_algos import gae
from vla_algos.collectors import EpisodeCollector, StepCollector
from vla_common.keys import ACTION, NEXT, STATE_VALUE, STATES, SUCCESS
from vla_envs import EpisodeQueue, InstructionsToBytes, VLAEnv, evaluation_episodes, make_env
from vla_policies import SmallVLA, VLAPolicy, load_policy


def queue(env: VLAEnv, policy: VLAPolicy, episodes: list, **options: Any) -> tuple[float, float]:
    """Success and idle share of the slots' time."""
    collector = EpisodeCollector(env, policy, episodes, **options)
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


class Sleeper(TensorDictModuleBase):
    """Random actions after a nap of ``fixed + per_row * batch`` seconds."""

    in_keys: ClassVar = [STATES]
    out_keys: ClassVar = [ACTION]
    loss_keys = ()

    def __init__(self, env: VLAEnv):
        super().__init__()
        self.shape, self.fixed, self.per_row = env.action_spec.shape[1:], 0.0, 0.0

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        time.sleep(self.fixed + self.per_row * len(tensordict))
        return tensordict.set(ACTION, 2 * torch.rand(len(tensordict), *self.shape) - 1)


def pipeline(id: str, num_envs: int, decisions: int, repetitions: int) -> None:
    """Print what a decision of all environments takes in one and in two stages, in milliseconds."""
    env = make_env(id, num_envs, image_size=224, render_quality="fast", seed=0)
    sleeper = Sleeper(env)
    ways = {stages: StepCollector(env, sleeper, decisions, stages=stages) for stages in (1, 2)}
    ways[1].rollout()  # warms up
    print(f"{id}, {num_envs} environments, {decisions} decisions, {repetitions} repetitions, medians of milliseconds\n")
    print(f"{'the policy takes':<28}  {'stages':>6}  {'env':>6}  {'policy':>6}  {'together':>8}  speed-up")
    for name, share in (("in proportion to its batch", 1.0), ("as long for any batch", 0.0)):
        rows: dict[int, list[tuple[float, ...]]] = {stages: [] for stages in ways}
        ratios = []
        for _ in range(repetitions):
            sleeper.fixed = sleeper.per_row = 0.0
            ways[1].reset()
            ways[1].rollout()
            nap = ways[1].stats()["time/env"] / decisions  # of now: other programs may run beside
            sleeper.fixed, sleeper.per_row = (1 - share) * nap, share * nap / num_envs
            for stages, collector in ways.items():
                env.set_seed(0)
                collector.reset()
                collector.rollout()
                stats = collector.stats()
                rows[stages].append(tuple(float(stats[f"time/{part}"]) for part in ("env", "policy", "rollout")))
            ratios.append(rows[1][-1][2] / rows[2][-1][2])
        for stages, results in rows.items():
            times = [1e3 * median(column) / decisions for column in zip(*results, strict=True)]
            speed_up = f"{median(ratios):8.2f}" if stages == 2 else ""
            print(f"{name:<28}  {stages:6}  {times[0]:6.1f}  {times[1]:6.1f}  {times[2]:8.1f}  {speed_up}")
    env.close()


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
    parser.add_argument("--pipeline", metavar="ID", help="environment to compare one and two stages in")
    parser.add_argument("--horizon", type=int, help="of the episodes; that of the run if left out")
    parser.add_argument("--envs", type=int, default=8)
    parser.add_argument("--decisions", type=int, default=12)
    arguments = parser.parse_args()
    if arguments.collectors:
        collectors(arguments.collectors, arguments.envs, arguments.decisions, arguments.repetitions)
        return
    if arguments.pipeline:
        pipeline(arguments.pipeline, arguments.envs, arguments.decisions, arguments.repetitions)
        return
    if arguments.run is None:
        parser.error("name a run's folder, or --collectors or --pipeline with an environment")
    policy = load_policy(arguments.run / "policy").eval()
    settings = OmegaConf.to_container(OmegaConf.load(arguments.run / "config.yaml").env)
    if arguments.horizon:
        settings["max_episode_steps"] = arguments.horizon
    env = make_env(**settings, chunk_size=policy.chunk_size)
    ways = {
        "horizon": (horizon, make_env(**{**settings, "ignore_terminations": True}, chunk_size=policy.chunk_size)),
        "queue": (queue, env),
        "queue, overlap_resets": (partial(queue, overlap_resets=True), env),
        "queue, stages=2": (partial(queue, stages=2), env),
        "queue, both": (partial(queue, stages=2, overlap_resets=True), env),
    }
    spec = env.simulator_spec
    number = -(-arguments.episodes // env.num_envs) * env.num_envs  # whole rounds of the horizon way
    episodes = evaluation_episodes(spec, -(-number // len(spec.tasks)), seed=9_200_000)[:number]
    rows: dict[str, list[tuple[float, ...]]] = {name: [] for name in ways}
    for repetition in range(arguments.repetitions + 1):
        for name, (way, its_env) in ways.items():
            torch.manual_seed(repetition)
            wall, cpu = time.perf_counter(), cpu_time_of_all()
            success, idle = way(its_env, policy, episodes)
            if repetition:  # the first one warms up
                rows[name].append((time.perf_counter() - wall, cpu_time_of_all() - cpu, success, idle))
    print(f"{spec.id}, {number} episodes, {env.num_envs} slots, {arguments.repetitions} repetitions, medians\n")
    print(f"{'':<22}  episodes/min  ratio  CPU s/episode  ratio  success    idle")
    fixed = rows["horizon"]
    for name, results in rows.items():
        wall, cpu, success, idle = (median(column) for column in zip(*results, strict=True))
        ratios = [median(old[i] / new[i] for old, new in zip(fixed, results, strict=True)) for i in (0, 1)]
        print(
            f"{name:<22}  {60 * number / wall:12.0f}  {ratios[0]:5.2f}  {cpu / number:13.3f}  {ratios[1]:5.2f}  "
            f"{100 * success:6.1f}%  {100 * idle:5.1f}%"
        )
    env.close()
    ways["horizon"][1].close()


if __name__ == "__main__":
    main()
