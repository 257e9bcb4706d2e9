"""SAC with prior data, residuals on a frozen policy: ``python recipes/sac.py``; settings: ``conf/sac.yaml``."""

from vla_common.program import begin_program

begin_program(__name__, "vla_algos.run.program")  # before torch is imported

from types import SimpleNamespace
from typing import Any, Literal

import hydra
import torch
from omegaconf import DictConfig
from tensordict import TensorDictBase
from torchrl.objectives import SoftUpdate

from vla_algos import Demonstrations, EpisodeCollector, Replay, clone, demonstrated, make_sac_loss, paid_by_success
from vla_algos.collectors.crashes import check_crashes
from vla_algos.metrics import WeightedMean, collector_stats, env_metrics, outcomes_by_task, throughput
from vla_algos.run import CLONING, TRAINING, HeldOut, Run, TrainVideos, launch, run_program
from vla_algos.run.environments import make_env_spec, own_share, training_episodes
from vla_algos.run.policies import make_run_policy, policy_writer
from vla_algos.run.sharding import say_room
from vla_common.settings import Count, Positive, Rate, Whole, setting_types
from vla_envs import make_env
from vla_policies.steered import SteeredConfig, SteeredPolicy

SETTINGS = {  # by section: the keyword arguments of one callable
    **CLONING,
    **{name: TRAINING[name] for name in ("iterations", "evaluate_every", "episode_order", "train_videos")},
    "recipe": Literal["sac"],
    "collector": {"episodes": Count},
    "pipeline": setting_types(EpisodeCollector, only=["stages", "overlap_resets"]),
    "steering": {**setting_types(SteeredConfig, without=["noise"]), "by": Literal["residual", "action"]},
    "replay": setting_types(Replay, without=["folder", "capacity"]),
    "loss": setting_types(make_sac_loss, without=["policy", "gamma"]),
    "update": {"update_to_data": Positive, "warmup": Whole, "lr": Rate, "tau": Rate},
}


@hydra.main(version_base=None, config_path="conf", config_name="sac")
def main(config: DictConfig) -> None:
    launch(train, config, SETTINGS, single=True)


def train(config: SimpleNamespace, run: Run) -> None:
    # ---- parts: each section is the keyword arguments of one of them; what is cheap comes first, and is checked
    update, spec = config.update, make_env_spec(config.env)
    own_env = own_share(config.env, spec, config.pipeline)
    held_out, demonstrations = HeldOut(run, spec), Demonstrations(config, spec, always=True)
    if config.policy.get("checkpoint") and demonstrations.settings.statistics == "demonstrations":
        raise ValueError("demonstrations.statistics=demonstrations: policy.checkpoint learns nothing; leave it out")
    films = TrainVideos(run, spec, **config.train_videos)
    run.say(held_out.describe())
    if not (demonstrations.wanted or config.policy.get("checkpoint")):
        run.say("warning: nothing is cloned, and there is no policy.checkpoint: the frozen policy is random")
    base = make_run_policy(run, spec, own_env)
    demonstrations.check_policy(base)
    demonstrations.check_executed(base.chunk_size)
    held_out.check_policy(base)
    policy = SteeredPolicy(base, SteeredConfig(**config.steering)).eval()
    most = -(-spec.max_episode_steps // policy.chunk_size)  # decisions of an episode
    replay = Replay(run.folder / "replay", config.iterations * config.collector["episodes"] * most, **config.replay)
    prior = Replay(run.folder / "prior", **config.replay)
    run.say(say_room(replay.bytes_of(policy), run.folder))
    loss_module = make_sac_loss(policy, replay.gamma, **config.loss)
    soft_update = SoftUpdate(loss_module, tau=update["tau"])
    optimizer = torch.optim.Adam(loss_module.parameters(), lr=update["lr"])
    episodes = training_episodes(config, spec)
    env = make_env(**own_env, chunk_size=policy.chunk_size, episodes=episodes)
    collector = EpisodeCollector(env, policy, **config.pipeline, step_hook=films.hook)
    publish = policy_writer(config, policy, spec, held_out.spec)

    # ---- where it begins: at the last checkpoint, or with a base that is published, or a clone of the expert
    shown, heldout = demonstrations.record(env, base) if demonstrations.wanted else (None, None)
    parts: dict[str, Any] = {"policy": policy, "loss": loss_module, "optimizer": optimizer, "replay": replay}
    cloned = None if config.policy.get("checkpoint") else base  # of which nothing else has the weights
    start = run.restore(demonstrations.facts, **parts, prior=prior, collector=collector, episodes=episodes, base=cloned)
    optimizer.param_groups[0]["lr"] = update["lr"]  # of this run, whatever was saved
    if start is None:
        if shown is not None:
            if cloned is not None:
                clone(base.requires_grad_(True), shown, heldout, run.folder / "warm_start", **config.cloning)
                base.requires_grad_(False).eval()
            prior.extend([paid_by_success(each) for each in demonstrated(shown, policy)])
        held_out(env, policy, 0, collector)
        run.save(0, publish)

    for iteration in run.iterations(config.iterations):
        # ---- act: whole episodes; the frozen policy looks at each decision once, and the actor changes what it plans
        collector.extend(episodes.next() for _ in range(config.collector["episodes"]))
        with films.of(iteration, policy.chunk_size):
            visited: list[TensorDictBase] = list(collector.iterator())
        fresh, began = replay.extend([paid_by_success(each) for each in visited]), run.seconds

        # ---- learn: so many steps of soft actor-critic for each new decision, on as many old ones as demonstrated ones
        mean = WeightedMean()
        steps = round(update["update_to_data"] * fresh) if replay.decisions >= update["warmup"] else 0
        for _ in range(steps):
            parts_of_batch = [each.sample() for each in (replay, prior) if each.decisions]
            losses = loss_module(torch.cat(parts_of_batch).to(policy.device))
            optimizer.zero_grad()
            (losses["loss_actor"] + losses["loss_qvalue"] + losses["loss_alpha"]).backward()
            optimizer.step()
            soft_update.step()
            mean.add({f"train/{name}": value.detach() for name, value in losses.items()})
        learnt = {"time/train": run.seconds - began, "replay/decisions": float(replay.decisions), **mean.compute()}

        # ---- tell
        rows = torch.cat(visited)
        outcomes, speed = env_metrics(rows), throughput(rows, run.seconds)
        run.log(iteration, outcomes, learnt, collector_stats(collector), speed)
        run.say(check_crashes(run.state, iteration, outcomes))
        episodes.tell(*outcomes_by_task(rows))  # episode_order=learnable draws accordingly
        evaluates = run.is_due(iteration, config.evaluate_every, config.iterations)
        if evaluates:
            held_out(env, policy, iteration, collector)
        run.save(iteration, publish if evaluates else None)

    run.publish(publish)
    env.close()
    held_out.summarise()


if __name__ == "__main__":
    run_program("sac", main)
