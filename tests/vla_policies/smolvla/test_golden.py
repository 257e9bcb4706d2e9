"""SmolVLA's network: recorded outputs of LeRobot on tiny random weights, and the published sizes."""

import json

import pytest
import torch
from closeness import assert_near, through
from lerobot_checkpoint import SMOLVLA, golden, prepare
from paths import GOLDEN
from safetensors.torch import load_file
from torch.nn.attention import SDPBackend, sdpa_kernel

from vla_policies.flow.steps import euler, times
from vla_policies.smolvla.model import SmolVLAModel, SmolVLAModelConfig

UNUSED = "vlm_with_expert.vlm.lm_head.weight"


@pytest.fixture(scope="module")
def model():
    weights = {key.removeprefix("model."): w.float() for key, w in load_file(SMOLVLA / "model.safetensors").items()}
    del weights[UNUSED]
    vlm = json.loads((SMOLVLA / "smolvlm_like" / "config.json").read_text())
    model = SmolVLAModel(SmolVLAModelConfig.from_shapes({key: tuple(w.shape) for key, w in weights.items()}, vlm))
    model.load_state_dict(weights)
    return model


@pytest.fixture(scope="module")
def recorded():
    return golden()


def inputs(recorded):
    pixels = torch.stack([prepare(recorded[name], 64) for name in ("image_u8", "image2_u8")], dim=1)
    return pixels, recorded["tokens"], recorded["token_mask"]


def whole_prefix(model, recorded):
    return model.add_state(model.prefix(*inputs(recorded)), recorded["prepared_state"])


@torch.no_grad()
def test_prefix(model, recorded):
    embeddings, valid = model.embed_prefix(*inputs(recorded))
    whole = torch.cat([embeddings, model.embed_state(recorded["prepared_state"])], dim=1)
    assert_near(whole[:, ::8], recorded["prefix_embs_strided"], through(model.vlm))
    prefix = whole_prefix(model, recorded)
    assert torch.equal(prefix.valid, recorded["prefix_pad_mask"])
    assert torch.equal(valid, prefix.valid[:, :-1])


@torch.no_grad()
@pytest.mark.parametrize("steps", [1, 4, 10])
def test_samples(model, recorded, steps):
    prefix, schedule, x = whole_prefix(model, recorded), times(steps, summed=False), recorded["noise"]
    for number in range(steps):
        now, then = schedule[number].expand(2), schedule[number + 1].expand(2)
        x = euler(x, model.velocity(prefix, x, now)[0], now, then)
    torch.testing.assert_close(x, recorded[f"sample_{steps}steps"], rtol=0, atol=1e-5)


def test_loss_and_gradients(model, recorded):
    time, real = recorded["time"].view(-1, 1, 1), recorded["action"].shape[-1]
    actions = torch.nn.functional.pad(recorded["normalized_action"], (0, model.config.action_dim - real))
    model.zero_grad()
    with sdpa_kernel(SDPBackend.MATH):
        speed, _ = model.velocity(
            whole_prefix(model, recorded), time * recorded["noise"] + (1 - time) * actions, recorded["time"]
        )
    loss = (recorded["noise"] - actions - speed).square()
    torch.testing.assert_close(loss, recorded["loss_elementwise"], rtol=1e-5, atol=1e-5)
    mean = loss[..., :real].mean()
    torch.testing.assert_close(mean, recorded["loss"], rtol=1e-5, atol=1e-5)
    mean.backward()
    expected = json.loads((SMOLVLA / "grad_norms.json").read_text())
    norms = {f"model.{key}": p.grad.norm().item() for key, p in model.named_parameters() if p.grad is not None}
    compared = {key: norm for key, norm in expected.items() if norm is not None and norm >= 1e-5}
    largest = max(compared.values())
    for key, norm in compared.items():
        assert norms[key] == pytest.approx(norm, rel=1e-5, abs=1e-7 * largest), key
    assert len(compared) > 40
    assert {key.split(".")[1] for key in compared} >= {"state_proj", "action_in_proj", "vlm_with_expert"}


@torch.no_grad()
def test_what_sees_what(model, recorded):
    """The last action changes no other, a padded word nothing, the state what comes after it."""
    prefix, noisy, time = whole_prefix(model, recorded), recorded["noise"], recorded["time"]
    before = model.velocity(prefix, noisy, time)[0]
    changed = noisy.clone()
    changed[:, -1] += 1
    after = model.velocity(prefix, changed, time)[0]
    assert torch.equal(after[:, :-1], before[:, :-1])
    assert not torch.equal(after[:, -1], before[:, -1])
    words = {**recorded, "tokens": recorded["tokens"].masked_fill(~recorded["token_mask"], 7)}
    assert torch.equal(model.velocity(whole_prefix(model, words), noisy, time)[0], before)
    moved = {**recorded, "prepared_state": recorded["prepared_state"] + 1}
    assert not torch.equal(model.velocity(whole_prefix(model, moved), noisy, time)[0], before)


def test_the_full_size_layout_fits():
    layout = json.loads((GOLDEN / "smolvla_full_layout.json").read_text())
    shapes = {key.removeprefix("model."): tuple(shape) for key, shape in layout.items()}
    with torch.device("meta"):
        model = SmolVLAModel(SmolVLAModelConfig.from_shapes(shapes))
    config = model.config
    assert (config.vision.heads, config.vision.image_size, config.image_tokens) == (12, 512, 64)
    assert (config.language.heads, config.language.kv_heads, config.language.head_dim) == (15, 5, 64)
    assert config.expert.cross == (1, 3, 5, 7, 9, 11, 13, 15)
    found = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
    assert found == {key: shape for key, shape in shapes.items() if key != UNUSED}
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) == 450_046_176


def test_other_tensors_and_sizes_are_refused():
    with pytest.raises(ValueError, match=r"no tensor .*: it is not a checkpoint of SmolVLA"):
        SmolVLAModelConfig.from_shapes({"weight": (1,)})
    shapes = {key.removeprefix("model."): w.shape for key, w in load_file(SMOLVLA / "model.safetensors").items()}
    with pytest.raises(ValueError, match="heads of 64 numbers do not fit"):
        SmolVLAModelConfig.from_shapes(shapes)
    expert = {key: shape for key, shape in shapes.items() if "lm_expert.layers.3" not in key}
    with pytest.raises(ValueError, match="the VLM has 4 layers and the action expert 3"):
        SmolVLAModelConfig.from_shapes(
            expert, {"text_config": {"head_dim": 16}, "vision_config": {"num_attention_heads": 4}}
        )
