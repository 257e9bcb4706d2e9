"""pi0 in LeRobot's layout: LeRobot's recorded actions, and the folder written again."""

import json

import pytest
import torch
from lerobot_checkpoint import PI0, change_json, golden, make_checkpoint
from openvla_checkpoint import act
from safetensors.torch import load_file, save_file
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

    def __call__(self, texts):
        return golden(PI0)["tokens"]


@pytest.fixture
def folder(tmp_path):
    return make_checkpoint(tmp_path / "checkpoint", PI0)


def load(folder, **settings):
    torch.manual_seed(0)
    policy = LeRobotPi0.from_pretrained(folder, benchmark="libero", **settings)
    policy.prompts = Recorded()
    return policy


@pytest.fixture
def seen():
    recorded, td = golden(PI0), make_example("libero", 2)
    td[keys.IMAGES], td[keys.WRIST_IMAGES] = recorded["image_u8"], recorded["image2_u8"].unsqueeze(1)
    td[keys.STATES] = recorded["state"]
    return td


@torch.no_grad()
@pytest.mark.parametrize("steps", [1, 4, 10])
def test_images_and_states_become_lerobots_actions(folder, seen, steps, monkeypatch):
    recorded = golden(PI0)
    policy = load(folder, num_steps=steps, num_action_chunks=6, method="flow_ode", value_head=False)
    monkeypatch.setattr(torch, "randn", lambda *shape, **named: recorded["noise"])
    actions = act(policy, seen, ExplorationType.RANDOM)[keys.ACTION]
    torch.testing.assert_close(actions, recorded[f"actions_{steps}steps"], rtol=0, atol=1e-5)


def test_images_and_the_loss_are_lerobots(folder, seen):
    recorded, policy = golden(PI0), load(folder)
    pixels = policy.pixels(seen)
    for number in (0, 1):
        expected = recorded[f"prepared_image_{number}_strided"]
        torch.testing.assert_close(pixels[:, number, :, ::7, ::7], expected, rtol=0, atol=1e-5)
    seen[keys.PROMPT_TOKENS] = recorded["tokens"]
    real, time = recorded["action"].shape[-1], recorded["time"].view(-1, 1, 1)
    actions = torch.nn.functional.pad(policy.to_model(recorded["action"], seen[keys.STATES]), (0, 10 - real))
    noisy = time * recorded["noise"] + (1 - time) * actions
    speed, _ = policy.velocity(policy.observe(seen), noisy, recorded["time"])
    loss = (recorded["noise"] - actions - speed).square()
    torch.testing.assert_close(loss, recorded["loss_elementwise"], rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("stored", ["both", "lm_head", "embed_tokens"])
def test_what_is_saved_has_lerobots_layout_and_acts_the_same(folder, seen, stored, tmp_path):
    weights = load_file(folder / "model.safetensors")
    if stored != "both":
        weights.pop(f"model.{EMBEDDINGS if stored == 'lm_head' else LM_HEAD}")
        save_file(weights, folder / "model.safetensors")
    policy = load(folder, num_steps=2, num_action_chunks=3)
    policy.save_pretrained(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert saved.keys() == weights.keys()
    assert all(torch.equal(saved[key].float(), tensor.float()) for key, tensor in weights.items())
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert (config["n_action_steps"], config["num_inference_steps"]) == (3, 2)
    assert find_policy_class(tmp_path / "saved") is LeRobotPi0
    again = load_policy(tmp_path / "saved")
    assert again.config == policy.config
    again.prompts = Recorded()
    first, second = (act(one, seen.clone(), ExplorationType.DETERMINISTIC)[keys.ACTION] for one in (policy, again))
    assert torch.equal(first, second)
    report = inspect_policy(tmp_path / "saved")
    assert not report.missing
    assert report.facts["chunk"] == "6 actions, of which 3 are executed"


def test_the_ratio_is_one_and_the_expert_is_trained(folder, seen):
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


def test_its_memory_is_that_of_the_parameters(folder):
    policy, meta = load(folder), meta_policy(folder, family="pi0_lerobot")
    sizes = [calculate(group_parameters(one, one.stays_float32), MemoryPlan()) for one in (policy, meta)]
    assert sizes[0] == sizes[1]
    assert meta.decision_memory().activations()[0] > 0


def test_pi05_of_lerobot_is_not_read(folder):
    change_json(folder / "config.json", type="pi05")
    with pytest.raises(ValueError, match=r"is a checkpoint of 'pi05'; known are .*pi0_lerobot"):
        find_policy_class(folder)
    with pytest.raises(ValueError, match=r"is of 'pi05', config.json must be of 'pi0'"):
        load(folder)
