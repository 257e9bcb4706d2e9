"""Logged numbers: what they average over, and intervals."""

import math

import pytest
import torch
from tensordict import TensorDict
from toy import ToyEnv, ToyPolicy

from vla_algos.advantages import gae
from vla_algos.collectors import StepCollector
from vla_algos.losses import ChunkClipPPOLoss
from vla_algos.metrics import (
    WeightedMean,
    add_update,
    env_metrics,
    explained_variance,
    rollout_metrics,
    wilson_interval,
)
from vla_keys import ADVANTAGE, DONE, LOST, NEXT, STEP_MASK, STEP_REWARDS, SUCCESS, VALUE_TARGET


@pytest.fixture
def batch() -> TensorDict:
    torch.manual_seed(0)
    return gae(StepCollector(ToyEnv(4, crashes={6: 1}), ToyPolicy(), 20).rollout())


def test_rollout_metrics_are_over_what_was_executed(batch):
    before = rollout_metrics(batch)
    mask = batch[NEXT, STEP_MASK]
    assert not mask.any(-1).all()
    assert before["rollout/rewards"] == pytest.approx((batch[NEXT, STEP_REWARDS].sum() / mask.sum()).item())
    assert abs(before["rollout/advantages_mean"]) < 1e-5
    for key in (ADVANTAGE, VALUE_TARGET):
        batch[key][~mask.any(-1)] = 1e6
    assert rollout_metrics(batch) == before


def test_env_metrics_are_over_finished_episodes(batch):
    metrics = env_metrics(batch)
    lost, done = batch[NEXT, LOST], batch[NEXT, DONE]
    finished = done & ~lost
    assert metrics["env/lost_episodes"] == lost.sum() == 1
    assert metrics["env/num_episodes"] == finished.sum()
    success = batch[NEXT, SUCCESS][finished].float().mean().item()
    assert 0 < success < 1 and metrics["env/success_once"] == pytest.approx(success)
    assert metrics["env/return"] == pytest.approx(success) and 5 <= metrics["env/episode_len"] <= 7
    assert metrics["env/return"] / 7 <= metrics["env/reward"] <= metrics["env/return"] / 5


def test_env_metrics_without_finished_episodes(batch):
    metrics = env_metrics(batch[:, :1][:2])
    assert metrics == {"env/num_episodes": 0, "env/lost_episodes": 0}


def test_explained_variance():
    target = torch.tensor([1.0, 2.0, 3.0])
    assert explained_variance(target - 5, target) == 1  # a constant error explains all the variance
    assert explained_variance(torch.zeros(3), target) == 0
    assert explained_variance(-target, target) == pytest.approx(-3)
    assert math.isnan(explained_variance(target, torch.ones(3)))


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [(0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (81, 263, 0.2553, 0.3662), (0, 0, 0.0, 1.0)],
)  # 81 of 263 is the worked example of Newcombe 1998
def test_wilson_interval(successes, trials, low, high):
    assert wilson_interval(successes, trials) == pytest.approx((low, high), abs=1e-4)


def test_update_metrics_weigh_minibatches_by_their_valid_elements(batch):
    torch.manual_seed(1)
    loss = ChunkClipPPOLoss(ToyPolicy(), entropy_coeff=0.01)
    flat = batch.reshape(-1)
    mean = WeightedMean()
    for part in (flat[:10], flat[10:]):
        add_update(mean, loss(part))
    whole = WeightedMean()
    add_update(whole, loss(flat))
    halves, whole = mean.compute(), whole.compute()
    assert {"train/loss", "train/entropy_loss", "train/actor/clip_fraction"} < whole.keys()
    assert {"train/critic/value_loss", "train/critic/value_clip_ratio"} < whole.keys()
    # The total mixes two kinds of means: it is exact only where each decision has as many actions.
    for name in whole.keys() - {"train/loss"}:
        assert halves[name] == pytest.approx(whole[name], abs=1e-5), name


def test_weighted_mean_of_nothing_is_nan():
    mean = WeightedMean()
    mean.add({"x": torch.tensor(3.0)}, torch.tensor(0))
    assert math.isnan(mean.compute()["x"])
