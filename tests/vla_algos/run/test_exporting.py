"""``vla-recipe export``: pi0 from LeRobot's layout into openpi's and back acts the same."""

import json
import re

import lerobot_checkpoint
import pi0_checkpoint
import pytest
import torch
from openvla_checkpoint import act
from paligemma_tokenizer import as_tokenizer_json
from safetensors.torch import load_file
from torch import nn
from torchrl.envs.utils import ExplorationType

from recipes.__main__ import main
from vla_common import keys
from vla_common.checksums import verify_checksums
from vla_policies import Pi0, load_policy, make_example
from vla_policies.checkpoint.lora import add_lora, has_lora
from vla_policies.pi0 import LeRobotPi0, checkpoint
from vla_policies.registry import policies, register_policy
from vla_policies.tiny import make_tiny

if "pi0_lerobot" not in policies:  # of a checkout that was not installed again
    register_policy("pi0_lerobot", LeRobotPi0)
LIBERO, METAWORLD = "policy.benchmark=libero", "policy.benchmark=metaworld"
VARIANT = "policy.config_name=pi0_metaworld"
EPSILON = 1e-6  # openpi's


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """A tokenizer as LeRobot has it, of the words of the folder in openpi's layout."""
    return as_tokenizer_json(pi0_checkpoint.TOKENIZER, tmp_path_factory.mktemp("words") / "tokenizer")


def make_lerobot(folder, words, of=lerobot_checkpoint.PI0):
    lerobot_checkpoint.make_checkpoint(folder, of)
    for file in words.iterdir():
        (folder / "tokenizer" / file.name).write_bytes(file.read_bytes())
    return folder


@pytest.fixture
def lerobot(tmp_path, words):
    return make_lerobot(tmp_path / "lerobot", words)


@pytest.fixture
def openpi(tmp_path):
    return pi0_checkpoint.make_checkpoint(tmp_path / "openpi")


def export(*typed):
    assert main(["export", *map(str, typed)]) == 0


def seen(benchmark):
    """Images of the size that the network sees, and states that are not zero."""
    td, generator = make_example(benchmark, 2), torch.Generator().manual_seed(3)
    for key in {keys.IMAGES, keys.WRIST_IMAGES} & set(td.keys()):
        shape = (*td[key].shape[:-3], 224, 224, 3)
        td[key] = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    td[keys.STATES] = torch.randn(td[keys.STATES].shape, generator=generator)
    return td


@torch.no_grad()
def difference(first, second, benchmark):
    """Largest difference of two policies' sampled actions, and of their values."""
    found = []
    for policy in (first, second):
        torch.manual_seed(4)
        found.append(act(policy, seen(benchmark), ExplorationType.RANDOM))
    assert found[0][keys.ACTION].abs().max() > 0.1
    torch.testing.assert_close(found[0]["state_value"], found[1]["state_value"], rtol=1e-4, atol=1e-4)
    return (found[0][keys.ACTION] - found[1][keys.ACTION]).abs().max().item()


@pytest.mark.parametrize("of", [lerobot_checkpoint.PI0, lerobot_checkpoint.PI05])
def test_from_lerobots_layout_and_back(of, openpi, words, tmp_path, capsys, monkeypatch):
    lerobot, new, back = make_lerobot(tmp_path / "lerobot", words, of), tmp_path / "new", tmp_path / "back"
    longer = "policy.max_prompt_length=100"  # pi0.5 lists the state
    export(lerobot, "--layout", "openpi", "--tokenizer", openpi, "--to", new, "--settings", LIBERO, longer)
    said = capsys.readouterr().out
    assert f"exported {lerobot} into {new}, of the family pi0" in said
    assert "openpi adds 1e-06 to deviations" in said
    assert "action_horizon=6, no delta actions, asset_id='libero'" in said
    verify_checksums(new)
    export(new, "--layout", "lerobot", "--tokenizer", words, "--to", back)
    before, after = (load_file(folder / "model.safetensors") for folder in (lerobot, back))
    embeddings, head = (f"model.{name}" for name in (checkpoint.EMBEDDINGS, checkpoint.LM_HEAD))
    before[head] = before.pop(embeddings, before[head])  # stored twice in one, and differ
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name].float(), tensor.float()) for name, tensor in after.items())
    assert "value_head.0.weight" in load_file(back / "vla_torchrl_heads.safetensors")
    first, second, third = (load_policy(folder) for folder in (back, new, back))
    assert isinstance(second, Pi0)
    assert (second.preset.relative, second.config.num_images_in_input, second.horizon) == ((), 2, 6)
    assert difference(first, third, "libero") == 0
    assert difference(first, second, "libero") < 100 * EPSILON
    monkeypatch.setattr(LeRobotPi0, "summed_times", True)  # of the steps: openpi adds them up, LeRobot multiplies
    apart = difference(first, second, "libero")
    monkeypatch.setattr(checkpoint, "_EPSILON", 0)
    rest = difference(first, second, "libero")
    print(f"actions differ by {apart:.1e}, without openpi's epsilon by {rest:.1e}")
    assert rest < EPSILON
    assert rest < apart < 10 * EPSILON


