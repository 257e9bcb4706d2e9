"""OpenVLA-OFT against the reference's numbers: both layouts, both heads, chunks, values, checkpoints."""

import json
from dataclasses import asdict

import pytest
import torch
from closeness import assert_near, through
from openvla_checkpoint import OFT, act, golden, make_checkpoint, observations, padded
from safetensors.torch import load_file
from torch.nn import functional as F
from torchrl.envs.utils import ExplorationType

from vla_algos.losses import ChunkClipPPOLoss
from vla_common import keys
from vla_policies.checkpoint.lora import add_lora
from vla_policies.nn.blocks import ValueHead
from vla_policies.openvla.model import STOP
from vla_policies.openvla.oft import OpenVLAOFT
from vla_policies.processing.images import center_crop, resize_lanczos3
from vla_policies.processing.jpeg import jpeg_round_trip

FIRST = 31744  # lowest id of an action token


@pytest.fixture(scope="module")
def data():
    return golden("openvla_oft_tiny")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("oft"), heads=True, value_head=True)


@pytest.fixture
def make(folder, data):
    """Policies that read the golden prompts, which the stand-in tokenizer cannot write.

    The golden numbers are of the reference's model and processor, without the resize and crop of its evaluation.
    """
    fresh = {"head": "tokens", "layout": "official", "use_proprio": False}
    fresh |= {"image_resize": "bicubic", "center_crop": False}

    def make(source=folder, **settings):
        defaults = {} if source != folder else fresh
        policy = OpenVLAOFT.from_pretrained(source, **{"benchmark": "libero", **defaults, **settings})
        policy.prompts = lambda texts: padded(data["prompt1"], data["prompt2"])
        return policy

    return make


@pytest.fixture
def stored(data):
    """The golden observations and actions as a rollout would store them."""
    td = observations(data["images"][:2], data["l1_proprio"], wrist_images=data["images"][2:])
    td[keys.PROMPT_TOKENS] = padded(data["prompt1"], data["prompt2"])
    td[keys.ACTION_TOKENS] = (data["train_action_tokens"] - FIRST).unflatten(1, (8, 7))
    return td


@pytest.mark.parametrize("num_images", [1, 2])
def test_parallel_decoding_matches_the_reference(make, data, stored, num_images):
    policy = make(num_images_in_input=num_images)
    states = policy.action_states(stored)
    assert_near(states, data[f"oft_action_hidden_{num_images}img"], through(policy.model))
    logits = policy.model.action_logits(states)
    assert_near(logits, data[f"oft_discrete_logits_window_{num_images}img"], through(policy.model))
    td = act(policy, stored, ExplorationType.DETERMINISTIC)
    actions = policy.statistics.action.unnormalize(policy.tokens.decode(td[keys.ACTION_TOKENS]))
    assert_near(actions, data[f"oft_discrete_actions_{num_images}img"].float())


def test_full_vocabulary_and_simplevla_agree_on_the_greedy_tokens(make, data, stored):
    policy = make()
    full = policy.model.language_model.lm_head(policy.action_states(stored))
    assert_near(full[0, :2], data["oft_full_vocab_logits_b0_first2"], through(policy.model))
    assert torch.equal(full[0].argmax(-1), data["oft_full_vocab_argmax_b0"])
    stored[keys.PROMPT_TOKENS] = data["simplevla_input_ids"]
    td = act(policy, stored, ExplorationType.DETERMINISTIC)
    assert torch.equal(td[keys.ACTION_TOKENS].flatten(1) + FIRST, data["simplevla_response_ids"])
    actions = policy.statistics.action.unnormalize(policy.tokens.decode(td[keys.ACTION_TOKENS]))
    assert_near(actions, data["simplevla_actions"].float())


def test_attention_is_bidirectional(make, data, stored):
    causal = data["oft_CAUSAL_eager_logits_window_b0"]
    policy = make()
    logits = policy.model.action_logits(policy.action_states(stored))[0]
    assert (logits - causal).abs().max() > 1
    prefix = policy._prefix(stored[[0]])
    zeros = torch.zeros(1, 57, policy.model.language_model.config.hidden_size)
    zeros[:, -1] = policy.model.language_model.embed(torch.tensor([STOP]))
    states = policy.model.action_states(prefix, zeros, 56, causal=True)
    assert_near(policy.model.action_logits(states)[0], causal, through(policy.model))


