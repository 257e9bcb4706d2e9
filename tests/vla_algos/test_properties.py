"""What must hold for every batch: order, padding, splitting and scaling change nothing that is learnt."""

from functools import cache

import pytest
import torch
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from toy import Given

from vla_algos.advantages import gae, group_advantages, normalize_advantages, trajectory_weights, valid_decisions
from vla_algos.losses import ChunkClipPPOLoss
from vla_common.keys import (
    ACTION_LOG_PROB,
    ADVANTAGE,
    DONE,
    NEXT,
    REFERENCE_LOG_PROB,
    REWARD,
    STATE_VALUE,
    STEP_MASK,
    STEP_REWARDS,
    TERMINATED,
    VALUE_TARGET,
    WEIGHT,
)

LEVELS = ("token", "action", "chunk")
GARBAGE = (1e6, float("inf"), float("nan"))  # what may be stored where nothing was executed
OUTPUTS = ("log_prob", "entropy", "value")
EXACT = {"rtol": 1e-9, "atol": 1e-12}  # in double precision
seeds = st.integers(0, 2**32 - 1)


def repeatable(examples):
    # No shrinking: examples are small as they are, and what differs between them is mostly a seed.
    return settings(max_examples=examples, deadline=None, derandomize=True, database=None, phases=[Phase.generate])


def prefixes(generator, *shape, chunk):
    """Step masks ``[*shape, chunk]``: of each decision the first actions are executed, now and then none."""
    executed = torch.randint(0, chunk + 1, shape, generator=generator).unsqueeze(-1)
    return torch.arange(chunk) < executed


@st.composite
def minibatches(draw, max_decisions=6, per_action=None):
    """Decisions ``[B]`` for :class:`Given` in double precision: uneven masks, ratios out of bounds on both sides."""
    generator = torch.Generator().manual_seed(draw(seeds))
    b, c, a = draw(st.integers(1, max_decisions)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    k = c if (draw(st.booleans()) if per_action is None else per_action) else 1
    random = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)  # noqa: E731
    old = -random(b, c, a).abs()
    log_prob = old + 0.4 * random(b, c, a)
    data = {
        "given": {"log_prob": log_prob, "entropy": random(b, c, a).abs(), "value": random(b, k)},
        ACTION_LOG_PROB: old,
        ADVANTAGE: random(b, k),
        STATE_VALUE: random(b, k),
        VALUE_TARGET: random(b, k),
        REFERENCE_LOG_PROB: log_prob + 0.5 * random(b, c, a),
        NEXT: {STEP_MASK: prefixes(generator, b, chunk=c)},
    }
    if draw(st.booleans()):
        data[WEIGHT] = random(b, 1).abs()
    return TensorDict(data, [b])


@st.composite
def rollouts(draw, per_action, max_envs=4):
    """Rollouts ``[N, T]`` in double precision: several episodes in a row, some end in mid-chunk and some are lost."""
    generator = torch.Generator().manual_seed(draw(seeds))
    n, t, c = draw(st.integers(1, max_envs)), draw(st.integers(1, 6)), draw(st.integers(1, 4))
    k = c if per_action else 1
    random = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)  # noqa: E731
    chance = lambda p: torch.rand(n, t, generator=generator) < p  # noqa: E731
    done, crashed = chance(0.4), chance(0.1)
    executed = torch.where(done, torch.randint(1, c + 1, (n, t), generator=generator), c)
    mask = torch.arange(c) < torch.where(crashed, 0, executed).unsqueeze(-1)
    rewards = random(n, t, c) * mask
    after = {
        STATE_VALUE: random(n, t, k),
        STEP_REWARDS: rewards,
        REWARD: rewards.sum(-1, keepdim=True),
        STEP_MASK: mask,
        DONE: (done | crashed).unsqueeze(-1),
        TERMINATED: (done & ~crashed & chance(0.5)).unsqueeze(-1),
    }
    return TensorDict({STATE_VALUE: random(n, t, k), NEXT: after}, [n, t])


def learn(loss, batch, parts=None):
    """Loss terms and gradients with respect to what the policy returned, of a batch worked off in ``parts``."""
    batch = batch.clone()
    for name in OUTPUTS:
        batch["given", name].requires_grad_()
    outs = [loss(batch)] if parts is None else [loss(batch[part], whole=batch) for part in parts]
    terms = {key: sum(out[key] for out in outs) for key, _ in outs[0].items() if key.startswith("loss_")}
    sum(terms.values()).backward()
    # What a loss does not depend on has no gradient.
    gradients = {name: batch["given", name].grad for name in OUTPUTS}
    gradients = {
        name: torch.zeros_like(batch["given", name]) if gradient is None else gradient
        for name, gradient in gradients.items()
    }
    return outs[0], {key: term.detach() for key, term in terms.items()}, gradients


