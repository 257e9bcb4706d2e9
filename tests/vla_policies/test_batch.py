"""Every policy of the library: any batch, observations by name, and TorchRL's own PPO loss with a ratio of 1."""

import pytest
import torch
from closeness import assert_near, sharpness, through
from openvla_checkpoint import golden, observations, padded
from openvla_checkpoint import make_checkpoint as make_openvla_checkpoint
from pi0_checkpoint import make_checkpoint as make_pi0_checkpoint
from tensordict import NonTensorStack, TensorDict
from tensordict.nn import ProbabilisticTensorDictModule, TensorDictModule, TensorDictSequential
from tiny_policies import SIZES
from torch.distributions import Independent, Normal
from torchrl.collectors import Collector
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import ProbabilisticActor
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE
from toy import CHUNK, DIM, ToyEnv

from vla_algos import ChunkClipPPOLoss, StepCollector, gae
from vla_common import keys
from vla_common.texts import encode, to_strings
from vla_policies import OpenVLA, OpenVLAOFT, Pi0, SmallFlow, SmallFlowConfig, SmallVLA, SmallVLAConfig, VLAPolicy
from vla_policies.batch import any_batch
from vla_policies.flow.steps import StepDistribution
from vla_policies.processing.adapters import make_example

METHODS = [(method, joint) for method in ("flow_sde", "flow_cps", "flow_noise") for joint in (False, True)]
PI0 = {"pi0": ("pi0_tiny", "pi0_metaworld"), "pi05": ("pi05_tiny", "pi05_metaworld")}
FLOWS = [("small_flow", method, joint) for method, joint in METHODS]
FLOWS += [("pi0", "flow_sde", False), ("pi0", "flow_noise", True), ("pi05", "flow_cps", False)]
POLICIES = [("small", None, None), ("openvla", None, None), ("openvla_oft", None, None), *FLOWS]
# Where rollout and update run through the same operations the ratio is 1 to the last bit. All K steps of a flow, and
# all tokens of OpenVLA, are one pass in the update and many in the rollout: sums are rounded differently. So are those
# of torch's fused layers, which nn.TransformerEncoder takes for a rollout in eval mode.


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("checkpoints")
    found = {name: make_pi0_checkpoint(root / name, tiny) for name, (tiny, _) in PI0.items()}
    found["openvla"] = make_openvla_checkpoint(root / "openvla", value_head=True)
    found["openvla_oft"] = make_openvla_checkpoint(root / "oft", heads=True, value_head=True)
    return found


@pytest.fixture(params=POLICIES, ids=lambda given: "-".join(str(part) for part in given if part is not None))
def made(request, folders):
    """A policy whose heads are not zero, six observations, and whether all is one pass in rollout and update."""
    name, method, joint = request.param
    torch.manual_seed(0)
    flow = {} if method is None else {"method": method, "joint_log_prob": joint}
    if name.startswith("small"):
        shape = {**SIZES, "action_low": (-1.0, -2.0), "action_high": (1.0, 4.0)}
        policy = SmallVLA(SmallVLAConfig(**shape)) if name == "small" else SmallFlow(SmallFlowConfig(**shape, **flow))
    elif name in PI0:
        policy = Pi0.from_pretrained(folders[name], benchmark="metaworld", config_name=PI0[name][1], **flow)
    else:
        data = golden(f"{name}_tiny")
        if name == "openvla":
            rows = [row[:length] for row, length in zip(data["input_ids"], data["prompt_lens"], strict=True)]
            policy = OpenVLA.from_pretrained(folders[name], benchmark="libero", value_head=True)
        else:
            rows = [data["prompt1"], data["prompt2"]]
            policy = OpenVLAOFT.from_pretrained(
                folders[name], benchmark="libero", head="tokens", layout="official", use_proprio=False, value_head=True
            )
        prompts = padded(*rows)  # the stand-in tokenizer cannot write them
        policy.prompts = lambda texts: prompts[[len(text) % 2 for text in texts]]
    for parameter_name, parameter in policy.named_parameters():
        if "value_head" in parameter_name or "action_out" in parameter_name:
            torch.nn.init.normal_(parameter, std=0.1)
    if method is None and name != "small":
        seen = observations(data["images"][[0, 1, 0, 1, 0, 1]], instructions=["pick it", "put it!"] * 3)
    else:
        seen = make_example("metaworld", 6)
        seen[keys.IMAGES] = torch.randint(0, 256, seen[keys.IMAGES].shape, dtype=torch.uint8)
        seen[keys.STATES] = torch.randn(seen[keys.STATES].shape)
        seen[keys.TASK_DESCRIPTIONS] = NonTensorStack(*["open the door", "push the puck"] * 3)
    return policy, seen, not joint and name != "openvla"


