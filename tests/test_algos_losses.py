"""The clipped PPO loss over chunks, against TorchRL's own and against recorded reference values."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModuleBase
from torch import nn
from torchrl.objectives import ClipPPOLoss
from toy import CHUNK, DIM, ToyEnv, ToyPolicy

from vla_algos.losses import ChunkClipPPOLoss
from vla_keys import (
    ACTION_LOG_PROB,
    ACTION_TOKENS,
    ADVANTAGE,
    NEXT,
    STATE_VALUE,
    STEP_MASK,
    VALUE_TARGET,
)

GOLDEN = np.load(Path(__file__).parent / "golden" / "algos.npz")
LEVELS = ("token", "action", "chunk")


@pytest.fixture
def policy() -> ToyPolicy:
    torch.manual_seed(0)
    return ToyPolicy()


@pytest.fixture
def batch(policy) -> TensorDict:
    """16 decisions of a policy that has moved on since, so that ratios and values differ."""
    with torch.no_grad():
        td = policy(ToyEnv(16).reset())
        td[ACTION_LOG_PROB] += 0.3 * torch.randn(16, CHUNK, DIM)
        td[STATE_VALUE] += 0.3 * torch.randn(16, 1)
    td[ADVANTAGE], td[VALUE_TARGET] = torch.randn(16, 1), torch.randn(16, 1)
    td[NEXT, STEP_MASK] = torch.ones(16, CHUNK, dtype=torch.bool)
    policy.passes.clear()
    return td


def gradients(policy: nn.Module, out: TensorDict) -> torch.Tensor:
    policy.zero_grad()
    sum(value for key, value in out.items() if key.startswith("loss_")).backward()
    return torch.cat([p.grad.flatten() for p in policy.parameters()])


def test_equals_torchrl_without_masks(policy, batch):
    ours = ChunkClipPPOLoss(policy, clip_epsilon=0.2, entropy_coeff=0.01, critic_coeff=0.5, huber_delta=1.0)(
        batch
    )

    class Critic(TensorDictModuleBase):
        in_keys, out_keys = ToyPolicy.loss_keys, [STATE_VALUE]

        def forward(self, td):
            return TensorDict({STATE_VALUE: policy.evaluate_actions(td)[2]}, td.shape)

    # TorchRL's default, smooth_l1, is Huber with delta 1.
    theirs = ClipPPOLoss(
        policy,
        Critic(),
        clip_epsilon=0.2,
        entropy_coeff=0.01,
        critic_coeff=0.5,
        clip_value=0.2,
        functional=False,
    )
    theirs.set_keys(action=ACTION_TOKENS, sample_log_prob=ACTION_LOG_PROB)
    theirs = theirs(batch)
    assert 0 < theirs["clip_fraction"] < 1 and 0 < theirs["value_clip_fraction"] < 1
    shared = ["loss_objective", "loss_entropy", "loss_critic", "kl_approx", "clip_fraction", "entropy"]
    for key in [*shared, "value_clip_fraction"]:
        assert torch.allclose(ours[key], theirs[key], atol=1e-6), key
    assert torch.allclose(ours["ratio"], theirs["mean_ratio"])
    assert torch.allclose(gradients(policy, ours), gradients(policy, theirs), atol=1e-6)


@pytest.mark.parametrize("level", LEVELS)
def test_recorded_reference(level):
    golden = {name: torch.tensor(GOLDEN[f"loss/chunk_level/{level}_level/unmasked/{name}"]) for name in
              ["logprobs", "old_logprobs", "advantages", "values", "prev_values", "returns", "loss",
               "grad_logprobs", "grad_values"]}  # fmt: skip
    log_prob = golden["logprobs"].view(12, 4, 7).requires_grad_()
    value = golden["values"].requires_grad_()

    class Recorded(TensorDictModuleBase):
        in_keys = out_keys = loss_keys = []

        def evaluate_actions(self, td):
            return log_prob, torch.zeros_like(log_prob), value

    data = {
        ACTION_LOG_PROB: golden["old_logprobs"].view(12, 4, 7),
        ADVANTAGE: golden["advantages"],
        STATE_VALUE: golden["prev_values"],
        VALUE_TARGET: golden["returns"],
        NEXT: {STEP_MASK: torch.ones(12, 4, dtype=torch.bool)},
    }
    loss = ChunkClipPPOLoss(Recorded(), log_prob_level=level, clip_epsilon=(0.2, 0.28), huber_delta=1.0)
    out = loss(TensorDict(data, [12]))
    total = out["loss_objective"] + out["loss_critic"]
    assert torch.allclose(total, golden["loss"], atol=1e-5)
    total.backward()
    assert torch.allclose(log_prob.grad.view(12, 28), golden["grad_logprobs"], atol=1e-6)
    assert torch.allclose(value.grad, golden["grad_values"], atol=1e-6)


def test_one_pass_of_the_policy(policy, batch):
    ChunkClipPPOLoss(policy)(batch)
    assert list(policy.passes) == [16]


def test_trains_the_policys_own_parameters(policy, batch):
    loss = ChunkClipPPOLoss(policy)
    assert {id(p) for p in loss.parameters()} == {id(p) for p in policy.parameters()}
    assert gradients(policy, loss(batch)).abs().sum() > 0


@pytest.mark.parametrize("level", LEVELS)
def test_unexecuted_actions_change_nothing(policy, batch, level):
    loss = ChunkClipPPOLoss(policy, log_prob_level=level, entropy_coeff=0.01)
    mask = torch.rand(16, CHUNK) < 0.5
    mask[0] = False  # a whole decision that was never executed
    batch[NEXT, STEP_MASK] = mask
    before = loss(batch)
    grad_before = gradients(policy, before)

    spoilt = batch.clone()
    spoilt[ACTION_LOG_PROB][~mask] = float("nan")
    spoilt[ACTION_TOKENS][~mask] = 0
    for key in (ADVANTAGE, VALUE_TARGET, STATE_VALUE):
        spoilt[key][~mask.any(-1)] = 1e6
    after = loss(spoilt)
    for key in loss.out_keys:
        assert torch.equal(before[key], after[key]), key
    assert torch.equal(grad_before, gradients(policy, after))

    expected = {"token": mask.sum() * DIM, "action": mask.sum(), "chunk": mask.any(-1).sum()}[level]
    assert after["num_elements"] == expected and after["num_decisions"] == mask.any(-1).sum()


def test_masked_batch_is_the_mean_over_what_is_left(policy, batch):
    """Dropping whole decisions by mask equals not passing them at all."""
    loss = ChunkClipPPOLoss(policy, log_prob_level="chunk", entropy_coeff=0.01)
    batch[NEXT, STEP_MASK][5:] = False
    masked, short = loss(batch), loss(batch[:5])
    for key in loss.out_keys:
        assert torch.allclose(masked[key], short[key], atol=1e-6), key


def test_fully_masked_batch_is_zero(policy, batch):
    batch[NEXT, STEP_MASK] = torch.zeros(16, CHUNK, dtype=torch.bool)
    out = ChunkClipPPOLoss(policy, entropy_coeff=0.01)(batch)
    assert gradients(policy, out).abs().sum() == 0 and out["loss_objective"] == 0


def test_asymmetric_clip(policy, batch):
    """With positive advantages only the upper bound acts, with negative ones only the lower."""
    with torch.no_grad():
        log_prob = policy.evaluate_actions(batch)[0]
    batch[ACTION_LOG_PROB] = log_prob - 1.0  # every ratio is e
    batch[ADVANTAGE] = torch.ones(16, 1)
    out = ChunkClipPPOLoss(policy, clip_epsilon=(0.1, 0.5), critic_coeff=None)(batch)
    assert out["loss_objective"].item() == pytest.approx(-1.5, abs=1e-5)
    assert out["clip_fraction"] == 1 and out["clipped_ratio"].item() == pytest.approx(1.5, abs=1e-5)
    batch[ACTION_LOG_PROB] = log_prob + 1.0
    batch[ADVANTAGE] = -torch.ones(16, 1)
    out = ChunkClipPPOLoss(policy, clip_epsilon=(0.1, 0.5), critic_coeff=None)(batch)
    assert out["loss_objective"].item() == pytest.approx(0.9, abs=1e-5)


def test_without_critic_no_value_is_needed(policy, batch):
    out = ChunkClipPPOLoss(policy, critic_coeff=None)(batch.exclude(STATE_VALUE, VALUE_TARGET))
    assert "loss_critic" not in out
    assert set(out.keys()) == set(ChunkClipPPOLoss(policy, critic_coeff=None).out_keys)


def test_bad_arguments(policy, batch, monkeypatch):
    with pytest.raises(ValueError, match="'token', 'action' or 'chunk'"):
        ChunkClipPPOLoss(policy, log_prob_level="tokens")
    evaluate = policy.evaluate_actions
    monkeypatch.setattr(policy, "evaluate_actions", lambda td: (*evaluate(td)[:2], None))
    with pytest.raises(ValueError, match="no value head"):
        ChunkClipPPOLoss(policy)(batch)
