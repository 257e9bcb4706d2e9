"""What does a run of an experiment cost here? ``python -m benchmarks.cost EXPERIMENT policy.checkpoint=FOLDER``.

Seconds by part, decisions a second by batch with the smallest that reaches nine tenths of the best, the share of this
device's own rate of a matrix product, GB by part, hours to the end of the experiment; and beside ours, in the same run
and rotating order, what others do: a frame after each action, logits of the whole vocabulary (OpenVLA-OFT), the prefix
at each denoising step and in each minibatch (pi0, SmolVLA). All ways must give the same numbers first. Settings are the
recipes'. Hours are of one process with the environments that it has here (``env.num_envs=4``).

    python -m benchmarks.cost libero_ppo_openpi policy.checkpoint=FOLDER --output cost.json
    python -m benchmarks.cost libero_ppo_openpi --random published policy.lora_rank=32 policy.dtype=bfloat16
    python -m benchmarks.cost libero_grpo_openvlaoft --random middle env.num_envs=2
"""

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch.utils.flop_counter import FlopCounterMode
from torchrl.envs.utils import ExplorationType, set_exploration_type

from benchmarks import flow, policies
from vla_algos import ChunkClipPPOLoss, ChunkGRPOLoss, Learner, StepCollector, gae
from vla_algos.run.arguments import compose_settings
from vla_algos.run.config import read_config
from vla_algos.run.environments import evaluated_env, make_env_spec, own_share, training_episodes
from vla_algos.run.evaluator import Evaluator
from vla_common import keys
from vla_common.experiments import find_experiments
from vla_envs import Episode, SimulatorSpec, make_env
from vla_policies import OpenVLAOFT, VLAPolicy, make_policy
from vla_policies.flow.vlm import VLMFlowPolicy
from vla_policies.memory import GB, MemoryPlan, PolicyMemory, calculate

ROOT = Path(__file__).resolve().parent.parent
CONF = ROOT / "recipes" / "conf"
DECISIONS = 4  # of each environment
Way = Callable[[], Any]


def seconds(ways: dict[str, Way], repetitions: int, device: torch.device) -> dict[str, float]:
    """Median seconds of each, in rotating order after a first time that warms up, until a GPU has done its work."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for repetition in range(repetitions + 1):
        turn = repetition % len(ways)
        for name in [*ways][turn:] + [*ways][:turn]:
            began = time.perf_counter()
            ways[name]()
            if device.type == "cuda":
                torch.cuda.synchronize()
            if repetition:
                found[name].append(time.perf_counter() - began)
    return {name: statistics.median(each) for name, each in found.items()}


def most_memory(function: Way, device: torch.device) -> float | None:
    """GB at most, on a GPU; without one nothing is run."""
    if device.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats()
    function()
    return torch.cuda.max_memory_allocated() / GB


def read_experiment(experiment: str, settings: Sequence[str]) -> SimpleNamespace:
    known = find_experiments(CONF)
    if experiment not in known or known[experiment].recipe not in ("ppo", "grpo"):
        raise ValueError(f"{experiment}: no experiment of ppo.py or grpo.py; vla-recipe list has them")
    recipe = known[experiment].recipe
    types = import_module(f"recipes.{recipe}").SETTINGS
    return read_config(compose_settings(recipe, [f"experiment={experiment}", *settings], CONF), types)


def of_a_world(spec: SimulatorSpec, episode: Any, chunk: int, repetitions: int) -> dict[str, float]:
    """Seconds of a decision's actions and of its frame, in one world in this process."""
    simulator: Any = spec.make()
    actions = np.zeros((chunk, spec.action_dim), np.float32)
    try:
        simulator.reset(episode)
        simulator.observe()

        def simulate() -> None:
            simulator.execute(actions) if hasattr(simulator, "execute") else [simulator.step(each) for each in actions]

        return seconds({"simulate": simulate, "draw": simulator.observe}, 3 * repetitions, torch.device("cpu"))
    finally:
        simulator.close()


