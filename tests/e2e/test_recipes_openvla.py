"""The recipes with OpenVLA and OpenVLA-OFT: real Meta-World, real checkpoint layout, tiny weights."""

import json
import math
import shutil

import pytest
from hydra.core.global_hydra import GlobalHydra
from openvla_checkpoint import make_checkpoint
from running import TOY, Started, composed, differing, main_of, recipe, train
from safetensors.torch import load_file, save_file

import vla_envs.env
from vla_algos.run.policy import adapt
from vla_policies import OpenVLA, load_policy
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


@pytest.mark.parametrize("name", ["ppo", "grpo"])
@pytest.mark.parametrize("family", ["openvla", "openvla_oft"])
def test_train_whole_then_an_adapter_then_go_on(name, family, checkpoint, tmp_path):
    chosen = [f"policy={family}", f"policy.value_head={str(name == 'ppo').lower()}"]
    if family == "openvla_oft":
        chosen += ["policy.layout=official", "policy.num_action_chunks=2"]
    metrics, whole = train(name, tmp_path / "whole", [*chosen, f"policy.checkpoint={checkpoint}"])
    assert math.isfinite(metrics["train/loss"]) and metrics["train/actor/log_ratio_at_start"] < 1e-5
    changed = differing(whole, checkpoint_with_head(whole, checkpoint))
    for part in ("vision_backbone", "projector", "language_model"):
        assert any(key.startswith(part) for key in changed), f"{part} has not learnt"

    # The folder says family, layout and chunk, so that nothing of it is repeated.
    adapting = [f"policy={family}", f"policy.checkpoint={whole}", "policy.lora_rank=2"]
    metrics, adapted = train(name, tmp_path / "adapted", adapting)
    assert math.isfinite(metrics["train/loss"]) and metrics["train/actor/log_ratio_at_start"] < 1e-5
    assert all(key.startswith("value_head.") for key in differing(adapted, whole))
    policy = load_policy(adapted)
    assert policy.family == family and has_lora(policy)

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
    chosen += ["policy.use_proprio=false", "policy.num_action_chunks=2", "sft.episodes=2", "sft.steps=2"]
    toy = [setting for setting in TOY if setting.startswith(("env.", "eval."))]
    main_of("sft")(composed("sft", [*toy, *chosen, "sft.batch_size=2", "sft.lr=1e-2"], tmp_path / "run"))
    changed = differing(tmp_path / "run" / "policy", checkpoint_with_head(tmp_path / "run" / "policy", folder))
    assert any(name.startswith("language_model") for name in changed)


def test_evaluate_a_published_folder_from_the_command_line(checkpoint, tmp_path):
    toy = [setting for setting in TOY if setting.startswith(("env.", "eval."))]
    ran = recipe("evaluate", tmp_path / "run", *toy, "policy=openvla", f"policy.checkpoint={checkpoint}")
    assert ran.returncode == 0, ran.stderr
    assert "95 % interval" in ran.stdout
    ran = recipe("evaluate", tmp_path / "run", *toy, f"policy.checkpoint={checkpoint}")
    assert ran.returncode != 0 and "policy=openvla" in ran.stderr


def no_checkpoint(folder):
    (folder / "config.json").unlink()


def no_weights(folder):
    (folder / "model.safetensors").unlink()


def missing_shard(folder):
    weights = load_file(folder / "model.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(weights, "model-00001-of-00002.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").unlink()


def truncated(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100_000])


def no_statistics(folder):
    (folder / "dataset_statistics.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    config.pop("norm_stats", None)
    (folder / "config.json").write_text(json.dumps(config))


def two_data_sets(folder):
    file = folder / "dataset_statistics.json"
    statistics = json.loads(file.read_text())
    (only,) = statistics.values()
    file.write_text(json.dumps({"first_data": only, "second_data": only}))


def untouched(folder):
    pass


@pytest.mark.parametrize(
    ("name", "spoil", "overrides", "message"),
    [
        ("ppo", no_checkpoint, [], "has no config.json"),
        ("ppo", no_weights, [], "has no weights"),
        ("ppo", missing_shard, [], "lacks 1 of 1 shards"),
        ("ppo", truncated, [], "truncated or no safetensors file"),
        ("ppo", no_statistics, [], "dataset_statistics.json"),
        ("ppo", two_data_sets, [], "first_data.*second_data"),
        ("ppo", untouched, ["policy.unnorm_key=bridge"], "golden_ds"),
        ("ppo", untouched, ["policy.action_dim=14"], "action_dim is 14"),
        ("ppo", untouched, ["policy.dtype=fp16"], "float16"),
        ("ppo", untouched, ["policy.max_prompt_length=3"], "3 tokens"),
        ("ppo", untouched, ["policy.temperature=0"], "temperature"),
        ("ppo", untouched, ["policy.lora_alpha=8"], "need policy.lora_rank"),
        ("ppo", untouched, ["policy.lora_rank=2", "policy.lora_targets=[query]"], "no layer is called"),
        ("ppo", untouched, ["policy.lora_adapter=/nowhere"], "not a LoRA adapter"),
        ("grpo", untouched, ["policy=openvla_oft"], "layout='rlinf'"),
        ("grpo", untouched, ["policy=openvla_oft", "policy.layout=rlinf", "policy.num_images_in_input=2"], "cameras"),
        ("grpo", untouched, ["policy=openvla_oft", "policy.layout=rlinf", "policy.use_proprio=true"], "8 numbers"),
        ("grpo", untouched, ["policy=openvla_oft", "policy.layout=rlinf", "policy.use_film=true"], "vision_backbone--"),
    ],
)
def test_bad_input_is_one_clear_error_before_a_simulator_starts(
    name, spoil, overrides, message, checkpoint, tmp_path, monkeypatch
):
    def stop(*_, **__):
        raise Started

    monkeypatch.setattr(vla_envs.env, "VLAEnv", stop)
    folder = shutil.copytree(checkpoint, tmp_path / "checkpoint")
    spoil(folder)
    family = [] if any(override.startswith("policy=") for override in overrides) else ["policy=openvla"]
    config = composed(name, [*family, *overrides, f"policy.checkpoint={folder}"], tmp_path / "run")
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        main_of(name)(config)


def test_a_continuous_head_has_no_log_probability_to_train(tmp_path, monkeypatch):
    monkeypatch.setattr(vla_envs.env, "VLAEnv", None)
    folder = make_checkpoint(tmp_path / "checkpoint", heads=True)
    chosen = ["policy=openvla_oft", f"policy.checkpoint={folder}", "policy.use_proprio=false"]
    with pytest.raises(ValueError, match="recipes/sft.py"):
        main_of("ppo")(composed("ppo", chosen, tmp_path / "run"))


def test_another_adapter_than_that_of_the_checkpoint_is_refused(checkpoint):
    policy = OpenVLA.from_pretrained(checkpoint, benchmark="metaworld")
    adapt(policy, 2, targets=["q_proj", "v_proj"])
    adapt(policy, 2)
    adapt(policy, 2, 2, ["v_proj", "q_proj"])
    for other in ((4,), (2, 8), (2, None, ["q_proj"])):
        with pytest.raises(ValueError, match="rank 2 and alpha 2 on \\['q_proj', 'v_proj'\\]"):
            adapt(policy, *other)
