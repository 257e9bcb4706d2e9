"""The clipped PPO loss over chunks, against TorchRL's own and by hand; test_golden.py has recorded numbers."""

import copy
import math
from unittest import mock

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModuleBase
from torch import nn
from torchrl.objectives import ClipPPOLoss
from toy import CHUNK, DIM, Given, ToyActorCritic, ToyEnv, ToyPolicy

from vla_algos import losses
from vla_algos.losses import ChunkClipPPOLoss, add_log_prob
from vla_common.keys import (
    ACTION_LOG_PROB,
    ACTION_TOKENS,
    ADVANTAGE,
    NEXT,
    REFERENCE_LOG_PROB,
    STATE_VALUE,
    STEP_MASK,
    VALUE_TARGET,
    WEIGHT,
)

LEVELS = ("token", "action", "chunk")


@pytest.fixture
def policy() -> ToyPolicy:
    torch.manual_seed(0)
    return ToyPolicy()


def moved_on(policy, values=1) -> TensorDict:
    """16 decisions of a policy that has moved on since, so that ratios and values differ."""
    with torch.no_grad():
        td = policy(ToyEnv(16).reset())
        td[ACTION_LOG_PROB] += 0.3 * torch.randn(16, CHUNK, DIM)
        td[STATE_VALUE] += 0.3 * torch.randn(16, values)
    td[ADVANTAGE], td[VALUE_TARGET] = torch.randn(16, values), torch.randn(16, values)
    td[NEXT, STEP_MASK] = torch.ones(16, CHUNK, dtype=torch.bool)
    policy.passes.clear()
    return td


@pytest.fixture
def batch(policy) -> TensorDict:
    return moved_on(policy)


def given(log_ratio, advantage, mask=None, entropy=None, value=None, **entries) -> TensorDict:
    """A batch for :class:`Given` with these log-ratios ``[B, C, A]``; what it returns are leaves of the graph."""
    log_ratio = torch.as_tensor(log_ratio)
    mask = torch.ones(log_ratio.shape[:2], dtype=torch.bool) if mask is None else torch.as_tensor(mask)
    old = torch.full_like(log_ratio, -1.0)
    outputs = {
        "log_prob": (old + log_ratio).requires_grad_(),
        "entropy": torch.zeros_like(old) if entropy is None else torch.as_tensor(entropy).requires_grad_(),
    }
    if value is not None:
        outputs["value"] = torch.as_tensor(value).requires_grad_()
    data = {"given": outputs, ACTION_LOG_PROB: old, ADVANTAGE: torch.as_tensor(advantage), NEXT: {STEP_MASK: mask}}
    return TensorDict(data | {key: torch.as_tensor(entry) for key, entry in entries.items()}, [len(mask)])


def total(out: TensorDict) -> torch.Tensor:
    return sum(value for key, value in out.items() if key.startswith("loss_"))


def gradients(policy: nn.Module, out: TensorDict) -> torch.Tensor:
    policy.zero_grad()
    total(out).backward()
    return torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])


def test_equals_torchrl_without_masks(policy, batch):
    ours = ChunkClipPPOLoss(policy, clip_epsilon=0.2, entropy_coeff=0.01, critic_coeff=0.5, huber_delta=1.0)(batch)

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
    assert 0 < theirs["clip_fraction"] < 1
    assert 0 < theirs["value_clip_fraction"] < 1
    for key in ("loss_objective", "loss_entropy", "loss_critic", "kl_approx", "entropy", "value_clip_fraction"):
        assert torch.allclose(ours[key], theirs[key], atol=1e-6), key
    assert torch.allclose(ours["ratio"], theirs["mean_ratio"])
    assert torch.allclose(gradients(policy, ours), gradients(policy, theirs), atol=1e-6)
    # TorchRL counts every ratio out of bounds; ours those whose advantage makes it matter.
    assert ours["clip_fraction"] < theirs["clip_fraction"]


