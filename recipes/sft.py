"""Behaviour cloning of a benchmark's scripted expert: ``python recipes/sft.py``; settings are in ``conf/sft.yaml``."""

import os

# Before torch is imported: a thread that waits must sleep, because the simulators need the cores meanwhile.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import time
from pathlib import Path

import hydra
from omegaconf import DictConfig

from vla_algos.imitation import BehaviourCloning
from vla_algos.run.launch import launch
from vla_algos.run.logging import RunLogger
from vla_algos.run.policy import make_policy
from vla_algos.run.resume import ResumableRun
from vla_algos.run.run import (
    demonstrate,
    demonstration_seed,
    describe,
    env_spec,
    evaluate_share,
    evaluation_settings,
    finish_run,
    progress_bar,
    save_videos,
    start_env,
    start_run,
    warm_start_settings,
)

KEYS = ("env", "policy", "sft", "eval", "seed", "checkpoint_every", "resume", "launcher")


@hydra.main(version_base=None, config_path="conf", config_name="sft")
def main(config: DictConfig) -> None:
    launch(run_recipe, config, alone=True)


def run_recipe(config: DictConfig, folder: Path) -> None:
    started = time.perf_counter()
    start_run(config, KEYS, folder)
    demonstrations = demonstration_seed(config.seed, config.eval.seed)
    spec = env_spec(config)
    recording, cloning = warm_start_settings(config, spec)
    grid, evaluation = evaluation_settings(config, spec)
    policy = make_policy(config, spec)
    env = start_env(config, policy)
    data = demonstrate(env, policy, demonstrations, recording)  # the same ones again, if this goes on where it stopped
    learner = BehaviourCloning(policy, data, **cloning)
    with ResumableRun(folder, policy, {"learner": learner}, config.checkpoint_every) as run:
        first = run.resume()
        logger = RunLogger(folder, after=-1 if first is None else first)
        started -= run.seconds
        if first is None:
            first = 0
            run.finish(first)
        with progress_bar("behaviour cloning", cloning["steps"], "step", first) as bar:
            for step in range(first + 1, cloning["steps"] + 1):
                loss = learner.step()
                bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
                bar.update()
                logger.log({"train/loss": loss}, step)
                run.finish(step, publish=step == cloning["steps"])
        policy.save_pretrained(folder / "policy")
        filmed = evaluation["videos"]
        result = run.interruptible(lambda: evaluate_share("evaluation", env, policy, grid, record=filmed))

    logger.log(result.metrics(), step=cloning["steps"])
    logger.close()
    save_videos(folder / "videos", result)
    finish_run(folder, result.metrics(), time.perf_counter() - started)
    env.close()
    print(f"\n{describe(spec)}\n\n{result.table()}\n")
    print(f"policy       {folder / 'policy'}\nvideos       {folder / 'videos'}")


if __name__ == "__main__":
    main()
