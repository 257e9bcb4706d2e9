"""``recompute_log_prob``: batches of other sizes may round otherwise, and the ratio is exactly 1 all the same."""

from types import SimpleNamespace

import pytest
import torch
from decisions import collected, decisions
from openvla_checkpoint import make_checkpoint
from tiny_policies import adapted, oft
from torch import nn
from toy import ToyActorCritic

from vla_algos.advantages import gae
from vla_algos.learner import Learner
from vla_algos.losses import ChunkClipPPOLoss
from vla_algos.minibatches import check_loss

RATIOS = ("kl_k3", "log_ratio", "log_ratio_at_start", "clip_fraction")
STILL = {"lr": 1e-30, "value_lr": 1e-30}  # no weight changes


class RoundsBySize(ToyActorCritic):
    """Its log-probabilities differ with the size of the batch, as those of a large network in bfloat16 do."""

    def evaluate_actions(self, td):
        log_prob, entropy, value = super().evaluate_actions(td)
        return log_prob + 1e-3 * (len(td) - 6), entropy, value


@pytest.mark.parametrize("decoupled", [False, True])
def test_the_ratio_is_exactly_one_before_a_weight_changes(decoupled):
    metrics = []
    for recompute in (False, True):
        policy, batch = collected(RoundsBySize)
        loss = ChunkClipPPOLoss(policy, decoupled=decoupled, clip_epsilon=1e-4)
        learner = Learner(loss, **STILL, minibatch_size=8, micro_batch_size=5, recompute_log_prob=recompute)
        torch.manual_seed(1)
        metrics.append(learner.update(gae(batch)))
    stored, recomputed = metrics
    assert all(stored[f"train/actor/{name}"] > 0 for name in RATIOS)
    assert all(recomputed[f"train/actor/{name}"] == 0 for name in RATIOS)
    assert recomputed["train/actor/ratio"] == 1
    assert recomputed["train/actor/log_ratio_recomputed"] == pytest.approx(stored["train/actor/log_ratio"], rel=1e-4)


def test_bfloat16(tmp_path):
    make_checkpoint(tmp_path / "oft")
    policy = adapted(oft)(tmp_path, dtype=torch.bfloat16)
    learner = Learner(ChunkClipPPOLoss(policy), **STILL, minibatch_size=3, micro_batch_size=2, recompute_log_prob=True)
    metrics = learner.update(decisions(policy, 5))  # acted in one pass
    assert all(metrics[f"train/actor/{name}"] == 0 for name in RATIOS)


def test_a_network_that_cannot_evaluate_actions_is_refused():
    loss = SimpleNamespace(actor_network=nn.Linear(1, 1), out_keys=[])
    with pytest.raises(ValueError, match="recompute_log_prob needs a policy that has evaluate_actions"):
        check_loss(loss, recompute_log_prob=True)
