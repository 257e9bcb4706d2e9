"""Behaviour cloning of a benchmark's scripted expert: ``python recipes/sft.py``; settings are in ``conf/sft.yaml``."""

import os

# Before torch is imported: a thread that waits must sleep, because the simulators need the cores meanwhile.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import time
from pathlib import Path

import hydra
from omegaconf import DictConfig

from vla_algos import distributed
from vla_algos.launch import launch
from vla_algos.loggers import RunLogger
from vla_algos.policy_setup import make_policy
from vla_algos.runs import (
    demonstration_seed,
    describe,
    env_spec,
    evaluate_share,
    evaluation_settings,
    finish_run,
    save_videos,
    start_env,
    start_run,
    warm_start,
    warm_start_settings,
)

KEYS = ("env", "policy", "sft", "eval", "seed", "launcher")


@hydra.main(version_base=None, config_path="conf", config_name="sft")
def main(config: DictConfig) -> None:
    launch(run_recipe, config)


def run_recipe(config: DictConfig, folder: Path) -> None:
    if distributed.world_size() > 1:
        raise ValueError("recipes/sft.py runs in one process: leave out torchrun, or set launcher.tasks_per_node=1")
    started = time.perf_counter()
    start_run(config, KEYS, folder)
    recording, cloning = warm_start_settings(config)
    demonstrations = demonstration_seed(config.seed, config.eval.seed)
    spec = env_spec(config)
    grid, evaluation = evaluation_settings(config, spec)
    policy = make_policy(config, spec)
    env = start_env(config, policy)
    warm_start(env, policy, demonstrations, recording, cloning)
    policy.save_pretrained(folder / "policy")

    result = evaluate_share("evaluation", env, policy, grid, record=evaluation["videos"])
    logger = RunLogger(folder)
    logger.log(result.metrics(), step=config.sft.steps)
    logger.close()
    save_videos(folder / "videos", result)
    finish_run(folder, result.metrics(), time.perf_counter() - started)
    env.close()
    print(f"\n{describe(spec)}\n\n{result.table()}\n")
    print(f"policy       {folder / 'policy'}\nvideos       {folder / 'videos'}")


if __name__ == "__main__":
    main()
