"""LeRobot loads what is saved here and acts as we do: its actions, recorded by tests/cross/lerobot_actions.py."""

import importlib.util
import json
import shutil

import numpy as np
import pytest
import torch
from lerobot_checkpoint import GOLDEN, change_json, golden, make_checkpoint, make_old, save_trained
from openvla_checkpoint import act
from paths import ROOT
from safetensors.torch import load_file, save_file
from tensordict import NonTensorData, NonTensorStack
from torchrl.envs.utils import ExplorationType

from vla_common import keys
from vla_policies import load_policy, make_example
from vla_policies.checkpoint.lora import has_lora, merge_adapter
from vla_policies.processing.prompts import list_states
from vla_policies.registry import inspect_policy, meta_policy

CROSS = ROOT / "tests" / "cross" / "lerobot_actions.py"
SPEC = importlib.util.spec_from_file_location("lerobot_actions", CROSS)
cross = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(cross)
SAID = json.loads(CROSS.with_suffix(".json").read_text())
TIME = {f"time_mlp_{part}": f"action_time_mlp_{part}" for part in ("in.weight", "in.bias", "out.weight", "out.bias")}


@pytest.fixture(params=cross.KINDS)
def kind(request):
    return request.param


@pytest.fixture
def lerobots(kind):
    with np.load(cross.RECORDED) as stored:
        return {name: torch.from_numpy(stored[name]) for name in stored.files if name.startswith(f"{kind}_")}


@pytest.fixture
def decide(kind, monkeypatch):
    """What a policy makes of the recorded images, words, states and noise."""
    of = GOLDEN / f"lerobot_{kind}_tiny"
    recorded, td = golden(of), make_example("libero", 2)
    td[keys.IMAGES], td[keys.WRIST_IMAGES] = recorded["image_u8"], recorded["image2_u8"].unsqueeze(1)
    td[keys.STATES] = recorded["state"]
    texts = json.loads((of / "golden.json").read_text())["instructions"]
    td.set(keys.TASK_DESCRIPTIONS, NonTensorStack(*map(NonTensorData, texts)))

    @torch.no_grad()
    def decide(policy):
        monkeypatch.setattr(torch, "randn", lambda *shape, **named: recorded["noise"])
        found = act(policy, td.clone(), ExplorationType.RANDOM)
        monkeypatch.undo()
        return found

    return decide


def assert_acts(found, actions):
    torch.testing.assert_close(found[keys.ACTION], actions[:, :3], rtol=0, atol=1e-5)


@pytest.mark.parametrize("layout", ["", "_old"])
def test_lerobot_loads_what_is_saved_and_acts_the_same(kind, layout, lerobots, decide, tmp_path):
    name = f"{kind}{layout}"
    policy = save_trained(tmp_path / name, kind, old=bool(layout))
    assert cross.digests(tmp_path / name) == SAID[name]  # these files it was that LeRobot loaded
    found, tokens = decide(policy), lerobots[f"{name}_tokens"]
    assert torch.equal(found[keys.PROMPT_TOKENS][:, : tokens.shape[1]], tokens)
    assert_acts(found, lerobots[f"{name}_actions"])


def test_prompts_of_pi05_are_lerobots():
    texts, states = cross.PROMPTED
    assert list_states(texts, torch.tensor(states)) == SAID["prompts"]


def test_an_adapter_of_lerobot_beside_its_weights(kind, lerobots, decide, tmp_path):
    base, folder, adapter = tmp_path / kind, tmp_path / "adapted", CROSS.with_name(f"lerobot_lora_{kind}")
    save_trained(base, kind)
    beside = load_policy(base, lora_adapter=adapter)
    shutil.copytree(base, folder)
    (folder / "SHA256SUMS").unlink()
    shutil.copytree(adapter, folder, dirs_exist_ok=True)
    change_json(folder / "config.json", use_peft=True)
    policy = load_policy(folder)
    assert has_lora(policy)
    assert meta_policy(folder, family=policy.family).config.lora_rank == 2
    assert inspect_policy(folder).facts["LoRA adapter"] == "yes"
    for one in (policy, beside):
        assert_acts(decide(one), lerobots[f"{kind}_lora_actions"])
    policy.save_pretrained(tmp_path / "again")
    assert_acts(decide(load_policy(tmp_path / "again")), lerobots[f"{kind}_lora_actions"])
    merge_adapter(policy)
    policy.save_pretrained(tmp_path / "merged")
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["use_peft"] is False
    merged = load_policy(tmp_path / "merged")
    assert not has_lora(merged)
    assert_acts(decide(merged), lerobots[f"{kind}_lora_actions"])


