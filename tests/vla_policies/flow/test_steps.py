"""Steps of a flow and their probabilities: reference numbers, and what makes them right."""

import math

import numpy as np
import pytest
import torch
from closeness import assert_near, sharpness, through
from openvla_checkpoint import act
from pi0_checkpoint import GOLDEN
from tensordict import TensorDict
from torchrl.envs.utils import ExplorationType

from vla_common import keys
from vla_policies import SmallFlow, SmallFlowConfig
from vla_policies.flow.steps import NoiseNetwork, euler, log_prob, stochastic_step, times
from vla_policies.processing.adapters import make_example
from vla_policies.registry import load_policy

METHODS = ("flow_sde", "flow_cps", "flow_noise")


@pytest.fixture(scope="module")
def reference():
    with np.load(GOLDEN / "rlinf_flow_sde.npz") as stored:
        return {key: torch.from_numpy(stored[key]) for key in stored.files}


@pytest.mark.parametrize("method", ["flow_ode", "flow_sde", "flow_cps"])
@pytest.mark.parametrize("number", range(5))
def test_reference_numbers(reference, method, number):
    schedule, step = times(5), torch.full((2,), number)
    torch.testing.assert_close(schedule, reference["timesteps"], rtol=0, atol=1e-7)
    x, v = reference["x_t"], reference["v_t"]
    if method == "flow_ode":
        mean, std = euler(x, v, schedule[step], schedule[step + 1]), torch.zeros(2, 1, 1)
    else:
        mean, std = stochastic_step(method, x, v, schedule, step, float(reference["noise_level"]))
    expected = {name: reference[f"{method}_{number}_{name}"] for name in ("mean", "std", "logprob")}
    assert_near(mean, expected["mean"], roundings=8)
    assert_near(std.expand_as(mean), expected["std"], roundings=8)
    found = log_prob(reference["x_next"], mean, std)
    assert_near(found, expected["logprob"], roundings=16)


def gaussian_flow(x, time):
    """Velocity of the straight flow from N(0, 1) to N(2, 0.5^2): the mean of noise minus action, given ``x``."""
    mean, spread = 2.0, 0.5
    time = time.view(-1, 1, 1)
    variance = (time**2 + (1 - time) ** 2 * spread**2).clamp_min(1e-12)
    gain = (x - (1 - time) * mean) / variance
    return time * gain - (mean + (1 - time) * spread**2 * gain)


@pytest.mark.parametrize("method", ["flow_sde", "flow_cps"])
def test_the_stochastic_step_keeps_the_marginals(method):
    """At each time the samples have the mean and the variance of the flow, up to the error of finite steps."""
    torch.manual_seed(0)
    steps, samples = 200, 40_000
    # flow_sde's noise grows without bound towards pure noise, where no step is small enough; flow_cps renews a share of
    # the noise, which is that of a continuous process if it shrinks with the root of the step.
    first, level = (20, 0.7) if method == "flow_sde" else (0, 0.7 / math.sqrt(steps))
    schedule = times(steps)

    def marginal(time):
        return 2 * (1 - time), time**2 + (1 - time) ** 2 * 0.25

    mean, variance = marginal(schedule[first].item())
    x = mean + math.sqrt(variance) * torch.randn(samples, 1, 1)
    for number in range(first, steps):
        step = torch.full((samples,), number)
        mean, std = stochastic_step(method, x, gaussian_flow(x, schedule[step]), schedule, step, level)
        x = mean + std * torch.randn_like(x)
        if number in (30, 60, 100, 140, 180, 199):
            mean, variance = marginal(schedule[number + 1].item())
            assert x.mean().item() == pytest.approx(mean, abs=0.03)
            assert x.var().item() == pytest.approx(variance, rel=0.05, abs=0.005)


@pytest.mark.parametrize("method", ["flow_sde", "flow_cps"])
@pytest.mark.parametrize("number", [0, 2, 3])
def test_densities_integrate_to_one(method, number):
    schedule, step = times(5), torch.tensor([number])
    mean, std = stochastic_step(method, torch.full((1, 1, 1), 0.3), torch.full((1, 1, 1), -1.2), schedule, step, 0.5)
    grid = torch.linspace(-6, 6, 200_001, dtype=torch.float64).view(-1, 1, 1)
    density = log_prob(grid, mean.double(), std.double()).exp()
    assert torch.trapezoid(density.flatten(), grid.flatten()).item() == pytest.approx(1, abs=1e-6)


def test_the_last_step_of_a_flow_ends_at_the_action_whatever_the_noise():
    """``flow_cps`` adds none there; ``flow_sde`` as much as its formula says."""
    schedule, step = times(4), torch.tensor([3])
    x, v = torch.randn(1, 2, 3), torch.randn(1, 2, 3)
    mean, std = stochastic_step("flow_cps", x, v, schedule, step, 0.5)
    torch.testing.assert_close(mean, x - 0.25 * v)
    assert not std.any()
    _, std = stochastic_step("flow_sde", x, v, schedule, step, 0.5)
    assert std.item() == pytest.approx(0.5 * math.sqrt(0.25 / 0.75) * math.sqrt(0.25))


