"""pi0 and pi0.5: recorded outputs of openpi, its checkpoint layout, and what reinforcement learning needs."""

import json
import math
import re
import shutil
from dataclasses import replace

import pytest
import torch
from closeness import assert_near, relative, rounding_error, sharpness, through
from openvla_checkpoint import act
from paths import ROOT
from pi0_checkpoint import GOLDEN, TOKENIZER, add_rlinf_heads, golden, make_checkpoint, statistics
from safetensors.torch import load_file, save_file
from torch.nn.attention import SDPBackend, sdpa_kernel
from torchrl.envs.utils import ExplorationType

from vla_algos.learner import Learner
from vla_algos.losses import ChunkClipPPOLoss
from vla_common import keys
from vla_envs import make_spec
from vla_policies import Pi0, load_policy, make_example
from vla_policies.checkpoint.lora import add_lora, has_lora, merge_adapter
from vla_policies.checkpoint.weights import load_weights
from vla_policies.flow.steps import euler, times
from vla_policies.pi0.checkpoint import EMBEDDINGS, LM_HEAD, Pi0Checkpoint, Pi0Statistics
from vla_policies.pi0.model import Pi0Model, Pi0ModelConfig
from vla_policies.pi0.policy import PAD, Pi0Prompts
from vla_policies.pi0.presets import get_adapter, get_preset, list_presets
from vla_policies.registry import inspect_policy, make_policy

NAMES = {"pi0_tiny": "pi0_metaworld", "pi05_tiny": "pi05_metaworld"}


@pytest.fixture(scope="module", params=NAMES)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def folder(name, tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp(name), name)


@pytest.fixture(scope="module")
def model(folder):
    checkpoint = Pi0Checkpoint.read(folder)
    model, entries = checkpoint.empty_model()
    load_weights(model, entries, unused=Pi0.unused)
    return model


@pytest.fixture(scope="module")
def recorded(name):
    return golden(name)


def inputs(recorded):
    pixels = recorded["images_u8"].permute(1, 0, 4, 2, 3).float() / 127.5 - 1
    return pixels, recorded["tokens"], recorded["token_mask"], recorded["image_masks"].T


@pytest.fixture
def make(name, folder):
    def make(**settings):
        torch.manual_seed(0)
        return Pi0.from_pretrained(folder, benchmark="metaworld", config_name=NAMES[name], **settings)

    return make


@pytest.fixture
def seen():
    torch.manual_seed(1)
    td = make_example("metaworld", 3)
    td[keys.STATES] = torch.randn(3, 4)
    return td


# ---- recorded outputs


@torch.no_grad()
def test_prefix(model, recorded):
    embeddings, valid = model.embed_prefix(*inputs(recorded))
    off = through(model.paligemma_with_expert.paligemma)
    assert_near(embeddings[:, ::8], recorded["prefix_embs_strided"], off)
    assert torch.equal(valid, recorded["prefix_pad_masks"])
    prefix = model.prefix(*inputs(recorded), output=True)
    kept = valid[:, ::8]
    assert_near(prefix.output[:, ::8][kept], recorded["prefix_out_strided"][kept], off)
    for layer, pair in enumerate(prefix.layers):
        for found, letter in zip(pair, "kv", strict=True):
            expected = recorded[f"kv_{letter}{layer}_strided"].transpose(1, 2)[kept]
            assert_near(found[:, :, ::8].transpose(1, 2)[kept], expected, off)


@torch.no_grad()
def test_suffix_and_velocity(model, recorded):
    tokens, condition = model.embed_suffix(recorded["x_t"], recorded["t"], recorded["state"])
    assert_near(tokens, recorded["suffix_embs"])
    if "adarms_cond" in recorded:
        assert_near(condition, recorded["adarms_cond"])
    prefix = model.prefix(*inputs(recorded))
    assert prefix.output is None
    found = model.velocity(prefix, recorded["x_t"], recorded["t"], recorded["state"])[0]
    assert_near(found, recorded["v_t"], through(model))