@cache
def make_loss(level, entropy_level="token", **options):
    defaults = {
        "entropy_coeff": 0.1,
        "dual_clip": 1.5,
        "reference_kl_coeff": 0.1,
        "clip_value": 0.2,
        "huber_delta": 1.0,
    }
    return ChunkClipPPOLoss(Given(), log_prob_level=level, entropy_level=entropy_level, **defaults | options)


def assert_close(first, second, **tolerance):
    torch.testing.assert_close(first, second, **(tolerance or EXACT))


def fitting(level, batch):
    """Advantages per action do not go with a ratio per chunk."""
    assume(level != "chunk" or batch[ADVANTAGE].shape[-1] == 1)


@pytest.mark.parametrize("level", LEVELS)
@repeatable(15)
@given(batch=minibatches(), seed=seeds)
def test_the_order_of_decisions_does_not_matter(level, batch, seed):
    fitting(level, batch)
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(seed))
    loss = make_loss(level, level)
    out, terms, gradients = learn(loss, batch)
    shuffled, same_terms, shuffled_gradients = learn(loss, batch[order])
    assert_close(terms, same_terms)
    for key in loss.out_keys:
        assert_close(out[key], shuffled[key])
    for name in OUTPUTS:
        assert_close(gradients[name][order], shuffled_gradients[name])


@pytest.mark.parametrize("bootstrap", ["truncation", "none", "any_done"])
@pytest.mark.parametrize("reward_level", ["chunk", "action"])
@repeatable(10)
@given(data=st.data(), seed=seeds)
def test_the_order_of_environments_does_not_matter(reward_level, bootstrap, data, seed):
    batch = data.draw(rollouts(reward_level == "action"))
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(seed))
    straight, shuffled = batch.clone(), batch[order].clone()
    for each in (straight, shuffled):
        gae(each, reward_level=reward_level, bootstrap=bootstrap)
        trajectory_weights(each, "action")
    for key in (ADVANTAGE, VALUE_TARGET, WEIGHT):
        assert_close(straight[key][order], shuffled[key], rtol=1e-6, atol=1e-9)


@repeatable(30)
@given(data=st.data(), count=st.integers(1, 8), seed=seeds)
def test_neither_order_nor_labels_of_a_group_matter(data, count, seed):
    scores = torch.tensor(data.draw(st.lists(st.integers(0, 5), min_size=count, max_size=count))).float()
    groups = torch.tensor(data.draw(st.lists(st.integers(0, 2), min_size=count, max_size=count)))
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    expected = group_advantages(scores, groups)
    assert_close(group_advantages(scores[order], groups[order]), expected[order], rtol=1e-5, atol=1e-6)
    renamed = torch.tensor([7, -3, 1000])[groups]
    assert_close(group_advantages(scores, renamed), expected, rtol=1e-5, atol=1e-6)
    for label in groups.unique():  # and no group sees the others
        own = groups == label
        assert_close(group_advantages(scores[own], groups[own]), expected[own], rtol=1e-5, atol=1e-6)


@repeatable(30)
@given(
    scores=st.lists(st.integers(-4, 4), min_size=2, max_size=8),
    scale=st.floats(0.1, 50.0),
    shift=st.floats(-20.0, 20.0),
)
def test_only_the_order_of_merit_in_a_group_counts(scores, scale, shift):
    scores = torch.tensor(scores).float()
    groups = torch.zeros(len(scores)).long()
    advantages = group_advantages(scores, groups, eps=0.0)
    assert advantages.sum().abs() < 1e-4
    if scores.min() == scores.max():
        assert (advantages == 0).all()
    else:
        assert advantages.std().item() == pytest.approx(1.0, abs=1e-4)
        assert_close(group_advantages(scale * scores + shift, groups, eps=0.0), advantages, rtol=1e-3, atol=1e-3)
        assert_close(group_advantages(-scores, groups), -group_advantages(scores, groups), rtol=1e-5, atol=1e-5)


@repeatable(30)
@given(seed=seeds, count=st.integers(1, 20), scale=st.floats(0.1, 100.0), shift=st.floats(-100.0, 100.0))
def test_normalised_advantages_have_neither_scale_nor_shift(seed, count, scale, shift):
    generator = torch.Generator().manual_seed(seed)
    advantage = torch.randn(count, generator=generator, dtype=torch.float64)
    valid = torch.rand(count, generator=generator) < 0.7
    normal = normalize_advantages(advantage, valid, eps=0.0)[valid]
    if valid.sum() < 2:
        assert (normal == 0).all()
        return
    assert normal.mean().abs() < 1e-9
    assert normal.std().item() == pytest.approx(1.0)
    spoilt = torch.where(valid, scale * advantage + shift, torch.nan)
    assert_close(normalize_advantages(spoilt, valid, eps=0.0)[valid], normal, rtol=1e-6, atol=1e-9)


