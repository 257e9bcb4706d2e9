"""The recipes with flow policies on real Meta-World: SmallFlow, and pi0 and pi0.5 with tiny weights."""

import math

import pytest
import torch
from hydra.core.global_hydra import GlobalHydra
from pi0_checkpoint import make_checkpoint
from running import differing, train
from safetensors.torch import load_file

from vla_policies import load_policy
from vla_policies.tiny import make_tiny

pytest.importorskip("metaworld", reason="Meta-World is not installed: pip install 'vla-torchrl[metaworld]'")
CONFIGS = {"pi0_tiny": "pi0_metaworld", "pi05_tiny": "pi05_metaworld"}
TOY_SFT = ["demonstrations.episodes=2", "cloning.steps=5", "demonstrations.max_steps=150"]


@pytest.fixture(autouse=True)
def hydra():
    yield
    GlobalHydra.instance().clear()


def heads(folder):
    return load_file(folder / "vla_torchrl_heads.safetensors")


@pytest.mark.parametrize(("variant", "method"), [("pi0_tiny", "flow_noise"), ("pi05_tiny", "flow_sde")])
def test_ppo_trains_pi0_saves_it_and_goes_on(variant, method, tmp_path):
    checkpoint = make_checkpoint(tmp_path / "checkpoint", variant)
    chosen = ["policy=pi0", f"policy.config_name={CONFIGS[variant]}", f"policy.method={method}"]
    chosen += ["policy.num_steps=2", "policy.num_action_chunks=2"]
    metrics, first = train("ppo", tmp_path / "first", [*chosen, f"policy.checkpoint={checkpoint}"])
    assert math.isfinite(metrics["train/loss"])
    assert metrics["train/actor/log_ratio_at_start"] < 1e-5
    changed = differing(first, checkpoint)
    assert changed
    assert not any("paligemma." in name for name in changed), "PaliGemma is frozen"
    assert any("gemma_expert" in name for name in changed)
    assert ("noise_network.mlp.0.weight" in heads(first)) == (method == "flow_noise")

    # The folder says everything, so that nothing is repeated.
    _, second = train("ppo", tmp_path / "second", [f"policy.checkpoint={first}"])
    assert differing(second, first)
    assert load_policy(second).config == load_policy(first).config
    before, after = heads(first), heads(second)
    assert any(not torch.equal(before[name], after[name]) for name in before if name.startswith("value_head."))


@pytest.mark.parametrize("method", ["flow_noise", "flow_sde"])
def test_ppo_trains_smolvla_saves_it_and_goes_on(method, tmp_path):
    checkpoint = make_tiny("smolvla_metaworld", tmp_path / "checkpoint")
    chosen = ["policy=smolvla", f"policy.method={method}", "policy.num_steps=2", "policy.num_action_chunks=2"]
    metrics, first = train("ppo", tmp_path / "first", [*chosen, f"policy.checkpoint={checkpoint}"])
    assert math.isfinite(metrics["train/loss"])
    assert metrics["train/actor/log_ratio_at_start"] < 1e-5
    changed = differing(first, checkpoint)
    assert not any(".vlm." in name for name in changed), "the VLM is frozen"
    assert {"model.state_proj.weight", "model.action_in_proj.weight"} <= set(changed)
    assert any("lm_expert" in name for name in changed)
    _, second = train("ppo", tmp_path / "second", [f"policy.checkpoint={first}"])
    assert differing(second, first)
    assert load_policy(second).config == load_policy(first).config


def test_grpo_trains_pi0_with_an_adapter(tmp_path):
    checkpoint = make_checkpoint(tmp_path / "checkpoint", "pi05_tiny")
    chosen = ["policy=pi0", f"policy.config_name={CONFIGS['pi05_tiny']}", "policy.value_head=false"]
    chosen += ["policy.num_steps=2", "policy.num_action_chunks=2", "policy.lora_rank=2"]
    metrics, folder = train("grpo", tmp_path / "run", [*chosen, f"policy.checkpoint={checkpoint}"])
    assert math.isfinite(metrics["train/loss"])
    assert not differing(folder, checkpoint)
    assert (folder / "lora_adapter" / "adapter_model.safetensors").is_file()


def test_the_small_flow_policy_is_cloned_trained_and_loaded(tmp_path):
    metrics, first = train("ppo", tmp_path / "first", ["policy=small_flow", *TOY_SFT])
    assert math.isfinite(metrics["train/loss"])
    assert metrics["train/actor/log_ratio_at_start"] < 1e-5
    _, second = train("ppo", tmp_path / "second", [f"policy.checkpoint={first}"])
    assert differing(second, first)
