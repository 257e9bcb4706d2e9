"""Behaviour cloning: what the policy is shown of the demonstrations. Learning by it is tested with the recipes."""

import pytest
import torch
from decisions import demonstrations

from vla_algos.imitation import BehaviourCloning
from vla_common import keys
from vla_common.texts import WIDTH, encode
from vla_policies import SmallVLA, SmallVLAConfig

STATES = torch.arange(24.0).reshape(8, 3)


@pytest.fixture
def policy():
    torch.manual_seed(0)
    return SmallVLA(SmallVLAConfig((-1.0,) * 2, (1.0,) * 2, 3, chunk_size=2, num_bins=5))


def shown(policy, monkeypatch, **settings):
    """The states of one step, a batch of all demonstrations, in their order."""
    seen, loss = [], policy.imitation_loss
    monkeypatch.setattr(policy, "imitation_loss", lambda td, sigma: (seen.append(td[keys.STATES]), loss(td, sigma))[1])
    monkeypatch.setattr(torch, "randperm", torch.arange)
    data = demonstrations(policy)
    BehaviourCloning(policy, data, steps=1, batch_size=8, **settings).step()
    assert torch.equal(data[keys.STATES], STATES)  # the demonstrations themselves stay clean
    return seen[0]


def test_states_get_noise(policy, monkeypatch):
    assert torch.equal(shown(policy, monkeypatch, state_noise=0.0), STATES)
    noise = shown(policy, monkeypatch, state_noise=0.5) - STATES
    assert (noise != 0).all()
    assert 0.2 < noise.std() < 0.8


def test_each_entry_may_have_its_own_noise(policy, monkeypatch):
    noise = shown(policy, monkeypatch, state_noise=[0.0, 5.0, 0.05]) - STATES
    assert (noise[:, 0] == 0).all()
    assert noise[:, 1].std() > 1 > 0.2 > noise[:, 2].std() > 0


def test_a_policy_that_has_learnt_keeps_the_normalisation_of_its_states(policy):
    data = demonstrations(policy)
    given = [data[key] for key in (keys.ACTION, keys.STATES, keys.STEP_MASK)]
    policy.take_statistics("others", *given)  # a new policy's are set as it is cloned
    assert not policy.encoder.state_mean.any()
    BehaviourCloning(policy, data, steps=1)
    learnt = {name: tensor.clone() for name, tensor in policy.named_buffers()}
    assert torch.allclose(learnt["encoder.state_mean"], data[keys.STATES].mean(0))
    data[keys.STATES] = 3 * data[keys.STATES] + 1
    BehaviourCloning(policy, data, steps=1)  # a round of DAgger; sft.py of a checkpoint
    assert all(torch.equal(tensor, learnt[name]) for name, tensor in policy.named_buffers())
    policy.take_statistics("others", *(data[key] for key in (keys.ACTION, keys.STATES, keys.STEP_MASK)))  # if asked to
    assert torch.allclose(policy.encoder.state_mean, 3 * learnt["encoder.state_mean"] + 1)


def test_one_state_is_enough_and_a_loss_that_is_not_finite_ends_it(policy):
    one = demonstrations(policy)[:1]
    cloning = BehaviourCloning(policy, one, steps=1)
    assert 0 < cloning.step() < 10
    one[keys.STATES] = torch.full_like(one[keys.STATES], torch.inf)
    with pytest.raises(
        FloatingPointError, match=r"cloning is nan: .* lower lr \(recipes: cloning\.lr\), or look at the demonstrations"
    ):
        cloning.step()


def test_a_state_that_is_loaded_keeps_the_rates_of_this_run(policy):
    saved = BehaviourCloning(policy, demonstrations(policy), steps=9, lr=1e-2, weight_decay=0.5, warmup_steps=1)
    saved.step()
    cloning = BehaviourCloning(policy, demonstrations(policy), steps=9, lr=1e-3, weight_decay=0.1, warmup_steps=1)
    cloning.load_state_dict(saved.state_dict())
    (loaded,), (before,) = cloning.optimizer.param_groups, saved.optimizer.param_groups
    assert loaded["weight_decay"] == 0.1
    assert loaded["lr"] == pytest.approx(before["lr"] / 10)
    assert cloning.optimizer.state[loaded["params"][0]]["step"] == 1


def test_what_is_left_of_an_epoch_has_no_rows_that_are_gone(policy):
    saved = BehaviourCloning(policy, demonstrations(policy), steps=9, batch_size=2)
    saved.step()
    cloning = BehaviourCloning(policy, demonstrations(policy)[:5], steps=9, batch_size=2)
    cloning.load_state_dict(saved.state_dict())
    for _ in range(5):
        cloning.step()


def test_prompts_that_list_states_have_the_noise_too(policy, monkeypatch):
    listed, data = [], demonstrations(policy)
    written = data[keys.PROMPT_TOKENS]
    monkeypatch.setattr(policy, "lists_states", True, raising=False)
    monkeypatch.setattr(policy, "prompt_tokens", lambda texts, states: listed.append(states) or written)
    data[keys.TASK_DESCRIPTIONS] = encode(["push"] * 8, WIDTH)
    monkeypatch.setattr(torch, "randperm", torch.arange)
    BehaviourCloning(policy, data, steps=1, batch_size=8, state_noise=0.5).step()
    assert (listed[-1] != STATES).all()


def test_a_policy_that_rounds_steps_away_is_refused(policy):
    with pytest.raises(ValueError, match="trained parameters are bfloat16, which rounds away steps"):
        BehaviourCloning(policy.bfloat16(), demonstrations(policy), steps=1)


@pytest.mark.parametrize("noise", [[0.1], [0.1] * 4])
def test_noise_for_other_states_is_one_clear_error(policy, noise):
    with pytest.raises(ValueError, match="one for each of the 3 states, got"):
        BehaviourCloning(policy, demonstrations(policy), steps=1, state_noise=noise)