def test_learned_noise_stays_within_its_bounds():
    torch.manual_seed(0)
    network = NoiseNetwork(16, 3, SmallFlowConfig.noise_std_range)
    std = network(100 * torch.randn(1000, 16))
    assert std.shape == (1000, 3)
    assert 0.08 <= std.min() < 0.1
    assert 0.14 < std.max() <= 0.16 + 1e-6


# ---- the small flow policy


def make(**settings):
    torch.manual_seed(0)
    policy = SmallFlow(SmallFlowConfig(action_low=(-1.0, -2.0), action_high=(1.0, 4.0), state_dim=4, **settings))
    torch.nn.init.normal_(policy.action_out.weight, std=0.3)
    if policy.value_head is not None:
        torch.nn.init.normal_(policy.value_head[-1].weight, std=0.3)
    return policy


@pytest.fixture
def seen():
    torch.manual_seed(1)
    td = make_example("metaworld", 6)
    return td.set(keys.IMAGES, torch.randint(0, 256, (6, 64, 64, 3), dtype=torch.uint8))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("joint", [None, True, False])
def test_the_ratio_is_one_before_the_first_update(method, joint, seen):
    """To the last bit in a batch as large as the rollout's; all steps in one pass are another batch."""
    policy = make(method=method, joint_log_prob=joint)
    stored = act(policy, seen, ExplorationType.RANDOM)
    log_prob_again, entropy, value = policy.evaluate_actions(stored)
    assert log_prob_again.shape == entropy.shape == (6, 5, 2)
    joint = method == "flow_noise" if joint is None else joint
    if joint:
        narrow = sharpness(policy.get_dist(stored))
        assert_near(log_prob_again, stored[keys.ACTION_LOG_PROB], narrow * through(policy))
        assert_near(value, stored[keys.STATE_VALUE], through(policy))
    else:
        assert torch.equal(log_prob_again, stored[keys.ACTION_LOG_PROB])
        assert torch.equal(value, stored[keys.STATE_VALUE])
    assert stored[keys.DENOISE_CHAIN].shape == (6, 6 if joint else 2, 5, 2)
    calls = []
    policy.velocity = lambda *given, velocity=policy.velocity: calls.append(1) or velocity(*given)
    policy.evaluate_actions(stored)
    assert len(calls) == 1  # all steps in one pass
    del policy.velocity
    assert_near(policy.get_dist(stored).log_prob(stored[keys.DENOISED]), log_prob_again)
    assert_near(policy.get_dist(stored).entropy(), entropy)
    if joint:
        last = policy.to_simulator(stored[keys.DENOISE_CHAIN][:, -1], stored[keys.STATES])
        assert torch.equal(stored[keys.ACTION], last)


@pytest.mark.parametrize("method", METHODS)
def test_the_ratio_of_all_steps_is_one_in_batches_of_the_rollout(method, seen):
    """What is left is the sum over the steps: another batch alone rounds the network otherwise."""
    policy = make(method=method, joint_log_prob=True)
    stored = act(policy, seen, ExplorationType.RANDOM)

    def by_steps(observed, noisy, time, velocity=policy.velocity):
        steps = zip(*(part.unflatten(0, (6, 5)).unbind(1) for part in (observed, noisy, time)), strict=True)
        speed, hidden = zip(*(velocity(*step) for step in steps), strict=True)
        return torch.stack(speed, 1).flatten(0, 1), torch.stack(hidden, 1).flatten(0, 1)

    policy.velocity = by_steps
    assert_near(policy.evaluate_actions(stored)[0], stored[keys.ACTION_LOG_PROB], roundings=5)


def test_each_sample_has_a_stochastic_step_of_its_own(seen):
    policy = make(method="flow_cps", num_steps=4)  # which adds no noise in the last one
    steps = torch.cat([act(policy, seen.clone(), ExplorationType.RANDOM)[keys.DENOISE_STEP] for _ in range(30)])
    assert set(steps.tolist()) == {0, 1, 2}
    by_batch = steps.view(30, 6)
    assert (by_batch != by_batch[:, :1]).any()
    torch.manual_seed(5)
    first = act(policy, seen.clone(), ExplorationType.RANDOM)
    torch.manual_seed(5)
    again = act(policy, seen.clone(), ExplorationType.RANDOM)
    assert torch.equal(first[keys.DENOISE_STEP], again[keys.DENOISE_STEP])
    assert torch.equal(first[keys.ACTION], again[keys.ACTION])


@pytest.mark.parametrize("method", [*METHODS, "flow_ode"])
def test_greedy_is_deterministic_and_leaves_the_random_state_alone(method, seen):
    policy = make(method=method)
    before = torch.get_rng_state()
    first = act(policy, seen.clone(), ExplorationType.DETERMINISTIC)[keys.ACTION]
    alone = act(policy, seen[2:3].clone(), ExplorationType.DETERMINISTIC)[keys.ACTION]
    assert torch.equal(torch.get_rng_state(), before)
    assert_near(first[2:3], alone, through(policy))  # whatever else is in the batch
    low, high = torch.tensor([-1.0, -2.0]), torch.tensor([1.0, 4.0])
    assert ((first >= low) & (first <= high)).all()


