"""Success of a saved policy on held-out episodes: ``python recipes/evaluate.py policy.checkpoint=FOLDER``."""

import sys

try:
    from vla_common.program import begin_program

    begin_program(__name__)  # before torch is imported
except ModuleNotFoundError as error:
    print(f"error: {error} in {sys.executable}; type the Python of docs/install.md: .venv/bin/python", file=sys.stderr)
    sys.exit(2)

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal

import hydra
from annotated_types import MinLen
from omegaconf import DictConfig

from vla_algos import EpisodeCollector, compare, parallel
from vla_algos.run import EVALUATION, Evaluator, Run, launch, run_program
from vla_algos.run.ablating import AblationName, check_ablations, evaluate_with_ablations
from vla_algos.run.files import finite_or_none, write_atomically
from vla_algos.run.summary import as_evaluated, describe_spec
from vla_common.checksums import identity
from vla_common.settings import setting_types
from vla_envs.workers.pool import SimulatorCrash

SETTINGS = {
    **EVALUATION,
    "recipe": Literal["evaluate"],
    "eval": setting_types(Evaluator, without=["sampled", "temperature", "env"]),
    "pipeline": setting_types(EpisodeCollector, only=["stages", "overlap_resets"]),
    "greedy": bool,
    "ablation": AblationName | Annotated[Sequence[AblationName], MinLen(1)] | None,
}


@hydra.main(version_base=None, config_path="conf", config_name="evaluate")
def main(config: DictConfig) -> None:
    launch(evaluate, config, SETTINGS)


def evaluate(config: SimpleNamespace, run: Run) -> None:
    if not config.policy.get("checkpoint"):
        raise ValueError("which policy? type: python recipes/evaluate.py policy.checkpoint=runs/ppo/latest/policy")
    ablations = [config.ablation] if isinstance(config.ablation, str) else list(config.ablation or [])
    check_ablations(ablations, run.spec, run.evaluator.episodes(run.spec))
    evaluated = identity(Path(config.policy["checkpoint"]).expanduser())
    policy = run.make_policy()
    run.check_results()
    with contextlib.closing(run.make_env(policy)):
        results = evaluate_with_ablations(run, ablations, config.seed, greedy=config.greedy)

    setting = {"evaluated_on": run.spec.id, "greedy": config.greedy, "ablation": config.ablation}
    setting["policy_identity"] = evaluated
    setting |= {"protocol": run.spec.protocol} if run.spec.protocol else {}
    spec = as_evaluated(run.spec, config.eval.get("trials"))
    setting["protocol_deviations"] = spec.protocol_deviations
    setting["differs_from_training"] = run.differs
    print(f"\n{describe_spec(spec)}\n{'greedy' if config.greedy else 'sampled'}")
    metrics: dict[str, Any] = {}
    for name, result in results.items():
        prefix = f"eval_{name}" if name else "eval"
        metrics |= {**result.metrics(prefix), **result.intervals(prefix)}
        if not name or result.failure:
            print(f"\n{result.table()}")
        if result.failure:
            what = f"ablation {name}: " if name else ""
            raise SimulatorCrash(f"{what}{result.failure}; type the command above to go on")
        if name:
            difference = compare(results[""].episodes, result.episodes, config.eval["mean_of"])
            metrics |= difference.metrics(prefix)
            print(f"\nablation {name}, paired\n{difference.table('normal', name)}")
    if parallel.is_main():
        write_atomically(run.folder / "metrics.json", json.dumps(finite_or_none(metrics | setting), indent=2) + "\n")
    run.finish({name: value for name, value in metrics.items() if isinstance(value, float)})
    print(f"\nresults      {run.folder}")


if __name__ == "__main__":
    run_program("evaluate", main)