@torch.no_grad()
@pytest.mark.parametrize("steps", [1, 5, 10])
def test_samples(model, recorded, steps):
    prefix, schedule, x = model.prefix(*inputs(recorded)), times(steps), recorded["noise"]
    for number in range(steps):
        now, then = schedule[number].expand(2), schedule[number + 1].expand(2)
        x = euler(x, model.velocity(prefix, x, now, recorded["state"])[0], now, then)
    assert_near(x, recorded[f"sample_{steps}steps"], through(model))


def test_loss_and_gradients(model, recorded, name):
    time = recorded["t"].view(-1, 1, 1)
    noisy = time * recorded["noise"] + (1 - time) * recorded["actions"]
    model.zero_grad()
    # The attention has to be written out as there.
    with sdpa_kernel(SDPBackend.MATH):
        speed, _ = model.velocity(model.prefix(*inputs(recorded)), noisy, recorded["t"], recorded["state"])
    assert_near(speed, recorded["v_at_training_xt"], through(model))
    error = recorded["noise"] - recorded["actions"] - speed
    loss = error.square()  # off by twice the error times what the speed is off by
    assert_near(loss, recorded["flow_loss_elementwise"], 2 * error.abs().max().item() * through(model))
    loss.mean().backward()
    expected = json.loads((GOLDEN / name / "grad_norms.json").read_text())
    found = {key: p.grad.norm().item() for key, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    compared = 0
    largest = max(norm for norm in expected.values() if norm is not None)
    for key, norm in expected.items():
        key = EMBEDDINGS if key == LM_HEAD else key
        if norm is not None and norm >= 1e-5:
            assert found[key] == pytest.approx(norm, rel=1e-5, abs=1e-7 * largest), key
            compared += 1
    assert compared > 70


@torch.no_grad()
def test_a_masked_camera_can_be_left_out(model, recorded):
    """The second sample's third camera is masked: without it the prefix is shorter and the velocity the same."""
    pixels, tokens, token_valid, image_valid = (part[1:] for part in inputs(recorded))
    assert not image_valid[0, 2]
    short = model.prefix(pixels[:, :2], tokens, token_valid)
    arguments = (recorded["x_t"][1:], recorded["t"][1:], recorded["state"][1:])
    assert_near(model.velocity(short, *arguments)[0], recorded["v_t"][1:], through(model))


@pytest.mark.parametrize("variant", ["pi0", "pi05"])
def test_full_size_layouts_fit(variant):
    layout = json.loads((GOLDEN / f"{variant}_full_layout.json").read_text())
    shapes = {key: tuple(shape) for key, shape in layout.items()}
    with torch.device("meta"):
        model = Pi0Model(Pi0ModelConfig.from_shapes(shapes))
    config = model.config
    assert config.vision.heads == 16
    assert config.expert.heads == config.language.heads == 8
    assert config.pi05 == (variant == "pi05")
    found = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
    assert found == {key: shape for key, shape in shapes.items() if key != LM_HEAD and not Pi0.unused(key)}


# ---- the checkpoint folder


def test_what_is_saved_has_the_published_layout_and_acts_the_same(make, folder, seen, tmp_path):
    policy = make(method="flow_noise", num_action_chunks=3)
    policy.save_pretrained(tmp_path)
    saved, original = load_file(tmp_path / "model.safetensors"), load_file(folder / "model.safetensors")
    assert saved.keys() == original.keys()
    for key, tensor in saved.items():
        assert torch.equal(tensor.float(), original[key].float()), key
    again = load_policy(tmp_path)
    assert again.config == policy.config
    assert (again.chunk_size, again.horizon) == (3, 6)
    torch.manual_seed(3)
    first = act(policy, seen.clone(), ExplorationType.RANDOM)
    torch.manual_seed(3)
    second = act(again, seen.clone(), ExplorationType.RANDOM)
    for key in (keys.ACTION, keys.ACTION_LOG_PROB, keys.STATE_VALUE):
        assert torch.equal(first[key], second[key]), key
    with pytest.raises(ValueError, match="leave config_name out"):
        Pi0.from_pretrained(tmp_path, config_name="pi0_libero")


def test_a_noise_level_is_kept_unless_another_is_asked_for(make, tmp_path):
    make(noise_level=0.8).save_pretrained(tmp_path)
    assert load_policy(tmp_path).flow.noise_level == 0.8
    assert load_policy(tmp_path, noise_level=0.4).flow.noise_level == 0.4


def test_bfloat16_and_lora(make, seen, tmp_path):
    policy = make(dtype=torch.bfloat16)
    assert policy.model.dtype == torch.bfloat16
    precise = {n for n, p in policy.model.named_parameters() if p.dtype == torch.float32}
    assert {n.rpartition(".")[0].rpartition(".")[2] for n in precise if "gemma_expert" not in n} >= {
        *("action_in_proj", "action_out_proj", "patch_embedding", "input_layernorm", "post_attention_layernorm")
    }
    assert not any(part in n for n in precise for part in ("self_attn", "mlp.", "embed_tokens", "layer_norm"))
    with pytest.raises(ValueError, match=r"bfloat16.*policy.lora_rank=32"):
        Learner(ChunkClipPPOLoss(policy), lr=1e-5)
    add_lora(policy, rank=2)
    Learner(ChunkClipPPOLoss(policy), lr=1e-5)
    adapted = [n for n, p in policy.named_parameters() if p.requires_grad and not n.startswith("value_head")]
    assert adapted
    assert all("gemma_expert" in n and ".lora_" in n for n in adapted)
    assert policy.prefix_is_frozen
    stored = act(policy, seen, ExplorationType.RANDOM)
    assert stored[keys.ACTION].dtype == stored[keys.ACTION_LOG_PROB].dtype == torch.float32
    log_prob, _, _ = policy.evaluate_actions(stored)
    log_prob.sum().backward()
    assert any(p.grad is not None and p.grad.any() for n, p in policy.named_parameters() if "lora_B" in n)
    policy.save_pretrained(tmp_path)
    again = load_policy(tmp_path)
    assert has_lora(again)
    assert again.model.dtype == torch.bfloat16
    assert again.model.action_in_proj.weight.dtype == torch.float32
    greedy = ExplorationType.DETERMINISTIC
    assert_near(act(again, seen, greedy)[keys.ACTION], act(policy, seen, greedy)[keys.ACTION])
    merge_adapter(policy)
    assert policy.prefix_is_frozen
    assert policy.model.action_in_proj.weight.requires_grad
    whole = make(train_expert_only=False)
    add_lora(whole, rank=2)
    assert not whole.prefix_is_frozen


def test_a_bfloat16_model_acts_like_the_float32_one(make, seen):
    dtypes, greedy = (torch.float32, torch.bfloat16), ExplorationType.DETERMINISTIC
    exact, rounded = (act(make(dtype=dtype), seen.clone(), greedy)[keys.ACTION] for dtype in dtypes)
    sizes = make().model.config
    layers = sizes.vision.depth + sizes.language.depth + sizes.expert.depth
    assert 0 < relative(rounded, exact) < rounding_error(torch.bfloat16, layers)


def test_statistics():
    raw = statistics(4)
    values = torch.tensor([[0.1, 0.6, -0.4, 1.1]])
    assert_near(
        Pi0Statistics("x", raw, quantiles=False).normalize("state", values), torch.tensor([[0.0, 1.0, -1.0, 2.0]])
    )
    assert_near(
        Pi0Statistics("x", raw, quantiles=True).normalize("state", values), torch.tensor([[0.0, 0.5, -0.5, 1.0]])
    )
    for quantiles in (False, True):
        found = Pi0Statistics("x", raw, quantiles)
        assert_near(found.unnormalize("actions", found.normalize("actions", values)), values)


def test_prompts():
    prompts = Pi0Prompts(TOKENIZER.read_bytes(), 40)
    first, second = prompts(["pick up_the cup\n", "pick up the cup"])
    assert torch.equal(first, second)
    assert first[0] == 2
    assert first.shape == (40,)
    count = int((first != PAD).sum())
    listed = prompts(["pick up the cup"], torch.tensor([[-2.0, -1.0, 0.0, 0.999, 2.0]]))
    assert int((listed != PAD).sum()) > count
    from sentencepiece import SentencePieceProcessor

    text = SentencePieceProcessor(model_proto=TOKENIZER.read_bytes()).decode(listed[0][listed[0] != PAD].tolist())
    assert "-1 0 128 255 255" in text.replace(" ⁇ ", "")
    with pytest.raises(ValueError, match="instruction is empty"):
        prompts([" "])
    with pytest.raises(ValueError, match=r"max_prompt_length=40: .* type policy.max_prompt_length=\d+,"):
        prompts(["word " * 60])
    with pytest.raises(ValueError, match="no sentencepiece file"):
        Pi0Prompts(b"nothing", 40)


def test_a_folder_without_a_tokenizer_says_where_to_get_it(tmp_path):
    folder = make_checkpoint(tmp_path / "pi0")
    (folder / "paligemma_tokenizer.model").unlink()
    (missing,) = inspect_policy(folder).missing
    typed = re.search(r"type: curl --location --output (\S+) (https://\S+)", missing)
    assert typed[1] == str(folder / "paligemma_tokenizer.model")
    for page in ("pi0.md", "pi05.md"):
        assert typed[2] in (ROOT / "docs" / "checkpoints" / page).read_text()
    (folder / "tokenizer.model").write_bytes(TOKENIZER.read_bytes())  # by its name on the hub
    assert not inspect_policy(folder).missing


def test_a_prompt_that_only_some_episodes_have_is_refused_before_they_begin(name, folder):
    """The pattern and most sentences fit, one does not: it is found without a simulator, with the length to type."""
    long = "put the word " + 20 * "and the other word " + "on the plate"
    spec = make_spec("metaworld/push")
    task = replace(spec.tasks[0], instruction="put {object} on {plate}", instructions=("put it down", long, "lift it"))
    spec = replace(spec, tasks=(task,))
    settings = {"family": "pi0", "checkpoint": folder, "config_name": NAMES[name], "max_prompt_length": 48}
    with pytest.raises(ValueError, match=r"^policy\.max_prompt_length=48: the prompt of 'put the word") as refused:
        make_policy(spec, **settings)
    needed = int(re.search(r"type policy\.max_prompt_length=(\d+)", str(refused.value))[1])
    with pytest.raises(ValueError, match=f"max_prompt_length={needed}"):
        make_policy(spec, **{**settings, "max_prompt_length": needed - 1})
    assert make_policy(spec, **{**settings, "max_prompt_length": needed}).prompts.max_length == needed


def test_the_longest_prompt_by_default(make, name):
    assert make().prompts.max_length == {"pi0_tiny": 48, "pi05_tiny": 200}[name]


@pytest.mark.parametrize("config_name", list_presets())
def test_presets_name_benchmarks_that_have_an_adapter(config_name):
    preset = get_preset(config_name)
    assert config_name.startswith("pi05_" if preset.pi05 else "pi0_")
    assert preset.benchmark in config_name
    assert all(joint < get_adapter(config_name).state_dim for joint in preset.relative)


def test_relative_actions_are_relative_to_the_state(tmp_path):
    checkpoint = make_checkpoint(tmp_path / "checkpoint", "pi0_tiny")
    policy = Pi0.from_pretrained(checkpoint, benchmark="libero", config_name="pi0_libero")
    states = torch.arange(16.0).view(2, 8)
    actions = torch.randn(2, 5, 7)
    simulated = policy.to_simulator(actions, states)
    plain = policy.statistics.unnormalize("actions", actions)
    assert_near(simulated[..., :6], plain[..., :6] + states[:, None, :6])
    assert_near(simulated[..., 6], plain[..., 6])
    assert_near(policy.to_model(simulated, states), actions)


@pytest.mark.parametrize("benchmark", ["calvin", "maniskill"])
def test_a_gripper_that_must_be_open_or_closed(benchmark, tmp_path):
    checkpoint = make_checkpoint(tmp_path / "checkpoint", "pi05_tiny")
    policy = Pi0.from_pretrained(checkpoint, benchmark=benchmark, config_name=f"pi05_{benchmark}")
    gripper = policy.to_simulator(torch.randn(2, 5, 7), torch.zeros(2, 7))[..., 6]
    assert set(gripper.unique().tolist()) <= {-1.0, 1.0}


def test_inspect_says_what_it_is(folder, name, make, tmp_path):
    report = inspect_policy(folder)
    assert not report.missing
    assert "set config_name" in report.facts["variant"]
    assert report.facts["family"] == ("pi0 (pi0.5)" if name == "pi05_tiny" else "pi0")
    make().save_pretrained(tmp_path)
    report = inspect_policy(tmp_path)
    assert report.facts["variant"] == NAMES[name]
    assert report.facts["heads"].endswith(".safetensors")
    (tmp_path / "paligemma_tokenizer.model").unlink()
    assert "tokenizer" in str(inspect_policy(tmp_path))
    shutil.rmtree(tmp_path / "assets")
    assert "norm_stats.json" in str(inspect_policy(tmp_path))


def test_statistics_where_rlinfs_checkpoints_have_them(tmp_path):
    folder = make_checkpoint(tmp_path, "pi0_tiny")
    expected = Pi0Checkpoint.read(folder).statistics
    (folder / "physical-intelligence").mkdir()
    (folder / "assets" / "tiny").rename(folder / "physical-intelligence" / "metaworld")
    found = Pi0Checkpoint.read(folder)
    assert list(found.statistics) == ["physical-intelligence/metaworld"]
    assert list(found.statistics.values()) == list(expected.values())
    assert found.select_statistics(None, quantiles=False).key == "physical-intelligence/metaworld"
    shutil.copytree(folder / "physical-intelligence", folder / "assets", dirs_exist_ok=True)
    assert list(Pi0Checkpoint.read(folder).statistics) == ["metaworld"]  # openpi's place counts, and then no other
    (folder / "assets").rename(folder / "elsewhere")
    (folder / "assets").symlink_to(folder / "elsewhere")
    assert list(Pi0Checkpoint.read(folder).statistics) == ["metaworld"]
    (folder / "assets" / "metaworld" / "norm_stats.json").rename(folder / "assets" / "norm_stats.json")
    policy = Pi0.from_pretrained(folder, benchmark="metaworld", config_name="pi0_metaworld")
    assert list(policy.folder.statistics) == ["norm_stats"]
    policy.save_pretrained(tmp_path / "saved")
    assert load_policy(tmp_path / "saved").statistics == policy.statistics


# ---- RLinf's heads

FLOW_NOISE = {"method": "flow_noise", "noise_std_range": (0.05, 0.3)}


@pytest.fixture
def rlinf(name, model, tmp_path):
    """A checkpoint with RLinf's heads, which reads PaliGemma or the expert; returns it and the heads' tensors."""
    expert = model.config.expert.width

    def rlinf(read=expert, **sizes):
        folder = make_checkpoint(tmp_path / "rlinf", name)
        return folder, add_rlinf_heads(folder, read, expert, model.config.action_dim, **sizes)

    return rlinf


def load_rlinf(folder, name, **settings):
    return Pi0.from_pretrained(folder, benchmark="metaworld", config_name=NAMES[name], **settings)


def rlinf_value(weights, features):
    for layer in (0, 2, 4):
        features = (
            features @ weights[f"value_head.mlp.{layer}.weight"].T + weights[f"value_head.mlp.{layer}.bias"]
        ).relu()
    return features @ weights["value_head.mlp.6.weight"].T + weights["value_head.mlp.6.bias"]


def rlinf_deviation(weights, hidden):
    for layer in range(3):
        name = f"noise_head.mlp_logvar.moduleList.{layer}.linear_1"
        hidden = (hidden @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]).tanh()
    low, high = weights["noise_head.logvar_min"], weights["noise_head.logvar_max"]
    return ((low + (high - low) * (hidden + 1) / 2) / 2).exp()