def act(policy, td, kind):
    with torch.no_grad(), set_exploration_type(kind):
        return policy(td)


def torchrl_loss(policy, **settings):
    loss = ClipPPOLoss(policy, policy.get_value_operator(), critic_coeff=0.5, **settings)
    loss.set_keys(action=policy.sample_key, sample_log_prob=keys.ACTION_LOG_PROB, value=keys.STATE_VALUE)
    return loss


def with_advantages(td):
    td[keys.ADVANTAGE], td[keys.VALUE_TARGET] = torch.randn(*td.shape, 1), torch.randn(*td.shape, 1)
    return td


def test_the_ratio_of_torchrls_loss_is_one(made):
    policy, seen, exact = made
    for mode in (True, False):
        policy.train(mode)
        td = with_advantages(
            act(policy, seen.clone(), ExplorationType.RANDOM).select(*policy.loss_keys, *policy.out_keys)
        )
        out = torchrl_loss(policy)(td)
        same = exact and (mode or not isinstance(policy, SmallVLA | SmallFlow))
        dist = policy.get_dist(td)
        rounded = 0 if same else sharpness(dist) * through(policy)
        again = dist.log_prob(td[policy.sample_key])
        assert_near(again, td[keys.ACTION_LOG_PROB], rounded)
        off = (again - td[keys.ACTION_LOG_PROB]).abs().max().item()
        assert out["max_ratio"].item() == pytest.approx(1, abs=4 * off)  # the exponential and the mean are rounded too
        assert out["mean_ratio"].item() == pytest.approx(1, abs=4 * off)
        assert out["entropy"].isfinite()
        log_prob, entropy, value = policy.evaluate_actions(td)
        assert_near(dist.entropy(), entropy)
        assert torch.equal(policy.get_value_operator()(td.clone())[keys.STATE_VALUE], value)
        assert_near(log_prob, td[keys.ACTION_LOG_PROB], rounded)
    (out["loss_objective"] + out["loss_critic"]).backward()
    moved = {name.split(".")[0] for name, p in policy.named_parameters() if p.grad is not None and p.grad.any()}
    assert "value_head" in moved
    assert len(moved) > 1


def test_an_action_instead_of_the_sample_is_refused(made):
    policy, seen, _ = made
    td = with_advantages(act(policy, seen, ExplorationType.RANDOM))
    loss = torchrl_loss(policy)
    loss.set_keys(action=keys.ACTION)
    for batch in (td, torch.stack([*td.unbind(0)]), TensorDict.lazy_stack([*td.unbind(0)])):
        with pytest.raises(ValueError, match=r"set_keys\(action=policy.sample_key") as error:
            loss(batch)
        assert "\n" not in str(error.value)
    wrong = td[policy.sample_key][:, :1, :1]  # would broadcast
    with pytest.raises(ValueError, match="was asked for the probability of"):
        policy.get_dist(td).log_prob(wrong)
    fresh = policy.get_dist(td).sample()
    assert policy.get_dist(td).log_prob(fresh).shape == td[keys.ACTION_LOG_PROB].shape


def test_any_batch_is_the_flat_one(made):
    policy, seen, _ = made
    batch = (2, 3, 1)
    torch.manual_seed(3)
    flat = act(policy, seen.clone(), ExplorationType.RANDOM)
    torch.manual_seed(3)
    given = seen.clone().reshape(*batch)
    images = given[keys.IMAGES]
    shaped = act(policy, given, ExplorationType.RANDOM)
    assert shaped is given
    assert shaped[keys.IMAGES] is images
    assert shaped.batch_size == batch
    for key in policy.out_keys:
        assert torch.equal(shaped[key], flat[key].reshape(*batch, *flat[key].shape[1:])), key
    for one, other in zip(policy.evaluate_actions(shaped), policy.evaluate_actions(flat), strict=True):
        assert torch.equal(one, other.reshape(*batch, *other.shape[1:]))
    log_prob = policy.get_dist(shaped).log_prob(shaped[policy.sample_key])
    expected = policy.get_dist(flat).log_prob(flat[policy.sample_key])
    assert torch.equal(log_prob, expected.reshape(log_prob.shape))
    assert policy.get_dist(shaped).entropy().shape == shaped[keys.ACTION_LOG_PROB].shape
    torch.manual_seed(4)
    losses = policy.imitation_loss(shaped, 0.1)
    torch.manual_seed(4)
    assert torch.equal(losses, policy.imitation_loss(flat, 0.1).reshape(losses.shape))