def by_batch(
    policy: VLAPolicy, observed: TensorDictBase, batches: Sequence[int], repetitions: int
) -> list[dict[str, float]]:
    """Decisions per second of so many environments at once."""
    rows = []
    with torch.no_grad(), set_exploration_type(ExplorationType.RANDOM):
        for batch in batches:
            some = observed[torch.arange(batch) % len(observed)]
            taken = seconds({"policy": lambda some=some: policy(some.clone())}, repetitions, policy.device)["policy"]
            with FlopCounterMode(display=False) as counter:
                policy(some.clone())
            rate = counter.get_total_flops() / taken / 1e12
            most = most_memory(lambda some=some: policy(some.clone()), policy.device)
            actions = batch * policy.chunk_size / taken
            row = {"batch": batch, "decisions_per_s": batch / taken, "actions_per_s": actions, "tflops": rate}
            rows.append(row if most is None else row | {"GB": most})
    return rows


def baselines(policy: VLAPolicy, batch: TensorDictBase) -> Iterator[tuple[str, dict[str, Way]]]:
    """Yield a part, and ways to compute it, of which the first is ours; all give the same numbers."""
    if isinstance(policy, OpenVLAOFT):
        pairs = {"256 rows": OpenVLAOFT.evaluate_actions, "all rows": policies.of_all_rows}
        own, policy.config = policy.config, replace(policy.config, temperature=1.0, top_k=0)
        same(*(torch.no_grad()(each)(policy, batch)[0] for each in pairs.values()))
        yield "update", {name: partial(policies.step, policy, batch, each) for name, each in pairs.items()}
        policy.config = own
    if isinstance(policy, VLMFlowPolicy):
        noise = torch.randn(len(batch), policy.horizon, policy.model_action_dim).to(policy.device)
        once, again = (torch.no_grad()(each) for each in (flow.sample_once, flow.sample_again))
        same(once(policy, batch, noise), again(policy, batch, noise))
        pairs = {"prefix once": once, "prefix at each step": again}
        yield "decision", {name: partial(each, policy, batch, noise) for name, each in pairs.items()}
        if policy.prefix_is_frozen:
            kept = policy.precompute(batch.clone())
            same(flow.update(policy, kept), flow.update(policy, batch))
            stored = {"prefix kept": kept, "prefix in each minibatch": batch}
            yield "update", {name: partial(flow.update, policy, each) for name, each in stored.items()}


