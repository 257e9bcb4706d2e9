"""Success of a saved policy on held-out episodes: ``python recipes/evaluate.py policy.checkpoint=FOLDER``."""

from vla_common.program import begin_program

begin_program(__name__, "vla_algos.run.program")  # before torch is imported

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal

import hydra
from annotated_types import MinLen
from omegaconf import DictConfig

from vla_algos import EpisodeCollector, compare, distributed
from vla_algos.ablations import check_reads
from vla_algos.files import finite_or_none, write_atomically
from vla_algos.run import EVALUATION, Evaluator, Run, launch, run_program
from vla_algos.run.ablated import AblatedEvaluation, AblationName, check_weights
from vla_algos.run.environments import as_evaluated, describe_spec, facts_of, make_env_spec, own_share
from vla_algos.run.policies import make_run_policy
from vla_common.checksums import identity
from vla_common.settings import setting_types
from vla_envs import EpisodeQueue, make_env
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
    # ---- parts
    served = config.policy.get("url")
    if not (served or config.policy.get("checkpoint")):
        raise ValueError("which policy? type: vla-recipe run evaluate policy.checkpoint=runs/ppo/latest/policy")
    if served and not config.greedy:
        raise ValueError("greedy=false: whether a policy of a server samples is said there; leave it out")
    spec = make_env_spec(config.env)
    own_env = own_share(config.env, spec, config.pipeline)
    evaluation = AblatedEvaluation(run, spec)
    print(describe_spec(spec))
    policy = make_run_policy(run, spec, own_env)
    written = served or identity(Path(config.policy["checkpoint"]).expanduser())  # now: a link may lead elsewhere later
    check_reads(policy, config.ablation)
    env = make_env(**own_env, chunk_size=policy.chunk_size, episodes=EpisodeQueue())

    # ---- evaluate: as it is, then with each ablation
    check_weights(run.folder, policy)  # what is there is continued, of the same policy
    spec = as_evaluated(spec, config.eval.get("trials"))
    run.begin(facts_of(spec))
    results = evaluation(env, policy)
    env.close()

    # ---- tell
    print(f"\n{describe_spec(spec)}\n{'greedy' if config.greedy else 'sampled'}")
    metrics: dict[str, Any] = {}
    for name, result in results.items():
        prefix = f"eval_{name}" if name else "eval"
        metrics |= {**result.metrics(prefix), **result.intervals(prefix)}
        if not name or result.failure:
            print(f"\n{result.table()}")
        if result.failure:
            raise SimulatorCrash(
                f"{f'ablation {name}: ' if name else ''}{result.failure}; type the same again: it resumes"
            )
        if name:
            difference = compare(results[""].episodes, result.episodes, config.eval["mean_of"])
            metrics |= difference.metrics(prefix)
            print(f"\nablation {name}, paired\n{difference.table('normal', name)}")
    setting = {"greedy": config.greedy, "ablation": config.ablation, "policy_identity": written}
    setting |= {**facts_of(spec), "differs_from_training": run.differs}
    if distributed.is_main():
        write_atomically(run.folder / "metrics.json", json.dumps(finite_or_none(metrics | setting), indent=2) + "\n")
    run.finish({name: value for name, value in metrics.items() if isinstance(value, float)})
    print(f"\nresults      {run.folder}")


if __name__ == "__main__":
    run_program("evaluate", main)
