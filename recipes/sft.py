"""Behaviour cloning of a benchmark's scripted expert: ``python recipes/sft.py``; settings are in ``conf/sft.yaml``."""

import os

# Before torch is imported: a thread that waits must sleep, because the simulators need the cores meanwhile.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from types import SimpleNamespace
from typing import Literal

import hydra
from omegaconf import DictConfig

from vla_algos import BehaviourCloning
from vla_algos.run import CLONING, Run, launch, record, translate_arguments
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
    translate_arguments("sft")
    main()
