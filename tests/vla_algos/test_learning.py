"""Collector, advantages, loss and evaluation together: PPO learns a toy task from its picture."""

import pytest
import torch
from toy import ToyEnv, ToyPolicy

from vla_algos.ablations import blank_images
from vla_algos.advantages import gae
from vla_algos.collectors import StepCollector
from vla_algos.evaluation import evaluate
from vla_algos.losses import ChunkClipPPOLoss
from vla_envs.simulator import Episode

GRID = [Episode(task_id=i % 2, trial_id=1000 + i) for i in range(40)]


@pytest.mark.parametrize("level", ["token", "action", "chunk"])
def test_ppo_learns(level):
    torch.manual_seed(0)
    policy = ToyPolicy()
    collector = StepCollector(ToyEnv(16, crashes={7: 1}), policy, decisions=8, total_frames=20 * 16 * 8)
    loss = ChunkClipPPOLoss(policy, log_prob_level=level, entropy_coeff=0.001)
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    before = evaluate(ToyEnv(8), policy, GRID)
    for batch in collector:
        data = gae(batch).reshape(-1)
        for _ in range(4):
            for minibatch in data[torch.randperm(len(data))].split(64):
                losses = loss(minibatch)
                optimizer.zero_grad()
                sum(value for key, value in losses.items() if key.startswith("loss_")).backward()
                optimizer.step()
    after = evaluate(ToyEnv(8), policy, GRID)
    assert before.success_once < 0.6
    assert after.success_once > 0.95
    assert evaluate(ToyEnv(8), policy, GRID, observe=blank_images).success_once < 0.6
