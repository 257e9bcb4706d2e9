"""Success of a saved policy on held-out episodes: ``python recipes/evaluate.py policy.checkpoint=FOLDER``."""

import sys

try:
    from vla_common.program import begin_program

    begin_program(__name__)  # before torch is imported
except ModuleNotFoundError as error:
    print(f"error: {error} in {sys.executable}; type the Python of docs/install.md: .venv/bin/python", file=sys.stderr)
    sys.exit(2)

import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Literal

import hydra
from omegaconf import DictConfig

from vla_algos import EpisodeCollector, parallel
from vla_algos.evaluation import blank_images, swap_instructions
from vla_algos.run import EVALUATION, Evaluator, Run, launch, run_program
from vla_algos.run.files import finite_or_none, write_atomically
from vla_algos.run.seeds import seed_rank
from vla_algos.run.summary import as_evaluated, describe_spec
from vla_common.errors import unknown_name
from vla_common.settings import setting_types
from vla_envs.workers.pool import SimulatorCrash

SETTINGS = {
    **EVALUATION,
    "recipe": Literal["evaluate"],
    "eval": setting_types(Evaluator, without=["sampled"]),
    "pipeline": setting_types(EpisodeCollector, only=["stages", "overlap_resets"]),
    "greedy": bool,
    "ablation": Literal["blank_images", "swap_instructions"] | None,  # what the policy is shown instead
    "mean_of": Sequence[str],
}


@hydra.main(version_base=None, config_path="conf", config_name="evaluate")
def main(config: DictConfig) -> None:
    launch(evaluate, config, SETTINGS)


def evaluate(config: SimpleNamespace, run: Run) -> None:
    if not config.policy.get("checkpoint"):
        raise ValueError("which policy? type: python recipes/evaluate.py policy.checkpoint=runs/ppo/latest/policy")
    groups = list(dict.fromkeys(task.group for task in run.spec.tasks))
    for name in config.mean_of:
        if name not in groups:
            raise unknown_name("group in mean_of", name, groups)
    ablations = {"blank_images": lambda: blank_images, "swap_instructions": lambda: swap_instructions(run.spec.tasks)}
    observe = ablations[config.ablation]() if config.ablation else None
    policy = run.make_policy()
    run.check_results()
    run.make_env(policy)
    seed_rank(config.seed)
    result = run.evaluate(config.ablation or "evaluation", greedy=config.greedy, observe=observe)

    setting = {"greedy": config.greedy, "ablation": config.ablation}
    setting |= {"protocol": run.spec.protocol} if run.spec.protocol else {}
    spec = as_evaluated(run.spec, config.eval.get("trials"))
    setting["protocol_deviations"] = spec.protocol_deviations
    metrics = {**result.metrics(), **result.intervals(), **setting}
    print(f"\n{describe_spec(spec)}\n{'greedy' if config.greedy else 'sampled'}, ablation {config.ablation or 'none'}")
    print(f"\n{result.table()}")
    if config.mean_of:
        once, at_end = result.mean_of_groups(config.mean_of)
        metrics |= {"eval/mean/success_once": once, "eval/mean/success_at_end": at_end}
        print(f"mean of {', '.join(config.mean_of)}: success {100 * once:.1f}%, at end {100 * at_end:.1f}%")
    if result.failure:
        raise SimulatorCrash(f"{result.failure}; the same command with hydra.run.dir={run.folder} goes on")
    if parallel.is_main():
        write_atomically(run.folder / "metrics.json", json.dumps(finite_or_none(metrics), indent=2) + "\n")
    run.finish(result.metrics())
    print(f"\nresults      {run.folder}")


if __name__ == "__main__":
    run_program("evaluate", main)