@torch.no_grad()
@pytest.mark.parametrize("reads", [None, "mean"])
def test_rlinfs_heads_compute_what_they_do_there(rlinf, name, model, reads, seen, tmp_path):
    language, expert = model.config.language.width, model.config.expert.width
    folder, weights = rlinf(language if reads else expert)
    policy = load_rlinf(folder, name, value_after_vlm=reads, **FLOW_NOISE)
    features, hidden = torch.randn(4, language if reads else expert), torch.randn(4, 6, expert)
    assert relative(policy.value_head(features), rlinf_value(weights, features)) < 1e-6
    assert relative(policy.noise_network(hidden), rlinf_deviation(weights, hidden)) < 1e-6
    assert not any(key.startswith(("value_head", "noise_head")) for key in policy.unused_tensors)
    assert "RLinf" in inspect_policy(folder).facts["heads"]
    policy.save_pretrained(tmp_path / "ours")
    again = load_policy(tmp_path / "ours")
    first, second = (act(one, seen.clone(), ExplorationType.DETERMINISTIC)[keys.STATE_VALUE] for one in (policy, again))
    assert torch.equal(first, second)
    assert not any(
        "_head." in key for key in load_file(tmp_path / "ours" / "model.safetensors") if "lm_head" not in key
    )


def test_rlinfs_heads_that_are_not_built_are_written_again(rlinf, name, tmp_path):
    folder, weights = rlinf()
    policy = load_rlinf(folder, name, value_head=False)
    assert policy.value_head is None
    policy.save_pretrained(tmp_path / "ours")
    saved = load_file(tmp_path / "ours" / "model.safetensors")
    assert all(torch.equal(saved[key], tensor) for key, tensor in weights.items())
    built = load_policy(tmp_path / "ours", value_head=True)
    assert torch.equal(built.value_head[0].weight, weights["value_head.mlp.0.weight"])


