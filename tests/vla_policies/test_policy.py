"""SmallVLA keeps the policy contract; checkpoints and settings fit or are refused; policies from outside are equals."""

import json
import re
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf
from paths import ROOT
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torchrl.envs.utils import ExplorationType, set_exploration_type

from vla_common import keys
from vla_common.registry import policies
from vla_common.settings import Count, Fraction, check_settings
from vla_policies import SmallVLA, SmallVLAConfig, VLAPolicy, load_policy, make_policy, policy_types, register_policy
from vla_policies.processing.action_tokens import ActionBins
from vla_policies.registry import inspect_policy, meta_policy
from vla_policies.small.encoder import HashedText

CONFIG = SmallVLAConfig(action_low=(-1.0, -1.0, 0.0), action_high=(1.0, 1.0, 0.5), state_dim=4, chunk_size=3)


@pytest.fixture
def policy():
    torch.manual_seed(0)
    policy = SmallVLA(CONFIG)
    policy.set_statistics(torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([0.1, 0.2, 0.3, 0.4]))
    return policy


def observations(n=4, text="push the puck"):
    generator = torch.Generator().manual_seed(1)
    return TensorDict(
        {
            keys.IMAGES: torch.randint(0, 256, (n, 48, 64, 3), dtype=torch.uint8, generator=generator),
            keys.STATES: torch.randn(n, 4, generator=generator),
            keys.TASK_DESCRIPTIONS: NonTensorStack(*(NonTensorData(text) for _ in range(n))),
        },
        batch_size=[n],
    )


def act(policy, td, kind):
    with torch.no_grad(), set_exploration_type(kind):
        return policy(td)


def test_size_and_default_number_of_bins():
    spec = {"action_low": (-1.0,) * 4, "action_high": (1.0,) * 4, "state_dim": 4}
    assert SmallVLAConfig(**spec).num_bins == 256
    size = sum(parameter.numel() for parameter in SmallVLA(SmallVLAConfig(**spec)).parameters())
    assert 0.5e6 < size < 1.5e6


def test_acting_writes_the_contracts_entries_within_the_bounds(policy):
    td = act(policy, observations(), ExplorationType.RANDOM)
    assert td[keys.ACTION].shape == td[keys.ACTION_LOG_PROB].shape == (4, 3, 3)
    assert td[keys.ACTION].dtype == torch.float32
    assert td[keys.ACTION_TOKENS].dtype == torch.int64
    assert td[keys.STATE_VALUE].shape == (4, 1)
    assert (td[keys.ACTION] >= policy.bins.low).all()
    assert (td[keys.ACTION] <= policy.bins.high).all()
    assert set(policy.loss_keys) <= set(td.keys())


def test_one_value_per_decision_or_per_primitive_action(policy):
    assert policy.num_values == 1
    per_action = SmallVLA(replace(CONFIG, value_per_action=True))
    assert per_action.num_values == 3
    assert act(per_action, observations(), ExplorationType.RANDOM)[keys.STATE_VALUE].shape == (4, 3)


def test_the_update_sees_the_probabilities_that_were_sampled_from(policy):
    td = act(policy, observations(), ExplorationType.RANDOM)
    stored = td.select(*policy.loss_keys)
    log_prob, entropy, value = policy.evaluate_actions(stored)
    torch.testing.assert_close(log_prob, td[keys.ACTION_LOG_PROB])
    torch.testing.assert_close(value, td[keys.STATE_VALUE])
    dist = policy.get_dist(stored)
    torch.testing.assert_close(dist.log_prob(td[keys.ACTION_TOKENS]), log_prob)
    torch.testing.assert_close(dist.entropy(), entropy)


