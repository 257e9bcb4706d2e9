"""LeRobot's folder: what its processors do with images, words, states and actions, and wrong folders."""

import json
import re

import pytest
import torch
from lerobot_checkpoint import SMOLVLA, change_json, golden, make_checkpoint, make_old
from safetensors.torch import load_file, save_file

from vla_policies.checkpoint.weights import load_weights
from vla_policies.lerobot.policy import LinePrompts
from vla_policies.lerobot.processors import PROCESSORS
from vla_policies.lerobot.statistics import FeatureStatistics
from vla_policies.processing.images import interpolate_with_pad
from vla_policies.smolvla import SmolVLA
from vla_policies.smolvla.policy import SmolVLACheckpoint

OPTIONS = {"family": "smolvla", "num_action_chunks": 3, "num_steps": 4}


@pytest.fixture
def folder(tmp_path):
    return make_checkpoint(tmp_path / "checkpoint")


@pytest.fixture(scope="module")
def recorded():
    return golden()


def read(folder):
    return SmolVLACheckpoint.read(folder)


def test_images(recorded):
    for number, name in enumerate(("image_u8", "image2_u8")):
        found = interpolate_with_pad(recorded[name], (64, 64), centred=False) * 2 - 1
        expected = recorded[f"prepared_image_{number}_strided"]
        torch.testing.assert_close(found[..., ::7, ::7], expected, rtol=0, atol=1e-5)
    same = interpolate_with_pad(recorded["image_u8"], (96, 128), centred=False)
    assert torch.equal(same, recorded["image_u8"].permute(0, 3, 1, 2) / 255)
    inner = interpolate_with_pad(torch.full((1, 8, 4, 3), 255, dtype=torch.uint8), (8, 8), centred=True)
    assert inner[0, 0, 0].tolist() == [0, 0, 1, 1, 1, 1, 0, 0]


def test_tokens(recorded, folder):
    instructions = json.loads((SMOLVLA / "golden.json").read_text())["instructions"]
    found = read(folder)
    prompts = LinePrompts(found.tokenizer, found.max_prompt_length)
    assert found.max_prompt_length == 16
    tokens, length = prompts(instructions), recorded["tokens"].shape[1]
    assert torch.equal(tokens[:, :length], recorded["tokens"])
    assert torch.equal(tokens[:, :length] != prompts.padding, recorded["token_mask"])
    assert (tokens[:, length:] == prompts.padding).all()
    assert torch.equal(prompts([f"{text}\n" for text in instructions]), tokens)
    with pytest.raises(ValueError, match=r"max_prompt_length=16: .* type policy.max_prompt_length=\d+,"):
        prompts(["put the red mug " * 9])
    with pytest.raises(ValueError, match="names no pad_token"):
        LinePrompts({"tokenizer.json": found.tokenizer["tokenizer.json"]}, 16)
    with pytest.raises(ValueError, match=r"tokenizer.json is no tokenizer"):
        LinePrompts({"tokenizer.json": b"nothing"}, 16)


def test_states_and_actions(recorded, folder):
    statistics = read(folder).statistics()
    near = {"rtol": 0, "atol": 1e-5}
    torch.testing.assert_close(statistics.normalize("state", recorded["state"]), recorded["normalized_state"], **near)
    torch.testing.assert_close(
        statistics.normalize("actions", recorded["action"]), recorded["normalized_action"], **near
    )
    for steps in (1, 4, 10):
        found = statistics.unnormalize("actions", recorded[f"sample_{steps}steps"][..., :7])
        torch.testing.assert_close(found, recorded[f"actions_{steps}steps"], **near)


def test_every_mode_of_normalisation():
    tensors = {f"action.{name}": torch.tensor([low, 3.0]) for name, low in (("mean", 1.0), ("std", 2.0))}
    tensors |= {f"action.{name}": torch.tensor([bound, 3.0]) for name, bound in (("q01", -1.0), ("q99", 3.0))}
    values = torch.tensor([[5.0, 3.0]])
    for mode, expected in (("IDENTITY", [5.0, 3.0]), ("MEAN_STD", [2.0, 0.0]), ("QUANTILES", [2.0, -1.0])):
        found = FeatureStatistics.read(tensors, "action", mode, 1e-8, "file")
        torch.testing.assert_close(found.normalize(values), torch.tensor([expected]))
        torch.testing.assert_close(found.unnormalize(found.normalize(values)), values)
    with pytest.raises(ValueError, match=r"file has no statistics action.min and action.max"):
        FeatureStatistics.read(tensors, "action", "MIN_MAX", 1e-8, "file")
    with pytest.raises(ValueError, match="normalises action by 'SQUARES'"):
        FeatureStatistics.read(tensors, "action", "SQUARES", 1e-8, "file")


