"""PPO fine-tunes a Vision-Language-Action policy: ``python recipes/ppo.py``; settings are in ``conf/ppo.yaml``."""

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
import torch
from omegaconf import DictConfig
from tensordict import TensorDictBase

from vla_algos import ChunkClipPPOLoss, Learner, StepCollector, check_levels, gae, parallel
from vla_algos.advantages import valid_decisions
from vla_algos.learner import OPTIM, check_steps
from vla_algos.metrics import env_metrics, rollout_metrics
from vla_algos.run import TRAINING, Run, launch, run_program
from vla_common.keys import ADVANTAGE, NEXT, STATE_VALUE, TASK_ID, VALUE_TARGET
from vla_common.settings import Count, setting_types

SETTINGS = {  # by section: the keyword arguments of one callable
    **TRAINING,
    "recipe": Literal["ppo"],
    "collector": {"decisions": Count},
    "pipeline": setting_types(StepCollector, only=["stages"]),
    "gae": setting_types(gae, without=["batch"]),
    "loss": setting_types(ChunkClipPPOLoss, without=["policy", "decoupled"]),
    "optim": setting_types(Learner, only=OPTIM),
    "update": setting_types(Learner, without=[*OPTIM, "loss_module", "optimizer", "offload_optimizer", "updates"]),
}


@hydra.main(version_base=None, config_path="conf", config_name="ppo")
def main(config: DictConfig) -> None:
    launch(train, config, SETTINGS)


def train(config: SimpleNamespace, run: Run) -> None:
    check_steps(**config.optim, **config.update, updates=config.iterations)
    policy = run.make_policy()
    loss_module = ChunkClipPPOLoss(policy, **config.loss, decoupled=config.sync["lag"] > 0)
    learner = run.on_actors(
        lambda: Learner(
            loss_module,
            **config.optim,
            **config.update,
            offload_optimizer=config.offload["optimizer"],
            updates=config.iterations,
        )
    )
    check_levels(
        config.gae["reward_level"],
        config.gae["bootstrap"],
        num_values=policy.num_values if loss_module.has_critic else None,
        chunk_size=policy.chunk_size,
        log_prob_level=config.loss["log_prob_level"],
    )
    env = run.make_env(policy)
    reads = {"values": loss_module.has_critic, "bootstrap": config.gae["bootstrap"]}
    collector = run.on_rollouts(
        lambda: StepCollector(env, policy, **config.collector, **config.pipeline, **reads, on_decision=run.film)
    )

    def learn(batch: TensorDictBase | None) -> tuple[TensorDictBase, dict[str, float]]:
        with run.timer("train"):
            own = None if batch is None else batch.select(NEXT, STATE_VALUE, TASK_ID, strict=False)
            everything = parallel.all_gather(own)  # of all processes that learn
            gae(everything, **config.gae)
            rows = parallel.local_rows(everything, 0 if batch is None else len(batch))
            if batch is not None:
                batch.update(rows.select(ADVANTAGE, VALUE_TARGET))
            policy.train()
            executed = bool(valid_decisions(everything).any())  # otherwise every episode crashed as it began
            return everything, learner.update(batch, before_step=run.stop_if_asked) if executed else {}

    with run.resumable(learner=learner, collector=collector):
        for _ in run.iterations():
            everything, update = run.turn(lambda: collector.rollout(), learn, join=torch.cat)
            run.log(everything, env_metrics(everything), rollout_metrics(everything), update)


if __name__ == "__main__":
    run_program("ppo", main)
