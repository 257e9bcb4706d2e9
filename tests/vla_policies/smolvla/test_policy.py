"""SmolVLA as a policy: what LeRobot's folder makes it do, and what reinforcement learning needs."""

import json
import math
import re

import pytest
import torch
from closeness import assert_near, relative, rounding_error, sharpness, through
from lerobot_checkpoint import SMOLVLA, golden, make_checkpoint
from openvla_checkpoint import act
from safetensors.torch import load_file
from tensordict import NonTensorData, NonTensorStack
from torch.distributions import Normal
from torchrl.envs.utils import ExplorationType

from vla_algos import BehaviourCloning
from vla_algos.learner import Learner
from vla_algos.losses import ChunkClipPPOLoss
from vla_common import keys
from vla_envs import make_spec
from vla_policies import SmolVLA, load_policy, make_example
from vla_policies.checkpoint.lora import add_lora, has_lora, merge_adapter
from vla_policies.flow.steps import times
from vla_policies.registry import find_policy_class, inspect_policy, make_policy, policies, register_policy

if "smolvla" not in policies:  # of a checkout that was not installed again
    register_policy("smolvla", SmolVLA)

RANDOM, GREEDY = ExplorationType.RANDOM, ExplorationType.DETERMINISTIC


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("smolvla") / "checkpoint")


@pytest.fixture
def make(folder):
    def make(**settings):
        torch.manual_seed(0)
        return SmolVLA.from_pretrained(folder, benchmark="libero", **settings)

    return make


@pytest.fixture
def seen():
    torch.manual_seed(1)
    td = make_example("libero", 3)
    td[keys.STATES] = torch.randn(3, 8)
    texts = ("put the red mug on the plate", "open the drawer", "push the blue block")
    return td.set(keys.TASK_DESCRIPTIONS, NonTensorStack(*map(NonTensorData, texts)))


# ---- as LeRobot


@torch.no_grad()
@pytest.mark.parametrize("steps", [1, 4, 10])
def test_images_words_and_states_become_lerobots_actions(make, steps, monkeypatch):
    recorded, policy = golden(), make(num_steps=steps, num_action_chunks=6, method="flow_ode", value_head=False)
    td = make_example("libero", 2)
    td[keys.IMAGES], td[keys.WRIST_IMAGES] = recorded["image_u8"], recorded["image2_u8"].unsqueeze(1)
    td[keys.STATES] = recorded["state"]
    texts = json.loads((SMOLVLA / "golden.json").read_text())["instructions"]
    td.set(keys.TASK_DESCRIPTIONS, NonTensorStack(*map(NonTensorData, texts)))
    monkeypatch.setattr(torch, "randn", lambda *shape, **named: recorded["noise"])
    actions = act(policy, td, RANDOM)[keys.ACTION]
    torch.testing.assert_close(actions, recorded[f"actions_{steps}steps"], rtol=0, atol=1e-5)


def test_the_config_says_how_many_actions_and_steps(make, tmp_path):
    policy = make()
    assert (policy.chunk_size, policy.horizon, policy.flow.num_steps) == (5, 6, 10)
    make(num_action_chunks=2, num_steps=4).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["n_action_steps"], config["num_steps"]) == (2, 4)


def test_cameras_come_in_the_order_of_the_checkpoint(make, seen):
    names = ("observation.images.image2", "observation.images.image")
    policy, seen[keys.WRIST_IMAGES] = make(cameras=names), seen[keys.WRIST_IMAGES] // 2
    first, second = policy.cameras(seen)
    assert torch.equal(first, seen[keys.WRIST_IMAGES][:, 0])
    assert torch.equal(second, seen[keys.IMAGES])
    one = make(cameras=names[1:])
    assert one.in_keys == [keys.IMAGES, keys.STATES, keys.TASK_DESCRIPTIONS]
    assert act(one, seen, GREEDY)[keys.MODEL_IMAGES].shape[1] == 1


def test_cameras_of_several_sizes_are_kept_as_the_model_sees_them(make, seen):
    policy = make()
    seen[keys.WRIST_IMAGES] = seen[keys.WRIST_IMAGES][:, :, :84, :84].contiguous()
    stored = act(policy, seen, RANDOM)
    assert stored[keys.MODEL_IMAGES].shape == (3, 2, 64, 64, 3)
    assert torch.equal(policy.evaluate_actions(stored)[0], stored[keys.ACTION_LOG_PROB])


# ---- the folder


