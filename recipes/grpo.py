"""GRPO fine-tunes a Vision-Language-Action policy: ``python recipes/grpo.py``; settings are in ``conf/grpo.yaml``."""

from vla_common.program import begin_program

begin_program(__name__, "vla_algos.run.program")  # before torch is imported

from types import SimpleNamespace
from typing import Any, Literal

import hydra
from omegaconf import DictConfig

from vla_algos import ChunkGRPOLoss, Demonstrations, EpisodeCollector, clone, collect_groups, distributed, grpo
from vla_algos.collectors.crashes import check_crashes
from vla_algos.groups import check_groups, check_signal, concatenate, gather_outcomes, group_metrics
from vla_algos.metrics import collector_stats, env_metrics, outcomes_by_task, rollout_metrics, throughput
from vla_algos.minibatches import UPDATE, Minibatches, check_loss, check_minibatches
from vla_algos.optim import OPTIM, check_schedule, make_optimizer
from vla_algos.reference import FrozenPolicy
from vla_algos.run import TRAINING, HeldOut, Run, TrainVideos, launch, run_program
from vla_algos.run.environments import make_env_spec, own_share, training_episodes
from vla_algos.run.policies import make_run_policy, policy_writer
from vla_algos.run.sharding import Sharding
from vla_common.settings import Count, setting_types
from vla_envs import make_env
from vla_policies.sharding import gathered

SETTINGS = {  # by section: the keyword arguments of one callable
    **TRAINING,
    "recipe": Literal["grpo"],
    "group_size": Count,
    "patience": Count,
    "collector": setting_types(collect_groups, without=["collector", "episodes"]),
    "pipeline": setting_types(EpisodeCollector, only=["stages", "overlap_resets"]),
    "loss": setting_types(ChunkGRPOLoss, without=["policy", "decoupled"]),
    "optim": OPTIM,
    "update": {name: kind for name, kind in UPDATE.items() if name != "critic_warmup_steps"},
}


@hydra.main(version_base=None, config_path="conf", config_name="grpo")
def main(config: DictConfig) -> None:
    launch(train, config, SETTINGS)


def train(config: SimpleNamespace, run: Run) -> None:
    # ---- parts: each section is the keyword arguments of one of them; what is cheap comes first, and is checked
    check_schedule(**config.optim, updates=config.iterations)
    check_minibatches(**config.update)
    check_groups(config.group_size, **config.collector)
    wanted = {key: distributed.per_rank(config.collector[key], f"collector.{key}") for key in ("groups", "max_groups")}
    bounds = config.collector["success_bounds"]
    spec = make_env_spec(config.env)
    own_env = own_share(config.env, spec, config.pipeline)  # of several processes each has some of the environments
    held_out, demonstrations = HeldOut(run, spec), Demonstrations(config, spec)
    films = TrainVideos(run, spec, **config.train_videos)
    run.say(held_out.describe())
    policy = make_run_policy(run, spec, own_env, Sharding(**config.sharding), config.offload["optimizer"])
    held_out.check_policy(policy)
    demonstrations.check_policy(policy)
    loss_module = ChunkGRPOLoss(policy, **config.loss)
    check_loss(loss_module, **config.update)
    optimizer, schedule = make_optimizer(
        loss_module, **config.optim, updates=config.iterations, offload=config.offload["optimizer"]
    )
    frozen = FrozenPolicy(policy) if loss_module.reference_kl_coeff else None
    episodes = training_episodes(config, spec, config.group_size)
    env = make_env(**own_env, chunk_size=policy.chunk_size, episodes=episodes)
    collector = EpisodeCollector(env, policy, **config.pipeline, step_hook=films.hook)
    publish = policy_writer(config, policy, spec, held_out.spec)

    # ---- where the policy begins: at the last checkpoint, a published one, or a clone of the expert
    parts: dict[str, Any] = {"policy": policy, "optimizer": optimizer, "schedule": schedule, "frozen": frozen}
    start = run.restore(demonstrations.facts, **parts, collector=collector, episodes=episodes)
    if start is None:
        if demonstrations.wanted:
            clone(policy, *demonstrations.record(env, policy), run.folder / "warm_start", **config.cloning)
        held_out(env, policy, 0, collector)
        run.save(0, publish)

    for iteration in run.iterations(config.iterations):
        # ---- act: groups of runs of one episode, until enough of them differ
        policy.eval()
        with gathered(policy), films.of(iteration, policy.chunk_size):
            groups = collect_groups(collector, episodes, **wanted, success_bounds=bounds)

        # ---- advantages: of each run among its group
        batch = grpo(groups, bounds, move=True)  # None: no group carries signal
        all_groups = gather_outcomes(groups)  # of all processes
        learnable, update, began = grpo(all_groups, bounds), {}, run.seconds

        # ---- learn: epochs of minibatches
        if learnable is not None:
            policy.train()
            steps = run.state.get("steps", 0)
            minibatches = Minibatches(loss_module, batch, **config.update, steps=steps, frozen=frozen)
            for minibatch in minibatches:
                optimizer.zero_grad()
                for part in minibatch:  # micro-batches: their gradients add up
                    losses = minibatch.losses(part)  # loss_module(part): shares of that of the whole
                    minibatch.total(losses).backward()
                if minibatch.too_far:  # from the policy that acted: target_kl
                    break
                minibatch.step(optimizer)
            run.state["steps"] = minibatches.steps
            update = {**rollout_metrics(learnable), **minibatches.metrics(optimizer), "time/train": run.seconds - began}
            schedule.step()
        del batch  # its images: the next rollout needs the room

        # ---- tell
        all_rows = concatenate(all_groups)
        outcomes = env_metrics(all_rows, sum(group.crashed for group in all_groups))
        counted = group_metrics(all_groups, bounds)
        run.log(iteration, outcomes, counted, update, collector_stats(collector), throughput(all_rows, run.seconds))
        run.say(check_crashes(run.state, iteration, outcomes))
        episodes.tell(*outcomes_by_task(all_rows))  # episode_order=learnable draws accordingly
        run.say(check_signal(run.state, iteration, all_groups, bool(update), config.patience))
        evaluates = run.is_due(iteration, config.evaluate_every, config.iterations)
        if evaluates:
            held_out(env, policy, iteration, collector)
        run.save(iteration, publish if evaluates else None)

    run.publish(publish)
    env.close()
    held_out.summarise()


if __name__ == "__main__":
    run_program("grpo", main)
