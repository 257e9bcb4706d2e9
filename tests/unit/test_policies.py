"""SmallVLA keeps the policy contract, and its checkpoints are whole or refused."""

import json
from dataclasses import replace

import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torchrl.envs.utils import ExplorationType, set_exploration_type

from vla_common import keys
from vla_policies import SmallVLA, SmallVLAConfig, load_policy
from vla_policies.processing.action_tokens import ActionBins
from vla_policies.small.text import HashedText

CONFIG = SmallVLAConfig(action_low=(-1.0, -1.0, 0.0), action_high=(1.0, 1.0, 0.5), state_dim=4, chunk_size=3)


@pytest.fixture
def policy():
    torch.manual_seed(0)
    policy = SmallVLA(CONFIG)
    policy.set_statistics(torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([0.1, 0.2, 0.3, 0.4]))
    return policy


def observations(n=4, text="push the puck"):
    generator = torch.Generator().manual_seed(1)
    return TensorDict(
        {
            keys.IMAGES: torch.randint(0, 256, (n, 48, 64, 3), dtype=torch.uint8, generator=generator),
            keys.STATES: torch.randn(n, 4, generator=generator),
            keys.TASK_DESCRIPTIONS: NonTensorStack(*(NonTensorData(text) for _ in range(n))),
        },
        batch_size=[n],
    )


def act(policy, td, kind):
    with torch.no_grad(), set_exploration_type(kind):
        return policy(td)


def test_size_and_default_number_of_bins():
    spec = {"action_low": (-1.0,) * 4, "action_high": (1.0,) * 4, "state_dim": 4}
    assert SmallVLAConfig(**spec).num_bins == 256
    size = sum(parameter.numel() for parameter in SmallVLA(SmallVLAConfig(**spec)).parameters())
    assert 0.5e6 < size < 1.5e6


def test_acting_writes_the_contracts_entries_within_the_bounds(policy):
    td = act(policy, observations(), ExplorationType.RANDOM)
    assert td[keys.ACTION].shape == td[keys.ACTION_LOG_PROB].shape == (4, 3, 3)
    assert td[keys.ACTION].dtype == torch.float32 and td[keys.ACTION_TOKENS].dtype == torch.int64
    assert td[keys.STATE_VALUE].shape == (4, 1)
    assert (td[keys.ACTION] >= policy.bins.low).all() and (td[keys.ACTION] <= policy.bins.high).all()
    assert set(policy.loss_keys) <= set(td.keys())


def test_one_value_per_decision_or_per_primitive_action(policy):
    assert policy.num_values == 1
    per_action = SmallVLA(replace(CONFIG, value_per_action=True))
    assert per_action.num_values == 3
    assert act(per_action, observations(), ExplorationType.RANDOM)[keys.STATE_VALUE].shape == (4, 3)


def test_the_update_sees_the_probabilities_that_were_sampled_from(policy):
    td = act(policy, observations(), ExplorationType.RANDOM)
    stored = td.select(*policy.loss_keys)
    log_prob, entropy, value = policy.evaluate_actions(stored)
    torch.testing.assert_close(log_prob, td[keys.ACTION_LOG_PROB])
    torch.testing.assert_close(value, td[keys.STATE_VALUE])
    dist = policy.get_dist(stored)
    torch.testing.assert_close(dist.log_prob(td[keys.ACTION_TOKENS]), log_prob)
    torch.testing.assert_close(dist.entropy(), entropy)


def test_sampling_is_seeded_and_greedy_is_not_random(policy):
    samples = []
    for _ in range(2):
        torch.manual_seed(7)
        samples.append(act(policy, observations(), ExplorationType.RANDOM)[keys.ACTION])
    assert torch.equal(*samples)
    assert not torch.equal(act(policy, observations(), ExplorationType.RANDOM)[keys.ACTION], samples[0])
    greedy = [act(policy, observations(), ExplorationType.DETERMINISTIC)[keys.ACTION] for _ in range(2)]
    assert torch.equal(*greedy)
    mean = policy.get_dist(act(policy, observations(), ExplorationType.RANDOM)).probs @ torch.arange(256.0)
    torch.testing.assert_close(greedy[0], policy.bins.decode(mean))
    mode = act(policy, observations(), ExplorationType.MODE)
    assert torch.equal(mode[keys.ACTION_TOKENS], policy.get_dist(mode).probs.argmax(-1))