def test_rlinfs_heads_in_bfloat16(rlinf, name):
    folder, weights = rlinf()
    stored = load_file(folder / "model.safetensors")
    save_file({key: tensor.bfloat16() for key, tensor in stored.items()}, folder / "model.safetensors")
    policy = load_rlinf(folder, name, **FLOW_NOISE)
    assert torch.equal(policy.value_head[2].weight, weights["value_head.mlp.2.weight"].bfloat16().float())


def test_settings_that_do_not_fit_rlinfs_heads_are_refused(rlinf, name, model):
    language, expert = model.config.language.width, model.config.expert.width
    assert language != expert
    folder, _ = rlinf(language)
    with pytest.raises(ValueError, match=f"reads {language} numbers, PaliGemma's; set value_after_vlm=mean"):
        load_rlinf(folder, name)
    with pytest.raises(ValueError, match=r"set noise_std_range=\[0.05,0.3\]"):
        load_rlinf(folder, name, value_after_vlm="mean", method="flow_noise")
    folder, _ = rlinf(expert)
    with pytest.raises(ValueError, match=f"reads {expert} numbers, the action expert's; set value_after_vlm=null"):
        load_rlinf(folder, name, value_after_vlm="mean")
    folder, _ = rlinf(expert + 1)
    with pytest.raises(ValueError, match="of another model"):
        load_rlinf(folder, name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"noise_head.logvar_min": None}, "lacks noise_head.logvar_min or noise_head.logvar_max"),
        ({"noise_head.logvar_min": None, "noise_head.logvar_max": None}, "lacks noise_head.logvar_min"),
        ({"value_head.mlp.0.weight": torch.zeros(20)}, "the value_head of .* must be matrices"),
        ({"value_head.mlp.2.bias": None}, "the value_head of .* lacks 2.bias"),
    ],
)
def test_broken_heads_of_rlinf_are_one_clear_error(rlinf, name, change, message):
    folder, _ = rlinf()
    weights = {**load_file(folder / "model.safetensors"), **change}
    save_file({key: tensor for key, tensor in weights.items() if tensor is not None}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=message) as refused:
        load_rlinf(folder, name, **FLOW_NOISE)
    assert "\n" not in str(refused.value)