def pad(batch, decisions, actions, garbage):
    """Append decisions and, to each chunk, actions that were never executed; spoil all stored entries of both.

    What the policy returns for them is finite, but anything.
    """
    b, c = batch[NEXT, STEP_MASK].shape
    padded = batch[torch.arange(b + decisions).clamp(max=b - 1)].clone()
    wide = {
        key: torch.cat([padded[key], padded[key][:, :1].expand(-1, actions, *padded[key].shape[2:])], 1)
        for key in padded.keys(True, True)
        if padded[key].shape[1] == c and (c > 1 or padded[key].ndim == 3 or key == (NEXT, STEP_MASK))
    }
    mask = wide[NEXT, STEP_MASK].clone()
    mask[b:], mask[:, c:] = False, False
    for key, value in wide.items():
        padded[key] = value.clone()
    padded[NEXT, STEP_MASK] = mask
    for key in (ACTION_LOG_PROB, ADVANTAGE, STATE_VALUE, VALUE_TARGET, REFERENCE_LOG_PROB, WEIGHT):
        if key in padded:
            per_decision = key == WEIGHT or padded[key].shape[1] != c + actions
            padded[key][~(mask.any(-1, keepdim=True) if per_decision else mask)] = garbage
    padded["given", "log_prob"][~mask] = -50.0
    padded["given", "entropy"][~mask] = 50.0
    value = padded["given", "value"]
    value[~(mask if value.shape == mask.shape else mask.any(-1, keepdim=True))] = 1e3
    return padded


@pytest.mark.parametrize("critic_coeff", [None, 1.0])
@pytest.mark.parametrize("level", LEVELS)
@repeatable(30)
@given(batch=minibatches(), decisions=st.integers(0, 3), actions=st.integers(0, 2), garbage=st.sampled_from(GARBAGE))
def test_padding_changes_no_loss_and_no_gradient(level, critic_coeff, batch, decisions, actions, garbage):
    fitting(level, batch)
    b = len(batch)
    loss = make_loss(level, level, critic_coeff=critic_coeff)
    out, terms, gradients = learn(loss, batch)
    padded_out, padded_terms, padded_gradients = learn(loss, pad(batch, decisions, actions, garbage))
    assert_close(padded_terms, terms)
    for key in loss.out_keys:
        assert_close(padded_out[key], out[key])
    for name in OUTPUTS:
        gradient, k = padded_gradients[name], gradients[name].shape[1]
        assert_close(gradient[:b, :k], gradients[name])
        assert (gradient[b:] == 0).all()
        assert (gradient[:, k:] == 0).all()


def spoil(batch, reward_level, garbage):
    """Overwrite what a rollout says about what was never executed."""
    mask, valid = batch[NEXT, STEP_MASK], valid_decisions(batch)
    batch[NEXT, STEP_REWARDS][~mask] = garbage
    batch[NEXT, REWARD][~valid] = garbage
    batch[STATE_VALUE][~(mask if reward_level == "action" else valid)] = garbage
    batch[NEXT, STATE_VALUE][~valid.expand_as(batch[NEXT, STATE_VALUE])] = garbage
    batch[NEXT, STATE_VALUE][..., 1:] = garbage  # the first one is the value of the observation after the decision
    return batch


def assert_same_advantages(padded, batch, reward_level):
    for each in (batch, padded):
        gae(each, gamma=0.9, lmbda=0.8, reward_level=reward_level)
        trajectory_weights(each, "token")
    valid = batch[NEXT, STEP_MASK] if reward_level == "action" else valid_decisions(batch)
    _, t, k = batch[ADVANTAGE].shape
    for key in (ADVANTAGE, VALUE_TARGET):
        assert_close(padded[key][:, :t, :k][valid], batch[key][valid], rtol=1e-6, atol=1e-9)
    assert_close(padded[WEIGHT][:, :t], batch[WEIGHT])
    assert (padded[WEIGHT][:, t:] == 0).all()


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("reward_level", ["chunk", "action"])
@repeatable(15)
@given(data=st.data(), decisions=st.integers(0, 3))
def test_padding_rows_with_decisions_changes_no_advantage(reward_level, garbage, data, decisions):
    batch = data.draw(rollouts(reward_level == "action"))
    t = batch.shape[1]
    padded = batch[:, torch.arange(t + decisions).clamp(max=t - 1)].clone()
    padded[NEXT, STEP_MASK][:, t:] = False
    assert_same_advantages(spoil(padded, reward_level, garbage), batch, reward_level)


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("reward_level", ["chunk", "action"])
@repeatable(15)
@given(data=st.data(), actions=st.integers(0, 2))
def test_padding_chunks_with_actions_changes_no_advantage(reward_level, garbage, data, actions):
    batch = data.draw(rollouts(reward_level == "action"))
    padded = batch.clone()
    keys = [(NEXT, STEP_REWARDS), (NEXT, STEP_MASK)]
    keys += [STATE_VALUE, (NEXT, STATE_VALUE)] if reward_level == "action" else []
    for key in keys:
        padded[key] = torch.cat([batch[key], torch.zeros_like(batch[key][..., :1]).expand(-1, -1, actions)], -1)
    assert_same_advantages(spoil(padded, reward_level, garbage), batch, reward_level)


