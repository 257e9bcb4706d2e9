"""OpenVLA against the reference's numbers, the policy contract, checkpoints and LoRA."""

import json
import shutil
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch
from closeness import assert_near, relative, rounding_error, through
from lerobot_checkpoint import change_json
from openvla_checkpoint import GOLDEN, act, golden, make_checkpoint, observations, padded
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from torchrl.envs.utils import ExplorationType
from transformers import DynamicCache

from vla_algos.losses import ChunkClipPPOLoss
from vla_common import keys
from vla_policies.checkpoint.lora import add_lora, fill_adapter, lora_config, merge_adapter, put_adapter, save_adapter
from vla_policies.nn.llama import Llama, LlamaConfig
from vla_policies.nn.rotary import rotation
from vla_policies.openvla.model import STOP, pack_right
from vla_policies.openvla.openvla import OpenVLA
from vla_policies.registry import make_policy

STRIDE = 8  # the stored sequences are every eighth token


@pytest.fixture(scope="module")
def data():
    return golden("openvla_tiny")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("openvla"))


@pytest.fixture
def prompts(data):
    return padded(*(row[:length] for row, length in zip(data["input_ids"], data["prompt_lens"], strict=True)))


@pytest.fixture
def make(folder, prompts):
    """Policies that read the golden prompts, which the stand-in tokenizer cannot write."""

    def make(source=folder, **settings):
        policy = OpenVLA.from_pretrained(source, **{"benchmark": "libero", **settings})
        policy.prompts = lambda texts: prompts
        return policy

    return make


@pytest.fixture
def stored(data, prompts):
    """The golden observations and actions as a rollout would store them."""
    td = observations(data["images"])
    td[keys.PROMPT_TOKENS] = prompts
    td[keys.ACTION_TOKENS] = (data["action_tokens"] - 31744).unsqueeze(1)
    return td


def test_hidden_states_of_a_whole_right_padded_sequence(make, data):
    model = make().model
    preprocessor = make().preprocessor
    pixels = preprocessor.normalize(preprocessor.resize([data["images"]]))
    patches = model.image_tokens(pixels)
    assert_near(patches[:, ::STRIDE], data["projected_strided"], through(model.vision_backbone, model.projector))
    words = model.language_model.embed(data["input_ids"])
    embeddings = torch.cat([words[:, :1], patches, words[:, 1:]], dim=1)
    valid = torch.cat([torch.ones(2, 256), data["attention_mask"]], dim=1).bool()
    positions = torch.arange(valid.shape[1]).expand(2, -1)
    hidden = model.language_model.hidden_states(embeddings, valid, positions, causal=True)
    assert_near(hidden[:, ::STRIDE], data["last_hidden_strided"], through(model))


def test_teacher_forced_pass_matches_the_reference(make, data, stored):
    policy = make()
    off = through(policy.model)
    states = policy.action_states(stored, stored[keys.ACTION_TOKENS])
    assert_near(states, data["last_hidden_at_action"], off)
    assert_near(policy.model.action_logits(states), data["action_logits_window"], off)
    full = policy.model.language_model.lm_head(states)
    assert_near(full[0, 0], data["action_logits_full_b0"][0], off)
    log_prob, entropy, value = policy.evaluate_actions(stored)
    assert_near(log_prob.squeeze(1), data["action_logprob_window"], off)
    chosen = full.log_softmax(-1).gather(-1, data["action_tokens"].unsqueeze(-1)).squeeze(-1)
    assert_near(chosen, data["action_logprob_full_vocab"], off)
    window = data["action_logits_window"].log_softmax(-1)
    assert_near(entropy.squeeze(1), -(window.exp() * window).sum(-1), off)
    assert value.shape == (2, 1)


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_loss_and_gradients_match_the_reference(make, data, stored, gradient_checkpointing):
    policy = make(gradient_checkpointing=gradient_checkpointing)
    model, preprocessor = policy.model, policy.preprocessor
    for part in (model.vision_backbone.featurizer, model.vision_backbone.fused_featurizer, model.language_model):
        assert part.gradient_checkpointing == gradient_checkpointing
    pixels = preprocessor.normalize(preprocessor.resize([data["images"]]))
    prefix = model.prefix(pixels, stored[keys.PROMPT_TOKENS])
    states = model.action_states(prefix, model.language_model.embed(data["action_tokens"]), 8, causal=True)
    labels = F.pad(data["action_tokens"], (0, 1), value=STOP)
    loss = F.cross_entropy(model.language_model.lm_head(states).flatten(0, 1), labels.flatten())
    assert_near(loss, data["loss"].float(), through(model))
    loss.backward()
    norms = json.loads((GOLDEN / "openvla_tiny" / "grad_norms.json").read_text())
    found = {name: parameter.grad.norm().item() for name, parameter in model.named_parameters()}
    assert found.keys() == {name for name, norm in norms.items() if norm is not None}
    largest = max(found.values())
    for name, norm in found.items():
        assert norm == pytest.approx(norms[name], rel=1e-5, abs=1e-7 * largest), name