def test_sampling_is_seeded_and_greedy_is_not_random(policy):
    samples = []
    for _ in range(2):
        torch.manual_seed(7)
        samples.append(act(policy, observations(), ExplorationType.RANDOM)[keys.ACTION])
    assert torch.equal(*samples)
    assert not torch.equal(act(policy, observations(), ExplorationType.RANDOM)[keys.ACTION], samples[0])
    greedy = [act(policy, observations(), ExplorationType.DETERMINISTIC)[keys.ACTION] for _ in range(2)]
    assert torch.equal(*greedy)
    mean = policy.get_dist(act(policy, observations(), ExplorationType.RANDOM)).probs @ torch.arange(256.0)
    torch.testing.assert_close(greedy[0], policy.bins.decode(mean))
    mode = act(policy, observations(), ExplorationType.MODE)
    assert torch.equal(mode[keys.ACTION_TOKENS], policy.get_dist(mode).probs.argmax(-1))


@pytest.mark.parametrize("what", ["image", "state", "text"])
def test_every_input_changes_the_action(policy, what):
    changed = observations(text="pull the puck" if what == "text" else "push the puck")
    if what == "image":
        changed[keys.IMAGES] = 255 - changed[keys.IMAGES]
    if what == "state":
        changed[keys.STATES] = changed[keys.STATES] + 1
    logits = [policy.get_dist(act(policy, td, ExplorationType.RANDOM)).logits for td in (observations(), changed)]
    assert not torch.allclose(*logits)


def test_the_value_loss_does_not_shape_the_policy_unless_asked():
    for detach in (True, False):
        policy = SmallVLA(SmallVLAConfig(**{**CONFIG.__dict__, "critic_detach": detach}))
        torch.nn.init.normal_(policy.value_head[-1].weight)
        policy(observations())[keys.STATE_VALUE].sum().backward()
        assert (policy.queries.grad is None) == detach


def test_hashed_text_tells_word_order_apart():
    text = HashedText(2048, 8)
    one, other = text.tokenize(["put the cup on the plate", "put the plate on the cup"])
    assert one.shape == (48,)
    assert set(one.tolist()) != set(other.tolist())
    assert torch.equal(*text.tokenize(["Press a BUTTON", "press a button"]))
    assert torch.isfinite(text(text.tokenize([""]))).all()


def test_bins_round_trip():
    bins = ActionBins([-1.0, 0.0], [1.0, 0.5], 5)
    tokens = torch.tensor([[0, 4], [2, 1], [4, 0]])
    assert torch.equal(bins.encode(bins.decode(tokens)), tokens.float())
    torch.testing.assert_close(bins.decode(tokens)[0], torch.tensor([-1.0, 0.5]))
    torch.testing.assert_close(bins.encode(torch.tensor([[9.0, -9.0]])), torch.tensor([[4.0, 0.0]]))


def test_imitation_learns_a_demonstration(policy):
    td = act(policy, observations(1), ExplorationType.RANDOM)
    td[keys.ACTION] = torch.tensor([0.5, -0.5, 0.25]).expand(1, 3, 3)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3)
    for _ in range(60):
        optimizer.zero_grad()
        policy.imitation_loss(td, sigma=0.1).mean().backward()
        optimizer.step()
    learnt = act(policy, observations(1), ExplorationType.DETERMINISTIC)[keys.ACTION]
    torch.testing.assert_close(learnt, td[keys.ACTION], atol=0.1, rtol=0)


def test_a_saved_policy_comes_back_with_its_statistics(policy, tmp_path):
    policy.save_pretrained(tmp_path / "policy")
    loaded = load_policy(tmp_path / "policy")
    assert loaded.config == policy.config
    for name in ("state_mean", "state_std"):
        assert torch.equal(getattr(loaded.encoder, name), getattr(policy.encoder, name))
    actions = [act(p, observations(), ExplorationType.DETERMINISTIC)[keys.ACTION] for p in (policy, loaded)]
    assert torch.equal(*actions)


