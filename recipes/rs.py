"""Rejection sampling, which clones what was solved: ``python recipes/rs.py``; settings are in ``conf/rs.yaml``."""

from vla_common.program import begin_program

begin_program(__name__, "vla_algos.run.program")  # before torch is imported

from types import SimpleNamespace
from typing import Any, Literal

import hydra
import torch
from omegaconf import DictConfig
from tensordict import TensorDictBase

from vla_algos import Demonstrations, EpisodeCollector, SelfImitation, clone, distributed
from vla_algos.collectors.crashes import check_crashes
from vla_algos.metrics import collector_stats, env_metrics, outcomes_by_task, throughput
from vla_algos.optim import OPTIM, check_schedule, make_optimizer, step
from vla_algos.run import TRAINING, HeldOut, Run, TrainVideos, launch, run_program
from vla_algos.run.environments import make_env_spec, own_share, training_episodes
from vla_algos.run.policies import make_run_policy, policy_writer
from vla_algos.run.sharding import Sharding
from vla_common.keys import NEXT, TASK_ID
from vla_common.settings import Count, setting_types
from vla_envs import make_env
from vla_policies.sharding import gathered

SETTINGS = {  # by section: the keyword arguments of one callable
    **{name: types for name, types in TRAINING.items() if name != "gpu"},
    "recipe": Literal["rs"],
    "collector": {"episodes": Count},
    "pipeline": setting_types(EpisodeCollector, only=["stages", "overlap_resets"]),
    "self_imitation": setting_types(SelfImitation, without=["policy", "coeff"]),
    "update": {"steps": Count},
    "optim": {name: types for name, types in OPTIM.items() if name != "value_lr"},
}


@hydra.main(version_base=None, config_path="conf", config_name="rs")
def main(config: DictConfig) -> None:
    launch(train, config, SETTINGS)


def train(config: SimpleNamespace, run: Run) -> None:
    # ---- parts: each section is the keyword arguments of one of them; what is cheap comes first, and is checked
    check_schedule(**config.optim, updates=config.iterations)
    wanted = distributed.per_rank(config.collector["episodes"], "collector.episodes")
    spec = make_env_spec(config.env)
    own_env = own_share(config.env, spec, config.pipeline)  # of several processes each has some of the environments
    held_out, demonstrations = HeldOut(run, spec), Demonstrations(config, spec)
    films = TrainVideos(run, spec, **config.train_videos)
    run.say(held_out.describe())
    policy = make_run_policy(run, spec, own_env, Sharding(**config.sharding), config.offload["optimizer"])
    held_out.check_policy(policy)
    demonstrations.check_policy(policy)
    optimizer, schedule = make_optimizer(
        policy, **config.optim, updates=config.iterations, offload=config.offload["optimizer"]
    )
    solved = SelfImitation(policy, coeff=1.0, **config.self_imitation)
    episodes = training_episodes(config, spec)
    env = make_env(**own_env, chunk_size=policy.chunk_size, episodes=episodes)
    collector = EpisodeCollector(env, policy, **config.pipeline, step_hook=films.hook)
    publish = policy_writer(config, policy, spec, held_out.spec)

    # ---- where the policy begins: at the last checkpoint, a published one, or a clone of the expert
    parts: dict[str, Any] = {"policy": policy, "optimizer": optimizer, "schedule": schedule, "solved": solved}
    start = run.restore(demonstrations.facts, **parts, collector=collector, episodes=episodes)
    if start is None:
        if demonstrations.wanted:
            clone(policy, *demonstrations.record(env, policy), run.folder / "warm_start", **config.cloning)
        held_out(env, policy, 0, collector)
        run.save(0, publish)

    for iteration in run.iterations(config.iterations):
        # ---- act: whole episodes of the policy that samples
        policy.eval()
        collector.extend(episodes.next() for _ in range(wanted))
        with gathered(policy), films.of(iteration, policy.chunk_size):
            batch: TensorDictBase = torch.cat(list(collector.iterator()))

        # ---- reject what was not solved, and clone what was, with what was kept before
        began = run.seconds
        solved.extend(batch.unsqueeze(0))
        policy.train()
        for _ in range(config.update["steps"]):
            optimizer.zero_grad()
            solved.add_gradient()
            if step(optimizer) is None:
                raise FloatingPointError("a gradient is not finite: the policy has diverged; lower optim.lr")
        schedule.step()
        update = {"time/train": run.seconds - began, **solved.metrics()}
        if "self_imitation/loss" not in update:
            kept = update["self_imitation/decisions"]
            run.say(f"iteration {iteration}: {kept:.0f} solved decisions; learning takes 4 self_imitation.batch_size")

        # ---- tell
        all_rows = distributed.all_gather(batch.select(NEXT, TASK_ID))
        del batch  # images: the next rollout needs the room
        outcomes, speed = env_metrics(all_rows), throughput(all_rows, run.seconds)
        run.log(iteration, outcomes, update, collector_stats(collector), speed)
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
    run_program("rs", main)
