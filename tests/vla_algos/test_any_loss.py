"""The learner with losses of TorchRL, subclasses of ours, and other optimizers."""

import pytest
import torch
from tensordict.nn import TensorDictModuleBase
from torchrl.objectives import ClipPPOLoss
from toy import CHUNK, DIM, ToyEnv

from vla_algos import ChunkClipPPOLoss, Learner, StepCollector, gae
from vla_algos.minibatches import takes_whole
from vla_common.keys import ACTION_LOG_PROB, ACTION_TOKENS, ADVANTAGE, STATE_VALUE, VALUE_TARGET
from vla_policies import SmallVLA, SmallVLAConfig


def weights(policy):
    return {name: parameter.detach().clone() for name, parameter in policy.named_parameters()}


def changed(policy, before):
    return {name for name, parameter in policy.named_parameters() if not torch.equal(parameter, before[name])}


class Critic(TensorDictModuleBase):
    """The values of a policy from what a rollout has stored."""

    def __init__(self, policy):
        super().__init__()
        self.policy, self.in_keys, self.out_keys = policy, list(policy.loss_keys), [STATE_VALUE]

    def forward(self, td):
        return td.set(STATE_VALUE, self.policy.evaluate_actions(td)[2])


def torchrl_loss(policy, **settings):
    loss = ClipPPOLoss(policy, Critic(policy), critic_coeff=0.5, **settings)
    loss.set_keys(
        action=ACTION_TOKENS,
        sample_log_prob=ACTION_LOG_PROB,
        advantage=ADVANTAGE,
        value=STATE_VALUE,
        value_target=VALUE_TARGET,
    )
    return loss


@pytest.fixture
def small_batch():
    torch.manual_seed(0)
    config = SmallVLAConfig(
        (-1.0,) * DIM,
        (1.0,) * DIM,
        3,
        chunk_size=CHUNK,
        num_bins=5,
        dim=16,
        layers=1,
        heads=2,
        keypoints=4,
        channels=(4, 4, 4),
    )
    policy = SmallVLA(config)
    return policy, gae(StepCollector(ToyEnv(6, horizon=60, goal=99), policy, 4).rollout())


@pytest.mark.parametrize("functional", [False, True])
def test_a_loss_of_torchrl_trains_a_policy_of_the_library(functional, small_batch):
    policy, batch = small_batch
    loss = torchrl_loss(policy, functional=functional)
    first = loss(batch.reshape(-1))
    assert first["mean_ratio"].item() == pytest.approx(1.0, abs=1e-6)
    before = weights(policy)
    learner = Learner(loss, lr=1e-3, value_lr=1e-2, epochs=2, minibatch_size=8)
    metrics = learner.update(batch)
    assert metrics["train/steps"] == 6
    assert metrics["train/critic/lr"] == 1e-2
    assert metrics["train/entropy"] == pytest.approx(first["entropy"].item(), abs=0.01)  # logged under its own name
    assert {"action_head.weight", "value_head.0.weight", "value_head.4.weight"} <= changed(policy, before)


def test_parts_of_a_minibatch_add_up_for_a_loss_of_torchrl(small_batch):
    """Every action was executed, so the mean over a minibatch is that over its parts."""
    policy, batch = small_batch
    gradients = []
    for size in (None, 5):
        learner = Learner(torchrl_loss(policy), lr=1e-30, minibatch_size=24, micro_batch_size=size, max_grad_norm=1e9)
        torch.manual_seed(1)
        learner.update(batch)
        gradients.append({name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        assert torch.allclose(gradient, gradients[1][name], rtol=1e-4, atol=1e-7), name


def test_another_optimizer_steps_as_it_says(small_batch):
    policy, batch = small_batch
    learner = Learner(
        ChunkClipPPOLoss(policy),
        lr=0.5,
        value_lr=0.25,
        minibatch_size=24,
        max_grad_norm=1e9,
        optimizer=lambda groups: torch.optim.SGD(groups),
    )
    before = weights(policy)
    learner.update(batch)
    for name, parameter in policy.named_parameters():
        rate = 0.25 if "value_head" in name else 0.5
        if parameter.grad is not None:
            assert torch.allclose(parameter, before[name] - rate * parameter.grad, atol=1e-7), name


def test_what_a_loss_of_torchrl_cannot_do_is_said_at_once(small_batch):
    policy, _ = small_batch
    with pytest.raises(ValueError, match=r"trajectory_mean.*ClipPPOLoss.*token_mean"):
        Learner(torchrl_loss(policy), lr=1e-3, aggregation="trajectory_mean")
    with pytest.raises(ValueError, match="target_kl needs a loss that returns kl_k3"):
        Learner(torchrl_loss(policy), lr=1e-3, target_kl=0.1)


def test_a_diagnostic_of_a_subclass_is_logged_with_its_weight(small_batch):
    class WithSurprise(ChunkClipPPOLoss):
        def forward(self, tensordict, whole=None):
            out = super().forward(tensordict, whole)
            out["surprise"] = torch.tensor(float(len(tensordict)))
            out["weights", "surprise"] = torch.tensor(float(len(tensordict)))
            return out

    policy, batch = small_batch
    metrics = Learner(WithSurprise(policy), lr=1e-3, minibatch_size=24, micro_batch_size=16).update(batch)
    assert metrics["train/surprise"] == pytest.approx((16 * 16 + 8 * 8) / 24)


def test_another_optimizer_resumes(small_batch):
    policy, batch = small_batch

    def make():
        return Learner(
            ChunkClipPPOLoss(policy),
            lr=0.1,
            minibatch_size=24,
            optimizer=lambda groups: torch.optim.SGD(groups, momentum=0.9),
        )

    first = make()
    first.update(batch)
    second = make()
    second.load_state_dict(first.state_dict())
    assert second.steps == first.steps == 1
    assert second.optimizer.state_dict()["state"].keys() == first.optimizer.state_dict()["state"].keys()


def test_limits_may_be_left_out(small_batch):
    policy, batch = small_batch
    learner = Learner(ChunkClipPPOLoss(policy), lr=1e-3, max_grad_norm=None, max_log_ratio=None)
    assert learner.update(batch)["train/steps"] == 1


def test_a_loss_gets_the_whole_minibatch_only_where_somebody_reads_it(small_batch):
    """Otherwise its parts would add up to several times the gradient."""

    class HandsOn(ChunkClipPPOLoss):
        def forward(self, tensordict, *args, **kwargs):
            return super().forward(tensordict, *args, **kwargs)

    class Ignores(ClipPPOLoss):
        def forward(self, tensordict, **kwargs):
            return super().forward(tensordict)

    policy, _ = small_batch
    assert takes_whole(ChunkClipPPOLoss(policy))
    assert takes_whole(HandsOn(policy))
    assert not takes_whole(torchrl_loss(policy))
    assert not takes_whole(Ignores(policy, Critic(policy)))