def test_broken_checkpoints_are_refused_with_a_reason(policy, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config.json"):
        load_policy(tmp_path)
    policy.save_pretrained(tmp_path)
    config, weights = tmp_path / "config.json", tmp_path / "model.safetensors"
    good_config, good_weights = config.read_text(), weights.read_bytes()
    (tmp_path / "SHA256SUMS").unlink()  # it would be said first that they were changed

    weights.write_bytes(good_weights[: len(good_weights) // 2])
    with pytest.raises(ValueError, match="truncated"):
        load_policy(tmp_path)
    weights.write_bytes(good_weights)

    for change, message in [
        ({"policy": "openvla_next"}, "openvla_next"),
        ({"dim": 64}, "in another shape"),
        ({"layers": 3}, "lacks"),
        ({"width": 3}, "width"),
    ]:
        config.write_text(json.dumps({**json.loads(good_config), **change}))
        with pytest.raises(ValueError, match=message):
            load_policy(tmp_path)
    config.write_text(good_config[:20])
    with pytest.raises(ValueError, match=r"config.json"):
        load_policy(tmp_path)
    config.write_text(good_config)
    load_policy(tmp_path)


def test_sizes_that_a_file_claims_take_no_memory_before_they_are_compared(policy, tmp_path, monkeypatch):
    policy.save_pretrained(tmp_path)
    (tmp_path / "SHA256SUMS").unlink()
    config, made, init = tmp_path / "config.json", [], SmallVLA.__init__
    config.write_text(json.dumps({**json.loads(config.read_text()), "text_buckets": 1_000_000, "layers": 100}))

    def recorded(self, config):
        init(self, config)
        made.append(next(self.parameters()).device.type)

    monkeypatch.setattr(SmallVLA, "__init__", recorded)
    with pytest.raises(ValueError, match="in another shape"):
        load_policy(tmp_path)
    assert made == ["meta"]


# Made for an environment


@dataclass(frozen=True)
class Shape:
    """An environment that has not been started; see :class:`vla_common.schema.EnvironmentShape`."""

    benchmark: str = "metaworld"
    id: str = "metaworld/toy"
    action_low: tuple[float, ...] = (-1.0, -1.0, -1.0, -1.0)
    action_high: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0)
    state_dim: int = 4
    tasks: tuple = ()
    image_shape: tuple[int, int] = (48, 64)
    wrist_image_shape: tuple[int, int, int] | None = None


SMALL = {"chunk_size": 3, "dim": 16, "layers": 1, "heads": 2, "channels": [4, 8, 8], "keypoints": 4, "text_buckets": 64}


@pytest.mark.parametrize("family", ["small", "small_flow"])
def test_what_nobody_sets_is_the_classs_default(family):
    unset = dict.fromkeys(policy_types(family).keys() - {"family", "checkpoint"})
    policy = make_policy(Shape(), family=family, **unset)
    assert policy.family == family
    assert policy.config.dim == 128
    assert policy.config.channels == (16, 32, 48)
    assert (policy.action_dim, policy.state_dim) == (4, 4)
    if family == "small":
        assert policy.config.num_bins == 41
        assert policy.config.critic_detach
    assert make_policy(Shape(), family=family, **SMALL).config.channels == (4, 8, 8)


@pytest.mark.parametrize("family", ["small", "small_flow"])
def test_settings_beside_a_checkpoint_are_its_own_or_refused(family, tmp_path):
    saved = make_policy(Shape(), family=family, **SMALL)
    saved.save_pretrained(tmp_path)
    for kind in ("small", "small_flow"):  # any family that is made new takes it
        loaded = make_policy(Shape(), family=kind, checkpoint=tmp_path)
        assert type(loaded) is type(saved)
        assert loaded.config == saved.config
    assert make_policy(Shape(), family=family, checkpoint=tmp_path, **SMALL).config == saved.config
    for name, value, own in [("dim", 999, 16), ("channels", [4, 8, 12], [4, 8, 8])]:
        with pytest.raises(ValueError, match="was trained with") as error:
            make_policy(Shape(), family=family, checkpoint=tmp_path, **{name: value})
        message = str(error.value)
        assert message.startswith(f"policy.{name}={value}: {tmp_path} was trained with {name}={own}")
        assert message.endswith(f"leave {name} out")
        assert "\n" not in message
        with pytest.raises(ValueError, match=rf"^{name}=.* was trained with {name}="):
            load_policy(tmp_path, **{name: value})


def test_a_setting_that_a_checkpoint_has_left_open_is_fixed_too(tmp_path):
    make_policy(Shape(), family="small_flow", **SMALL).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"policy.crop=\[0, 0, 1, 1\]: .* with crop=None"):
        make_policy(Shape(), family="small_flow", checkpoint=tmp_path, crop=[0, 0, 1, 1])


def test_how_a_flow_samples_is_not_fixed_by_its_checkpoint(tmp_path):
    saved = make_policy(Shape(), family="small_flow", **SMALL)
    saved.save_pretrained(tmp_path)
    loaded = make_policy(Shape(), family="small_flow", checkpoint=tmp_path, num_steps=3, joint_log_prob=True)
    assert loaded.config == replace(saved.config, num_steps=3, joint_log_prob=True)
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in saved.state_dict().items())
    loaded.save_pretrained(tmp_path / "again")
    assert load_policy(tmp_path / "again").config == loaded.config
    assert meta_policy(tmp_path, num_steps=3).config.num_steps == 3
    with pytest.raises(ValueError, match=r"^policy.num_steps=0: "):
        make_policy(Shape(), family="small_flow", checkpoint=tmp_path, num_steps=0)
    with pytest.raises(ValueError, match=r"^policy.method=flow_noise: .* was trained with method=flow_sde"):
        make_policy(Shape(), family="small_flow", checkpoint=tmp_path, method="flow_noise")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"family": "smal"}, "unknown policy.family 'smal'; did you mean small"),
        ({"family": "small", "num_bin": 9}, "unknown setting 'policy.num_bin'; did you mean policy.num_bins"),
        ({"family": "small", "num_bins": 1}, "policy.num_bins=1: must be greater than or equal to 2"),
        ({"family": "small", "dim": 0.5}, "policy.dim=0.5: must be a valid integer"),
        ({"family": "small", "state_dim": 9}, "unknown setting 'policy.state_dim'"),
        ({"family": "small", "dim": 100, "heads": 3}, "policy.heads=3: must divide dim=100; a dim of 99 would do"),
        (
            {"family": "small", "channels": [16, 30, 48]},
            "policy.channels=[16, 30, 48]: the last two must be multiples of 4",
        ),
        ({"family": "small_flow", "dim": 9, "heads": 1}, "policy.dim=9: must be even"),
        ({"family": "small_flow", "method": "sde"}, "policy.method=sde: must be 'flow_sde', 'flow_noise', 'flow_cps'"),
        ({"family": "small_flow", "noise_level": -1.0}, "policy.noise_level=-1.0: must be greater than or equal to 0"),
        ({"family": "pi0"}, "policy=pi0 starts from a checkpoint; type policy.checkpoint=FOLDER"),
        ({"family": "pi0", "dtype": "float16"}, "policy.dtype=float16: must be 'float32' or 'bfloat16'"),
        ({"family": "openvla", "lora_rank": 0}, "policy.lora_rank=0: must be greater than or equal to 1"),
        ({"family": "openvla_oft", "layout": "theirs"}, "policy.layout=theirs: must be 'official' or 'rlinf'"),
        ({"family": "openvla", "benchmark": "libero"}, "unknown setting 'policy.benchmark'"),
    ],
)
def test_settings_are_refused_as_they_are_typed(settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make_policy(Shape(), **settings)


@pytest.mark.parametrize("family", ["small", "small_flow", "openvla", "openvla_oft", "pi0"])
def test_a_configuration_is_the_keyword_arguments_of_make_policy(family):
    types = policy_types(family)
    written = OmegaConf.to_container(OmegaConf.load(ROOT / "recipes" / "conf" / "policy" / f"{family}.yaml"))
    assert written.pop("family") == family
    assert set(written) == types.keys() - {"family"}
    assert set(written.values()) == {None}, "what is written there would count as typed"
    check_settings("policy", {**written, "family": family}, types)


def test_an_environment_that_does_not_fit_is_refused(tmp_path):
    make_policy(Shape(), family="small", **SMALL).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"4 action and 4 state dimensions, metaworld/toy has 4 and 9; .*env=..."):
        make_policy(Shape(state_dim=9), family="small", checkpoint=tmp_path)


