"""Success of a saved policy on a fixed grid of episodes: ``python recipes/evaluate.py policy.checkpoint=FOLDER``."""

import os

# Before torch is imported: a thread that waits must sleep, because the simulators need the cores meanwhile.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import json
import time
from pathlib import Path

import hydra
from omegaconf import DictConfig

from vla_algos import parallel
from vla_algos.evaluation import blank_images, swap_instructions
from vla_algos.run.launch import launch
from vla_algos.run.policy import make_policy
from vla_algos.run.run import (
    describe,
    env_spec,
    evaluate_share,
    evaluation_settings,
    finish_run,
    own_random_numbers,
    save_videos,
    start_env,
    start_run,
    whole_evaluation,
)
from vla_common.errors import unknown_name

KEYS = ("env", "policy", "eval", "seed", "greedy", "ablation", "mean_of", "launcher")
ABLATIONS = {  # what the policy is shown instead
    "blank_images": lambda spec: blank_images,
    "swap_instructions": lambda spec: swap_instructions(spec.tasks),
}


@hydra.main(version_base=None, config_path="conf", config_name="evaluate")
def main(config: DictConfig) -> None:
    launch(run_recipe, config)


def run_recipe(config: DictConfig, folder: Path) -> None:
    if not config.policy.checkpoint:
        raise ValueError("which policy? type: python recipes/evaluate.py policy.checkpoint=runs/ppo/latest/policy")
    if config.ablation is not None and config.ablation not in ABLATIONS:
        raise unknown_name("ablation", config.ablation, ABLATIONS)
    started = time.perf_counter()
    start_run(config, KEYS, folder)
    spec = env_spec(config)
    grid, evaluation = evaluation_settings(config, spec)
    groups = list(dict.fromkeys(task.group for task in spec.tasks))
    for name in config.mean_of:
        if name not in groups:
            raise unknown_name("group in mean_of", name, groups)
    policy = make_policy(config, spec)
    env = start_env(config, policy)
    own_random_numbers(config.seed)
    ablation = ABLATIONS[config.ablation](spec) if config.ablation else None
    share = evaluate_share(
        config.ablation or "evaluation",
        env,
        policy,
        grid,
        greedy=config.greedy,
        observe=ablation,
        record=evaluation["videos"],
    )
    result = whole_evaluation(share)
    env.close()
    save_videos(folder / "videos", result)
    setting = {"greedy": config.greedy, "ablation": config.ablation, "departures": spec.departures}
    metrics = {**result.metrics(), "eval/interval": result.interval, **setting}
    if config.mean_of:
        once, at_end = result.mean_of_groups(config.mean_of)
        metrics |= {"eval/mean/success_once": once, "eval/mean/success_at_end": at_end}
    if parallel.is_main():
        (folder / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
    finish_run(folder, result.metrics(), time.perf_counter() - started)
    print(f"\n{describe(spec)}\n{'greedy' if config.greedy else 'sampled'}, ablation {config.ablation or 'none'}")
    print(f"\n{result.table()}")
    if config.mean_of:
        print(f"mean of {', '.join(config.mean_of)}: success {100 * once:.1f}%, at end {100 * at_end:.1f}%")
    print(f"\nresults      {folder}")


if __name__ == "__main__":
    main()