def test_weights_of_an_rlinf_run_have_to_be_converted(tmp_path):
    folder = make_checkpoint(tmp_path)
    (folder / "actor" / "model_state_dict").mkdir(parents=True)
    (folder / "model.safetensors").rename(folder / "actor" / "model_state_dict" / "full_weights.pt")
    with pytest.raises(ValueError, match=r"is a pickle; convert it with RLinf's .*convert_pt_to_hf"):
        Pi0Checkpoint.read(folder)


def test_a_new_value_head_starts_as_rlinfs(make):
    layers = [layer for layer in make().value_head if isinstance(layer, torch.nn.Linear)]
    assert [layer.out_features for layer in layers] == [512, 256, 128, 1]
    for layer in layers[:-1]:  # Kaiming by fan-out: variance 2 / out
        assert layer.weight.std().item() == pytest.approx((2 / layer.out_features) ** 0.5, rel=0.05)
    assert layers[-1].weight.std().item() == pytest.approx(0.02, rel=0.2)
    assert not any(layer.bias.any() for layer in layers)


# ---- reinforcement learning


@pytest.mark.parametrize(
    ("method", "reads"), [("flow_sde", None), ("flow_noise", "mean"), ("flow_cps", "mean"), ("flow_sde", "mean")]
)
def test_the_ratio_is_one_and_a_kept_prefix_changes_nothing(make, seen, method, reads):
    policy = make(method=method, value_after_vlm=reads)
    stored = act(policy, seen, ExplorationType.RANDOM)
    assert stored[keys.ACTION].shape == (3, 5, 4)
    assert stored[keys.DENOISE_CHAIN].shape[2:] == (6, 8)
    plain = policy.evaluate_actions(stored)
    off = through(policy)
    narrow = sharpness(policy.get_dist(stored))
    assert_near(plain[0], stored[keys.ACTION_LOG_PROB], narrow * off)
    assert_near(plain[2], stored[keys.STATE_VALUE], off)
    prepared = policy.precompute(stored.clone())
    assert prepared.get(keys.PREFIX_KEYS, None) is not None
    for first, second in zip(plain, policy.evaluate_actions(prepared[torch.tensor([2, 0])]), strict=True):
        assert_near(second, first[torch.tensor([2, 0])], narrow * off)