def same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Refuse ways that do not compute the same."""
    torch.testing.assert_close(theirs.float(), ours.float(), rtol=0.01, atol=0.05)  # the rounding of bfloat16


def random_policy(settings: dict[str, Any], spec: SimulatorSpec, size: str) -> VLAPolicy:
    """OpenVLA-OFT or pi0 with random weights, for LIBERO."""
    family, rank = settings["family"], settings.get("lora_rank") or 0
    if spec.benchmark != "libero" or family not in ("openvla_oft", "pi0"):
        raise ValueError("--random: makes openvla_oft and pi0 for LIBERO; for others type policy.checkpoint=FOLDER")
    device, checkpointing = "cuda" if torch.cuda.is_available() else "cpu", bool(settings["gradient_checkpointing"])
    how = {"dtype": getattr(torch, settings["dtype"] or "float32"), "lora": rank, "checkpointing": checkpointing}
    if family == "openvla_oft":
        return policies.make_policy({"published": "7b"}.get(size, size), device, **how)
    frozen = settings["train_expert_only"] is not False
    return flow.make_policy(size, settings["num_steps"] or 5, frozen, device, **how)


def collect(config: SimpleNamespace, spec: SimulatorSpec, policy: VLAPolicy) -> tuple[Any, Any, dict[str, Any]]:
    """A batch ``[N, DECISIONS]``, first observations, and seconds of it with the most memory on a GPU."""
    episodes = training_episodes(config, spec)
    env = make_env(**own_share(config.env, spec, {}), chunk_size=policy.chunk_size, episodes=episodes)
    try:
        collector = StepCollector(env, policy, DECISIONS, values=config.recipe == "ppo")
        collector.rollout()  # warms up
        most = most_memory(collector.rollout, policy.device)
        return collector.rollout(), env.reset(), {**collector.stats(), "GB": most}
    finally:
        env.close()


def learn(config: SimpleNamespace, policy: VLAPolicy, rollout: TensorDictBase, repetitions: int) -> dict[str, Any]:
    """Seconds of the advantages and of an epoch of the update, with its most memory on a GPU."""
    began = time.perf_counter()
    if config.recipe == "ppo":
        gae(rollout, **config.gae)
    else:  # those of groups need whole episodes
        rollout[keys.ADVANTAGE] = torch.randn(rollout.shape).unsqueeze(-1)
    advantage = time.perf_counter() - began
    loss = (ChunkClipPPOLoss if config.recipe == "ppo" else ChunkGRPOLoss)(policy, **config.loss)
    sizes = {"minibatch_size": rollout.numel(), "micro_batch_size": micro_batch(config, rollout)}
    learner = Learner(loss, **config.optim, **sizes, epochs=1, updates=config.iterations, max_log_ratio=None)
    ways = {"update": lambda: learner.update(rollout.clone())}
    taken = seconds(ways, repetitions, policy.device)
    return {"advantage": advantage, "GB": most_memory(ways["update"], policy.device), **taken}


def micro_batch(config: SimpleNamespace, rollout: TensorDictBase) -> int:
    return min(config.update["micro_batch_size"] or rollout.numel(), rollout.numel())


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure everything; returns what ``--output`` writes."""
    config, repetitions = read_experiment(options.experiment, options.settings), options.repetitions
    spec = make_env_spec(config.env)
    made = random_policy(config.policy, spec, options.random) if options.random else make_policy(spec, **config.policy)
    policy = made.eval()
    rollout, observed, acted = collect(config, spec, policy)
    world = of_a_world(spec, Episode(0, 0, 0), policy.chunk_size, repetitions)
    learnt, decisions = learn(config, policy, rollout, repetitions), rollout.numel()
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        policy.save_pretrained(Path(folder) / "policy")
        save = time.perf_counter() - began
    parts = {**world, "policy": acted["time/policy"] / decisions, "rollout": acted["time/rollout"] / decisions}
    parts |= {"advantage": learnt["advantage"] / decisions, "update, an epoch": learnt["update"] / decisions}
    frames = (world["simulate"] + policy.chunk_size * world["draw"]) / (world["simulate"] + world["draw"])
    others: dict[str, Any] = {"rollout: a frame after each action": {"of ours": frames}}
    for part, ways in baselines(policy, rollout.reshape(-1)[:4].to(policy.device)):
        taken = seconds(ways, repetitions, policy.device)
        ours = next(iter(taken.values()))
        others |= {f"{part}: {name}": {"of ours": each / ours, "ms": 1e3 * each} for name, each in taken.items()}
    rows = by_batch(policy, observed, options.batches, repetitions)
    best = max(row["decisions_per_s"] for row in rows)
    cuda = policy.device.type == "cuda"
    return {
        "experiment": options.experiment,
        "machine": f"{torch.cuda.get_device_name() if cuda else platform.machine()}, torch {torch.__version__}",
        "policy": f"{policy.family}, {sum(each.numel() for each in policy.parameters()) / 1e6:.1f} M parameters",
        "environments": len(rollout),
        "ms_per_decision": {name: 1e3 * each for name, each in parts.items()},
        "save_s": save,
        "by_batch": rows,
        "knee": next(row["batch"] for row in rows if row["decisions_per_s"] >= 0.9 * best),
        "share_of_a_product": max(row["tflops"] for row in rows) / product(policy),
        "GB": memory(policy, micro_batch(config, rollout), len(rollout))
        | {f"{what}, measured": each["GB"] for what, each in (("update", learnt), ("rollout", acted)) if each["GB"]},
        "hours": hours(config, spec, policy.chunk_size, parts["rollout"], parts["update, an epoch"]),
        "beside_ours": others,
    }