def test_greedy_tokens_and_actions_match_the_reference(make, data):
    policy = make(benchmark="metaworld")
    td = act(policy, observations(data["images"], torch.zeros(2, 4)), ExplorationType.DETERMINISTIC)
    assert torch.equal(td[keys.ACTION_TOKENS].squeeze(1) + 31744, data["greedy_tokens"])
    assert_near(td[keys.ACTION].squeeze(1), data["greedy_actions"][:, [0, 1, 2, 6]].float())
    assert td[keys.ACTION].shape == (2, 1, policy.action_dim) == (2, 1, 4)
    units = policy.statistics.action.unnormalize(policy.tokens.decode(td[keys.ACTION_TOKENS]))
    assert_near(units.squeeze(1), data["greedy_actions"].float())


@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, 0), (1.6, 0), (0.5, 1), (1.3, 20), (2.0, 256)])
@pytest.mark.parametrize("kind", [ExplorationType.RANDOM, ExplorationType.DETERMINISTIC])
def test_the_update_sees_the_probabilities_that_were_sampled_from(make, data, temperature, top_k, kind):
    torch.manual_seed(0)
    policy = make(temperature=temperature, top_k=top_k)
    td = act(policy, observations(data["images"]), kind)
    assert td[keys.ACTION_LOG_PROB].shape == (2, 1, 7)
    assert td[keys.ACTION_LOG_PROB].dtype == torch.float32
    rollout = td.select(*policy.loss_keys)
    log_prob, entropy, value = policy.evaluate_actions(rollout)
    assert_near(log_prob, td[keys.ACTION_LOG_PROB], through(policy))
    assert_near(value, td[keys.STATE_VALUE], through(policy))
    assert_near(policy.get_dist(rollout).log_prob(td[keys.ACTION_TOKENS]), log_prob)
    (log_prob.sum() + entropy.sum() + value.sum()).backward()
    gradients = [parameter.grad for parameter in policy.parameters() if parameter.grad is not None]
    assert all(torch.isfinite(gradient).all() for gradient in gradients)


def test_a_token_that_fell_out_of_the_top_k_stays_finite_and_keeps_its_gradient(make, stored):
    policy = make(top_k=2)
    log_prob, entropy, _ = policy.evaluate_actions(stored)  # the golden tokens are unlikely ones
    assert torch.isfinite(log_prob).all()
    assert torch.isfinite(entropy).all()
    log_prob.sum().backward()
    assert policy.model.language_model.lm_head.weight.grad.abs().sum() > 0


def test_padding_of_the_prompt_does_not_matter(make, stored):
    policy = make()
    expected = policy.evaluate_actions(stored)[0]
    stored[keys.PROMPT_TOKENS] = F.pad(stored[keys.PROMPT_TOKENS], (0, 40), value=32000)
    assert_near(policy.evaluate_actions(stored)[0], expected, through(policy))
    alone = torch.cat([policy.evaluate_actions(stored[[row]])[0] for row in range(2)])
    assert_near(alone, expected, through(policy))
    text, valid = pack_right(stored[keys.PROMPT_TOKENS], 32000)
    assert text.shape == (2, 20)
    assert valid.sum(1).tolist() == [19, 20]


def test_the_ppo_loss_trains_it(make, data):
    policy = make()
    td = act(policy, observations(data["images"]), ExplorationType.RANDOM)
    td[keys.NEXT, keys.STEP_MASK] = torch.ones(2, 1, dtype=torch.bool)
    td[keys.ADVANTAGE], td[keys.VALUE_TARGET] = torch.tensor([[1.0], [-1.0]]), torch.ones(2, 1)
    out = ChunkClipPPOLoss(policy)(td)
    assert out["log_ratio_per_token"] < 1e-5
    (out["loss_objective"] + out["loss_critic"]).backward()
    assert policy.value_head.mlp[4].weight.grad.abs().sum() > 0
    assert policy.model.vision_backbone.featurizer.pos_embed.grad.abs().sum() > 0


