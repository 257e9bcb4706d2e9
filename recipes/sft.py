"""Behaviour cloning of a benchmark's scripted expert: ``python recipes/sft.py``; settings are in ``conf/sft.yaml``."""

import os

# Before torch is imported: a thread that waits must sleep, because the simulators need the cores meanwhile.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import hydra
from omegaconf import DictConfig

from vla_algos.loggers import RunLogger
from vla_algos.runs import (
    demonstration_seed,
    evaluate_with_bar,
    group,
    make_env_and_policy,
    save_videos,
    start_run,
    warm_start,
)
from vla_envs import evaluation_grid

KEYS = ("env", "policy", "sft", "eval", "seed")


@hydra.main(version_base=None, config_path="conf", config_name="sft")
def main(config: DictConfig) -> None:
    folder = start_run(config, KEYS)
    env, policy = make_env_and_policy(config)
    warm_start(env, policy, group(config.sft), demonstration_seed(config.seed, config.eval.seed))
    policy.save_pretrained(folder / "policy")

    grid = evaluation_grid(env.simulator_spec, config.eval.trials, config.eval.seed)
    result = evaluate_with_bar("evaluation", env, policy, grid, record=config.eval.videos)
    logger = RunLogger(folder)
    logger.log(result.metrics(), step=config.sft.steps)
    logger.close()
    save_videos(folder / "videos", result)
    env.close()
    print(f"\n{result.table()}\n\npolicy       {folder / 'policy'}\nvideos       {folder / 'videos'}")


if __name__ == "__main__":
    main()