@pytest.mark.parametrize("entropy_level", LEVELS)
@pytest.mark.parametrize("level", LEVELS)
@repeatable(10)
@given(data=st.data(), batch=minibatches(max_decisions=8), critic=st.sampled_from([None, 0.5]))
def test_micro_batches_add_up_to_the_whole(level, entropy_level, data, batch, critic):
    fitting(level, batch)
    loss = make_loss(level, entropy_level, critic_coeff=critic)
    size = data.draw(st.integers(1, len(batch)))
    _, terms, gradients = learn(loss, batch)
    _, sums, accumulated = learn(loss, batch, torch.arange(len(batch)).split(size))
    assert_close(sums, terms)
    assert_close(accumulated, gradients)


@pytest.mark.parametrize("level", LEVELS)
@repeatable(15)
@given(batch=minibatches())
def test_without_a_step_the_ratio_is_exactly_one(level, batch):
    fitting(level, batch)
    assume(batch[NEXT, STEP_MASK].any())
    batch[ACTION_LOG_PROB] = batch["given", "log_prob"].clone()
    out, _, _ = learn(make_loss(level, entropy_coeff=0.0, reference_kl_coeff=0.0, critic_coeff=None), batch)
    assert out["ratio"] == out["clipped_ratio"] == 1
    for key in ("kl_approx", "kl_k3", "clip_fraction", "dual_clip_fraction", "log_ratio_per_token"):
        assert out[key] == 0, key
    plain = batch.exclude(WEIGHT)
    _, _, gradients = learn(make_loss(level, entropy_coeff=0.0, reference_kl_coeff=0.0, critic_coeff=None), plain)
    mask = batch[NEXT, STEP_MASK]  # the plain policy gradient: each executed token is pushed by its advantage
    push = (-batch[ADVANTAGE] / out["weights", "ratio"]).expand(mask.shape) * mask
    assert_close(gradients["log_prob"], push.unsqueeze(-1).expand_as(gradients["log_prob"]))


@pytest.mark.parametrize("level", LEVELS)
@repeatable(20)
@given(data=st.data(), lengths=st.lists(st.integers(1, 4), min_size=1, max_size=4), seed=seeds)
def test_with_trajectory_weights_each_trajectory_counts_the_same(level, data, lengths, seed):
    """The loss is the mean over trajectories of what each of them alone would have."""
    generator = torch.Generator().manual_seed(seed)
    batch = data.draw(minibatches(max_decisions=1, per_action=False)).exclude(WEIGHT)
    d, (_, c) = sum(lengths), batch[NEXT, STEP_MASK].shape
    batch = batch[torch.zeros(d).long()].clone()
    for key in (("given", "log_prob"), ADVANTAGE):
        batch[key] = torch.randn(batch[key].shape, generator=generator, dtype=torch.float64)
    batch[ACTION_LOG_PROB] = batch["given", "log_prob"] + 0.3 * torch.randn(
        batch["given", "log_prob"].shape, generator=generator, dtype=torch.float64
    )
    ends = torch.tensor(lengths).cumsum(0) - 1
    batch[NEXT, DONE] = torch.zeros(d, 1, dtype=torch.bool).index_fill(0, ends, True)
    executed = torch.full((d,), c)
    executed[ends] = torch.randint(1, c + 1, (len(lengths),), generator=generator)
    batch[NEXT, STEP_MASK] = torch.arange(c) < executed.unsqueeze(-1)

    loss = make_loss(level, entropy_coeff=0.0, reference_kl_coeff=0.0, critic_coeff=None)
    alone = [loss(part)["loss_objective"] for part in batch.split(lengths)]
    together = loss(trajectory_weights(batch, level))["loss_objective"]
    assert_close(together, torch.stack(alone).mean(), rtol=1e-6, atol=1e-9)