def test_imitation_learns_a_demonstration(make, data):
    policy = make(benchmark="metaworld")
    action = torch.tensor([0.4, -0.3, 0.2, 1.0]).expand(2, 1, 4)
    td = observations(data["images"], torch.zeros(2, 4))
    td[keys.PROMPT_TOKENS], td[keys.ACTION] = policy.prompt_tokens(["", ""]), action
    optimizer = torch.optim.AdamW(policy.model.language_model.parameters(), lr=3e-3)
    for _ in range(30):
        optimizer.zero_grad()
        policy.imitation_loss(td, sigma=0.0).mean().backward()
        optimizer.step()
    learnt = act(policy, td, ExplorationType.DETERMINISTIC)[keys.ACTION]
    assert (learnt - action).abs().max() < 0.02
    with torch.no_grad():
        hard, narrow, wide = (policy.imitation_loss(td, sigma=sigma) for sigma in (0.0, 1e-3, 0.1))
    assert hard.shape == (2, 1)
    assert (hard < wide).all()
    assert_near(narrow, hard)


def test_lora_starts_from_the_same_policy_and_trains_only_adapters_and_heads(make, stored):
    policy = make()
    before = policy.evaluate_actions(stored)[0]
    add_lora(policy, rank=4)
    assert torch.equal(policy.evaluate_actions(stored)[0], before)
    trained = {name for name, parameter in policy.named_parameters() if parameter.requires_grad}
    assert all(".lora_" in name or name.startswith("value_head.") for name in trained)
    assert any("lm_head.lora_B" in name for name in trained)
    assert any("qkv.lora_A" in name for name in trained)
    with pytest.raises(ValueError, match="merge it first"):
        add_lora(policy)
    with pytest.raises(ValueError, match="query"):
        add_lora(make(), targets=["query"])


def test_adapters_are_saved_alone_loaded_and_merged(make, stored, tmp_path):
    policy = make()
    add_lora(policy, rank=4, alpha=8)
    for name, parameter in policy.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    expected = policy.evaluate_actions(stored)[0]
    states = policy.action_states(stored, stored[keys.ACTION_TOKENS])
    full = policy.model.language_model.lm_head(states)[..., 31744:32000]
    assert_near(policy.model.action_logits(states), full, through(policy.model.language_model.lm_head))

    save_adapter(policy, tmp_path / "adapter")
    names = load_file(tmp_path / "adapter" / "adapter_model.safetensors").keys()
    assert "base_model.model.language_model.model.layers.0.self_attn.q_proj.lora_A.weight" in names
    other = make()
    fill_adapter(other, put_adapter(other, tmp_path / "adapter"))
    assert torch.equal(other.evaluate_actions(stored)[0], expected)

    change_json(tmp_path / "adapter" / "adapter_config.json", lora_dropout=0.5)  # as the one that it was cloned with
    (tmp_path / "adapter" / "SHA256SUMS").unlink()
    fill_adapter(other := make(), put_adapter(other, tmp_path / "adapter"))
    assert torch.equal(other.train().evaluate_actions(stored)[0], expected)

    policy.save_pretrained(tmp_path / "unmerged")
    assert torch.equal(make(tmp_path / "unmerged").evaluate_actions(stored)[0], expected)
    with pytest.raises(ValueError, match=r"has an adapter; leave lora_adapter out, or merge its own: vla-recipe merge"):
        make(tmp_path / "unmerged", lora_adapter=tmp_path / "adapter")
    merge_adapter(policy)
    policy.save_pretrained(tmp_path / "merged")
    merged = make(tmp_path / "merged")
    assert_near(merged.evaluate_actions(stored)[0], expected, through(policy))
    assert merged.model.state_dict().keys() == make().model.state_dict().keys()
    with pytest.raises(ValueError, match="add_lora"):
        save_adapter(policy, tmp_path / "none")