@pytest.mark.parametrize("level", LEVELS)
def test_clip_fraction_is_the_share_of_elements_without_gradient(level):
    torch.manual_seed(0)
    td = given(0.3 * torch.randn(16, CHUNK, DIM), torch.randn(16, 1), torch.rand(16, CHUNK) < 0.7)
    out = ChunkClipPPOLoss(Given(), log_prob_level=level, critic_coeff=None)(td)
    out["loss_objective"].backward()
    mask = td[NEXT, STEP_MASK]
    learns = td["given", "log_prob"].grad != 0
    assert not learns[~mask].any()
    per_element, valid = {
        "token": (learns, mask.unsqueeze(-1).expand_as(learns)),
        "action": (learns.any(-1), mask),
        "chunk": (learns.any(-1).any(-1), mask.any(-1)),
    }[level]
    share = 1 - per_element[valid].float().mean()
    assert 0 < share < 1
    assert out["clip_fraction"].item() == pytest.approx(share.item(), abs=1e-6)


def test_one_pass_of_the_policy(policy, batch):
    ChunkClipPPOLoss(policy)(batch)
    assert list(policy.passes) == [16]


def test_trains_the_policys_own_parameters(policy, batch):
    loss = ChunkClipPPOLoss(policy)
    assert policy in set(loss.modules())  # loss.train() and loss.to() reach it
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
    weights = after["weights"]
    assert weights["ratio"] == expected
    assert weights["value_loss"] == mask.any(-1).sum()
    assert weights["log_ratio_per_token"] == weights["entropy"] == mask.sum() * DIM


def test_masked_batch_is_the_mean_over_what_is_left(policy, batch):
    """Dropping whole decisions by mask equals not passing them at all."""
    loss = ChunkClipPPOLoss(policy, log_prob_level="chunk", entropy_coeff=0.01)
    batch[NEXT, STEP_MASK][5:] = False
    masked, short = loss(batch), loss(batch[:5])
    for key in loss.out_keys:
        assert torch.allclose(masked[key], short[key], atol=1e-6), key


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("values", [1, CHUNK])
def test_fully_masked_batch_is_zero(level, values):
    torch.manual_seed(0)
    policy = ToyActorCritic(values)
    batch = moved_on(policy, values if level != "chunk" else 1)
    if level == "chunk":
        batch[STATE_VALUE] = batch[VALUE_TARGET] = torch.randn(16, values)
    batch[NEXT, STEP_MASK] = torch.zeros(16, CHUNK, dtype=torch.bool)
    batch[REFERENCE_LOG_PROB] = batch[ACTION_LOG_PROB] - 1
    loss = ChunkClipPPOLoss(
        policy,
        log_prob_level=level,
        entropy_coeff=0.01,
        entropy_level=level,
        dual_clip=3.0,
        reference_kl_coeff=0.1,
    )
    out = loss(batch)
    assert gradients(policy, out).abs().sum() == 0
    assert all(out[key] == 0 for key in loss.out_keys)


def test_asymmetric_clip(policy, batch):
    """With positive advantages only the upper bound acts, with negative ones only the lower."""
    with torch.no_grad():
        log_prob = policy.evaluate_actions(batch)[0]
    batch[ACTION_LOG_PROB] = log_prob - 1.0  # every ratio is e
    batch[ADVANTAGE] = torch.ones(16, 1)
    out = ChunkClipPPOLoss(policy, clip_epsilon=(0.1, 0.5), critic_coeff=None)(batch)
    assert out["loss_objective"].item() == pytest.approx(-1.5, abs=1e-5)
    assert out["clip_fraction"] == 1
    assert out["clipped_ratio"].item() == pytest.approx(1.5, abs=1e-5)
    batch[ACTION_LOG_PROB] = log_prob + 1.0
    batch[ADVANTAGE] = -torch.ones(16, 1)
    out = ChunkClipPPOLoss(policy, clip_epsilon=(0.1, 0.5), critic_coeff=None)(batch)
    assert out["loss_objective"].item() == pytest.approx(0.9, abs=1e-5)