@pytest.mark.parametrize("what", ["image", "state", "text"])
def test_every_input_changes_the_action(policy, what):
    changed = observations(text="pull the puck" if what == "text" else "push the puck")
    if what == "image":
        changed[keys.IMAGES] = 255 - changed[keys.IMAGES]
    if what == "state":
        changed[keys.STATES] = changed[keys.STATES] + 1
    logits = [policy.get_dist(act(policy, td, ExplorationType.RANDOM)).logits for td in (observations(), changed)]
    assert not torch.allclose(*logits)


def test_the_value_loss_does_not_shape_the_policy_unless_asked():
    for detach in (True, False):
        policy = SmallVLA(SmallVLAConfig(**{**CONFIG.__dict__, "critic_detach": detach}))
        torch.nn.init.normal_(policy.value_head[-1].weight)
        policy(observations())[keys.STATE_VALUE].sum().backward()
        assert (policy.queries.grad is None) == detach


def test_hashed_text_tells_word_order_apart():
    text = HashedText(2048, 8)
    one, other = text.tokenize(["put the cup on the plate", "put the plate on the cup"])
    assert one.shape == (48,) and set(one.tolist()) != set(other.tolist())
    assert torch.equal(*text.tokenize(["Press a BUTTON", "press a button"]))
    assert torch.isfinite(text(text.tokenize([""]))).all()


def test_bins_round_trip():
    bins = ActionBins([-1.0, 0.0], [1.0, 0.5], 5)
    tokens = torch.tensor([[0, 4], [2, 1], [4, 0]])
    assert torch.equal(bins.encode(bins.decode(tokens)), tokens.float())
    torch.testing.assert_close(bins.decode(tokens)[0], torch.tensor([-1.0, 0.5]))
    torch.testing.assert_close(bins.encode(torch.tensor([[9.0, -9.0]])), torch.tensor([[4.0, 0.0]]))
    with pytest.raises(ValueError, match="num_bins"):
        ActionBins([0.0], [1.0], 1)


def test_imitation_learns_a_demonstration(policy):
    td = act(policy, observations(1), ExplorationType.RANDOM)
    td[keys.ACTION] = torch.tensor([0.5, -0.5, 0.25]).expand(1, 3, 3)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3)
    for _ in range(60):
        optimizer.zero_grad()
        policy.imitation_loss(td, sigma=0.1).mean().backward()
        optimizer.step()
    learnt = act(policy, observations(1), ExplorationType.DETERMINISTIC)[keys.ACTION]
    torch.testing.assert_close(learnt, td[keys.ACTION], atol=0.1, rtol=0)


def test_a_saved_policy_comes_back_with_its_statistics(policy, tmp_path):
    policy.save_pretrained(tmp_path / "policy")
    loaded = load_policy(tmp_path / "policy")
    assert loaded.config == policy.config
    for name in ("state_mean", "state_std"):
        assert torch.equal(getattr(loaded.encoder, name), getattr(policy.encoder, name))
    actions = [act(p, observations(), ExplorationType.DETERMINISTIC)[keys.ACTION] for p in (policy, loaded)]
    assert torch.equal(*actions)


def test_broken_checkpoints_are_refused_with_a_reason(policy, tmp_path):
    with pytest.raises(FileNotFoundError, match="config.json"):
        load_policy(tmp_path)
    policy.save_pretrained(tmp_path)
    config, weights = tmp_path / "config.json", tmp_path / "model.safetensors"
    good_config, good_weights = config.read_text(), weights.read_bytes()

    weights.write_bytes(good_weights[: len(good_weights) // 2])
    with pytest.raises(ValueError, match="truncated"):
        load_policy(tmp_path)
    weights.write_bytes(good_weights)

    for change, message in [
        ({"policy": "openvla_next"}, "openvla_next"),
        ({"dim": 64}, "wrong shape"),
        ({"layers": 3}, "missing"),
        ({"width": 3}, "width"),
    ]:
        config.write_text(json.dumps({**json.loads(good_config), **change}))
        with pytest.raises(ValueError, match=message):
            load_policy(tmp_path)
    config.write_text(good_config[:20])
    with pytest.raises(ValueError, match="config.json"):
        load_policy(tmp_path)
    config.write_text(good_config)
    load_policy(tmp_path)
