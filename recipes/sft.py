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
from vla_algos.run import CLONING, Run, launch, record, run_program
from vla_common.settings import Count

SETTINGS = {
    **CLONING,
    "recipe": Literal["sft"],
    "demonstrations": {**CLONING["demonstrations"], "episodes": Count},
}


@hydra.main(version_base=None, config_path="conf", config_name="sft")
def main(config: DictConfig) -> None:
    launch(train, config, SETTINGS, alone=True)


def train(config: SimpleNamespace, run: Run) -> None:
    policy = run.make_policy()
    env = run.make_env(policy)
    data = record(env, policy, run.demonstration_seed, **config.demonstrations)  # the same again, if this is resumed
    learner = BehaviourCloning(policy, data, **config.cloning)

    with run.resumable(learner=learner, warm_start=False):
        for _ in run.iterations(config.cloning["steps"], unit="step", title="behaviour cloning"):
            run.log_step({"train/loss": learner.step()})


if __name__ == "__main__":
    run_program("sft", main)
