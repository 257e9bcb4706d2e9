"""A reward of one's own: a TorchRL transform that charges every action for its size, then PPO on what is left.

python examples/custom_reward.py --cost 0.02
"""

import argparse

import torch
from torchrl.envs import TransformedEnv
from torchrl.envs.transforms import Transform

from vla_algos import ChunkClipPPOLoss, Learner, StepCollector, gae
from vla_envs import make_env
from vla_policies import SmallVLA, SmallVLAConfig


class ActionCost(Transform):
    """Subtracts ``cost`` times the mean square of each executed action from its reward."""

    def __init__(self, cost: float):
        super().__init__(in_keys=["step_rewards", "reward"], out_keys=["step_rewards", "reward"])
        self.cost = cost

    def _step(self, tensordict, next_tensordict):
        price = self.cost * tensordict["action"].square().mean(-1)  # [N, C]
        rewards = (next_tensordict["step_rewards"] - price) * next_tensordict["step_mask"]
        return next_tensordict.update({"step_rewards": rewards, "reward": rewards.sum(-1, keepdim=True)})


def main(arguments=None):
    """Learn for some iterations; returns the mean reward of an action in each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cost", type=float, default=0.02)
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--num-envs", type=int, default=8)
    parser.add_argument("--decisions", type=int, default=16)
    args = parser.parse_args(arguments)
    torch.manual_seed(0)
    simulators = make_env("metaworld/reach-v3", args.num_envs, seed=0, image_size=64, render_quality="fast")
    env = TransformedEnv(simulators, ActionCost(args.cost))
    spec = simulators.simulator_spec
    policy = SmallVLA(SmallVLAConfig(spec.action_low, spec.action_high, spec.state_dim, num_bins=41))
    collector = StepCollector(env, policy, args.decisions)
    learner = Learner(ChunkClipPPOLoss(policy), lr=3e-4, value_lr=1e-3)
    rewards = []
    for _ in range(args.iterations):
        batch = collector.rollout()
        learner.update(gae(batch))
        rewards.append(batch["next", "step_rewards"][batch["next", "step_mask"]].mean().item())
        print(f"mean reward of an action {rewards[-1]:.4f}")
    collector.shutdown()
    return rewards


if __name__ == "__main__":
    main()