def test_supervised_loss_and_gradients_match_the_reference(make, data, stored):
    policy = make()
    model = policy.model
    stop = model.language_model.embed(torch.full((2, 1), STOP))
    suffix = torch.cat([torch.zeros(2, 56, stop.shape[-1]), stop], dim=1)
    states = model.action_states(policy._prefix(stored), suffix, 57, causal=False)
    assert_near(model.action_logits(states[:, :56]), data["train_logits_window"], through(model))
    labels = F.pad(data["train_action_tokens"], (0, 1), value=STOP)
    loss = F.cross_entropy(model.language_model.lm_head(states).flatten(0, 1), labels.flatten())
    assert_near(loss, data["train_loss"].float(), through(model))
    loss.backward()
    norms = json.loads((OFT / "train_grad_norms.json").read_text())
    found = {name: parameter.grad.norm().item() for name, parameter in model.named_parameters()}
    assert found.keys() == {name for name, norm in norms.items() if norm is not None}
    largest = max(found.values())
    for name, norm in found.items():
        assert norm == pytest.approx(norms[name], rel=1e-5, abs=1e-7 * largest), name


def test_rlinf_layout_log_probabilities_entropy_and_values(make, data, stored):
    policy = make(layout="rlinf", temperature=1.6)
    for prompts in (stored[keys.PROMPT_TOKENS], data["rlinf_input_ids"]):  # padding right, and after BOS
        stored[keys.PROMPT_TOKENS] = prompts
        log_prob, entropy, value = policy.evaluate_actions(stored)
        assert log_prob.shape == entropy.shape == (2, 8, 7)
        assert_near(log_prob.flatten(1), data["rlinf_logprobs_T1.6"], through(policy))
        assert_near(entropy.flatten(1), data["rlinf_entropy"], through(policy))
        assert_near(value, data["rlinf_values"], through(policy))
    other = make(layout="official", temperature=1.6).evaluate_actions(stored)[0]
    assert (other - log_prob).abs().max() > 0.5


def test_l1_head_with_proprioception_matches_the_reference(make, data, stored):
    policy = make(head="l1", use_proprio=True, num_images_in_input=2, value_head=False)
    bounds = policy.statistics.proprio
    normalised = data["l1_proprio"]
    inside = normalised.clamp(-0.8, 0.8)  # what normalisation does not clamp, for the way through the states
    assert_near(policy.statistics.normalize_states(bounds.unnormalize(inside)), inside)
    policy.statistics = type("Given", (), {"normalize_states": lambda self, states: states})()
    states = policy.action_states(stored)
    assert_near(policy.action_head(states), data["l1_actions_norm"], through(policy))


def test_l1_head_acts_learns_and_has_no_log_probability(make, data, stored):
    policy = make(head="l1", use_proprio=True, num_images_in_input=2, value_head=False)
    stored[keys.STATES] = policy.statistics.proprio.unnormalize(data["l1_proprio"])
    td = act(policy, stored, ExplorationType.RANDOM)
    expected = policy.adapter.to_simulator(data["l1_actions_unnorm"].float())
    assert_near(td[keys.ACTION], expected, through(policy))
    assert keys.STATE_VALUE not in td
    assert policy.num_values == 0
    for ask in (policy.get_dist, policy.evaluate_actions):
        with pytest.raises(ValueError, match="L1 head"):
            ask(td)
    loss = policy.imitation_loss(td, sigma=0.1)
    assert loss.shape == (2, 8)
    loss.mean().backward()
    assert policy.proprio_projector.fc1.weight.grad.abs().sum() > 0