def test_without_critic_no_value_is_needed(policy, batch):
    out = ChunkClipPPOLoss(policy, critic_coeff=None)(batch.exclude(STATE_VALUE, VALUE_TARGET))
    assert "loss_critic" not in out
    assert set(out.keys(True, True)) == set(ChunkClipPPOLoss(policy, critic_coeff=None).out_keys)


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "expected"),
    [
        (math.log(10.0), -2.0, 6.0),  # the ratio is bounded at 3
        (math.log(3.1), -2.0, 6.0),
        (math.log(2.9), -2.0, 5.8),  # not yet
        (math.log(0.1), -2.0, 1.6),  # the ordinary clip
        (math.log(10.0), 2.0, -2.4),  # good actions have no other bound than the ordinary one
        (math.log(0.1), 2.0, -0.2),
        (math.log(10.0), 0.0, 0.0),
    ],
)
@pytest.mark.parametrize("level", LEVELS)
def test_dual_clip_bounds_the_loss_of_bad_actions_only(log_ratio, advantage, expected, level):
    td = given([[[log_ratio]]], [[advantage]])
    out = ChunkClipPPOLoss(Given(), log_prob_level=level, clip_epsilon=0.2, dual_clip=3.0, critic_coeff=None)(td)
    out["loss_objective"].backward()
    bounded = expected == 6.0
    assert out["loss_objective"].item() == out["policy_loss"].item() == pytest.approx(expected, abs=1e-5)
    assert out["dual_clip_fraction"] == float(bounded)
    gradient = td["given", "log_prob"].grad.item()
    without = given([[[log_ratio]]], [[advantage]])
    ChunkClipPPOLoss(Given(), clip_epsilon=0.2, critic_coeff=None)(without)["loss_objective"].backward()
    assert gradient == (0.0 if bounded else without["given", "log_prob"].grad.item())
    if bounded:
        assert without["given", "log_prob"].grad.item() > 6.0


@pytest.mark.parametrize(("level", "expected"), [("token", 2.0), ("action", 4.0), ("chunk", 6.0)])
def test_entropy_levels(level, expected):
    """Three executed actions of two tokens with entropies 1, 3; 1, 3; 1, 3; the fourth is not executed."""
    entropy = torch.tensor([1.0, 3.0]).repeat(2, 2, 1)
    td = given(torch.zeros(2, 2, 2), torch.ones(2, 1), [[True, True], [True, False]], entropy=entropy)
    out = ChunkClipPPOLoss(Given(), entropy_coeff=0.1, entropy_level=level, critic_coeff=None)(td)
    assert out["entropy"].item() == pytest.approx(expected)
    assert out["loss_entropy"].item() == pytest.approx(-0.1 * expected)
    assert out["weights", "entropy"] == {"token": 6, "action": 3, "chunk": 2}[level]
    total(out).backward()
    gradient = td["given", "entropy"].grad
    assert (gradient[1, 1] == 0).all()
    executed = gradient[td[NEXT, STEP_MASK]]
    assert torch.allclose(executed, torch.full((3, 2), -0.1 / out["weights", "entropy"].item()))


def test_weights_scale_each_decision_in_every_term():
    torch.manual_seed(0)
    mask = torch.tensor([[True, True], [True, False], [True, True]])
    weight = torch.tensor([[3.0], [0.5], [0.0]])
    entries = {
        STATE_VALUE: torch.randn(3, 1),
        VALUE_TARGET: torch.randn(3, 1),
        REFERENCE_LOG_PROB: torch.full((3, 2, 2), -1.3),
    }
    td = given(torch.randn(3, 2, 2), torch.randn(3, 1), mask, torch.rand(3, 2, 2), torch.randn(3, 1), **entries)
    loss = ChunkClipPPOLoss(Given(), log_prob_level="action", entropy_coeff=0.1, reference_kl_coeff=0.1)
    alone = [loss(td[i : i + 1]) for i in range(3)]
    weighted = loss(td.clone(False).set(WEIGHT, weight))
    counts = {
        "loss_objective": [2, 1, 2], "policy_loss": [2, 1, 2], "loss_entropy": [4, 2, 4],
        "loss_reference_kl": [4, 2, 4], "loss_critic": [1, 1, 1], "value_loss": [1, 1, 1],
    }  # fmt: skip
    for key, count in counts.items():
        terms = [w.item() * n * out[key].item() for w, n, out in zip(weight, count, alone, strict=True)]
        assert weighted[key].item() == pytest.approx(sum(terms) / sum(count), abs=1e-6), key
    plain = loss(td)
    for key in set(loss.out_keys) - counts.keys():
        assert weighted[key] == plain[key], key  # diagnostics count every element the same