def test_from_openpis_layout(openpi, words, tmp_path):
    export(openpi, "--layout", "lerobot", "--tokenizer", words, "--settings", METAWORLD, VARIANT)
    second = load_policy(tmp_path / "openpi-lerobot")
    assert isinstance(second, LeRobotPi0)
    config = json.loads((tmp_path / "openpi-lerobot" / "config.json").read_text())
    assert (config["type"], config["chunk_size"], config["n_action_steps"]) == ("pi0", 6, 5)
    assert config["input_features"].keys() == {"observation.image", "observation.state"}
    assert config["output_features"] == {"action": {"type": "ACTION", "shape": [4]}}
    first = Pi0.from_pretrained(openpi, benchmark="metaworld", config_name="pi0_metaworld")
    first.value_head.load_state_dict(second.value_head.state_dict())
    assert 0 < difference(first, second, "metaworld") < 100 * EPSILON


def test_an_adapter_is_merged_and_heads_stay(openpi, words, tmp_path):
    settings = {"benchmark": "metaworld", "config_name": "pi0_metaworld", "method": "flow_noise"}
    policy = Pi0.from_pretrained(openpi, **settings)
    add_lora(policy, 4)
    generator = torch.Generator().manual_seed(7)
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.05, generator=generator)
    policy.save_pretrained(tmp_path / "run" / "policy")
    export(tmp_path / "run", "--layout", "lerobot", "--tokenizer", words)
    found = load_policy(tmp_path / "run" / "policy-lerobot")
    assert not has_lora(found)
    assert difference(policy, found, "metaworld") < 100 * EPSILON
    assert not (tmp_path / "run" / "policy-lerobot" / "lora_adapter").exists()


def test_only_what_is_read_is_written_and_never_through_a_link(openpi, words, tmp_path):
    (openpi / "modeling.py").write_text("raise SystemExit")
    (words / "more.json").write_text("{}")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "new").symlink_to(elsewhere)
    export(
        openpi, "--layout", "lerobot", "--tokenizer", words, "--to", tmp_path / "new", "--settings", METAWORLD, VARIANT
    )
    (words / "more.json").unlink()
    assert not any(elsewhere.iterdir())
    written = {path.name for path in (tmp_path / "new").rglob("*")}
    assert "tokenizer.json" in written
    assert not {"modeling.py", "more.json"} & written


def refused(capsys, *typed):
    assert main(["export", *map(str, typed)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line.removeprefix("error: ")


def test_what_has_no_counterpart_is_one_line(lerobot, openpi, words, tmp_path, capsys):
    to_lerobot = (openpi, "--layout", "lerobot", "--tokenizer", words, "--settings")
    to_openpi = (lerobot, "--layout", "openpi", "--tokenizer", openpi, "--settings", LIBERO)
    smolvla = make_tiny("smolvla", tmp_path / "smolvla")
    pi05 = pi0_checkpoint.make_checkpoint(tmp_path / "pi05", "pi05_tiny")
    others = make_tiny("pi0", tmp_path / "others")
    for typed, message in {
        (smolvla, "--layout", "openpi"): "smolvla has one layout; those of pi0 and pi0.5 are exported",
        (smolvla, "--layout", "lerobot"): "smolvla has one layout",
        (openpi, "--layout", "openpi"): "pi0 has openpi's layout already; there is nothing to export",
        (openpi, "--layout", "lerobot", "--settings", METAWORLD): "does not say its config_name; set config_name",
        (*to_lerobot, "policy.config_name=pi0_libero", LIBERO): "actions of pi0_libero are relative to the state",
        (*to_lerobot, "policy.config_name=pi0_calvin", "policy.benchmark=calvin"): "cameras of calvin are not known",
        (*to_lerobot, "benchmark"): "'benchmark' is no setting of a policy",
        (
            pi05,
            *to_lerobot[1:],
            METAWORLD,
            "policy.config_name=pi05_metaworld",
        ): "prompts of this pi0.5 do not list the state",
        (
            openpi,
            "--layout",
            "lerobot",
            "--settings",
            METAWORLD,
            VARIANT,
        ): "no tokenizer.json and .* add --tokenizer NEW",
        (lerobot, "--layout", "openpi", "--settings", LIBERO): "no tokenizer.model, PaliGemma's tokenizer",
        (*to_openpi[:4], others, *to_openpi[5:]): "others has another tokenizer: 'put",
        (
            *to_openpi,
            'policy.cameras=["observation.images.image2","observation.images.image"]',
        ): "looks at a wrist camera first",
        (*to_openpi, "policy.num_action_chunks=7"): "num_action_chunks is 7, must be 1 to 6",
        (tmp_path / "none", "--layout", "openpi"): "no such folder",
    }.items():
        line = refused(capsys, *typed, "--to", tmp_path / "new")
        assert re.search(message, line), line
        assert not (tmp_path / "new").exists()
    assert "is there already; type another folder: --to NEW" in refused(capsys, *to_openpi[:5], "--to", openpi)
    for number, name in ((0, "STATE"), (1, "ACTION")):
        file = lerobot / ("policy_preprocessor.json", "policy_postprocessor.json")[number]
        file.write_text(file.read_text().replace(f'"{name}": "MEAN_STD"', f'"{name}": "MIN_MAX"'))
    assert "normalises by MIN_MAX; openpi's pi0 by MEAN_STD" in refused(capsys, *to_openpi, "--to", tmp_path / "new")
