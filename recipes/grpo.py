"""GRPO fine-tunes a Vision-Language-Action policy: ``python recipes/grpo.py``; settings are in ``conf/grpo.yaml``."""

import sys

try:
    from vla_common.program import begin_program

    begin_program(__name__)  # before torch is imported
except ModuleNotFoundError as error:
    print(f"error: {error} in {sys.executable}; type the Python of docs/install.md: .venv/bin/python", file=sys.stderr)
    sys.exit(2)

from itertools import chain
from types import SimpleNamespace
from typing import Literal

import hydra
from omegaconf import DictConfig

from vla_algos import ChunkClipPPOLoss, EpisodeCollector, Learner, collect_groups, grpo, parallel
from vla_algos.groups import (
    Group,
    check_groups,
    concatenate,
    describe_groups_without_signal,
    group_metrics,
    outcomes_of,
)
from vla_algos.learner import OPTIM, check_steps
from vla_algos.metrics import env_metrics, rollout_metrics
from vla_algos.run import TRAINING, Run, launch, run_program
from vla_common.settings import Count, setting_types

CRITIC = ("critic_coeff", "clip_value", "huber_delta")  # GRPO has none
SETTINGS = {  # by section: the keyword arguments of one callable
    **TRAINING,
    "recipe": Literal["grpo"],
    "group_size": Count,
    "patience": Count,
    "collector": setting_types(collect_groups, without=["collector", "episodes"]),
    "pipeline": setting_types(EpisodeCollector, only=["stages", "overlap_resets"]),
    "loss": setting_types(ChunkClipPPOLoss, without=["policy", "decoupled", *CRITIC]),
    "optim": setting_types(Learner, only=OPTIM),
    "update": setting_types(
        Learner, without=[*OPTIM, "loss_module", "optimizer", "offload_optimizer", "updates", "critic_warmup_steps"]
    ),
}


@hydra.main(version_base=None, config_path="conf", config_name="grpo")
def main(config: DictConfig) -> None:
    launch(train, config, SETTINGS)


def train(config: SimpleNamespace, run: Run) -> None:
    check_steps(**config.optim, **config.update, updates=config.iterations)
    check_groups(config.group_size, **config.collector)
    if config.env.get("group_size", 1) != 1:
        raise ValueError(f"the size of a group is group_size alone; type group_size={config.env['group_size']}")
    wanted = {name: run.per_rollout(config.collector[name], f"collector.{name}") for name in ("groups", "max_groups")}
    bounds = config.collector["success_bounds"]
    policy = run.make_policy()
    loss_module = ChunkClipPPOLoss(policy, **config.loss, critic_coeff=None, decoupled=config.sync["lag"] > 0)
    learner = run.on_actors(
        lambda: Learner(
            loss_module,
            **config.optim,
            **config.update,
            offload_optimizer=config.offload["optimizer"],
            updates=config.iterations,
        )
    )
    env = run.make_env(policy)
    episodes = run.on_rollouts(lambda: run.training_episodes(config.group_size))
    collector = run.on_rollouts(lambda: EpisodeCollector(env, policy, **config.pipeline, on_decision=run.film))

    def collect() -> list[Group]:
        return collect_groups(collector, episodes, **wanted, success_bounds=bounds)

    def learn(groups: list[Group] | None) -> tuple[list[Group], bool, dict[str, float]]:
        batch = grpo(groups or [], bounds, move=True)  # None: no group carries signal
        everything = [group for part in parallel.all_gather_object(outcomes_of(groups or [])) for group in part]
        learnable, update = grpo(everything, bounds), {}
        with run.timer("train"):
            if learnable is not None:
                policy.train()
                update = {**rollout_metrics(learnable), **learner.update(batch, before_step=run.stop_if_asked)}
        return everything, learnable is not None, update

    with run.resumable(learner=learner, collector=collector, episodes=episodes):
        for iteration in run.iterations():
            everything, learnt, update = run.turn(collect, learn, join=lambda parts: [*chain(*parts)])
            outcomes = concatenate(everything)
            crashed = sum(group.crashed for group in everything)
            run.log(outcomes, env_metrics(outcomes, crashed), group_metrics(everything, bounds), update)

            in_a_row = 0 if learnt else run.state.get("iterations_without_signal", 0) + 1
            run.state["iterations_without_signal"] = in_a_row
            if in_a_row:
                why = describe_groups_without_signal(everything)
                run.write(f"iteration {iteration}: {why}; nothing was learnt")
            if in_a_row == config.patience:
                run.end_here(f"{in_a_row} iterations in a row without a group to learn from (patience={in_a_row})")


if __name__ == "__main__":
    run_program("grpo", main)
