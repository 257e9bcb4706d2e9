"""Behaviour cloning of a benchmark's scripted expert: ``python recipes/sft.py``; settings are in ``conf/sft.yaml``."""

from vla_common.program import begin_program

begin_program(__name__, "vla_algos.run.program")  # before torch is imported

from types import SimpleNamespace
from typing import Literal

import hydra
from omegaconf import DictConfig

from vla_algos import BehaviourCloning, Demonstrations
from vla_algos.run import CLONING, HeldOut, Run, launch, run_program
from vla_algos.run.environments import make_env_spec, own_share
from vla_algos.run.policies import make_run_policy, policy_writer
from vla_common.settings import Count
from vla_envs import EpisodeSampler, make_env

SETTINGS = {
    **CLONING,
    "recipe": Literal["sft"],
    "demonstrations": {**CLONING["demonstrations"], "episodes": Count},
    "heldout_every": Count,
}


@hydra.main(version_base=None, config_path="conf", config_name="sft")
def main(config: DictConfig) -> None:
    launch(train, config, SETTINGS, single=True)


def train(config: SimpleNamespace, run: Run) -> None:
    # ---- parts
    spec = make_env_spec(config.env)
    own_env = own_share(config.env, spec)
    held_out, demonstrations = HeldOut(run, spec), Demonstrations(config, spec, always=True)
    run.say(held_out.describe())
    policy = make_run_policy(run, spec, own_env)
    held_out.check_policy(policy)
    demonstrations.check_policy(policy)
    env = make_env(**own_env, chunk_size=policy.chunk_size, episodes=EpisodeSampler(spec, config.seed))
    shown, heldout = demonstrations.record(env, policy)  # the same again, if this is resumed
    cloning, steps = BehaviourCloning(policy, shown, **config.cloning), config.cloning["steps"]
    publish = policy_writer(config, policy, spec, held_out.spec)

    # ---- learn
    if run.restore(demonstrations.facts, policy=policy, cloning=cloning) is None:
        run.save(0)
    for step in run.iterations(steps, unit="step", title="behaviour cloning"):
        metrics = {"train/loss": cloning.step()}
        if heldout and run.is_due(step, config.heldout_every, steps):
            metrics |= {f"heldout/{name}": value for name, value in cloning.evaluate(heldout).items()}
        run.log(step, metrics)
        run.save(step, publish if step == steps else None)

    # ---- evaluate
    held_out(env, policy, steps)
    run.publish(publish)
    env.close()
    held_out.summarise()


if __name__ == "__main__":
    run_program("sft", main)
