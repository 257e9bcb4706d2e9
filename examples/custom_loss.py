"""A loss of one's own, everything else the library's: ``python examples/custom_loss.py``.

Simple Policy Optimization (Xie et al. 2024, arXiv 2401.16025) does not clip the ratio of probabilities: a parabola with
its top at the edge of the trust region brings a ratio back that has left it, where PPO's gradient is 0. It is a plain
TorchRL ``LossModule``: the learner adds up its terms called ``loss_...`` and logs its other entries as ``train/...``.
For a recipe with it type ``vla-recipe copy ppo`` and change the line with ``ChunkClipPPOLoss``.
Seed 0, 30 iterations, 64 held-out episodes: 45.3 % after cloning, 62.5 % (50.3 - 73.3) after. PPO gets further here, to
95.3 % (own_loop.py): this is how to change the loss, not a better loss.
"""

import argparse
import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: its idle threads must leave the cores to simulators

import torch
from tensordict import TensorDict, TensorDictBase
from torch.nn import functional as F
from torchrl.objectives import LossModule
from tqdm import trange

from vla_algos import BehaviourCloning, Learner, StepCollector, evaluate, gae, record_demonstrations
from vla_common.settings import Positive
from vla_envs import Episode, evaluation_episodes, make_env
from vla_policies import SmallVLA, SmallVLAConfig, VLAPolicy

TASK = "button-press-topdown-v3"
ENV = {  # as in own_loop.py: a stand-in that trains on a CPU, not the benchmark
    "id": f"metaworld/{TASK}",
    "image_size": 64,
    "render_quality": "minimal",
    "reward_type": "progress",
    "camera": {"lookat": [0.0, 0.68, 0.12], "distance": 0.95, "azimuth": 270, "elevation": -50},
    "reset_ranges": {TASK: [[-0.25, 0.7, 0.115], [0.25, 0.9, 0.115]]},
}


class SimplePolicyLoss(LossModule):
    """``-(A r - |A| (r - 1)^2 / (2 epsilon))`` with one ratio ``r`` per action token, and a value loss.

    Args:
        policy: trained in place; has ``evaluate_actions``.
        epsilon: distance of the ratio from 1 at which its gain is largest.
        critic_coeff: weight of the value loss.
    """

    in_keys = ("action_log_prob", "advantage", "value_target", ("next", "step_mask"))
    out_keys = ("loss_objective", "loss_critic", "ratio_distance")

    def __init__(self, policy: VLAPolicy, epsilon: Positive = 0.2, critic_coeff: float = 0.5):
        super().__init__()
        self.policy, self.epsilon, self.critic_coeff = policy, epsilon, critic_coeff

    def forward(self, tensordict: TensorDictBase) -> TensorDict:
        """Loss terms of a minibatch ``[B]``, scalars."""
        log_prob, _, value = self.policy.evaluate_actions(tensordict)  # [B, C, A], entropy, [B, 1]
        # An episode may end in the middle of a chunk: what was never executed must not reach the loss.
        executed = tensordict["next", "step_mask"].unsqueeze(-1).expand_as(log_prob)
        ratio = (log_prob - tensordict["action_log_prob"]).exp()
        advantage = tensordict["advantage"].unsqueeze(-1)  # [B, 1, 1]
        gain = advantage * ratio - advantage.abs() * (ratio - 1) ** 2 / (2 * self.epsilon)
        return TensorDict(
            {
                "loss_objective": -gain[executed].mean(),
                "loss_critic": self.critic_coeff * F.huber_loss(value, tensordict["value_target"]),
                "ratio_distance": (ratio - 1).abs()[executed].mean().detach(),  # no term: logged
            }
        )


def main(arguments=None):
    """Clone, measure, learn with the loss, and measure again; returns the metrics of the last update."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epsilon", type=float, default=0.2)
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument("--num-envs", type=int, default=16)
    parser.add_argument("--decisions", type=int, default=64, help="per environment and iteration")
    parser.add_argument("--max-episode-steps", type=int, default=100)
    parser.add_argument("--demonstrations", type=int, default=12)
    parser.add_argument("--cloning-steps", type=int, default=400)
    parser.add_argument("--held-out", type=int, default=64, help="episodes to measure success on")
    args = parser.parse_args(arguments)

    torch.manual_seed(args.seed)
    env = make_env(**ENV, num_envs=args.num_envs, seed=args.seed, max_episode_steps=args.max_episode_steps)
    spec = env.simulator_spec
    policy = SmallVLA(SmallVLAConfig(spec.action_low, spec.action_high, spec.state_dim, num_bins=41))
    episodes = [Episode(task_id=0, trial_id=n, seed=1_000_000 + args.seed) for n in range(args.demonstrations)]
    cloning = BehaviourCloning(policy, record_demonstrations(env, policy, episodes), steps=args.cloning_steps)
    for _ in trange(args.cloning_steps, desc="behaviour cloning"):
        cloning.step()
    held_out = evaluation_episodes(spec, args.held_out, seed=9_000_000)
    print("\nbefore\n" + evaluate(env, policy, held_out).table())

    collector = StepCollector(env, policy, args.decisions)
    learner = Learner(SimplePolicyLoss(policy, args.epsilon), lr=3e-4, value_lr=1e-3, epochs=4, critic_warmup_steps=32)
    for _ in (bar := trange(args.iterations, desc="SPO")):
        batch = collector.rollout()
        gae(batch, gamma=0.9, lmbda=0.9)
        metrics = learner.update(batch)
        ended = batch["next", "done"]
        bar.set_postfix_str(
            f"success {batch['next', 'success'][ended].float().mean():.0%}, "
            f"ratio moved by {metrics['train/ratio_distance']:.3f}"
        )
    after = evaluate(env, policy, held_out)
    print("\nafter\n" + after.table())
    env.close()
    return metrics


if __name__ == "__main__":
    main()
