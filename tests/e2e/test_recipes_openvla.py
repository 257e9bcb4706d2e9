"""The recipes with OpenVLA and OpenVLA-OFT: real Meta-World, real checkpoint layout, tiny weights."""

import math

import pytest
from hydra.core.global_hydra import GlobalHydra
from openvla_checkpoint import make_checkpoint
from running import TOY, composed, differing, main_of, recipe, train
from safetensors.torch import load_file, save_file

from vla_policies import load_policy
from vla_policies.checkpoint.lora import has_lora

pytest.importorskip("metaworld", reason="Meta-World is not installed: pip install 'vla-torchrl[metaworld]'")
ADAPTER = "lora_adapter/adapter_model.safetensors"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("openvla"))


@pytest.fixture(autouse=True)
def hydra():
    yield
    GlobalHydra.instance().clear()


@pytest.mark.parametrize(("name", "family"), [("ppo", "openvla"), ("grpo", "openvla_oft")])
def test_train_whole_then_an_adapter_then_go_on(name, family, checkpoint, tmp_path):
    chosen = [f"policy={family}", f"policy.value_head={str(name == 'ppo').lower()}"]
    if family == "openvla_oft":
        chosen += ["policy.layout=official", "policy.num_action_chunks=2"]
    metrics, whole = train(name, tmp_path / "whole", [*chosen, f"policy.checkpoint={checkpoint}"])
    assert math.isfinite(metrics["train/loss"])
    assert metrics["train/actor/log_ratio_at_start"] < 1e-5
    changed = differing(whole, checkpoint_with_head(whole, checkpoint))
    for part in ("vision_backbone", "projector", "language_model"):
        assert any(key.startswith(part) for key in changed), f"{part} has not learnt"

    # The folder says family, layout and chunk, so that nothing of it is repeated.
    adapting = [f"policy={family}", f"policy.checkpoint={whole}", "policy.lora_rank=2"]
    metrics, adapted = train(name, tmp_path / "adapted", adapting)
    assert math.isfinite(metrics["train/loss"])
    assert metrics["train/actor/log_ratio_at_start"] < 1e-5
    assert all(key.startswith("value_head.") for key in differing(adapted, whole))
    policy = load_policy(adapted)
    assert policy.family == family
    assert has_lora(policy)

    _, further = train(name, tmp_path / "further", [f"policy.checkpoint={adapted}"])
    assert all(key.startswith("value_head.") for key in differing(further, whole))
    assert differing(further, adapted, ADAPTER)


def checkpoint_with_head(trained, checkpoint):
    """A folder of the original weights with the value head of ``trained``, which they lack."""
    folder = trained.parent / "original"
    folder.mkdir()
    weights, others = load_file(trained / "model.safetensors"), load_file(checkpoint / "model.safetensors")
    heads = {name: tensor for name, tensor in weights.items() if name.startswith("value_head.")}
    save_file(
        {**{name: tensor.to(weights[name].dtype) for name, tensor in others.items()}, **heads},
        folder / "model.safetensors",
    )
    return folder


@pytest.mark.parametrize("head", ["tokens", "l1"])
def test_supervised_training_on_demonstrations(head, tmp_path):
    folder = make_checkpoint(tmp_path / "checkpoint", heads=True)
    chosen = ["policy=openvla_oft", f"policy.checkpoint={folder}", "policy.layout=official", f"policy.head={head}"]
    chosen += ["policy.use_proprio=false", "policy.num_action_chunks=2", "demonstrations.episodes=2", "cloning.steps=2"]
    toy = [setting for setting in TOY if setting.startswith(("env.", "eval."))]
    main_of("sft")(composed("sft", [*toy, *chosen, "cloning.batch_size=2", "cloning.lr=1e-2"], tmp_path / "run"))
    changed = differing(tmp_path / "run" / "policy", checkpoint_with_head(tmp_path / "run" / "policy", folder))
    assert any(name.startswith("language_model") for name in changed)


def test_evaluate_a_published_folder_from_the_command_line(checkpoint, tmp_path):
    toy = [setting for setting in TOY if setting.startswith(("env.", "eval."))]
    ran = recipe("evaluate", tmp_path / "run", *toy, "policy=openvla", f"policy.checkpoint={checkpoint}")
    assert ran.returncode == 0, ran.stderr
    assert "95 % interval" in ran.stdout
    ran = recipe("evaluate", tmp_path / "other", *toy, f"policy.checkpoint={checkpoint}")
    assert ran.returncode == 2
    assert "policy=openvla" in ran.stderr
