"""PPO fine-tunes a Vision-Language-Action policy: ``python recipes/ppo.py``; settings are in ``conf/ppo.yaml``."""

import os

# Before torch is imported: a thread that waits must sleep, because the simulators need the cores meanwhile.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import time
from pathlib import Path

import hydra
import torch
from omegaconf import DictConfig
from tensordict import TensorDict
from tqdm import tqdm

from vla_algos.advantages import gae, valid_decisions
from vla_algos.checkpoints import random_state, save_checkpoint
from vla_algos.collectors import StepCollector
from vla_algos.evaluation import EvaluationResult
from vla_algos.loggers import RunLogger
from vla_algos.losses import ChunkClipPPOLoss
from vla_algos.metrics import WeightedMean, add_update, env_metrics, rollout_metrics
from vla_algos.runs import (
    demonstration_seed,
    describe,
    evaluate_with_bar,
    evaluation_settings,
    finish_run,
    group,
    make_env_and_policy,
    save_videos,
    start_run,
    take,
    warm_start,
    warm_start_settings,
)
from vla_envs import evaluation_grid
from vla_keys import NEXT, STEP_MASK

KEYS = ("env", "policy", "sft", "algo", "collector", "optim", "eval", "seed", "iterations", "evaluate_every")


@hydra.main(version_base=None, config_path="conf", config_name="ppo")
def main(config: DictConfig) -> None:
    started = time.perf_counter()
    folder = start_run(config, KEYS)
    # Every setting is checked before any work begins.
    algo = group(config, "algo", gae, learn, ChunkClipPPOLoss, also=["critic_warmup"])
    discount, learning = take(algo, gae), take(algo, learn)
    critic_warmup = algo.pop("critic_warmup")
    if config.iterations < 1 or (critic_warmup and not algo["critic_coeff"]):
        raise ValueError("iterations must be at least 1, and algo.critic_warmup=0 where algo.critic_coeff is 0 or null")
    optim = group(config, "optim", make_optimizer, learn)
    learning |= take(optim, learn)
    collecting = group(config, "collector", StepCollector)
    recording, cloning = warm_start_settings(config)
    evaluation = evaluation_settings(config)
    demonstrations = demonstration_seed(config.seed, evaluation["seed"])

    # Policy: loaded, or a small one that clones the benchmark's scripted expert for a moment.
    env, policy = make_env_and_policy(config)
    spec = env.simulator_spec
    print(f"{describe(spec)}\npolicy of {sum(p.numel() for p in policy.parameters()):,} parameters")
    loss_module = ChunkClipPPOLoss(policy, **algo)
    optimizer = make_optimizer(policy, **optim)
    if not config.policy.checkpoint:
        warm_start(env, policy, demonstrations, recording, cloning)

    collector = StepCollector(env, policy, **collecting)
    logger = RunLogger(folder)
    grid = evaluation_grid(spec, evaluation["trials"], evaluation["seed"])

    def test(step: int) -> EvaluationResult:
        result = evaluate_with_bar(f"evaluation after {step}", env, policy, grid, record=evaluation["videos"])
        collector.reset()  # the evaluation used the same simulators
        logger.log({**result.metrics(), "time/elapsed": time.perf_counter() - started}, step)
        save_videos(folder / "videos" / f"iteration_{step:04d}", result)
        return result

    def save(step: int) -> None:
        state = {"optimizer": optimizer.state_dict(), "collector": collector.state_dict(), "random": random_state()}
        save_checkpoint(folder / "checkpoints", step, policy, state)

    before = after = test(0)
    speeds = []
    with tqdm(total=config.iterations, desc="PPO", unit="iteration") as bar:
        for iteration in range(1, config.iterations + 1):
            clock = time.perf_counter()
            policy.eval()
            batch = next(collector.iterator())
            collected = time.perf_counter()

            gae(batch, **discount)
            policy.train()
            warming_up = iteration <= critic_warmup
            update = learn(loss_module, optimizer, batch, **learning, critic_only=warming_up)
            learnt = time.perf_counter()

            steps = int(batch[NEXT, STEP_MASK].sum())
            metrics = {**env_metrics(batch), **rollout_metrics(batch), **update, **collector.stats()}
            metrics |= {
                "time/train": learnt - collected,
                "time/iteration": learnt - clock,
                "time/elapsed": learnt - started,
                "env_steps_per_s": steps / (learnt - clock),
                "decisions_per_s": batch.numel() / (learnt - clock),
            }
            logger.log(metrics, iteration)
            speeds.append(metrics["env_steps_per_s"])
            bar.update()
            bar.set_postfix_str(
                f"success {100 * metrics.get('env/success_once', float('nan')):.0f}%, {speeds[-1]:.0f} env steps/s"
            )
            last = iteration == config.iterations
            if last or (config.evaluate_every and iteration % config.evaluate_every == 0):
                after = test(iteration)
                save(iteration)

    policy.save_pretrained(folder / "policy")
    finish_run(folder)
    logger.close()
    env.close()
    summarise(folder, before, after, describe(spec), sorted(speeds)[len(speeds) // 2], time.perf_counter() - started)


def make_optimizer(policy: torch.nn.Module, lr: float, value_lr: float, weight_decay: float) -> torch.optim.AdamW:
    """AdamW with a learning rate of its own for the value head."""
    is_value = {name: "value_head" in name for name, _ in policy.named_parameters()}
    actor = [parameter for name, parameter in policy.named_parameters() if not is_value[name]]
    value = [parameter for name, parameter in policy.named_parameters() if is_value[name]]
    groups = [{"params": actor, "lr": lr}, {"params": value, "lr": value_lr}]
    return torch.optim.AdamW(groups, weight_decay=weight_decay)


def learn(
    loss_module: ChunkClipPPOLoss,
    optimizer: torch.optim.Optimizer,
    batch: TensorDict,
    epochs: int,
    minibatch_size: int,
    max_grad_norm: float,
    critic_only: bool,
) -> dict[str, float]:
    """Several epochs of clipped PPO over the decisions that were really made; returns the metrics of the update."""
    samples = batch.reshape(-1)
    samples = samples[valid_decisions(samples).squeeze(-1)]
    mean = WeightedMean()
    for _ in range(epochs):
        for rows in torch.randperm(len(samples)).split(minibatch_size):
            losses = loss_module(samples[rows])
            terms = {name: loss for name, loss in losses.items() if name.startswith("loss_")}
            loss = terms["loss_critic"] if critic_only else sum(terms.values())
            optimizer.zero_grad()
            loss.backward()
            if critic_only:  # the value loss may reach the backbone as well, see critic_detach
                for parameter in optimizer.param_groups[0]["params"]:
                    parameter.grad = None
            # Policy and value head are clipped apart: a value far off must not silence the policy.
            norms = [
                torch.nn.utils.clip_grad_norm_(params["params"], max_grad_norm) for params in optimizer.param_groups
            ]
            optimizer.step()
            add_update(mean, losses)
            mean.add({"train/actor/grad_norm": norms[0]})
    rate = 0.0 if critic_only else optimizer.param_groups[0]["lr"]
    return {**mean.compute(), "train/actor/lr": rate, "train/critic/lr": optimizer.param_groups[1]["lr"]}


def summarise(
    folder: Path,
    before: EvaluationResult,
    after: EvaluationResult,
    setting: str,
    speed: float,
    seconds: float,
) -> None:
    print(f"\n{setting}\n\nbefore PPO\n{before.table()}\n\nafter PPO\n{after.table()}\n")
    rows = {
        "time": f"{seconds / 60:.1f} minutes, {speed:.0f} env steps/s in training (median)",
        "policy": folder / "policy",
        "checkpoints": folder / "checkpoints",
        "curves": f"tensorboard --logdir {folder}   (and {folder / 'metrics.jsonl'})",
        "videos": folder / "videos",
    }
    for name, value in rows.items():
        print(f"{name:<12} {value}")


if __name__ == "__main__":
    main()