@pytest.mark.parametrize("level", ["token", "action"])
def test_per_action_advantages_and_values_are_those_of_chunks_of_one(level):
    """The same actions, once as 16 decisions of 3 and once as 48 decisions of 1."""
    torch.manual_seed(0)
    shape = (16, CHUNK)
    entries = {
        STATE_VALUE: torch.randn(shape),
        VALUE_TARGET: torch.randn(shape),
        REFERENCE_LOG_PROB: torch.randn(*shape, DIM),
    }
    mask = torch.rand(shape) < 0.7
    td = given(
        0.3 * torch.randn(*shape, DIM), torch.randn(shape), mask, torch.rand(*shape, DIM), torch.randn(shape), **entries
    )
    single = TensorDict({key: td[key].detach().reshape(-1, 1, *td[key].shape[2:]) for key in td.keys(True, True)}, [48])
    for key in (ADVANTAGE, STATE_VALUE, VALUE_TARGET, ("given", "value")):
        assert single[key].shape == (48, 1)
    for name in ("log_prob", "value", "entropy"):
        single["given", name].requires_grad_()
    options = {"entropy_coeff": 0.1, "entropy_level": level, "reference_kl_coeff": 0.1, "dual_clip": 3.0}
    loss = ChunkClipPPOLoss(Given(), log_prob_level=level, **options)
    whole, ones = loss(td), loss(single)
    for key in loss.out_keys:
        assert whole[key].item() == pytest.approx(ones[key].item(), abs=1e-6), key
    total(whole).backward()
    total(ones).backward()
    for name in ("log_prob", "value", "entropy"):
        gradient = td["given", name].grad
        assert torch.allclose(gradient, single["given", name].grad.reshape(gradient.shape), atol=1e-7), name
    assert whole["weights", "value_loss"] == mask.sum()


def test_value_loss_by_hand():
    """Quadratic near the target, linear beyond ``huber_delta``, and the worse of the value and the clipped value."""
    value = torch.tensor([[1.0], [1.0], [0.1], [4.0]])
    entries = {
        STATE_VALUE: torch.tensor([[0.0], [2.0], [0.0], [4.0]]),
        VALUE_TARGET: torch.tensor([[1.0]] * 3 + [[0.0]]),
    }
    td = given(torch.zeros(4, 1, 1), torch.zeros(4, 1), value=value, **entries)
    out = ChunkClipPPOLoss(Given(), clip_value=0.2, huber_delta=2.0, critic_coeff=0.5)(td)
    expected = [0.5 * 0.8**2, 0.5 * 0.8**2, 0.5 * 0.9**2, 2.0 * (4.0 - 1.0)]
    assert out["value_loss"].item() == pytest.approx(sum(expected) / 4)
    assert out["loss_critic"].item() == pytest.approx(0.5 * sum(expected) / 4)
    assert out["value_clip_fraction"] == 0.5
    unclipped = ChunkClipPPOLoss(Given(), clip_value=None, huber_delta=2.0)(td)
    assert unclipped["value_loss"].item() == pytest.approx((0.5 * 0.9**2 + 2.0 * 3.0) / 4)
    assert "value_clip_fraction" not in unclipped


@pytest.mark.parametrize("size", [5, 16, 100])
def test_the_kl_to_the_same_policy_is_zero_and_pulls_nowhere(policy, batch, size):
    with torch.no_grad():
        expected = policy.evaluate_actions(batch)[0]
    assert add_log_prob(batch, copy.deepcopy(policy), REFERENCE_LOG_PROB, size) is batch
    assert torch.allclose(batch[REFERENCE_LOG_PROB], expected, atol=1e-6)
    assert not batch[REFERENCE_LOG_PROB].requires_grad
    out = ChunkClipPPOLoss(policy, reference_kl_coeff=0.5)(batch)
    policy.zero_grad()
    out["loss_reference_kl"].backward()
    assert out["reference_kl"].item() == pytest.approx(0.0, abs=1e-9)
    assert max(p.grad.abs().max() for p in policy.parameters()) < 1e-6


@pytest.mark.parametrize("level", LEVELS)
def test_the_kl_to_another_policy_holds_the_trained_one_back(policy, batch, level):
    other = ToyPolicy()
    batch[NEXT, STEP_MASK] = torch.rand(16, CHUNK) < 0.6
    add_log_prob(batch, other, REFERENCE_LOG_PROB, 4)
    assert all(p.grad is None for p in other.parameters())
    loss = ChunkClipPPOLoss(policy, log_prob_level=level, reference_kl_coeff=0.5)
    out = loss(batch)
    with torch.no_grad():
        d = (other.evaluate_actions(batch)[0] - policy.evaluate_actions(batch)[0])[batch[NEXT, STEP_MASK]]
    assert out["reference_kl"].item() == pytest.approx((d.exp() - d - 1).mean().item(), rel=1e-4)  # whatever the level
    assert out["loss_reference_kl"].item() == pytest.approx(0.5 * out["reference_kl"].item())
    before = out["reference_kl"].item()
    assert before > 0
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    optimizer.zero_grad()
    out["loss_reference_kl"].backward()
    optimizer.step()
    assert 0 < loss(batch)["reference_kl"].item() < before


