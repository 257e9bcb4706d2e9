"""A steered policy: the frozen one's own actions before it has learnt, weights that stay, one look at each decision."""

import pytest
import torch
from tensordict import NonTensorStack, TensorDict
from tiny_policies import small, small_flow
from torchrl.envs.utils import ExplorationType, set_exploration_type

from vla_common import keys
from vla_policies import Pi0, SmolVLA, inspect_policy, load_policy
from vla_policies.registry import meta_policy
from vla_policies.steered import SteeredConfig, SteeredPolicy
from vla_policies.tiny import make_tiny

LOADERS = {
    "pi0": lambda folder: Pi0.from_pretrained(folder, benchmark="metaworld", config_name="pi0_metaworld"),
    "pi05": lambda folder: Pi0.from_pretrained(folder, benchmark="metaworld", config_name="pi05_metaworld"),
    "smolvla_metaworld": lambda folder: SmolVLA.from_pretrained(folder, benchmark="metaworld"),
    "small_flow": small_flow,
}


def seen(policy, count=3):
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (count, 32, 32, 3), generator=generator, dtype=torch.uint8)
    texts = NonTensorStack(*("push the button" for _ in range(count)))
    observed = {keys.IMAGES: images, keys.STATES: torch.rand(count, policy.state_dim, generator=generator)}
    return TensorDict({**observed, keys.TASK_DESCRIPTIONS: texts}, [count])


def act(policy, tensordict, how=ExplorationType.DETERMINISTIC):
    with torch.no_grad(), set_exploration_type(how):
        return policy(tensordict)


@pytest.fixture(scope="module", params=LOADERS)
def base(request, tmp_path_factory):
    name = request.param
    folder = tmp_path_factory.mktemp("tiny") / name
    return LOADERS[name](folder if name == "small_flow" else make_tiny(name, folder, "metaworld"))


@pytest.mark.parametrize("noise", ["repeated", "whole"])
def test_without_learning_greedy_is_the_base_to_the_bit_and_noise_nearly_normal(base, noise):
    expected = act(base.eval().requires_grad_(False), seen(base))[keys.ACTION]
    policy = SteeredPolicy(base, SteeredConfig(noise=noise, limit=3.0, width=8))
    acted = act(policy, seen(base))
    assert torch.equal(acted[keys.ACTION], expected)
    assert acted[keys.STEERING].shape == (3, base.model_action_dim * (base.horizon if noise == "whole" else 1))
    sampled = act(policy, seen(base, 200), ExplorationType.RANDOM)[keys.STEERING]
    assert 0.85 < sampled.std() < 1.0
    assert sampled.abs().max() < 3


def test_noise_steers_and_the_base_stays_to_the_bit(base, tmp_path):
    policy = SteeredPolicy(base, SteeredConfig(width=8))
    weights = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    before = act(policy, seen(base))
    features = before[keys.FEATURES].float()
    optimizer = torch.optim.Adam([each for each in policy.parameters() if each.requires_grad], lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        (policy.actor.get_dist(TensorDict({keys.FEATURES: features}, [3])).rsample() - 1).square().mean().backward()
        optimizer.step()
    after = act(policy, seen(base))
    assert not torch.equal(after[keys.ACTION], before[keys.ACTION])
    assert torch.equal(after[keys.FEATURES], before[keys.FEATURES])
    assert all(torch.equal(tensor, weights[name]) for name, tensor in base.state_dict().items())
    policy.save_pretrained(tmp_path / "steered")
    loaded = load_policy(tmp_path / "steered")
    assert torch.equal(act(loaded.eval(), seen(base))[keys.ACTION], after[keys.ACTION])
    assert "steered, of" in str(inspect_policy(tmp_path / "steered"))


def test_a_base_that_was_exchanged_is_refused(tmp_path):
    SteeredPolicy(small_flow(None), SteeredConfig(width=8)).save_pretrained(tmp_path / "steered")
    small_flow(None).save_pretrained(tmp_path / "steered" / "base")
    with pytest.raises(ValueError, match=r"another base/model\.safetensors"):
        load_policy(tmp_path / "steered")


def test_features_take_at_most_8_kb_and_one_look(base):
    policy = SteeredPolicy(base, SteeredConfig(width=8))
    looks, observe = [], base.observe
    base.observe = lambda tensordict: looks.append(len(tensordict)) or observe(tensordict)
    acted = act(policy, seen(base))
    del base.observe
    assert looks == [3]
    assert acted[keys.FEATURES].dtype == torch.float16
    assert 2 * policy.num_features <= 8192
    assert {*policy.loss_keys} == {keys.FEATURES, keys.STEERING}


@pytest.mark.parametrize("settings", [{"name": "pi0", "config_name": "pi0_libero"}, {"name": "smolvla"}])
def test_published_sizes_take_at_most_8_kb(settings):
    assert 2 * meta_policy(**settings).keep_features() <= 8192


@pytest.mark.parametrize("by", ["residual", "action"])
@pytest.mark.parametrize("make", [small, small_flow])
def test_actions_are_changed_and_what_was_done_is_explained(make, by, tmp_path):
    base = make(None).eval()
    expected = act(base, seen(base, 50))[keys.ACTION]
    policy = SteeredPolicy(base, SteeredConfig(by=by, width=8, limit=1.0, deviation=0.3, reach=0.5))
    greedy, sampled = act(policy, seen(base, 50)), act(policy, seen(base, 50), ExplorationType.RANDOM)
    count = base.chunk_size * base.action_dim
    assert policy.num_features == base.keep_features() + count * (by == "residual")
    if by == "residual":
        assert torch.allclose(greedy[keys.ACTION], expected, atol=1e-6)
        difference = sampled[keys.ACTION] - greedy[keys.ACTION]
        within = (sampled[keys.ACTION].abs() < 1) & (greedy[keys.ACTION].abs() < 1)
        added = 0.5 * sampled[keys.STEERING].view_as(difference)  # of a range of -1 to 1
        assert torch.allclose(difference[within], added[within], atol=1e-5)
    else:
        assert not greedy[keys.ACTION].any()
    shown = base.write_prompt(seen(base, 50)).set(keys.ACTION, sampled[keys.ACTION])
    explained = policy.explain(shown)
    within = (sampled[keys.ACTION].abs() < 1).flatten(1)  # what was not clipped
    assert torch.allclose(explained[keys.STEERING][within], sampled[keys.STEERING][within], atol=1e-4)
    assert torch.equal(explained[keys.FEATURES], sampled[keys.FEATURES])
    policy.save_pretrained(tmp_path / "steered")
    loaded = load_policy(tmp_path / "steered").eval()
    assert torch.equal(act(loaded, seen(base, 50))[keys.ACTION], greedy[keys.ACTION])


def test_of_noise_no_action_is_explained():
    policy = SteeredPolicy(small_flow(None), SteeredConfig(width=8))
    with pytest.raises(ValueError, match=r"type steering\.by=residual"):
        policy.explain(policy.base.write_prompt(seen(policy.base)))


def test_what_does_not_denoise_cannot_be_steered():
    with pytest.raises(ValueError, match=r"small does not denoise.*; take policy=small_flow"):
        SteeredPolicy(small(None), SteeredConfig())
