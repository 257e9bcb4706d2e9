"""Success of a saved policy on a fixed grid of episodes: ``python recipes/evaluate.py policy.checkpoint=FOLDER``."""

import os

# Before torch is imported: a thread that waits must sleep, because the simulators need the cores meanwhile.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import json

import hydra
from omegaconf import DictConfig

from vla_algos.evaluation import blank_images, swap_instructions
from vla_algos.runs import evaluate_with_bar, make_env_and_policy, save_videos, start_run
from vla_envs import evaluation_grid
from vla_envs.errors import unknown_name

KEYS = ("env", "policy", "eval", "seed", "greedy", "ablation")
ABLATIONS = ("blank_images", "swap_instructions")


@hydra.main(version_base=None, config_path="conf", config_name="evaluate")
def main(config: DictConfig) -> None:
    if not config.policy.checkpoint:
        raise ValueError("which policy? type: python recipes/evaluate.py policy.checkpoint=runs/ppo/latest/policy")
    if config.ablation is not None and config.ablation not in ABLATIONS:
        raise unknown_name("ablation", config.ablation, ABLATIONS)
    folder = start_run(config, KEYS)
    env, policy = make_env_and_policy(config)
    spec = env.simulator_spec
    ablation = config.ablation and {
        "blank_images": lambda: blank_images,
        "swap_instructions": lambda: swap_instructions(spec.tasks),
    }[config.ablation]()
    result = evaluate_with_bar(
        config.ablation or "evaluation",
        env,
        policy.eval(),
        evaluation_grid(spec, config.eval.trials, config.eval.seed),
        greedy=config.greedy,
        observe=ablation,
        record=config.eval.videos,
    )
    env.close()
    save_videos(folder / "videos", result)
    (folder / "metrics.json").write_text(json.dumps(result.metrics(), indent=2) + "\n")
    print(f"\n{spec.id}, {'greedy' if config.greedy else 'sampled'}, ablation {config.ablation or 'none'}")
    for departure in spec.departures:
        print(f"  not the benchmark's: {departure}")
    print(f"\n{result.table()}\n\nresults      {folder}")


if __name__ == "__main__":
    main()