def test_gradients_of_the_log_probability_reach_what_is_trained(seen):
    policy = make(method="flow_noise")
    stored = act(policy, seen, ExplorationType.RANDOM)
    log_prob_now, _, value = policy.evaluate_actions(stored)
    log_prob_now.sum().backward()
    reached = {name.partition(".")[0] for name, p in policy.named_parameters() if p.grad is not None and p.grad.any()}
    assert {"encoder", "trunk", "action_in", "action_out", "time_in", "noise_network"} <= reached
    policy.zero_grad()
    value.sum().backward()
    reached = {name.partition(".")[0] for name, p in policy.named_parameters() if p.grad is not None and p.grad.any()}
    assert reached == {"value_head"}


def test_the_imitation_loss_is_zero_for_the_straight_flow_to_the_demonstration(seen):
    policy, times_seen = make(), []
    seen[keys.ACTION] = torch.stack([torch.rand(6, 5) * 2 - 1, torch.rand(6, 5) * 6 - 2], dim=-1)
    target = policy.to_model(seen[keys.ACTION], seen[keys.STATES])

    def velocity(observed, x, time):
        times_seen.append(time)
        time = time.view(-1, 1, 1)
        return (x - target) / time, None  # noise minus action

    policy.velocity, policy.observe = velocity, lambda seen: None
    for _ in range(300):
        assert_near(policy.imitation_loss(seen, sigma=0.0) + 1, torch.ones(6, 5))
    drawn = torch.cat(times_seen)
    assert 0.001 <= drawn.min() < 0.05
    assert drawn.mean().item() == pytest.approx(0.001 + 0.999 * 0.6, abs=0.02)


@pytest.mark.timeout(600)  # a minute and a half of training, more on a busy machine
def test_a_flow_learns_a_demonstration(seen):
    policy = make(num_steps=5)
    torch.nn.init.zeros_(policy.action_out.weight)
    seen[keys.STATES] = 2 * torch.randn(6, 4)
    seen[keys.PROMPT_TOKENS] = policy.prompt_tokens(seen.get(keys.TASK_DESCRIPTIONS).tolist())
    target = torch.stack([torch.rand(6, 5) * 2 - 1, torch.rand(6, 5) * 6 - 2], dim=-1) * 0.8
    data = TensorDict({**dict(seen.items()), keys.ACTION: target}, batch_size=[6])
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3)
    for _ in range(250):
        optimizer.zero_grad()
        loss = policy.imitation_loss(data, sigma=0.0)
        assert loss.shape == (6, 5)
        loss.mean().backward()
        optimizer.step()
    found = act(policy, seen.clone(), ExplorationType.DETERMINISTIC)[keys.ACTION]
    assert (found - target).abs().mean() < 0.5 * (target - target.mean(0)).abs().mean()


def test_what_is_saved_acts_the_same(seen, tmp_path):
    policy = make(method="flow_noise", noise_std_range=(0.05, 0.3))
    policy.save_pretrained(tmp_path)
    loaded = load_policy(tmp_path)
    assert loaded.config == policy.config
    actions = [act(one, seen.clone(), ExplorationType.DETERMINISTIC)[keys.ACTION] for one in (policy, loaded)]
    assert torch.equal(*actions)


def test_a_greedy_value_is_the_mean_over_the_steps(seen):
    """So that the value beyond the end of a rollout is on average that of a decision whose step was drawn."""
    policy = make(num_steps=3)
    values = iter([torch.full((6, 1), number) for number in (1.0, 2.0, 6.0)])
    policy.value = lambda observed, hidden: next(values)
    assert act(policy, seen, ExplorationType.DETERMINISTIC)[keys.STATE_VALUE].flatten().tolist() == [3.0] * 6


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "flow_grpo"}, "must be 'flow_sde', 'flow_noise', 'flow_cps' or 'flow_ode'"),
        ({"num_steps": 0}, "num_steps=0"),
        ({"method": "flow_cps", "noise_level": 1.5}, "at most 1"),
        ({"noise_std_range": 0.1}, "must be a list"),
        ({"num_steps": 1, "method": "flow_cps"}, "at least 2"),
        ({"noise_level": 0.0}, "no log-probability"),
        ({"method": "flow_noise", "noise_std_range": (0.0, 0.1)}, "must be greater than 0"),
        ({"noise_std_range": (0.2, 0.1)}, r"smallest first; write \[0.1, 0.2\]"),
    ],
)
def test_settings_that_cannot_be(settings, message):
    with pytest.raises(ValueError, match=message):
        make(**settings)


def test_a_deterministic_flow_has_no_log_probability(seen):
    policy = make(method="flow_ode", noise_level=0.0)
    stored = act(policy, seen, ExplorationType.RANDOM)
    assert stored.get(keys.ACTION_LOG_PROB, None) is None
    with pytest.raises(ValueError, match="flow_sde"):
        policy.evaluate_actions(stored)
