"""DAgger, an expert takes over where the policy led: ``python recipes/dagger.py``; settings: ``conf/dagger.yaml``."""

from vla_common.program import begin_program

begin_program(__name__, "vla_algos.run.program")  # before torch is imported

import contextlib
from types import SimpleNamespace
from typing import Literal

import hydra
import torch
from omegaconf import DictConfig
from tensordict import TensorDictBase

from vla_algos import Demonstrations, EpisodeCollector, Interventions, clone, distributed
from vla_algos.collectors.crashes import check_crashes
from vla_algos.metrics import collector_stats, env_metrics, outcomes_by_task, throughput
from vla_algos.run import TRAINING, HeldOut, Run, TrainVideos, launch, run_program
from vla_algos.run.environments import make_env_spec, own_share, training_episodes
from vla_algos.run.policies import make_run_policy, policy_writer
from vla_algos.run.sharding import Sharding
from vla_common.keys import NEXT, TASK_ID
from vla_common.settings import Count, Rate, setting_types
from vla_envs import make_env
from vla_envs.experts import check_expert
from vla_policies.sharding import gathered

SETTINGS = {  # by section: the keyword arguments of one callable
    **{name: types for name, types in TRAINING.items() if name not in ("gpu", "offload")},
    "recipe": Literal["dagger"],
    "collector": {"episodes": Count},
    "pipeline": setting_types(EpisodeCollector, only=["stages", "overlap_resets"]),
    "interventions": setting_types(Interventions, only=["budget"]),
    "update": {"steps": Count, "lr": Rate},
}


@hydra.main(version_base=None, config_path="conf", config_name="dagger")
def main(config: DictConfig) -> None:
    launch(train, config, SETTINGS)


def train(config: SimpleNamespace, run: Run) -> None:
    # ---- parts: each section is the keyword arguments of one of them; what is cheap comes first, and is checked
    wanted = distributed.per_rank(config.collector["episodes"], "collector.episodes")
    spec = make_env_spec(config.env)
    with contextlib.suppress(ImportError):  # what starts it says what to install
        check_expert(spec.simulator_class(), spec)
    own_env = own_share(config.env, spec, config.pipeline)  # of several processes each has some of the environments
    held_out, demonstrations = HeldOut(run, spec), Demonstrations(config, spec, always=True)
    films = TrainVideos(run, spec, **config.train_videos)
    run.say(held_out.describe())
    policy = make_run_policy(run, spec, own_env, Sharding(**config.sharding))
    held_out.check_policy(policy)
    demonstrations.check_policy(policy)
    episodes = training_episodes(config, spec)
    env = make_env(**own_env, chunk_size=policy.chunk_size, episodes=episodes)
    shown, heldout = demonstrations.record(env, policy) if demonstrations.wanted else (None, None)
    interventions = Interventions(policy, shown, **config.interventions, **demonstrations.settings.recording)
    collector = EpisodeCollector(env, policy, **config.pipeline, step_hook=films.hook)
    publish = policy_writer(config, policy, spec, held_out.spec)

    # ---- where the policy begins: at the last checkpoint, a published one, or a clone of the expert
    start = run.restore(
        demonstrations.facts, policy=policy, interventions=interventions, collector=collector, episodes=episodes
    )
    if start is None:
        if shown is not None and not config.policy.get("checkpoint"):
            clone(policy, shown, heldout, run.folder / "warm_start", **config.cloning)
        held_out(env, policy, 0, collector)
        run.save(0, publish)

    for iteration in run.iterations(config.iterations):
        # ---- act: whole episodes of the policy that samples
        policy.eval()
        tried = [episodes.next() for _ in range(wanted)]
        collector.extend(tried)
        with gathered(policy), films.of(iteration, policy.chunk_size):
            visited: list[TensorDictBase] = list(collector.iterator())

        # ---- let the expert take over on the way, and clone all that it has ever done
        began = run.seconds
        interventions.extend(env, tried, visited)
        folder = run.folder / "cloning" / f"iteration_{iteration:04d}"
        if shown is None and not interventions.actions:
            run.say(f"iteration {iteration}: the expert has solved nothing yet, so there is nothing to clone")
        else:
            clone(policy, interventions.samples(), heldout, folder, **config.cloning | config.update)
        update = {"time/train": run.seconds - began, **interventions.metrics()}

        # ---- tell
        all_rows = distributed.all_gather(torch.cat([each.select(NEXT, TASK_ID) for each in visited]))
        del visited  # images: the next rollout needs the room
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
    run_program("dagger", main)