def test_the_prefix_is_kept_only_if_it_is_frozen_and_fits(make, seen):
    small = make(prefix_cache_gb=1e-6)
    stored = act(small, seen, ExplorationType.RANDOM)
    with pytest.warns(UserWarning, match="prefix_cache_gb"):
        assert small.precompute(stored).get("prefix", None) is None
    whole = make(train_expert_only=False)
    assert whole.precompute(act(whole, seen.clone(), ExplorationType.RANDOM)).get("prefix", None) is None


@pytest.mark.parametrize("only", [True, False])
@pytest.mark.parametrize("checkpointing", [True, False])
def test_what_the_update_reaches(make, seen, only, checkpointing):
    policy = make(train_expert_only=only, gradient_checkpointing=checkpointing)
    stored = act(policy, seen, ExplorationType.RANDOM)
    log_prob, _, value = policy.evaluate_actions(stored)
    (log_prob.sum() + value.sum()).backward()
    reached = {n for n, p in policy.named_parameters() if p.grad is not None and p.grad.any()}
    assert any("gemma_expert" in n for n in reached)
    assert any(n.startswith("value_head") for n in reached)
    assert any("paligemma.model.vision" in n for n in reached) == (not only)


def test_imitation(make, seen, monkeypatch):
    policy, noisy = make(num_action_chunks=4), []
    monkeypatch.setattr(torch, "randn_like", torch.zeros_like)
    velocity = policy.velocity
    policy.velocity = lambda observed, x, time: noisy.append(x) or velocity(observed, x, time)
    seen[keys.PROMPT_TOKENS] = policy.prompt_tokens(seen.get(keys.TASK_DESCRIPTIONS).tolist(), seen[keys.STATES])
    seen[keys.ACTION] = torch.rand(3, 4, 4)
    loss = policy.imitation_loss(seen, sigma=0.0)
    assert loss.shape == (3, 4)
    assert math.isfinite(loss.sum().item())
    last, after = noisy[0][:, 3:4, :4], noisy[0][:, 4:, :4]
    assert torch.equal(after, last.expand_as(after))  # what comes after the chunk repeats its last action
    assert last.any()