def test_what_is_saved_has_lerobots_layout_and_acts_the_same(make, folder, seen, tmp_path):
    policy = make(method="flow_noise", num_action_chunks=3)
    policy.save_pretrained(tmp_path)
    saved, original = load_file(tmp_path / "model.safetensors"), load_file(folder / "model.safetensors")
    assert saved.keys() == original.keys()
    assert all(torch.equal(saved[key].float(), tensor.float()) for key, tensor in original.items())
    again = load_policy(tmp_path)
    assert again.config == policy.config
    both = []
    for one in (policy, again):
        torch.manual_seed(3)
        both.append(act(one, seen.clone(), RANDOM))
    for key in (keys.ACTION, keys.ACTION_LOG_PROB, keys.STATE_VALUE):
        assert torch.equal(both[0][key], both[1][key]), key
    assert "set benchmark" in inspect_policy(folder).facts["benchmark"]
    report = inspect_policy(tmp_path)
    assert not report.missing
    assert report.facts["benchmark"] == "libero"
    assert report.facts["heads"].endswith(".safetensors")


def test_statistics_of_demonstrations(make, tmp_path):
    policy, (actions, states) = make(), (torch.rand(4, 5, 7), torch.rand(4, 8))
    policy.take_statistics("mine", actions, states, torch.ones(4, 5, dtype=torch.bool))
    normalised = policy.to_model(actions, states).flatten(0, 1)
    torch.testing.assert_close(normalised.mean(0), torch.zeros(7), rtol=0, atol=1e-4)
    torch.testing.assert_close(policy.to_simulator(policy.to_model(actions, states), states), actions)
    policy.save_pretrained(tmp_path)
    torch.testing.assert_close(load_policy(tmp_path).to_model(actions, states).flatten(0, 1), normalised)


def test_a_checkpoint_of_another_policy_of_lerobot(tmp_path):
    folder = make_checkpoint(tmp_path / "act", type="act")
    with pytest.raises(ValueError, match=r"is a checkpoint of 'act'; known are .*smolvla"):
        find_policy_class(folder)
    with pytest.raises(ValueError, match=r"is of 'act', config.json must be of 'smolvla'"):
        make_policy(make_spec("libero/goal"), family="smolvla", checkpoint=folder)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_action_chunks": 7}, "num_action_chunks is 7, must be 1 to 6, the horizon"),
        ({"cameras": ("observation.images.top",)}, "looks at observation.images.image, .* set cameras to the names"),
        ({"benchmark": "metaworld"}, r"cameras=\['observation.image'\].*such as cameras=\[observation.images.image\]"),
        ({"benchmark": "maniskill"}, "cameras of maniskill are not known; set them"),
        ({"benchmark": "calvin", "cameras": ("observation.images.image",)}, "have 8 numbers, the benchmark has 7"),
        ({"benchmark": "robotwin", "cameras": ("observation.images.image",)}, "room for 10 numbers, robotwin needs"),
        ({"max_prompt_length": 0}, "max_prompt_length=0"),
        ({"config_name": "smolvla_libero"}, "SmolVLA has no settings"),
    ],
)
def test_a_setting_that_does_not_fit_is_refused(folder, settings, message):
    with pytest.raises(ValueError, match=message) as refused:
        SmolVLA.from_pretrained(folder, **{"benchmark": "libero", **settings})
    assert "\n" not in str(refused.value)


def test_a_long_prompt_is_refused_before_a_simulator_starts(folder):
    with pytest.raises(ValueError, match=r"^policy\.max_prompt_length=16: the prompt of .* has \d+ tokens; type") as no:
        make_policy(make_spec("libero/goal"), family="smolvla", checkpoint=folder)
    needed = int(re.search(r"type policy\.max_prompt_length=(\d+)", str(no.value))[1])
    make_policy(make_spec("libero/goal"), family="smolvla", checkpoint=folder, max_prompt_length=needed)


# ---- reinforcement learning


@pytest.mark.parametrize(
    ("method", "reads"), [("flow_sde", None), ("flow_noise", "mean"), ("flow_cps", "mean"), ("flow_sde", "mean")]
)
def test_the_ratio_is_one_and_a_kept_prefix_changes_nothing(make, seen, method, reads):
    policy = make(method=method, value_after_vlm=reads, num_steps=4)
    stored = act(policy, seen, RANDOM)
    assert stored[keys.ACTION].shape == (3, 5, 7)
    assert stored[keys.DENOISE_CHAIN].shape[2:] == (6, 10)
    plain, off, narrow = policy.evaluate_actions(stored), through(policy), sharpness(policy.get_dist(stored))
    if method != "flow_noise":  # whose steps go through the network in one pass: another batch
        assert torch.equal(plain[0], stored[keys.ACTION_LOG_PROB])
    assert_near(plain[0], stored[keys.ACTION_LOG_PROB], narrow * off)
    assert_near(plain[2], stored[keys.STATE_VALUE], off)
    prepared = policy.precompute(stored.clone())
    assert prepared.get(keys.PREFIX_KEYS, None) is not None
    rows = torch.tensor([2, 0])
    for first, second in zip(plain, policy.evaluate_actions(prepared[rows]), strict=True):
        assert_near(second, first[rows], narrow * off)