def test_layers_of_an_adapter_have_their_own_rank_and_scale(tmp_path):
    adapter = shutil.copytree(CROSS.with_name("lerobot_lora_smolvla"), tmp_path / "adapter")
    layer = "model.vlm_with_expert.lm_expert.layers.0.self_attn.q_proj"
    change_json(adapter / "adapter_config.json", alpha_pattern={layer: 64}, rank_pattern={layer: 1})
    weights = load_file(adapter / "adapter_model.safetensors")
    for name in [name for name in weights if layer in name]:
        weights[name] = weights[name].narrow(0 if "lora_A" in name else 1, 0, 1).contiguous()
    save_file(weights, adapter / "adapter_model.safetensors")
    base = make_checkpoint(tmp_path / "base", GOLDEN / "lerobot_smolvla_tiny")
    policy = load_policy(base, benchmark="libero", lora_adapter=adapter)
    scales = {name: each.scaling["default"] for name, each in policy.model.named_modules() if hasattr(each, "scaling")}
    assert scales.pop(layer.removeprefix("model.")) == 64
    assert set(scales.values()) == {4.0}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_dora": True}, "is not a plain LoRA adapter; DoRA, PiSSA and other kinds are refused"),
        (
            {"init_lora_weights": "pissa_niter_4"},
            "is not a plain LoRA adapter; DoRA, PiSSA and other kinds are refused",
        ),
        ("statistics", "copy the base's weights and tokenizer to it and load"),
        ({"modules_to_save": None}, r"adapts layers that this model does not have: \['state_proj\.bias', 'state_proj"),
        ({"modules_to_save": ["state_proj", "action_head"], "r": 3}, r"the rank is \[3\], that of the weights \[2\]"),
        ({"base_model_name_or_path": "../../elsewhere", "auto_mapping": {"base_model_class": "Evil"}}, None),
        ("pi0", "adapts layers that this model does not have"),
        ("half", "is truncated or no safetensors file"),
    ],
)
def test_a_wrong_adapter_is_one_line(change, message, tmp_path):
    of = change if change == "pi0" else "smolvla"
    adapter = shutil.copytree(CROSS.with_name(f"lerobot_lora_{of}"), tmp_path / "adapter")
    if isinstance(change, dict):
        change_json(adapter / "adapter_config.json", **change)
    elif change == "half":
        content = (adapter / "adapter_model.safetensors").read_bytes()
        (adapter / "adapter_model.safetensors").write_bytes(content[: len(content) // 2])
    base = make_checkpoint(tmp_path / "base", GOLDEN / "lerobot_smolvla_tiny")
    if change == "statistics":
        for file in base.glob("policy_*.safetensors"):
            found = {name: 2 * each for name, each in load_file(file).items()}
            save_file(found, adapter / file.name)
    if message is None:  # what its files name is neither opened nor imported
        load_policy(base, benchmark="libero", lora_adapter=adapter)
        return
    with pytest.raises(ValueError, match=message) as refused:
        load_policy(base, benchmark="libero", lora_adapter=adapter)
    assert "\n" not in str(refused.value)


def test_a_folder_of_before_0_4_acts_the_same_and_is_saved_as_one_of_today(kind, decide, tmp_path):
    settings = {"benchmark": "libero", "method": "flow_ode", "value_head": False, "num_steps": 2}
    new, old = (make_checkpoint(tmp_path / name, GOLDEN / f"lerobot_{kind}_tiny") for name in ("new", "old"))
    for folder in (new, old):
        change_json(folder / "config.json", tokenizer_max_length=256)
    step = json.loads((new / "policy_preprocessor.json").read_text())
    next(each for each in step["steps"] if each["registry_name"] == "tokenizer_processor")["config"]["max_length"] = 256
    (new / "policy_preprocessor.json").write_text(json.dumps(step))
    weights = load_file(make_old(old) / "model.safetensors")
    if kind == "pi05":
        weights = {TIME.get(key, key): tensor for key, tensor in weights.items()}
        weights["state_proj.weight"] = torch.zeros(32, 12)  # of pi0
        save_file(weights, old / "model.safetensors")
    policy, expected = load_policy(old, **settings), decide(load_policy(new, **settings))
    assert torch.equal(decide(policy)[keys.ACTION], expected[keys.ACTION])
    policy.save_pretrained(tmp_path / "saved")
    saved, published = (load_file(folder / "model.safetensors") for folder in (tmp_path / "saved", new))
    assert saved.keys() == published.keys()
    assert torch.equal(decide(load_policy(tmp_path / "saved"))[keys.ACTION], expected[keys.ACTION])