def test_a_single_observation_and_observations_by_name(made):
    policy, seen, _ = made
    row = act(policy, seen[:1].clone(), ExplorationType.DETERMINISTIC)
    alone = act(policy, seen[0].clone(), ExplorationType.DETERMINISTIC)
    assert alone.batch_size == ()
    assert torch.equal(alone[keys.ACTION], row[keys.ACTION][0])
    assert policy.evaluate_actions(alone)[0].shape == row[keys.ACTION_LOG_PROB].shape[1:]
    tensors = {key: seen[key] for key in policy.in_keys if key != keys.TASK_DESCRIPTIONS}
    texts = seen.get(keys.TASK_DESCRIPTIONS).tolist()
    torch.manual_seed(5)
    expected = act(policy, seen.clone(), ExplorationType.RANDOM)
    for form in (texts, NonTensorStack(*texts), encode(texts)):
        torch.manual_seed(5)
        with torch.no_grad():
            found = policy(**tensors, task_descriptions=form)
        for key, value in zip(policy.out_keys, found, strict=True):
            assert torch.equal(value, expected[key]), key
    with torch.no_grad():
        found = policy(**{key: value[0] for key, value in tensors.items()}, task_descriptions=texts[0])
    assert found[policy.out_keys.index(keys.ACTION)].shape == expected[keys.ACTION].shape[1:]


# ---- rollouts of a toy environment


def small(flow=False, **settings):
    torch.manual_seed(0)
    shape = {"action_low": (-1.0,) * DIM, "action_high": (1.0,) * DIM, "state_dim": 3, "chunk_size": CHUNK}
    shape |= {"dim": 16, "layers": 1, "heads": 2, "keypoints": 4, "channels": (4, 4, 4)}
    return SmallFlow(SmallFlowConfig(**shape, **settings)) if flow else SmallVLA(SmallVLAConfig(**shape, num_bins=5))


@pytest.mark.parametrize("flow", [False, True])
def test_the_ratio_is_one_for_what_collectors_store(flow):
    """The update has four times as many rows as the rollout, whose matrix products may be rounded differently."""
    policy = small(flow)
    ours = gae(StepCollector(ToyEnv(6, horizon=60, goal=99), policy, 4).rollout())
    env = ToyEnv(6, horizon=60, goal=99)
    theirs = next(iter(Collector(env, policy, frames_per_batch=24, total_frames=24)))
    del theirs[keys.STATE_VALUE]  # there is none under "next", and estimators stack both
    for part in (theirs, theirs["next"]):  # as InstructionsToBytes does it: estimators take tensors alone
        part[keys.TASK_DESCRIPTIONS] = encode(to_strings(part)).unflatten(0, (6, 4))
    for wrong in (policy, policy.get_value_operator()):
        with pytest.raises(ValueError, match=r"get_value_operator\(\), deactivate_vmap=True"):
            GAE(gamma=0.9, lmbda=0.9, value_network=wrong)(theirs.clone())
    GAE(
        gamma=0.9,
        lmbda=0.9,
        value_network=policy.get_value_operator(),
        deactivate_vmap=True,
    )(theirs)
    assert theirs[keys.ADVANTAGE].shape == (6, 4, 1)
    for batch in (ours, theirs):
        for td in (batch.reshape(-1), batch):
            out = torchrl_loss(policy)(td)
            assert out["mean_ratio"].item() == pytest.approx(1, abs=1e-6)
            assert out["max_ratio"].item() == pytest.approx(1, abs=1e-5)


def test_the_critic_needs_what_its_gradient_is_of():
    policy = small()
    env = ToyEnv(2)
    seen = env.reset()
    critic = policy.get_value_operator()
    with pytest.raises(
        ValueError, match=r"needs policy.loss_keys in the batch, which lacks \['prompt_tokens', 'action_tokens'\]"
    ):
        critic(seen.clone())
    state = torch.get_rng_state()
    with torch.no_grad():
        value = critic(seen.clone())
    assert torch.equal(torch.get_rng_state(), state)
    assert keys.ACTION not in value
    assert torch.equal(value[keys.STATE_VALUE], act(policy, seen.clone(), ExplorationType.RANDOM)[keys.STATE_VALUE])
    with pytest.raises(ValueError, match="SmallFlow has no value head"):
        small(flow=True, value_head=False).get_value_operator()