def product(policy: VLAPolicy) -> float:
    """TFLOP/s of a large product of matrices on the policy's device, in its precision."""
    side = 8192 if policy.device.type == "cuda" else 1024
    dtype = getattr(getattr(policy, "model", None), "dtype", torch.float32)
    left = torch.randn(side, side, device=policy.device).to(dtype)
    return 2 * side**3 / seconds({"product": lambda: left @ left}, 9, policy.device)["product"] / 1e12


def memory(policy: VLAPolicy, micro_batch_size: int, num_envs: int) -> dict[str, float]:
    """GB by part, calculated."""
    whole = PolicyMemory(policy)
    part = calculate(whole.groups, MemoryPlan())
    checkpointing = bool(getattr(policy.config, "gradient_checkpointing", False))
    sizes = {"decisions": micro_batch_size, "num_envs": num_envs}
    update, rollout = whole.gigabytes(MemoryPlan(), checkpointing=checkpointing, **sizes)
    found = {"weights": part.weights / GB, "gradients": part.gradients / GB, "Adam": part.adam / GB}
    return found | {"update, calculated": update, "rollout, calculated": rollout}


def hours(config: SimpleNamespace, spec: SimulatorSpec, chunk: int, act: float, learn: float) -> dict[str, float]:
    """Of all iterations, and of the evaluations between; of GRPO with episodes of full length."""
    longest = -(-spec.max_episode_steps // chunk)
    some = config.collector
    decisions = (
        config.env["num_envs"] * some["decisions"]
        if "decisions" in some
        else some["groups"] * config.group_size * longest
    )
    held_out = make_env_spec(evaluated_env(config.env, config.eval), "eval.env")
    trials = len(Evaluator(**config.eval).episodes(held_out)) * (2 if config.eval.get("sampled") else 1)
    evaluations = 1 + (config.iterations // config.evaluate_every if config.evaluate_every else 1)
    found = {
        "rollouts": config.iterations * decisions * act,
        "updates": config.iterations * decisions * config.update["epochs"] * learn,
        "evaluations": evaluations * trials * longest * act,
    }
    return {name: each / 3600 for name, each in found.items()}


def show(result: dict[str, Any]) -> None:
    """Print a result, a section per table."""
    for name, value in result.items():
        if isinstance(value, dict):
            print(f"\n{name}")
            for what, each in value.items():
                cells = [f"{number:.4g}" for number in (each.values() if isinstance(each, dict) else [each])]
                print(f"  {what:<38}" + "".join(f"{cell:>12}" for cell in cells))
        elif isinstance(value, list):
            print(f"\n{name}: {', '.join(value[0])}")
            print("\n".join("  " + "".join(f"{number:>12.4g}" for number in row.values()) for row in value))
        else:
            print(f"{name}: {value:.4g}" if isinstance(value, float) else f"{name}: {value}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment")
    parser.add_argument("settings", nargs="*", metavar="SETTING=VALUE", help="as recipes take them")
    parser.add_argument("--random", choices=[*flow.SIZES], help="a policy of this size with random weights")
    parser.add_argument(
        "--batches", type=lambda text: [int(each) for each in text.split(",")], default=[1, 2, 4, 8, 16]
    )
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--output", type=Path, help="write the result as JSON")
    options = parser.parse_intermixed_args(arguments)
    try:
        result = measure(options)
    except ValueError as error:
        parser.error(str(error))
    show(result)
    if options.output:
        options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
