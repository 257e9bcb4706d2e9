"""Behaviour cloning of a benchmark's scripted expert: ``python recipes/sft.py``; settings are in ``conf/sft.yaml``."""

import sys

try:
    from vla_common.program import begin_program

    begin_program(__name__)  # before torch is imported
except ModuleNotFoundError as error:
    print(f"error: {error} in {sys.executable}; type the Python of docs/install.md: .venv/bin/python", file=sys.stderr)
    sys.exit(2)

from types import SimpleNamespace
from typing import Literal

import hydra
from omegaconf import DictConfig

from vla_algos import BehaviourCloning
from vla_algos.run import CLONING, Run, launch, run_program
from vla_common.settings import Count

SETTINGS = {
    **CLONING,
    "recipe": Literal["sft"],
    "demonstrations": {**CLONING["demonstrations"], "episodes": Count},
    "heldout_every": Count,
}


@hydra.main(version_base=None, config_path="conf", config_name="sft")
def main(config: DictConfig) -> None:
    launch(train, config, SETTINGS, alone=True)


def train(config: SimpleNamespace, run: Run) -> None:
    policy = run.make_policy()
    run.make_env(policy)
    demonstrations, heldout = run.record(policy)  # the same again, if this is resumed
    learner = BehaviourCloning(policy, demonstrations, **config.cloning)
    steps = config.cloning["steps"]

    with run.resumable(learner=learner, warm_start=False):
        for step in run.iterations(steps, unit="step", title="behaviour cloning"):
            metrics = {"train/loss": learner.step()}
            if heldout and (step % config.heldout_every == 0 or step == steps):
                metrics |= {f"heldout/{name}": value for name, value in learner.evaluate(heldout).items()}
            run.log_step(metrics)


if __name__ == "__main__":
    run_program("sft", main)