def test_adapters_of_a_published_checkpoint_may_have_parts_that_nothing_reads(make, folder, tmp_path):
    policy = make()
    add_lora(policy, rank=2)
    save_adapter(policy, tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    weights, last = load_file(file), "base_model.model.vision_backbone.featurizer.blocks.2.attn.qkv"
    rows, width = load_file(folder / "model.safetensors")[f"{last.removeprefix('base_model.model.')}.weight"].shape
    extra = {f"{last}.lora_A.weight": torch.ones(2, width), f"{last}.lora_B.weight": torch.ones(rows, 2)}
    save_file(weights | extra, file)
    (tmp_path / "SHA256SUMS").unlink()  # a foreign one has none
    fill_adapter(other := make(), put_adapter(other, tmp_path))
    foreign = "base_model.model.language_model.model.layers.9.mlp.up_proj.lora_A.weight"
    save_file(weights | {foreign: torch.ones(1)}, file)
    with pytest.raises(ValueError, match="another model"):
        put_adapter(make(), tmp_path)
    with pytest.raises(FileNotFoundError, match="adapter_config"):
        put_adapter(make(), tmp_path / "nothing")


def test_a_saved_policy_comes_back_whole(make, folder, stored, tmp_path):
    policy = make(temperature=1.6, unnorm_key="golden_ds")
    policy.save_pretrained(tmp_path)
    loaded = make(tmp_path)
    assert asdict(loaded.config) == asdict(policy.config)
    for one, other in zip(policy.evaluate_actions(stored), loaded.evaluate_actions(stored), strict=True):
        assert torch.equal(one, other)
    saved, original = load_file(tmp_path / "model.safetensors"), load_file(folder / "model.safetensors")
    assert saved.keys() == original.keys() | {f"value_head.{name}" for name in policy.value_head.state_dict()}
    assert all(torch.equal(saved[name], tensor.to(saved[name].dtype)) for name, tensor in original.items())


def test_a_value_head_that_is_not_built_keeps_its_numbers(make, tmp_path):
    policy = make()
    policy.save_pretrained(tmp_path / "ppo")
    make(tmp_path / "ppo", value_head=False).save_pretrained(tmp_path / "grpo")
    again = make(tmp_path / "grpo", value_head=True)
    for one, other in zip(policy.value_head.parameters(), again.value_head.parameters(), strict=True):
        assert torch.equal(one, other)


def test_bfloat16_agrees_with_float32(make, stored):
    assert make(dtype="bfloat16").model.dtype == make(dtype=torch.bfloat16).model.dtype == torch.bfloat16
    policy = make(dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in policy.model.parameters()} == {torch.bfloat16}
    log_prob, _, value = policy.evaluate_actions(stored)
    assert log_prob.dtype == value.dtype == torch.float32
    exact = make()
    sizes = exact.model.config
    layers = sizes.language.num_hidden_layers + sizes.vision.featurizer.depth
    assert 0 < relative(log_prob, exact.evaluate_actions(stored)[0]) < rounding_error(torch.bfloat16, layers)


def test_rotary_angles_are_float32_whatever_the_model_is_in():
    config = LlamaConfig(16, 16, 1, 2, 2, 8)
    positions = torch.tensor([[0, 333]])
    exact, rounded = (
        rotation(positions, config.head_dim, config.rope_theta, dtype) for dtype in (torch.float32, torch.bfloat16)
    )
    assert all((one - other.float()).abs().max() < 0.005 for one, other in zip(exact, rounded, strict=True))


def test_decoding_token_by_token_equals_one_pass():
    torch.manual_seed(0)
    model = Llama(LlamaConfig(16, 32, 2, 4, 2, 8))
    embeddings, valid = torch.randn(2, 9, 16), torch.ones(2, 9, dtype=torch.bool)
    valid[0, 1:4] = False
    positions = (valid.cumsum(1) - 1).clamp_min(0)
    expected = model.hidden_states(embeddings, valid, positions, causal=True)
    cache, parts = DynamicCache(), []
    for begin, end in ((0, 5), (5, 7), (7, 8), (8, 9)):
        new = slice(begin, end)
        parts.append(
            model.hidden_states(embeddings[:, new], valid[:, :end], positions[:, new], causal=True, cache=cache)
        )
    assert_near(torch.cat(parts, 1)[valid], expected[valid], through(model))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"unnorm_key": "bridge_orig"}, "golden_ds"),
        ({"benchmark": "atari"}, "metaworld"),
        ({"benchmark": "robotwin"}, "14"),
        ({"action_dim": 14}, "7 dimensions"),
        ({"temperature": 0.0}, "temperature"),
        ({"top_k": 300}, "top_k"),
        ({"num_action_chunks": 8}, "num_action_chunks"),
        ({"statistics": "mean"}, "min_max"),
    ],
)
def test_settings_that_do_not_fit_are_refused_with_a_reason(folder, settings, message):
    with pytest.raises(ValueError, match=message):
        OpenVLA.from_pretrained(folder, **{"benchmark": "libero", **settings})