@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, 0), (1.6, 0), (0.5, 1), (1.3, 20)])
@pytest.mark.parametrize("layout", ["official", "rlinf"])
def test_the_update_sees_the_probabilities_that_were_sampled_from(make, stored, layout, temperature, top_k):
    policy = make(layout=layout, temperature=temperature, top_k=top_k)
    td = act(policy, stored, ExplorationType.RANDOM)
    rollout = td.select(*policy.loss_keys)
    log_prob, entropy, value = policy.evaluate_actions(rollout)
    assert_near(log_prob, td[keys.ACTION_LOG_PROB], through(policy))
    assert_near(value, td[keys.STATE_VALUE], through(policy))
    one = torch.cat([policy.evaluate_actions(rollout[[row]])[0] for row in range(2)])
    assert_near(one, log_prob.detach(), through(policy))
    (log_prob.sum() + entropy.sum()).backward()
    gradients = [parameter.grad for parameter in policy.parameters() if parameter.grad is not None]
    assert all(torch.isfinite(gradient).all() for gradient in gradients)


def test_one_value_per_primitive_action_and_the_ppo_loss(make, stored, tmp_path):
    source = make_checkpoint(tmp_path)
    policy = make(source, value_per_action=True, layout="rlinf")  # the checkpoint has no value head: a new one
    assert policy.num_values == 8
    td = act(policy, stored, ExplorationType.RANDOM)
    assert td[keys.STATE_VALUE].shape == (2, 8)
    assert td[keys.STATE_VALUE].abs().max() > 0
    td[keys.NEXT, keys.STEP_MASK] = torch.ones(2, 8, dtype=torch.bool)
    td[keys.ADVANTAGE], td[keys.VALUE_TARGET] = torch.randn(2, 8), torch.ones(2, 8)
    out = ChunkClipPPOLoss(policy, log_prob_level="action")(td)
    assert out["log_ratio_per_token"] < 1e-5
    (out["loss_objective"] + out["loss_critic"]).backward()
    assert policy.value_head.mlp[4].weight.grad.abs().sum() > 0


def test_what_a_policy_reads_is_what_a_collector_keeps(make):
    assert make().loss_keys == (keys.MODEL_IMAGES, keys.PROMPT_TOKENS, keys.ACTION_TOKENS)
    policy = make(num_images_in_input=2, use_proprio=True)
    assert set(policy.loss_keys[:2]) == {keys.MODEL_IMAGES, keys.STATES}
    without = make(head="l1", value_head=False)
    assert without.loss_keys == (keys.MODEL_IMAGES, keys.PROMPT_TOKENS)
    assert without.out_keys == [*without.loss_keys, keys.ACTION]
    assert policy.state_dim == 8
    assert policy.chunk_size == 8
    assert policy.action_dim == 7


def test_a_saved_policy_comes_back_whole(make, stored, tmp_path):
    policy = make(head="l1", use_proprio=True, num_images_in_input=2)
    policy.save_pretrained(tmp_path)
    loaded = make(tmp_path)
    assert asdict(loaded.config) == asdict(policy.config)
    assert {file.name.partition("--")[0] for file in tmp_path.glob("*--*.pt")} == {"action_head", "proprio_projector"}
    actions = [act(one, stored, ExplorationType.DETERMINISTIC)[keys.ACTION] for one in (policy, loaded)]
    assert torch.equal(*actions)
    for name, wrong in (("layout", "rlinf"), ("head", "tokens"), ("num_action_chunks", 5)):
        with pytest.raises(ValueError, match=f"leave {name} out"):
            make(tmp_path, **{name: wrong})


def test_lora_with_the_l1_head_trains_the_heads_too(make):
    policy = make(head="l1", use_proprio=True)
    add_lora(policy, rank=2)
    trained = {name.partition(".")[0] for name, parameter in policy.named_parameters() if parameter.requires_grad}
    assert trained == {"model", "value_head", "action_head", "proprio_projector"}


def test_a_published_folder_tells_its_head_but_not_its_layout(folder, tmp_path):
    published = OpenVLAOFT.from_pretrained(folder, benchmark="libero")
    assert published.config.head == "l1"
    assert published.config.use_proprio
    bare = make_checkpoint(tmp_path)
    with pytest.raises(ValueError, match="layout='rlinf'"):
        OpenVLAOFT.from_pretrained(bare, benchmark="libero")
    with pytest.raises(FileNotFoundError, match="action_head"):
        OpenVLAOFT.from_pretrained(bare, benchmark="libero", head="l1")