# Policies from outside


@dataclass(frozen=True)
class ConstantConfig:
    action_low: tuple[float, ...]
    action_high: tuple[float, ...]
    state_dim: int
    chunk_size: Count = 2
    strength: Fraction = 0.5


class Constant(VLAPolicy):
    """The least that recipes, saving, loading and inspecting need."""

    family = "constant"
    config_class = ConstantConfig
    in_keys = (keys.STATES,)
    out_keys = (keys.ACTION,)

    def __init__(self, config):
        super().__init__()
        self.config, self.chunk_size, self.num_values = config, config.chunk_size, 1
        self.action_dim, self.state_dim = len(config.action_low), config.state_dim
        self.actor, self.value_head = torch.nn.Linear(config.state_dim, self.action_dim), torch.nn.Linear(4, 1)

    def forward(self, tensordict):
        action = self.actor(tensordict[keys.STATES]).unsqueeze(1).expand(-1, self.chunk_size, -1)
        return tensordict.set(keys.ACTION, self.config.strength * action)


@pytest.fixture
def constant(monkeypatch):
    monkeypatch.setattr(policies, "_registered", dict(policies._registered))
    register_policy("constant", Constant)


@pytest.mark.usefixtures("constant")
def test_a_policy_of_a_few_lines_is_made_saved_loaded_and_inspected(tmp_path):
    policy = make_policy(Shape(), family="constant", strength=0.25)
    policy.save_pretrained(tmp_path)
    loaded = load_policy(tmp_path)
    assert type(loaded) is Constant
    assert loaded.config == policy.config
    assert torch.equal(policy(observations())[keys.ACTION], loaded(observations())[keys.ACTION])
    facts = inspect_policy(tmp_path).facts
    assert facts["family"] == "constant"
    assert facts["weights"].startswith("25 parameters")
    assert policy_types("constant").keys() == {"family", "checkpoint", "chunk_size", "strength"}
    with pytest.raises(ValueError, match=r"policy.strength=1.5: must be less than or equal to 1"):
        make_policy(Shape(), family="constant", strength=1.5)
    assert {*policy.critic_parameters()} == {*policy.value_head.parameters()}
    assert policy.device == torch.device("cpu")
    assert policy.precompute(policy) is policy
    with pytest.raises(NotImplementedError, match=r"^Constant has no imitation_loss$"):
        policy.imitation_loss(observations(), sigma=0.1)


