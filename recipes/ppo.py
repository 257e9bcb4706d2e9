"""PPO fine-tunes a Vision-Language-Action policy: ``python recipes/ppo.py``; settings are in ``conf/ppo.yaml``."""

import os

# Before torch is imported: a thread that waits must sleep, because the simulators need the cores meanwhile.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import time
from pathlib import Path

import hydra
from omegaconf import DictConfig

from vla_algos import parallel
from vla_algos.advantages import check_levels, gae
from vla_algos.collectors import StepCollector
from vla_algos.learner import Learner
from vla_algos.losses import ChunkClipPPOLoss
from vla_algos.metrics import env_metrics, rollout_metrics
from vla_algos.run.config import group, take
from vla_algos.run.launch import launch
from vla_algos.run.logging import RunLogger
from vla_algos.run.policy import make_policy
from vla_algos.run.resume import ResumableRun
from vla_algos.run.run import (
    OPTIM,
    begin_together,
    collector_stats,
    demonstration_seed,
    describe,
    describe_policy,
    env_spec,
    evaluation_settings,
    finish_run,
    progress_bar,
    share_of_test,
    show_iteration,
    start_env,
    start_run,
    summarise,
    warm_start,
    warm_start_settings,
    whole_test,
)
from vla_common.keys import ADVANTAGE, NEXT, STATE_VALUE, STEP_MASK, VALUE_TARGET

KEYS = ("env", "policy", "sft", "algo", "collector", "optim", "eval", "seed", "iterations", "evaluate_every")
KEYS += ("episode_order", "checkpoint_every", "resume", "launcher")


@hydra.main(version_base=None, config_path="conf", config_name="ppo")
def main(config: DictConfig) -> None:
    launch(run_recipe, config)


def run_recipe(config: DictConfig, folder: Path) -> None:
    started = time.perf_counter()
    start_run(config, KEYS, folder)
    # Every setting is checked before any work begins.
    elsewhere = [*OPTIM, "batch", "policy", "loss_module", "updates"]
    algo = group(config, "algo", gae, ChunkClipPPOLoss, Learner, without=elsewhere)
    discount, learning = take(algo, gae), take(algo, Learner)
    learning |= group(config, "optim", also=OPTIM)
    collecting = group(config, "collector", also=["decisions"])
    demonstrations = demonstration_seed(config.seed, config.eval.seed)
    if config.iterations < 1:
        raise ValueError(f"iterations is {config.iterations}, must be at least 1")

    # Policy: loaded, or a small one that clones the benchmark's scripted expert for a moment.
    spec = env_spec(config)
    recording, cloning = warm_start_settings(config, spec)
    grid, evaluation = evaluation_settings(config, spec, "sampled")
    policy = make_policy(config, spec)
    loss_module = ChunkClipPPOLoss(policy, **algo)
    learner = Learner(loss_module, **learning, updates=config.iterations)
    check_levels(
        discount["reward_level"],
        discount["bootstrap"],
        num_values=policy.num_values if loss_module.has_critic else None,
        chunk_size=policy.chunk_size,
        log_prob_level=algo["log_prob_level"],
    )
    env = start_env(config, policy)
    print(f"{describe(spec)}\n{describe_policy(policy)}")
    reading = {"values": loss_module.has_critic, "bootstrap": discount["bootstrap"]}
    collector = StepCollector(env, policy, **collecting, **reading)

    def imitate() -> None:
        if not config.policy.checkpoint and recording["episodes"] and parallel.is_main():
            warm_start(env, policy, demonstrations, recording, cloning)

    with ResumableRun(folder, policy, {"learner": learner, "collector": collector}, config.checkpoint_every) as run:
        first = run.resume()
        logger = RunLogger(folder, after=-1 if first is None else first)
        started -= run.seconds
        if first is None:
            run.interruptible(imitate)
            begin_together(policy, config.seed)
            run.notes = {"tests": [], "speeds": []}
            first = 0
            run.finish(first)
        tests, speeds = run.notes["tests"], run.notes["speeds"]

        def test(step: int) -> None:
            title = f"evaluation after {step}"
            share = run.interruptible(lambda: share_of_test(title, env, policy, grid, evaluation))
            tests.append(whole_test(share, folder / "videos" / f"iteration_{step:04d}"))
            collector.reset()  # the evaluation used the same simulators
            logger.log({**tests[-1][1], "time/elapsed": time.perf_counter() - started}, step)

        with progress_bar("PPO", config.iterations, "iteration", first) as bar:
            for iteration in range(first, config.iterations + 1):
                tested = iteration in (0, config.iterations) or (
                    config.evaluate_every and iteration % config.evaluate_every == 0
                )
                if iteration > first:
                    clock = time.perf_counter()
                    policy.eval()
                    policy.start_iteration(iteration)
                    batch = run.interruptible(collector.rollout)
                    collected = time.perf_counter()

                    outcomes = parallel.gather(batch.select(NEXT, STATE_VALUE, strict=False))  # of all processes
                    gae(outcomes, **discount)
                    batch.update(parallel.own_rows(outcomes, len(batch)).select(ADVANTAGE, VALUE_TARGET))
                    policy.train()
                    update = learner.update(batch, run.stop_if_asked)
                    learnt = time.perf_counter()

                    speeds.append(int(outcomes[NEXT, STEP_MASK].sum()) / (learnt - clock))
                    metrics = {**env_metrics(outcomes), **rollout_metrics(outcomes), **update}
                    metrics |= {
                        **collector_stats(collector),
                        "time/train": learnt - collected,
                        "time/iteration": learnt - clock,
                        "time/elapsed": learnt - started,
                        "env_steps_per_s": speeds[-1],
                        "decisions_per_s": outcomes.numel() / (learnt - clock),
                    }
                    logger.log(metrics, iteration)
                    bar.update()
                    show_iteration(bar, iteration, metrics)
                    run.finish(iteration, publish=bool(tested))
                if tested:
                    test(iteration)

    if parallel.is_main():
        policy.save_pretrained(folder / "policy")
    seconds = time.perf_counter() - started
    finish_run(folder, tests[-1][1], seconds)
    logger.close()
    env.close()
    summarise("PPO", folder, describe(spec), tests, sorted(speeds)[len(speeds) // 2], seconds)


if __name__ == "__main__":
    main()