def test_the_kl_to_a_policy_that_is_worlds_apart_is_finite():
    td = given([[[0.0, 0.0]]], [[0.0]], reference_log_prob=[[[500.0, -500.0]]])
    out = ChunkClipPPOLoss(Given(), reference_kl_coeff=1.0, critic_coeff=None)(td)
    out["loss_reference_kl"].backward()
    assert out["reference_kl"].item() == pytest.approx((math.exp(20) - 21) / 2, rel=1e-5)
    assert td["given", "log_prob"].grad.isfinite().all()


def test_diagnostics_by_hand():
    log_ratio = torch.tensor([[[0.5, -0.25], [0.1, 0.1]], [[-0.5, 0.0], [9.0, 9.0]]])
    td = given(log_ratio, torch.ones(2, 1), [[True, True], [True, False]])
    out = ChunkClipPPOLoss(Given(), log_prob_level="action", clip_epsilon=0.2, critic_coeff=None)(td)
    elements = torch.tensor([0.25, 0.2, -0.5])
    ratio = elements.exp()
    assert out["ratio"].item() == pytest.approx(ratio.mean().item())
    assert out["clipped_ratio"].item() == pytest.approx(ratio.clamp(0.8, 1.2).mean().item())
    assert out["kl_approx"].item() == pytest.approx(-elements.mean().item(), abs=1e-6)
    assert out["kl_k3"].item() == pytest.approx((ratio - 1 - elements).mean().item(), abs=1e-6)
    assert out["log_ratio_per_token"].item() == pytest.approx((0.5 + 0.25 + 0.1 + 0.1 + 0.5) / 6)
    assert out["clip_fraction"].item() == pytest.approx(2 / 3)  # with a good advantage the lower bound does not matter
    assert [int(out["weights", key]) for key in ("ratio", "log_ratio_per_token")] == [3, 6]
    assert not any(out[key].requires_grad for key in set(out.keys()) if not key.startswith("loss_"))


@pytest.mark.parametrize("options", [{}, {"dual_clip": 2.0}, {"clip_value": None}, {"reference_kl_coeff": 0.1}])
@pytest.mark.parametrize("critic_coeff", [None, 0.0, 1.0])
def test_out_keys_are_what_comes_out(policy, batch, options, critic_coeff):
    batch[REFERENCE_LOG_PROB] = batch[ACTION_LOG_PROB]
    loss = ChunkClipPPOLoss(policy, critic_coeff=critic_coeff, **options)
    assert loss.has_critic == bool(critic_coeff)
    assert policy in set(loss.modules())  # loss.train() and loss.to() reach it
    assert set(loss(batch).keys(True, True)) == set(loss.out_keys)


def test_coefficients_can_be_scheduled(policy, batch):
    loss = ChunkClipPPOLoss(policy, entropy_coeff=0.1)
    before = loss(batch)["loss_entropy"]
    loss.entropy_coeff = 0.05
    assert loss(batch)["loss_entropy"].item() == pytest.approx(before.item() / 2)


def test_coefficients_lie_where_a_policy_computes_that_host_memory_keeps(policy, monkeypatch):
    monkeypatch.setattr(losses, "compute_device", lambda parameter: torch.device("cuda"))
    theirs = mock.Mock(side_effect=InterruptedError)
    monkeypatch.setattr(ClipPPOLoss, "__init__", theirs)
    with pytest.raises(InterruptedError):
        ChunkClipPPOLoss(policy)
    assert theirs.call_args.kwargs["device"] == torch.device("cuda")


@pytest.mark.parametrize(("advantage", "dual_clip"), [(1.0, None), (-1.0, 3.0)])
def test_a_ratio_beyond_all_numbers_has_no_gradient_where_it_is_bounded(advantage, dual_clip):
    td = given([[[100.0]], [[0.0]]], [[advantage], [advantage]])
    loss = ChunkClipPPOLoss(Given(), critic_coeff=None, dual_clip=dual_clip)(td)["loss_objective"]
    loss.backward()
    assert loss.isfinite()
    assert td["given", "log_prob"].grad.flatten().tolist() == [0.0, -advantage / 2]