@pytest.mark.usefixtures("constant")
def test_names_are_given_once():
    with pytest.raises(ValueError, match="there is a policy family 'small' already"):
        register_policy("small", type("Other", (Constant,), {"family": "small"}))
    with pytest.raises(ValueError, match=r"Constant.family is 'constant' and it is registered as 'other'"):
        register_policy("other", Constant)


def test_a_checkpoint_of_a_package_that_is_not_installed_says_so(tmp_path, request):
    request.getfixturevalue("constant")
    make_policy(Shape(), family="constant").save_pretrained(tmp_path)
    del policies._registered["constant"]
    with pytest.raises(ValueError, match=r"a checkpoint of 'constant'; known are openvla, .*: install the package"):
        load_policy(tmp_path)


class Declared:
    """What an installed package declares, as importlib.metadata gives it."""

    def __init__(self, name, item, package, value="package:Thing"):
        self.name, self.item, self.dist, self.value = name, item, SimpleNamespace(name=package), value
        self.module, _, self.attr = value.partition(":")

    def load(self):
        return self.item


@pytest.mark.parametrize("item", [object, 3, type("Other", (Constant,), {"family": "other"})])
def test_a_strangers_mistake_is_not_in_the_way_of_our_policies(item, monkeypatch, tmp_path):
    make_policy(Shape(), family="small", **SMALL).save_pretrained(tmp_path)
    found = {**policies._entry_points, "strange": Declared("strange", item, "strange-package")}
    monkeypatch.setattr(policies, "_entry_points", found)
    monkeypatch.setattr(policies, "_registered", dict(policies._registered))
    with pytest.warns(RuntimeWarning, match="'strange' of vla_torchrl.policies must be a VLAPolicy of that family"):
        assert load_policy(tmp_path).family == "small"
