"""GRPO fine-tunes a Vision-Language-Action policy: ``python recipes/grpo.py``; settings are in ``conf/grpo.yaml``."""

import os

# Before torch is imported: a thread that waits must sleep, because the simulators need the cores meanwhile.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import time
from pathlib import Path

import hydra
import torch
from omegaconf import DictConfig

from vla_algos import parallel
from vla_algos.collectors import EpisodeCollector
from vla_algos.grpo import check_groups, collect_groups, describe_silence, group_metrics, grpo, outcomes_of
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
    training_episodes,
    warm_start,
    warm_start_settings,
    whole_test,
)
from vla_common.keys import NEXT, STEP_MASK

KEYS = ("env", "policy", "sft", "algo", "optim", "eval", "seed", "iterations", "evaluate_every")
KEYS += ("episode_order", "checkpoint_every", "resume", "launcher")


@hydra.main(version_base=None, config_path="conf", config_name="grpo")
def main(config: DictConfig) -> None:
    launch(run_recipe, config)


def run_recipe(config: DictConfig, folder: Path) -> None:
    started = time.perf_counter()
    start_run(config, KEYS, folder)
    # Every setting is checked before any work begins.
    critic = ["critic_coeff", "clip_value", "huber_delta", "critic_warmup_steps"]  # GRPO has none
    elsewhere = [*OPTIM, *critic, "collector", "episodes", "policy", "loss_module", "updates"]
    readers = [collect_groups, ChunkClipPPOLoss, Learner]
    algo = group(config, "algo", *readers, also=["group_size", "patience"], without=elsewhere)
    grouping, learning = take(algo, collect_groups), take(algo, Learner)
    success_bounds = grouping["success_bounds"]
    group_size, patience = algo.pop("group_size"), algo.pop("patience")
    learning |= group(config, "optim", also=OPTIM)
    demonstrations = demonstration_seed(config.seed, config.eval.seed)
    if config.iterations < 1 or patience < 1:
        raise ValueError(f"iterations and algo.patience must be at least 1, are {config.iterations} and {patience}")
    check_groups(group_size, **grouping)
    grouping |= {name: parallel.share(grouping[name], f"algo.{name}") for name in ("groups", "max_groups")}
    if "group_size" in config.env:
        raise ValueError("the size of a group is algo.group_size alone; leave env.group_size out")

    # Policy: loaded, or a small one that clones the benchmark's scripted expert for a moment.
    spec = env_spec(config)
    recording, cloning = warm_start_settings(config, spec)
    grid, evaluation = evaluation_settings(config, spec, "sampled")
    policy = make_policy(config, spec)
    learner = Learner(ChunkClipPPOLoss(policy, **algo, critic_coeff=None), **learning, updates=config.iterations)
    env = start_env(config, policy)
    print(f"{describe(spec)}\n{describe_policy(policy)}")
    episodes = training_episodes(config, spec, group_size)
    collector = EpisodeCollector(env, policy)

    parts = {"learner": learner, "collector": collector, "episodes": episodes}

    def imitate() -> None:
        if not config.policy.checkpoint and recording["episodes"] and parallel.is_main():
            warm_start(env, policy, demonstrations, recording, cloning)

    with ResumableRun(folder, policy, parts, config.checkpoint_every) as run:
        first = run.resume()
        logger = RunLogger(folder, after=-1 if first is None else first)
        started -= run.seconds
        if first is None:
            run.interruptible(imitate)
            begin_together(policy, config.seed)
            run.notes = {"tests": [], "speeds": [], "silent": 0}  # iterations in a row without a group to learn from
            first = 0
            run.finish(first)
        tests, speeds = run.notes["tests"], run.notes["speeds"]

        def test(step: int) -> None:
            title = f"evaluation after {step}"
            share = run.interruptible(lambda: share_of_test(title, env, policy, grid, evaluation))
            tests.append(whole_test(share, folder / "videos" / f"iteration_{step:04d}"))
            logger.log({**tests[-1][1], "time/elapsed": time.perf_counter() - started}, step)

        with progress_bar("GRPO", config.iterations, "iteration", first) as bar:
            for iteration in range(first, config.iterations + 1):
                if iteration > first:
                    clock = time.perf_counter()
                    policy.eval()
                    policy.start_iteration(iteration)
                    groups = run.interruptible(lambda: collect_groups(collector, episodes, **grouping))
                    batch = grpo(groups, success_bounds)
                    groups = [one for some in parallel.gather_objects(outcomes_of(groups)) for one in some]
                    everything = torch.cat([episode for group in groups for episode in group.episodes])
                    learnable = grpo(groups, success_bounds)
                    collected = time.perf_counter()

                    update = {}
                    if learnable is not None:
                        policy.train()
                        update = {**rollout_metrics(learnable), **learner.update(batch, run.stop_if_asked)}
                    learnt = time.perf_counter()

                    speeds.append(int(everything[NEXT, STEP_MASK].sum()) / (learnt - clock))
                    metrics = {**env_metrics(everything), **group_metrics(groups, success_bounds), **update}
                    metrics |= {
                        **collector_stats(collector),
                        "time/train": learnt - collected,
                        "time/iteration": learnt - clock,
                        "time/elapsed": learnt - started,
                        "env_steps_per_s": speeds[-1],
                        "decisions_per_s": len(everything) / (learnt - clock),
                    }
                    logger.log(metrics, iteration)
                    bar.update()
                    show_iteration(bar, iteration, metrics)
                    run.notes["silent"] = 0 if learnable is not None else run.notes["silent"] + 1
                    if learnable is None:
                        bar.write(f"iteration {iteration}: {describe_silence(groups)}; nothing was learnt")

                last = iteration == config.iterations or run.notes["silent"] == patience
                every = config.evaluate_every
                tested = last or iteration == 0 or bool(every and iteration % every == 0)
                if iteration > first:
                    run.finish(iteration, publish=tested)
                if tested:
                    test(iteration)
                if last:
                    break

    if parallel.is_main():
        policy.save_pretrained(folder / "policy")
    seconds = time.perf_counter() - started
    finish_run(folder, tests[-1][1], seconds)
    logger.close()
    env.close()
    if run.notes["silent"] == patience:
        print(f"\nstopped: {patience} iterations in a row without a group to learn from (algo.patience={patience})")
    summarise("GRPO", folder, describe(spec), tests, sorted(speeds)[len(speeds) // 2], seconds)


if __name__ == "__main__":
    main()
