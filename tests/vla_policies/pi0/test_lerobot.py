"""pi0 and pi0.5 in LeRobot's layout: LeRobot's recorded actions, and the folder written again."""

import json

import pytest
import torch
from lerobot_checkpoint import PI0, PI05, change_json, golden, make_checkpoint
from openvla_checkpoint import act
from safetensors.torch import load_file, save_file
from torch.nn.attention import SDPBackend, sdpa_kernel
from torchrl.envs.utils import ExplorationType

from vla_common import keys
from vla_policies import load_policy, make_example
from vla_policies.memory import MemoryPlan, calculate, group_parameters
from vla_policies.pi0 import LeRobotPi0
from vla_policies.pi0.checkpoint import EMBEDDINGS, LM_HEAD
from vla_policies.registry import find_policy_class, inspect_policy, meta_policy, policies, register_policy

if "pi0_lerobot" not in policies:  # of a checkout that was not installed again
    register_policy("pi0_lerobot", LeRobotPi0)


class Recorded:
    """The prompts that were recorded, whose tokenizer is not at hand."""

    padding = 0

    def __init__(self, tokens):
        self.tokens = tokens

    def __call__(self, texts, states=None):
        return self.tokens


@pytest.fixture(params=[PI0, PI05], ids=["pi0", "pi05"])
def of(request):
    return request.param


@pytest.fixture
def recorded(of):
    return golden(of)


@pytest.fixture
def folder(of, tmp_path):
    return make_checkpoint(tmp_path / "checkpoint", of)


@pytest.fixture
def load(recorded):
    def load(folder, **settings):
        torch.manual_seed(0)
        policy = LeRobotPi0.from_pretrained(folder, benchmark="libero", **settings)
        policy.prompts = Recorded(recorded["tokens"])
        return policy

    return load


@pytest.fixture
def seen(recorded):
    td = make_example("libero", 2)
    td[keys.IMAGES], td[keys.WRIST_IMAGES] = recorded["image_u8"], recorded["image2_u8"].unsqueeze(1)
    td[keys.STATES] = recorded["state"]
    return td


@torch.no_grad()
@pytest.mark.parametrize("steps", [1, 4, 10])
def test_images_and_states_become_lerobots_actions(load, folder, seen, recorded, steps, monkeypatch):
    policy = load(folder, num_steps=steps, num_action_chunks=6, method="flow_ode", value_head=False)
    monkeypatch.setattr(torch, "randn", lambda *shape, **named: recorded["noise"])
    actions = act(policy, seen, ExplorationType.RANDOM)[keys.ACTION]
    torch.testing.assert_close(actions, recorded[f"actions_{steps}steps"], rtol=0, atol=1e-5)


def test_images_prefix_loss_and_gradients_are_lerobots(load, folder, of, seen, recorded):
    policy = load(folder, train_expert_only=False, gradient_checkpointing=False)
    pixels = policy.pixels(seen)
    for number in (0, 1):
        expected = recorded[f"prepared_image_{number}_strided"]
        torch.testing.assert_close(pixels[:, number, :, ::7, ::7], expected, rtol=0, atol=1e-5)
    valid = recorded["token_mask"]
    embeddings, seen_by_all = policy.model.embed_prefix(pixels, recorded["tokens"], valid)
    empty = recorded["prefix_pad_mask"].shape[1] - seen_by_all.shape[1]  # a camera that is masked, before the words
    whole = torch.cat([embeddings[:, : -valid.shape[1]], torch.full((2, empty, 48), torch.nan)], dim=1)
    whole = torch.cat([whole, embeddings[:, -valid.shape[1] :]], dim=1)[:, ::8]
    known = ~whole.isnan()
    torch.testing.assert_close(whole[known], recorded["prefix_embs_strided"][known], rtol=0, atol=1e-5)
    seen[keys.PROMPT_TOKENS] = recorded["tokens"]
    real, time = recorded["action"].shape[-1], recorded["time"].view(-1, 1, 1)
    actions = torch.nn.functional.pad(policy.to_model(recorded["action"], seen[keys.STATES]), (0, 10 - real))
    noisy = time * recorded["noise"] + (1 - time) * actions
    with sdpa_kernel(SDPBackend.MATH):
        speed, _ = policy.velocity(policy.observe(seen), noisy, recorded["time"])
    loss = (recorded["noise"] - actions - speed).square()
    torch.testing.assert_close(loss, recorded["loss_elementwise"], rtol=1e-5, atol=2e-5)
    mean = loss[..., :real].mean()
    torch.testing.assert_close(mean, recorded["loss"], rtol=1e-5, atol=1e-5)
    mean.backward()
    norms = {f"model.{key}": p.grad.norm().item() for key, p in policy.model.named_parameters() if p.grad is not None}
    expected = json.loads((of / "grad_norms.json").read_text())
    compared = {key: norm for key, norm in expected.items() if norm is not None and norm >= 1e-5}
    for key, norm in compared.items():
        assert norms[key] == pytest.approx(norm, rel=1e-5, abs=1e-7 * max(compared.values())), key
    assert len(compared) > 40