@torch.no_grad()
def test_log_probabilities_by_hand(make, seen):
    """Flow-SDE, written out: dx = v dt plus its correction, and noise of a sqrt(t / (1 - t)) sqrt(width)."""
    level, count = 0.4, 4
    policy = make(noise_level=level, num_steps=count)
    stored = act(policy, seen, RANDOM)
    schedule, chain, step = times(count, summed=False), stored[keys.DENOISE_CHAIN], stored[keys.DENOISE_STEP]
    speed, _ = policy.velocity(policy.observe(stored), chain[:, 0], schedule[step])
    for row in range(3):
        now, then, x, v = schedule[step[row]], schedule[step[row] + 1], chain[row, 0], speed[row]
        width, sigma = now - then, level * (now / (1 - min(now, schedule[1]))).sqrt()
        drift = -v * width - sigma**2 * width / (2 * now) * (x + v * (1 - now))
        expected = Normal(x + drift, sigma * width.sqrt()).log_prob(chain[row, 1])[:5, :7]
        torch.testing.assert_close(stored[keys.ACTION_LOG_PROB][row], expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_log_probabilities_of_flow_noise_by_hand(make, seen):
    policy = make(method="flow_noise", num_steps=3)
    stored = act(policy, seen, RANDOM)
    schedule, chain, observed = times(3, summed=False), stored[keys.DENOISE_CHAIN], policy.observe(stored)
    total = torch.zeros(3, 5, 7)
    for number in range(3):
        speed, hidden = policy.velocity(observed, chain[:, number], schedule[number].expand(3))
        mean = chain[:, number] - speed / 3
        total += Normal(mean, policy.noise_network(hidden)).log_prob(chain[:, number + 1])[:, :5, :7]
    torch.testing.assert_close(stored[keys.ACTION_LOG_PROB], total, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize("only", [True, False])
def test_what_the_update_reaches(make, seen, only, checkpointing):
    policy = make(train_expert_only=only, gradient_checkpointing=checkpointing)
    assert policy.prefix_is_frozen == only
    stored = policy.precompute(act(policy, seen, RANDOM))
    assert (stored.get(keys.PREFIX_KEYS, None) is not None) == only
    log_prob, _, value = policy.evaluate_actions(stored)
    (log_prob.sum() + value.sum()).backward()
    reached = {n for n, p in policy.named_parameters() if p.grad is not None and p.grad.any()}
    for part in ("lm_expert.layers.0", "lm_expert.layers.1.self_attn.k_proj", "state_proj", "action_in_proj"):
        assert any(part in n for n in reached), part
    assert any(n.startswith("value_head") for n in reached)
    assert any("vlm.model.vision_model" in n for n in reached) == (not only)


def test_a_step_of_ppo_with_a_kept_prefix_is_the_same_as_without(make, seen):
    stepped = []
    for gigabytes in (4.0, 0.0):
        policy = make(prefix_cache_gb=gigabytes, num_steps=3)
        torch.manual_seed(4)
        stored = act(policy, seen.clone(), RANDOM)
        stored = stored.exclude(keys.IMAGES, keys.WRIST_IMAGES)
        if gigabytes:
            stored = policy.precompute(stored)
        log_prob, _, value = policy.evaluate_actions(stored)
        loss = -(log_prob * torch.linspace(-1, 1, 3).view(3, 1, 1)).mean() + value.square().mean()
        optimizer = torch.optim.SGD([p for p in policy.parameters() if p.requires_grad], lr=1e-4)
        loss.backward()
        optimizer.step()
        stepped.append({n: p.detach() for n, p in policy.named_parameters() if p.requires_grad})
    assert any("state_proj" in name for name in stepped[0])
    for name, weight in stepped[0].items():
        torch.testing.assert_close(weight, stepped[1][name], rtol=1e-5, atol=1e-7)


def test_bfloat16_and_lora(make, seen, tmp_path):
    policy = make(dtype=torch.bfloat16)
    assert policy.model.dtype == torch.bfloat16
    precise = {n for n, p in policy.model.named_parameters() if p.dtype == torch.float32}
    assert {n.rpartition(".")[0].rpartition(".")[2] for n in precise} >= {
        *("action_in_proj", "state_proj", "patch_embedding", "input_layernorm", "post_attention_layernorm")
    }
    assert not any(part in n for n in precise for part in ("self_attn", "mlp.", "embed_tokens", "layer_norm"))
    with pytest.raises(ValueError, match=r"bfloat16.*policy.lora_rank=32"):
        Learner(ChunkClipPPOLoss(policy), lr=1e-5)
    add_lora(policy, rank=2)
    Learner(ChunkClipPPOLoss(policy), lr=1e-5)
    adapted = [n for n, p in policy.named_parameters() if p.requires_grad and not n.startswith("value_head")]
    assert adapted
    assert all("lm_expert" in n and ".lora_" in n for n in adapted)
    assert policy.prefix_is_frozen
    stored = act(policy, seen, RANDOM)
    policy.evaluate_actions(stored)[0].sum().backward()
    assert any(p.grad is not None and p.grad.any() for n, p in policy.named_parameters() if "lora_B" in n)
    policy.save_pretrained(tmp_path)
    again = load_policy(tmp_path)
    assert has_lora(again)
    assert again.model.dtype == torch.bfloat16
    assert_near(act(again, seen, GREEDY)[keys.ACTION], act(policy, seen, GREEDY)[keys.ACTION])


def test_a_merged_adapter_equals_the_adapted_policy(make, seen):
    policy = make()
    add_lora(policy, rank=4)
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    before, adapted = act(make(), seen, GREEDY)[keys.ACTION], act(policy, seen, GREEDY)[keys.ACTION]
    merge_adapter(policy)
    assert not has_lora(policy)
    assert relative(adapted, before) > 1e-3
    torch.testing.assert_close(act(policy, seen, GREEDY)[keys.ACTION], adapted, rtol=1e-4, atol=1e-5)


def test_a_bfloat16_model_acts_like_the_float32_one(make, seen):
    dtypes = (torch.float32, torch.bfloat16)
    exact, rounded = (act(make(dtype=dtype), seen.clone(), GREEDY)[keys.ACTION] for dtype in dtypes)
    sizes = make().model.config
    assert 0 < relative(rounded, exact) < rounding_error(torch.bfloat16, sizes.vision.depth + 2 * sizes.language.depth)


def test_imitation(make, seen):
    policy = make(num_action_chunks=4)
    seen[keys.PROMPT_TOKENS] = policy.prompt_tokens(seen.get(keys.TASK_DESCRIPTIONS).tolist())
    seen[keys.ACTION] = torch.rand(3, 4, 7)
    loss = policy.imitation_loss(seen, sigma=0.0)
    assert loss.shape == (3, 4)
    assert math.isfinite(loss.sum().item())
    loss.mean().backward()
    assert policy.model.state_proj.weight.grad.any()


# ---- where to look, while it clones


def test_state_prediction_trains_what_makes_tokens_of_both_cameras(make, seen):
    rows = seen.clone()
    rows[keys.PROMPT_TOKENS] = make().prompt_tokens(["open the drawer"] * 3)
    rows[keys.ACTION], rows[keys.STEP_MASK] = torch.randn(3, 5, 7), torch.ones(3, 5, dtype=torch.bool)
    rows[keys.EPISODE], rows[keys.STEP] = torch.zeros(3, dtype=torch.int64), torch.arange(3)
    rows[keys.FINAL_STATES] = torch.randn(3, 8)
    policy = make(train_expert_only=False).train()
    cloning = BehaviourCloning(policy, rows, steps=1, batch_size=3, auxiliary=1.0)
    found = []
    for first in (seen[keys.IMAGES], seen[keys.IMAGES].flip(0)):
        with cloning.state_prediction.watching():
            policy.imitation_loss(rows.clone().update({keys.IMAGES: first}), sigma=0.1)
        found.append(cloning.state_prediction.share_of_loss(torch.arange(3)))
    assert found[0] != found[1]
    found[0].backward()
    assert policy.model.vision.embeddings.patch_embedding.weight.grad.abs().sum() > 0
    with pytest.raises(ValueError, match=r"cloning\.auxiliary=1.*or does not train them\); type cloning\.auxiliary=0"):
        BehaviourCloning(make(), rows, steps=1, auxiliary=1.0)
