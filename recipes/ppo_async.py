"""PPO whose processes only act or only learn, side by side: ``python recipes/ppo_async.py``."""

from vla_common.program import begin_program

begin_program(__name__, "vla_algos.run.program")  # before torch is imported

from types import SimpleNamespace
from typing import Any, Literal

import hydra
from omegaconf import DictConfig
from tensordict import TensorDictBase

from vla_algos import ChunkClipPPOLoss, Demonstrations, Learner, StepCollector, check_levels, clone, distributed, gae
from vla_algos.advantages import valid_decisions
from vla_algos.collectors.crashes import check_crashes
from vla_algos.disaggregated.placement import DEFAULTS
from vla_algos.disaggregated.roles import Roles, members
from vla_algos.disaggregated.schedule import Schedule
from vla_algos.metrics import collector_stats, env_metrics, outcomes_by_task, rollout_metrics, throughput
from vla_algos.minibatches import UPDATE, check_minibatches
from vla_algos.optim import OPTIM, check_schedule
from vla_algos.run import TRAINING, HeldOut, Run, launch, run_program
from vla_algos.run.environments import make_env_spec, training_episodes
from vla_algos.run.policies import make_run_policy, policy_writer
from vla_common.keys import ADVANTAGE, NEXT, STATE_VALUE, TASK_ID, VALUE_TARGET
from vla_common.settings import Count, Whole, setting_types
from vla_envs import make_env

SETTINGS = {  # by section: the keyword arguments of one callable
    **{name: types for name, types in TRAINING.items() if name != "train_videos"},
    "recipe": Literal["ppo_async", "ppo"],  # of an experiment
    "collector": {"decisions": Count},
    "pipeline": setting_types(StepCollector, only=["stages"]),
    "gae": setting_types(gae, without=["batch"]),
    "loss": setting_types(ChunkClipPPOLoss, without=["policy", "decoupled"]),
    "optim": OPTIM,
    "update": UPDATE,
    "placement": dict.fromkeys(DEFAULTS, Any),  # Placement.read says what they may be
    "sync": {"lag": Whole},
}


@hydra.main(version_base=None, config_path="conf", config_name="ppo_async")
def main(config: DictConfig) -> None:
    launch(train, config, SETTINGS, members=members)


def train(config: SimpleNamespace, run: Run) -> None:
    # ---- parts: of the processes that learn, of those that collect, and of all
    check_schedule(**config.optim, updates=config.iterations)
    check_minibatches(**config.update)
    spec, roles = make_env_spec(config.env), Roles.of(config.placement)
    sharding, own_env = roles.shard(config.sharding), roles.share(config.env, spec, config.pipeline)
    held_out, demonstrations = HeldOut(run, spec, len(roles.rollouts)), Demonstrations(config, spec)
    run.say(held_out.describe())
    offload = config.offload["optimizer"] and roles.learns
    with roles.on_own_ranks():
        policy = make_run_policy(run, spec, own_env, sharding, offload)
    demonstrations.check_policy(policy)
    run.say(roles.describe())
    loss_module = ChunkClipPPOLoss(policy, **config.loss, decoupled=config.sync["lag"] > 0)
    check_levels(loss_module, policy, config.gae["reward_level"])

    def make_learner() -> Learner:
        more = {"updates": config.iterations, "offload": offload}
        return Learner(loss_module, **config.optim, **config.update, **more)

    def make_collector() -> StepCollector:
        held_out.check_policy(policy)
        episodes = training_episodes(config, spec)
        env = make_env(**own_env, chunk_size=policy.chunk_size, episodes=episodes)
        reads = {"values": loss_module.has_critic, "bootstrap": config.gae["bootstrap"]}
        return StepCollector(env, policy, **config.collector, **config.pipeline, **reads)

    learner, collector = roles.on(roles.actors, make_learner), roles.on(roles.rollouts, make_collector)
    schedule = Schedule(policy, config.seed, config.sync["lag"], roles)
    publish = policy_writer(config, policy, spec, held_out.spec) if roles.learns else lambda folder: None

    def measure(iteration: int) -> None:
        with schedule.acting():
            results = roles.on(roles.rollouts, lambda: held_out.measure(collector.env, policy, iteration, collector))
        held_out.note(distributed.broadcast_object(results, roles.rollouts[0]), policy, iteration)

    def learn(batch: TensorDictBase | None) -> tuple[TensorDictBase, dict[str, float]]:
        began, own = run.seconds, None if batch is None else batch.select(NEXT, STATE_VALUE, TASK_ID, strict=False)
        all_rows = distributed.all_gather(own)  # of all processes that learn
        gae(all_rows, **config.gae)
        rows = distributed.local_rows(all_rows, 0 if batch is None else len(batch)).select(ADVANTAGE, VALUE_TARGET)
        if batch is not None:
            batch.update(rows)
        policy.train()
        update = learner.update(batch) if valid_decisions(all_rows).any() else {}  # else all crashed as they began
        return all_rows, update | {"time/train": run.seconds - began}

    # ---- where the policy begins: at the last checkpoint, a published one, or a clone of the expert
    start = run.restore(demonstrations.facts, policy=policy, learner=learner, collector=collector, schedule=schedule)
    if start is None:
        if demonstrations.wanted:
            env = roles.on(roles.rollouts, lambda: collector.env)
            samples = demonstrations.record(env, policy, by=roles.rollouts[0])
            roles.on(roles.actors, lambda: clone(policy, *samples, run.folder / "warm_start", **config.cloning))
        schedule.begin()
        measure(0)
        run.save(0, publish)

    for iteration in run.iterations(config.iterations):
        # ---- collect by the weights of `sync.lag` updates before, and learn
        all_rows, update = schedule.turn(iteration, config.iterations, lambda: collector.rollout(), learn)

        # ---- tell
        outcomes, speed = env_metrics(all_rows), throughput(all_rows, run.seconds)
        update |= {**rollout_metrics(all_rows), **schedule.metrics()}
        run.log(iteration, outcomes, update, collector_stats(collector), speed)
        run.say(check_crashes(run.state, iteration, outcomes))
        if collector is not None:
            collector.base_env.episodes.tell(*outcomes_by_task(all_rows))
        evaluates = run.is_due(iteration, config.evaluate_every, config.iterations)
        if evaluates:
            measure(iteration)
        run.save(iteration, publish if evaluates else None)

    if roles.learns:
        run.publish(publish)
    roles.on(roles.rollouts, lambda: collector.env.close())
    held_out.summarise()


if __name__ == "__main__":
    run_program("ppo_async", main)