def test_what_is_written_is_what_was_read(folder, tmp_path):
    checkpoint = SmolVLACheckpoint.read(folder)
    model, entries = checkpoint.empty_model()
    unused = load_weights(model, entries, unused=SmolVLA.unused)
    assert list(unused) == ["vlm_with_expert.vlm.lm_head.weight"]
    copy = tmp_path / "copy"
    files = checkpoint.write(copy, {**model.state_dict(), **unused}, OPTIONS)
    assert {str(file.relative_to(copy)) for file in copy.rglob("*") if file.is_file()} == set(files)
    assert set(files) - {"vla_torchrl.json"} == {str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file()}
    for name in files:
        if name.endswith(".safetensors"):
            found, expected = load_file(copy / name), load_file(folder / name)
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[key].float(), tensor.float()) for key, tensor in expected.items())
        elif name not in ("config.json", "vla_torchrl.json"):
            assert json.loads((copy / name).read_text()) == json.loads((folder / name).read_text())
    expected = {**json.loads((folder / "config.json").read_text()), "n_action_steps": 3, "num_steps": 4}
    assert json.loads((copy / "config.json").read_text()) == expected
    assert SmolVLACheckpoint.read(copy).options == OPTIONS


def test_statistics_are_found_at_any_step(folder):
    name, content = "elsewhere_step_9.safetensors", json.loads((folder / PROCESSORS[0]).read_text())
    step = content["steps"].pop()
    (folder / step["state_file"]).rename(folder / name)
    content["steps"].insert(1, {**step, "state_file": name})
    (folder / PROCESSORS[0]).write_text(json.dumps(content))
    assert len(read(folder).statistics().state.first) == 8


def test_cameras_by_name(folder):
    found = read(folder)
    image, image2 = "observation.images.image", "observation.images.image2"
    assert found.order_cameras([image, image2], chosen=False) == [0, 1]
    assert found.order_cameras([image2, image], chosen=False) == [1, 0]
    assert found.order_cameras([image2], chosen=True) == [0]
    for names, chosen in (([image], False), ([image, "observation.images.top"], True)):
        with pytest.raises(
            ValueError, match=r"cameras=\[.* looks at observation.images.image, observation.*set cameras"
        ):
            found.order_cameras(names, chosen)
    change_json(folder / "config.json", empty_cameras=1)
    assert read(folder).order_cameras([image], chosen=False) == [0]
    content = json.loads((folder / PROCESSORS[0]).read_text())
    content["steps"][0]["config"]["rename_map"] = {"front": image2, "hand": image}
    (folder / PROCESSORS[0]).write_text(json.dumps(content))
    assert read(folder).order_cameras(["front", "hand"], chosen=False) == [1, 0]


def change_step(folder, number, name, **entries):
    content = json.loads((folder / PROCESSORS[number]).read_text())
    for step in content["steps"]:
        if step["registry_name"] == name:
            step.update(entries)
    (folder / PROCESSORS[number]).write_text(json.dumps(content))


def read_all(folder):
    checkpoint = SmolVLACheckpoint.read(folder)
    checkpoint.statistics()
    checkpoint.empty_model()