# ---- bad input


def spoil(folder, what):
    if what == "statistics":
        shutil.rmtree(folder / "assets")
    elif what == "tokenizer":
        (folder / "paligemma_tokenizer.model").unlink()
    elif what == "jax":
        (folder / "model.safetensors").unlink()
        (folder / "params").mkdir()
    elif what == "weights":
        (folder / "model.safetensors").unlink()
    elif what == "another":
        save_file({"weight": torch.zeros(1)}, folder / "model.safetensors")
    elif what == "small":
        file = folder / "assets" / "tiny" / "norm_stats.json"
        file.write_text(json.dumps({"norm_stats": statistics(3)}))
    elif what == "two":
        shutil.copytree(folder / "assets" / "tiny", folder / "assets" / "other")


@pytest.mark.parametrize(
    ("what", "settings", "message"),
    [
        ("statistics", {}, "norm_stats.json"),
        ("tokenizer", {}, "paligemma_tokenizer.model"),
        ("jax", {}, "JAX checkpoint.*convert"),
        ("weights", {}, "has no model.safetensors"),
        ("another", {}, "not a checkpoint of pi0"),
        ("small", {}, "have 3 numbers of state, the benchmark has 4"),
        ("two", {}, "norm_stats_id.*other.*tiny"),
        ("", {"norm_stats_id": "nothing"}, "'tiny'"),
        ("", {"config_name": "pi0_metawrld"}, "config_name is one of"),
        ("", {"config_name": "pi05_metaworld"}, "checkpoint is of pi0"),
        ("", {"benchmark": "libero"}, "pi0_metaworld is for metaworld"),
        ("", {"benchmark": "robotwin", "config_name": "pi0_aloha_robotwin"}, "room for 8 numbers"),
        ("", {"num_images_in_input": 4}, "num_images_in_input=4: must be less than or equal to 3"),
        ("", {"num_images_in_input": 2}, "metaworld has 1 cameras"),
        ("", {"num_action_chunks": 7}, "must be 1 to 6"),
        ("", {"num_steps": 0}, "num_steps=0"),
        ("", {"noise_level": 0.0}, "no log-probability"),
        ("", {"value_after_vlm": "max"}, "value_after_vlm=max: must be 'mean'"),
        ("", {"layout": "official"}, "Pi0 has no settings"),
    ],
)
def test_a_folder_or_setting_that_does_not_fit_is_refused(what, settings, message, tmp_path):
    folder = make_checkpoint(tmp_path / "checkpoint")
    spoil(folder, what)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        Pi0.from_pretrained(folder, **{"benchmark": "metaworld", "config_name": "pi0_metaworld", **settings})


def test_states_of_another_size_are_refused(make, seen):
    policy = make()
    seen[keys.STATES] = torch.zeros(3, 7)
    with pytest.raises(ValueError, match="states of metaworld have 4 numbers"):
        policy(seen)
