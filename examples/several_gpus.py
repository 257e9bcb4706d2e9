"""PPO of one policy by several processes: ``torchrun --nproc-per-node 2 examples/several_gpus.py``.

Each process has its share of the environments and its part of the weights; ``recipes/ppo.py`` does the same with
resuming, evaluation and logs. The policy is small, so that it runs on a CPU; a large one is made by
``make_policy(spec, family="openvla_oft", checkpoint=FOLDER, shard=divide)`` and reads its part of the weights alone.
"""

import argparse

import torch

from vla_algos import ChunkClipPPOLoss, Learner, StepCollector, distributed, gae
from vla_common.keys import ADVANTAGE, NEXT, VALUE_TARGET
from vla_envs import EpisodeSampler, make_env, make_spec
from vla_policies import make_policy
from vla_policies.sharding import gathered, shard


def divide(policy):
    """One copy of the weights, a part in each process; ``compute=torch.bfloat16`` would compute in it."""
    shard(policy, distributed.device_mesh(distributed.world_size()))


def main():
    """Train with those that torchrun has started."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--iterations", type=int, default=3)
    parser.add_argument("--num-envs", type=int, default=4, help="of all processes together")
    parser.add_argument("--decisions", type=int, default=8, help="per environment and iteration")
    parser.add_argument("--save", default="runs/several_gpus/policy", help="folder for the policy")
    args = parser.parse_args()
    with distributed.process_group():  # joins what torchrun has started; only the first process prints
        train(args)


def train(args):
    """Collect, estimate, learn, and save the policy."""
    torch.manual_seed(0)  # new weights are the same in all processes
    spec = make_spec("metaworld/button-press-topdown-v3", reward_type="progress", max_episode_steps=20, image_size=32)
    policy = make_policy(spec, family="small", shard=divide)
    torch.manual_seed(distributed.rank())  # they sample different actions
    episodes = EpisodeSampler(spec, seed=0, rank=distributed.rank(), world_size=distributed.world_size())
    num_envs = distributed.per_rank(args.num_envs, "--num-envs")
    env = make_env(spec, num_envs=num_envs, chunk_size=policy.chunk_size, episodes=episodes)
    learner = Learner(ChunkClipPPOLoss(policy), lr=1e-4, minibatch_size=16)
    collector = StepCollector(env, policy, decisions=args.decisions)
    for iteration in range(args.iterations):
        policy.eval()
        with gathered(policy):  # all weights, for as many calls of the policy as this process needs
            batch = collector.rollout()
        everything = distributed.all_gather(batch.select(NEXT, "state_value"))  # advantages are normalised over all
        gae(everything)
        batch.update(distributed.local_rows(everything, len(batch)).select(ADVANTAGE, VALUE_TARGET))
        policy.train()
        metrics = learner.update(batch)
        print(f"iteration {iteration}: loss {metrics['train/loss']:.4f}, moved {metrics.get('train/moved', 0):.0%}")
    policy.save_pretrained(args.save)  # by all of them; the first one writes
    env.close()


if __name__ == "__main__":
    main()