def test_pixels_belong_to_the_checkpoint(folder, tmp_path):
    """As the published code of each sequence layout has them, until the user asks for others; ours are kept."""

    def load(source, **settings):
        config = OpenVLAOFT.from_pretrained(source, benchmark="libero", value_head=False, **settings).config
        return config.image_resize, config.center_crop

    bare = make_checkpoint(tmp_path / "bare")
    assert load(folder) == load(bare, layout="official") == ("lanczos3", True)
    assert load(bare, layout="rlinf") == ("bicubic", False)
    assert load(folder, image_resize="bicubic") == ("bicubic", True)
    assert load(folder, center_crop=False) == ("lanczos3", False)

    ours = tmp_path / "ours"
    OpenVLAOFT.from_pretrained(folder, benchmark="libero").save_pretrained(ours)
    assert load(ours) == ("lanczos3", True)
    assert load(ours, image_resize="bicubic") == ("bicubic", True)
    saved = json.loads((ours / "vla_torchrl.json").read_text())
    del saved["image_resize"]  # as before there was a choice
    (ours / "vla_torchrl.json").write_text(json.dumps(saved | {"center_crop": False}))
    (ours / "SHA256SUMS").unlink()
    assert load(ours) == ("bicubic", False)


@pytest.mark.parametrize("num_images", [1, 2])
def test_the_official_layout_sees_every_camera_resized_and_cropped_as_its_code_does(folder, stored, num_images):
    policy = OpenVLAOFT.from_pretrained(folder, benchmark="libero", num_images_in_input=num_images)
    seen = []
    policy.model.vision_backbone.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    policy.prompts = lambda texts: stored[keys.PROMPT_TOKENS]
    act(policy, stored, ExplorationType.DETERMINISTIC)
    cameras = torch.stack([stored[keys.IMAGES], stored[keys.WRIST_IMAGES][:, 0]], 1)[:, :num_images]
    resized = [resize_lanczos3(jpeg_round_trip(camera), (224, 224)) for camera in cameras.unbind(1)]
    cropped = torch.stack([center_crop(camera) for camera in resized], 1)
    assert torch.equal(seen[0], policy.preprocessor.normalize(cropped))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"head": "diffusion"}, "tokens"),
        ({"image_resize": "lanczos"}, "'bicubic' or 'lanczos3'"),
        ({"center_crop": None}, "center_crop=null: must be a valid boolean: true or false"),
        ({"layout": "simplevla"}, "rlinf"),
        ({"head": "l1", "layout": "rlinf"}, "official"),
        ({"use_film": True}, "has no vision_backbone.*leave use_film out"),
        ({"num_images_in_input": 3}, "cameras"),
        ({"num_action_chunks": 0}, "num_action_chunks"),
        ({"use_proprio": True, "benchmark": "calvin"}, "proprioception of 8"),
        ({"value_per_action": True}, "mlp.4.weight"),
    ],
)
def test_settings_that_do_not_fit_are_refused_with_a_reason(make, settings, message):
    with pytest.raises(ValueError, match=message):
        make(**settings)


def test_value_head_starts_as_in_the_reference():
    torch.manual_seed(0)
    head = ValueHead(64, 8)
    assert {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()} == {
        "mlp.0.weight": (512, 64),
        "mlp.0.bias": (512,),
        "mlp.2.weight": (128, 512),
        "mlp.2.bias": (128,),
        "mlp.4.weight": (8, 128),
    }
    assert head.mlp[2].weight.std().item() == pytest.approx((2 / 128) ** 0.5, rel=0.05)
    assert head.mlp[4].weight.std().item() == pytest.approx(0.02, rel=0.1)
    loaded = {key.removeprefix("value_head.") for key in load_file(OFT / "rlinf_value_head.safetensors")}
    assert loaded == head.state_dict().keys()