@pytest.mark.parametrize("level", LEVELS)
def test_a_policy_that_has_diverged_is_not_hidden(level):
    log_ratio = torch.zeros(2, 2, 2)
    log_ratio[1, 0, 1] = torch.nan
    mask = torch.tensor([[True, True], [True, False]])
    loss = ChunkClipPPOLoss(Given(), log_prob_level=level, critic_coeff=None)
    assert loss(given(log_ratio, torch.ones(2, 1), mask))["loss_objective"].isnan()
    assert loss(given(log_ratio, torch.ones(2, 1), ~mask))["loss_objective"].isfinite()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"log_prob_level": "tokens"}, "log_prob_level=tokens: must be 'token', 'action' or 'chunk'"),
        ({"entropy_level": "step"}, "entropy_level=step: must be 'token', 'action' or 'chunk'"),
        ({"dual_clip": 1.0}, "greater than 1"),
        ({"dual_clip": 0.2}, "greater than 1"),
        ({"reference_kl_coeff": -0.1}, "reference_kl_coeff=-0.1"),
    ],
)
def test_bad_settings(policy, settings, message):
    with pytest.raises(ValueError, match=message):
        ChunkClipPPOLoss(policy, **settings)


def test_a_critic_needs_a_value_head(policy, batch, monkeypatch):
    evaluate = policy.evaluate_actions
    monkeypatch.setattr(policy, "evaluate_actions", lambda td: (*evaluate(td)[:2], None))
    with pytest.raises(ValueError, match="no value head"):
        ChunkClipPPOLoss(policy)(batch)


@pytest.mark.parametrize(
    "key", [ACTION_LOG_PROB, ADVANTAGE, VALUE_TARGET, STATE_VALUE, REFERENCE_LOG_PROB, ACTION_TOKENS]
)
def test_missing_entries_are_named_with_where_they_come_from(policy, batch, key):
    batch[REFERENCE_LOG_PROB] = batch[ACTION_LOG_PROB]
    loss = ChunkClipPPOLoss(policy, reference_kl_coeff=0.1)
    loss(batch)
    with pytest.raises(ValueError, match=rf"the batch lacks \['{key}'\].*rollout.*gae\(\).*add_log_prob"):
        loss(batch.exclude(key))


def test_per_action_advantages_do_not_go_with_one_ratio_per_chunk(policy, batch):
    batch[ADVANTAGE] = torch.randn(16, CHUNK)
    with pytest.raises(ValueError, match="reward_level='chunk', or log_prob_level='action' or 'token'"):
        ChunkClipPPOLoss(policy, log_prob_level="chunk")(batch)
    for level in ("token", "action"):
        ChunkClipPPOLoss(policy, log_prob_level=level)(batch)


@pytest.mark.parametrize("shape", [(16,), (16, 2), (16, 1, 1), (16, CHUNK, DIM)])
@pytest.mark.parametrize("level", LEVELS)
def test_advantages_of_another_shape(policy, batch, shape, level):
    batch[ADVANTAGE] = torch.randn(shape)
    with pytest.raises(ValueError, match=r"must be \[B, 1\] per decision or \[B, C\] per primitive action"):
        ChunkClipPPOLoss(policy, log_prob_level=level)(batch)


@pytest.mark.parametrize(("values", "targets"), [(1, CHUNK), (CHUNK, 1)])
def test_values_and_targets_of_different_levels(values, targets):
    policy = ToyActorCritic(values)
    batch = moved_on(policy, values)
    batch[VALUE_TARGET] = torch.randn(16, targets)
    message = rf"value is \[16, {values}\] and 'value_target' \[16, {targets}\].*reward_level='action'"
    with pytest.raises(ValueError, match=message):
        ChunkClipPPOLoss(policy)(batch)


@pytest.mark.parametrize("summed", [(-1,), (-2, -1)])
def test_log_probabilities_that_are_summed_already_are_refused(summed):
    batch = given(torch.zeros(4, CHUNK, DIM), torch.ones(4, 1))
    for entry in (("given", "log_prob"), ("given", "entropy"), ACTION_LOG_PROB):
        batch[entry] = batch[entry].sum(summed)
    with pytest.raises(ValueError, match=r"must be \[B, C, A\], one per element"):
        ChunkClipPPOLoss(Given(), critic_coeff=None)(batch)