def spoil(folder, what):
    if what in ("act", "diffusion"):
        change_json(folder / "config.json", type=what)
    elif what == "ours":
        change_json(folder / "config.json", type=None)
    elif what == "no config":
        (folder / "config.json").unlink()
    elif what == "no processors":
        (folder / PROCESSORS[1]).unlink()
    elif what == "no statistics":
        (folder / "policy_preprocessor_step_5_normalizer_processor.safetensors").unlink()
    elif what == "no state file":
        change_step(folder, 0, "normalizer_processor", state_file=None)
    elif what == "no step":
        change_step(folder, 1, "unnormalizer_processor", registry_name="device_processor")
    elif what == "pi05":
        change_step(
            folder, 0, "smolvla_new_line_processor", registry_name="pi05_prepare_state_tokenizer_processor_step"
        )
    elif what == "no line break":
        change_step(folder, 0, "smolvla_new_line_processor", registry_name="device_processor")
    elif what == "truncated":
        content = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(content[: len(content) // 2])
    elif what.startswith("before 0.4"):
        make_old(folder)
        weights = load_file(folder / "model.safetensors")
        if what.endswith("without"):
            del weights["normalize_inputs.buffer_observation_state.std"]
        elif what.endswith("infinite"):  # as LeRobot leaves what it never saw
            weights["unnormalize_outputs.buffer_action.mean"].fill_(torch.inf)
        elif what.endswith("mapping"):
            change_json(folder / "config.json", normalization_mapping=None)
        elif what.endswith("tokenizer"):
            (folder / "tokenizer").rename(folder / "elsewhere")
        save_file(weights, folder / "model.safetensors")
    elif what == "no adapter":
        change_json(folder / "config.json", use_peft=True)
    elif what == "adapter alone":
        (folder / "model.safetensors").unlink()
        (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "lerobot/smolvla_base"}')
    elif what == "tokenizer":
        change_step(folder, 0, "tokenizer_processor", artifacts={}, config={"tokenizer_name": "HuggingFaceTB/SmolVLM2"})
        (folder / "tokenizer").rename(folder / "elsewhere")
    elif what == "relative":
        entries = {"registry_name": "relative_actions_processor", "config": {"enabled": True}}
        change_step(folder, 0, "device_processor", **entries)
    elif what == "images by statistics":
        change_step(folder, 0, "normalizer_processor", config={"norm_map": {"VISUAL": "MEAN_STD"}})
    elif what == "special tokens":
        change_json(folder / "config.json", add_image_special_tokens=True)
    elif what == "VLM":
        (folder / "smolvlm_like" / "config.json").unlink()
    elif what == "image size":
        change_json(folder / "config.json", resize_imgs_with_padding=[32, 32])


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("act", "is of 'act', config.json must be of 'smolvla'; pass a checkpoint of smolvla"),
        ("diffusion", "is of 'diffusion'"),
        ("ours", "is no policy of LeRobot"),
        ("no config", "has no config.json; pass LeRobot's pretrained_model folder"),
        ("no processors", "has no policy_postprocessor.json; copy the whole checkpoint"),
        ("no statistics", "has no policy_preprocessor_step_5_.*, the statistics; copy it"),
        ("no state file", "has no statistics observation.state.mean and observation.state.std; copy them"),
        ("no step", "policy_postprocessor.json has no step unnormalizer_processor, so no statistics; copy it"),
        ("pi05", "has a step 'pi05_prepare_state_tokenizer_processor_step', which is not of smolvla"),
        ("no line break", "has no step smolvla_new_line_processor: it is not of smolvla; copy its own"),
        ("truncated", "is truncated or no safetensors file.*copy it again"),
        ("before 0.4 without", "has no statistics observation.state.std; copy them"),
        ("before 0.4 infinite", "has numbers that are not finite in unnormalize_outputs.buffer_action.mean"),
        ("before 0.4 mapping", "config.json has no normalization_mapping; copy it again"),
        ("before 0.4 tokenizer", "has no tokenizer; .* type: hf download smolvlm_like tokenizer.json"),
        ("no adapter", r"has no adapter_config.json, which config.json asks for \(use_peft\); copy it"),
        ("adapter alone", "is a LoRA adapter without the weights .* model.safetensors of 'lerobot/smolvla_base'"),
        ("tokenizer", "has no tokenizer; .* type: hf download HuggingFaceTB/SmolVLM2 tokenizer.json"),
        ("relative", "makes actions relative to the state, which is not supported"),
        ("images by statistics", "normalises images by statistics, which is not supported"),
        ("special tokens", "add_image_special_tokens is true, only false is supported"),
        ("VLM", "heads of 64 numbers do not fit.*put the config.json of smolvlm_like into .*/smolvlm_like"),
        ("image size", r"resize_imgs_with_padding is \[32, 32\], its VLM needs \[64, 64\]"),
    ],
)
def test_a_wrong_folder_is_one_line(folder, what, message):
    assert SmolVLA.recognises(folder)
    spoil(folder, what)
    with pytest.raises((ValueError, FileNotFoundError)) as refused:
        read_all(folder)
    assert "\n" not in str(refused.value)
    assert re.search(message, str(refused.value)), refused.value