@pytest.mark.parametrize("stored", ["both", "lm_head", "embed_tokens"])
def test_what_is_saved_has_lerobots_layout_and_acts_the_same(load, folder, seen, recorded, stored, tmp_path):
    weights = load_file(folder / "model.safetensors")
    if stored != "both":
        weights.pop(f"model.{EMBEDDINGS if stored == 'lm_head' else LM_HEAD}")
        save_file(weights, folder / "model.safetensors")
    policy = load(folder, num_steps=2, num_action_chunks=3)
    policy.save_pretrained(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    if stored != "lm_head":  # which LeRobot asks for, and reads the embeddings from where it comes last
        weights[f"model.{LM_HEAD}"] = weights[f"model.{EMBEDDINGS}"]
    assert saved.keys() == weights.keys()
    assert all(torch.equal(saved[key].float(), tensor.float()) for key, tensor in weights.items())
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert (config["n_action_steps"], config["num_inference_steps"]) == (3, 2)
    assert find_policy_class(tmp_path / "saved") is LeRobotPi0
    again = load_policy(tmp_path / "saved")
    assert again.config == policy.config
    again.prompts = Recorded(recorded["tokens"])
    first, second = (act(one, seen.clone(), ExplorationType.DETERMINISTIC)[keys.ACTION] for one in (policy, again))
    assert torch.equal(first, second)
    report = inspect_policy(tmp_path / "saved")
    assert not report.missing
    assert report.facts["chunk"] == "6 actions, of which 3 are executed"


def test_the_ratio_is_one_and_the_expert_is_trained(load, folder, seen):
    policy = load(folder, num_steps=3)
    stored = act(policy, seen, ExplorationType.RANDOM)
    log_prob, _, value = policy.evaluate_actions(stored)
    assert torch.equal(log_prob, stored[keys.ACTION_LOG_PROB])
    kept = policy.precompute(stored.exclude(keys.IMAGES, keys.WRIST_IMAGES))
    torch.testing.assert_close(policy.evaluate_actions(kept)[0], log_prob, rtol=1e-4, atol=1e-4)
    (log_prob.sum() + value.sum()).backward()
    reached = {n for n, p in policy.named_parameters() if p.grad is not None and p.grad.any()}
    assert any("gemma_expert" in name for name in reached)
    assert not any("paligemma." in name for name in reached)


def test_its_memory_is_that_of_the_parameters(load, folder):
    policy, meta = load(folder), meta_policy(folder, family="pi0_lerobot")
    sizes = [calculate(group_parameters(one, one.stays_float32), MemoryPlan()) for one in (policy, meta)]
    assert sizes[0] == sizes[1]
    assert meta.decision_memory().activations()[0] > 0


def test_another_kind_is_refused(load, folder):
    change_json(folder / "config.json", use_visual_memory=True)
    with pytest.raises(ValueError, match=r"config.json: use_visual_memory is true, only false is supported"):
        load(folder)
    change_json(folder / "config.json", type="act")
    with pytest.raises(ValueError, match=r"is of 'act', config.json must be of 'pi0' or 'pi05'; pass a checkpoint of"):
        load(folder)