# ---- policies of strangers


class Gaussian(VLAPolicy):
    """The least that can be trained: an actor."""

    in_keys, out_keys, sample_key = (keys.STATES,), ("sample", keys.ACTION, keys.ACTION_LOG_PROB), "sample"

    def __init__(self):
        super().__init__()
        self.mean = torch.nn.Linear(3, CHUNK * DIM)

    def forward(self, td):
        dist = self.get_dist(td)
        sample = dist.sample()
        return td.update({"sample": sample, keys.ACTION: sample.tanh(), keys.ACTION_LOG_PROB: dist.log_prob(sample)})

    def get_dist(self, td):
        return Normal(self.mean(td[keys.STATES]).unflatten(-1, (CHUNK, DIM)), 1.0)


def test_an_actor_needs_two_methods():
    policy = Gaussian()
    assert policy.loss_keys == (keys.STATES, "sample")
    assert policy.prompt_tokens(["anything"]).shape == (1, 0)
    batch = gae(StepCollector(ToyEnv(4), policy, 3).rollout())
    out = ChunkClipPPOLoss(policy, critic_coeff=None)(batch.reshape(-1))
    assert out["ratio"].item() == pytest.approx(1, abs=1e-6)
    assert policy.evaluate_actions(batch)[0].shape == (4, 3, CHUNK, DIM)
    assert policy.get_dist(batch).batch_shape == (4, 3, CHUNK, DIM)


def test_what_a_policy_lacks_is_said_when_it_is_made():
    class Nothing(VLAPolicy):
        in_keys, out_keys = (keys.STATES,), (keys.ACTION,)

    class NoDistribution(Nothing):
        out_keys = (keys.ACTION, keys.ACTION_LOG_PROB)

        def forward(self, tensordict):
            return tensordict

    class Critic(Gaussian):
        num_values = 1

    class Reads(Gaussian):
        in_keys = (keys.STATES, keys.TASK_DESCRIPTIONS)

    for policy_class, missing in ((Nothing, "forward"), (NoDistribution, "get_dist"), (Critic, "evaluate_actions")):
        with pytest.raises(TypeError, match=f"{policy_class.__name__} lacks {missing}"):
            policy_class()
    with pytest.raises(NotImplementedError, match="reads instructions and has no prompt_tokens"):
        Reads().prompt_tokens(["go"])


def test_our_loss_refuses_a_module_without_evaluate_actions_and_names_theirs():
    module = TensorDictSequential(TensorDictModule(torch.nn.Linear(3, 2), [keys.STATES], ["loc"]))
    actor = ProbabilisticActor(module, in_keys=["loc"], distribution_class=torch.distributions.Bernoulli)
    assert isinstance(actor[-1], ProbabilisticTensorDictModule)
    for policy in (module, actor):
        with pytest.raises(ValueError, match=r"no evaluate_actions and no loss_keys.*ClipPPOLoss\(actor, critic\)"):
            ChunkClipPPOLoss(policy)


def test_distributions_are_unflattened_with_what_they_are_made_of():
    class Asks:
        @any_batch
        def get_dist(self, tensordict):
            return Independent(StepDistribution(tensordict["x"], torch.ones(6, 2, 3)), 1)

    dist = Asks().get_dist(TensorDict({"x": torch.randn(2, 3, 2, 3)}, [2, 3]))
    assert dist.batch_shape == (2, 3, 2)
    assert dist.event_shape == (3,)
    assert dist.log_prob(dist.sample()).shape == dist.entropy().shape == (2, 3, 2)


def test_a_batch_without_rows_is_refused(made):
    policy, seen, _ = made
    with pytest.raises(ValueError, match=r"batch \[0\] has no observation"):
        policy(seen[:0])


def test_our_loss_takes_any_batch():
    policy = small()
    batch = gae(StepCollector(ToyEnv(6), policy, 4).rollout())
    one, other = ChunkClipPPOLoss(policy)(batch), ChunkClipPPOLoss(policy)(batch.reshape(-1))
    for name, value in other.items(True, True):
        torch.testing.assert_close(one[name], value, rtol=0, atol=0)
