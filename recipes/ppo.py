"""PPO fine-tunes a Vision-Language-Action policy: ``python recipes/ppo.py``; settings are in ``conf/ppo.yaml``."""

from vla_common.program import begin_program

begin_program(__name__, "vla_algos.run.program")  # before torch is imported

from types import SimpleNamespace
from typing import Any, Literal

import hydra
from omegaconf import DictConfig

from vla_algos import ChunkClipPPOLoss, Demonstrations, SelfImitation, StepCollector, clone, distributed, gae
from vla_algos.advantages import check_levels
from vla_algos.collectors.crashes import check_crashes
from vla_algos.metrics import collector_stats, env_metrics, outcomes_by_task, rollout_metrics, throughput
from vla_algos.minibatches import UPDATE, Minibatches, check_loss, check_minibatches
from vla_algos.optim import OPTIM, check_schedule, make_optimizer
from vla_algos.reference import FrozenPolicy
from vla_algos.run import TRAINING, HeldOut, Run, TrainVideos, launch, run_program
from vla_algos.run.environments import make_env_spec, own_share, training_episodes
from vla_algos.run.policies import make_run_policy, policy_writer
from vla_algos.run.sharding import Sharding
from vla_common.keys import ADVANTAGE, NEXT, STATE_VALUE, TASK_ID, VALUE_TARGET
from vla_common.settings import Count, setting_types
from vla_envs import make_env
from vla_policies.sharding import gathered

SETTINGS = {  # by section: the keyword arguments of one callable
    **TRAINING,
    "recipe": Literal["ppo"],
    "collector": {"decisions": Count},
    "pipeline": setting_types(StepCollector, only=["stages"]),
    "gae": setting_types(gae, without=["batch"]),
    "loss": setting_types(ChunkClipPPOLoss, without=["policy", "decoupled"]),
    "optim": OPTIM,
    "update": UPDATE,
    "self_imitation": setting_types(SelfImitation, without=["policy"]),
}


@hydra.main(version_base=None, config_path="conf", config_name="ppo")
def main(config: DictConfig) -> None:
    launch(train, config, SETTINGS)


def train(config: SimpleNamespace, run: Run) -> None:
    # ---- parts: each section is the keyword arguments of one of them; what is cheap comes first, and is checked
    check_schedule(**config.optim, updates=config.iterations)
    check_minibatches(**config.update)
    spec = make_env_spec(config.env)
    own_env = own_share(config.env, spec, config.pipeline)  # of several processes each has some of the environments
    held_out, demonstrations = HeldOut(run, spec), Demonstrations(config, spec)
    films = TrainVideos(run, spec, **config.train_videos)
    run.say(held_out.describe())
    policy = make_run_policy(run, spec, own_env, Sharding(**config.sharding), config.offload["optimizer"])
    held_out.check_policy(policy)
    demonstrations.check_policy(policy)
    loss_module = ChunkClipPPOLoss(policy, **config.loss)
    check_loss(loss_module, **config.update)
    check_levels(loss_module, policy, config.gae["reward_level"])
    optimizer, schedule = make_optimizer(
        loss_module, **config.optim, updates=config.iterations, offload=config.offload["optimizer"]
    )
    frozen = FrozenPolicy(policy) if loss_module.reference_kl_coeff else None
    solved = SelfImitation(policy, **config.self_imitation)
    episodes = training_episodes(config, spec)
    env = make_env(**own_env, chunk_size=policy.chunk_size, episodes=episodes)
    reads = {"values": loss_module.has_critic, "bootstrap": config.gae["bootstrap"]}
    collector = StepCollector(env, policy, **config.collector, **config.pipeline, **reads, step_hook=films.hook)
    publish = policy_writer(config, policy, spec, held_out.spec)

    # ---- where the policy begins: at the last checkpoint, a published one, or a clone of the expert
    state: dict[str, Any] = {"policy": policy, "optimizer": optimizer, "schedule": schedule, "collector": collector}
    start = run.restore(demonstrations.facts, **state, frozen=frozen, solved=solved)
    if start is None:
        if demonstrations.wanted:
            clone(policy, *demonstrations.record(env, policy), run.folder / "warm_start", **config.cloning)
        held_out(env, policy, 0, collector)
        run.save(0, publish)

    for iteration in run.iterations(config.iterations):
        # ---- act: [environments, decisions]
        policy.eval()
        with gathered(policy), films.of(iteration, policy.chunk_size):
            batch = collector.rollout()
        solved.extend(batch)

        # ---- advantages, over the batches of all processes
        began = run.seconds
        all_rows = distributed.all_gather(batch.select(NEXT, STATE_VALUE, TASK_ID, strict=False))
        gae(all_rows, **config.gae)
        batch.update(distributed.local_rows(all_rows, len(batch)).select(ADVANTAGE, VALUE_TARGET))

        # ---- learn: epochs of minibatches
        policy.train()
        minibatches = Minibatches(loss_module, batch, **config.update, steps=run.state.get("steps", 0), frozen=frozen)
        for minibatch in minibatches:
            optimizer.zero_grad()
            for part in minibatch:  # micro-batches: their gradients add up
                losses = minibatch.losses(part)  # loss_module(part): shares of that of the whole
                minibatch.total(losses).backward()
            if minibatch.too_far:  # from the policy that acted: target_kl
                break
            solved.add_gradient()  # of cloning what has solved an episode
            minibatch.step(optimizer)
        run.state["steps"] = minibatches.steps
        update = minibatches.metrics(optimizer)
        if update:  # otherwise every episode crashed as it began
            schedule.step()
        update |= {"time/train": run.seconds - began, **solved.metrics()}
        del batch  # its images: the next rollout needs the room

        # ---- tell
        outcomes, speed = env_metrics(all_rows), throughput(all_rows, run.seconds)
        run.log(iteration, outcomes, rollout_metrics(all_rows), update, collector_stats(collector), speed)
        run.say(check_crashes(run.state, iteration, outcomes))
        episodes.tell(*outcomes_by_task(all_rows))  # episode_order=learnable draws accordingly
        evaluates = run.is_due(iteration, config.evaluate_every, config.iterations)
        if evaluates:
            held_out(env, policy, iteration, collector)
        run.save(iteration, publish if evaluates else None)

    run.publish(publish)
    env.close()
    held_out.summarise()


if __name__ == "__main__":
    run_program("ppo", main)