def test_empty_and_over_long_instructions_are_refused(folder):
    policy = OpenVLA.from_pretrained(folder, benchmark="libero", max_prompt_length=30)
    for text, message in (("", "empty"), ("push " * 30, "max_prompt_length")):
        with pytest.raises(ValueError, match=message):
            policy(observations(torch.zeros(1, 64, 64, 3, dtype=torch.uint8), instructions=[text]))


def libero(benchmark="libero", tasks=("put the bowl on the stove",)):
    """An environment that has not been started."""
    return SimpleNamespace(
        benchmark=benchmark, id=f"{benchmark}/toy", action_low=(-1.0,) * 7, action_high=(1.0,) * 7, state_dim=8,
        image_shape=(256, 256), wrist_image_shape=(1, 256, 256), tasks=[SimpleNamespace(instruction=t) for t in tasks],
    )  # fmt: skip


def test_recipes_load_a_checkpoint_for_the_environment_they_have(folder, tmp_path):
    policy = make_policy(libero(), family="openvla", checkpoint=folder, lora_rank=4, dtype="bfloat16", top_k=None)
    assert lora_config(policy).r == 4
    assert policy.model.projector.fc1.weight.dtype == torch.bfloat16
    assert policy.config.benchmark == "libero"
    assert policy.config.top_k == 0
    policy.save_pretrained(tmp_path)
    for family in ("openvla", "small"):  # the family of the recipes' default takes any checkpoint
        again = make_policy(libero(), family=family, checkpoint=tmp_path)
        assert isinstance(again, OpenVLA)
        assert lora_config(again).r == 4
    with pytest.raises(ValueError, match="has a LoRA adapter already, of rank 4"):
        make_policy(libero(), family="openvla", checkpoint=tmp_path, lora_rank=8)
    with pytest.raises(ValueError, match=r"policy.lora_alpha and policy.lora_targets need policy.lora_rank"):
        make_policy(libero(), family="openvla", checkpoint=folder, lora_alpha=8)


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("preprocessor_config.json", {"input_sizes": [[3, 4000, 4000]] * 2}, r"makes images \(4000, 4000\), its model"),
        ("config.json", {"text_config": {"rms_norm_eps": float("nan")}}, "must be finite numbers above 0"),
        ("config.json", {"text_config": {"num_attention_heads": 0}}, "must be finite numbers above 0"),
    ],
)
def test_small_files_that_would_move_the_robot_by_chance_are_refused(file, change, message, folder, tmp_path):
    shutil.copytree(folder, tmp_path / "copy")
    content = json.loads((folder / file).read_text())
    change = {name: value if isinstance(value, list) else content[name] | value for name, value in change.items()}
    change_json(tmp_path / "copy" / file, **change)
    with pytest.raises(ValueError, match=message):
        OpenVLA.from_pretrained(tmp_path / "copy", benchmark="libero")


def test_recipes_refuse_what_does_not_fit_a_checkpoint(folder, tmp_path):
    OpenVLA.from_pretrained(folder, benchmark="libero").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"^policy.statistics=min_max: .* was trained with statistics=q99"):
        make_policy(libero(), family="openvla", checkpoint=tmp_path, statistics="min_max")
    with pytest.raises(ValueError, match=r"acts in libero and maniskill/toy is of maniskill; .*policy=openvla"):
        make_policy(libero("maniskill"), family="small", checkpoint=tmp_path)
    assert make_policy(libero("maniskill"), family="openvla", checkpoint=tmp_path).config.benchmark == "maniskill"
    with pytest.raises(ValueError, match=r"^policy.dim: OpenVLA has no settings"):
        make_policy(libero(), family="small", checkpoint=tmp_path, dim=64)
    with pytest.raises(ValueError, match="instruction is empty"):
        make_policy(libero(tasks=[" "]), family="openvla", checkpoint=folder)
    with pytest.raises(ValueError, match="a checkpoint of openvla, not of openvla_oft"):
        make_policy(libero(), family="openvla_oft", checkpoint=tmp_path, layout="rlinf")
