"""The step-bound collector on a toy environment whose dynamics are known."""

import pytest
import torch
from torchrl.envs.utils import check_env_specs
from toy import CHUNK, DIM, ToyEnv, ToyPolicy

from vla_algos.collectors import EpisodeCollector, StepCollector
from vla_algos.evaluation import evaluate
from vla_algos.progress import listening
from vla_common.keys import (
    ACTION,
    ACTION_LOG_PROB,
    CRASHED,
    DONE,
    EPISODE_LEN,
    EPISODE_RETURN,
    IMAGES,
    NEXT,
    REWARD,
    STATE_VALUE,
    STATES,
    STEP_MASK,
    SUCCESS,
    TASK_DESCRIPTIONS,
    TERMINATED,
    TRIAL_ID,
    TRUNCATED,
)
from vla_envs.simulator import Episode

N, T = 4, 6


BOOTSTRAPS = ("truncation", "none", "any_done")


class StateValuePolicy(ToyPolicy):
    """A policy whose value is known: 100 * trial + steps, so a wrong observation cannot hide.

    With ``values`` it has one for each action of the chunk, which go up by 0.25.
    """

    def __init__(self, values=1):
        super().__init__()
        self.values = values

    def forward(self, td):
        super().forward(td)
        td[STATE_VALUE] = td[STATES][:, 2:] * 100 + td[STATES][:, :1] + 0.25 * torch.arange(self.values)
        return td


def assert_same(first, second):
    """Equal to the bit; values that were not asked for are NaN in both."""
    assert set(first.keys(True, True)) == set(second.keys(True, True))
    for key in first.keys(True, True):
        torch.testing.assert_close(first[key], second[key], rtol=0, atol=0, equal_nan=True)


@pytest.fixture
def policy():
    torch.manual_seed(0)
    return StateValuePolicy()


def test_toy_env_keeps_the_contract():
    check_env_specs(ToyEnv(3))


def test_batch_has_what_learning_needs_and_no_more(policy):
    batch = next(iter(StepCollector(ToyEnv(N), policy, T)))
    assert batch.shape == (N, T)
    assert batch[ACTION].shape == batch[ACTION_LOG_PROB].shape == (N, T, CHUNK, DIM)
    assert batch[IMAGES].dtype == torch.uint8
    assert (NEXT, IMAGES) not in batch.keys(True)
    assert TASK_DESCRIPTIONS not in batch.keys(True)
    assert batch[NEXT, STEP_MASK].shape == (N, T, CHUNK)


def test_rows_follow_each_other_in_time(policy):
    collector = StepCollector(ToyEnv(N), policy, T)
    first, second = collector.rollout(), collector.rollout()
    batch = torch.cat([first, second], 1)
    done = batch[NEXT, DONE].squeeze(-1)[:, :-1]
    assert done.any()
    assert not done.all()
    same_trial = batch[TRIAL_ID][:, 1:] == batch[TRIAL_ID][:, :-1]
    assert torch.equal(same_trial, ~done)  # across the border of the two batches too
    steps = batch[STATES][..., 0].long()
    length = batch[NEXT, EPISODE_LEN].squeeze(-1)
    assert torch.equal(steps[:, 1:], torch.where(done, 0, length[:, :-1]))
    assert torch.equal(length, steps + batch[NEXT, STEP_MASK].sum(-1))


def test_batches_do_not_share_memory(policy):
    collector = StepCollector(ToyEnv(N), policy, T)
    first = collector.rollout()
    copy = first.clone()
    collector.rollout()
    assert_same(first, copy)


@pytest.mark.parametrize("values", [1, CHUNK])
@pytest.mark.parametrize("goal", [5, 100])  # 100: nothing terminates, everything is truncated
@pytest.mark.parametrize("bootstrap", BOOTSTRAPS)
def test_next_value_is_the_value_of_the_true_next_observation(bootstrap, goal, values):
    """NaN where the bootstrap does not look beyond the end of the episode, so that it cannot be used by mistake."""
    torch.manual_seed(0)
    env = ToyEnv(N, goal=goal, crashes={6: 1})
    batch = StepCollector(env, StateValuePolicy(values), 12, bootstrap=bootstrap).rollout()
    after = batch[NEXT]
    assert after[TRUNCATED].any()
    assert after[CRASHED].any()
    assert goal > 5 or after[TERMINATED].any()
    expected = 100 * batch[TRIAL_ID].unsqueeze(-1) + after[EPISODE_LEN] + 0.25 * torch.arange(values)
    unwanted = {"truncation": after[TERMINATED], "none": after[DONE], "any_done": torch.zeros_like(after[DONE])}
    expected = expected.masked_fill(unwanted[bootstrap], torch.nan).masked_fill(after[CRASHED], 0.0)
    torch.testing.assert_close(after[STATE_VALUE], expected, rtol=0, atol=0, equal_nan=True)
    assert batch[STATE_VALUE].isfinite().all()


def test_passes_of_the_policy(policy):
    """T passes to act; the final observations share the rest, at most N in each."""
    StepCollector(ToyEnv(N, horizon=1000, goal=1000), policy, T).rollout()
    assert list(policy.passes) == [N] * (T + 1)
    for bootstrap in BOOTSTRAPS:
        policy.passes.clear()
        after = StepCollector(ToyEnv(N, crashes={2: 1}), policy, T, bootstrap=bootstrap).rollout()[NEXT]
        assert after[TERMINATED].any()
        assert after[CRASHED].any()
        ends = {"truncation": after[TRUNCATED], "none": torch.zeros_like(after[DONE]), "any_done": after[DONE]}
        ended = (ends[bootstrap] & ~after[CRASHED]).sum() + (~after[DONE][:, -1]).sum()
        assert list(policy.passes)[:T] == [N] * T
        assert sum(list(policy.passes)[T:]) == ended
        assert max(policy.passes) == N


@pytest.mark.parametrize("bootstrap", BOOTSTRAPS)
def test_what_step_hook_saw_is_what_is_stored(policy, bootstrap):
    seen = []
    collector = StepCollector(ToyEnv(N), policy, 5, bootstrap=bootstrap, step_hook=seen.append)
    for _ in range(2):
        seen.clear()
        batch = collector.rollout()
        assert not batch[NEXT, DONE][:, -1].all()
        for key in (DONE, TERMINATED, TRUNCATED, REWARD, EPISODE_LEN):
            assert torch.equal(torch.stack([outcome[NEXT, key] for outcome in seen], 1), batch[NEXT, key]), key


def test_returns_add_up(policy):
    batch = StepCollector(ToyEnv(N), policy, 20).rollout()
    for row in batch.unbind(0):
        ends = row[NEXT, DONE].squeeze(-1).nonzero().flatten().tolist()
        starts = [0, *(end + 1 for end in ends)]
        for start, end in zip(starts, ends, strict=False):
            total = row[NEXT, REWARD][start : end + 1].sum()
            assert total == row[NEXT, EPISODE_RETURN][end].squeeze()
            assert row[NEXT, SUCCESS][end].item() == (total.item() == 1)


@pytest.mark.parametrize("has_head", [False, True])
def test_without_values_none_are_stored_nor_computed(has_head):
    policy = ToyPolicy()
    if not has_head:
        policy.out_keys = [key for key in policy.out_keys if key != STATE_VALUE]
    batch = StepCollector(ToyEnv(N), policy, T, values=not has_head).rollout()
    assert STATE_VALUE not in batch.keys(True)
    assert (NEXT, STATE_VALUE) not in batch.keys(True)
    assert len(policy.passes) == T


def test_total_frames_and_stats(policy):
    decisions = []
    collector = StepCollector(ToyEnv(N, crashes={2: 1}), policy, T, 3 * N * T, step_hook=decisions.append)
    assert len(collector) == 3 == len(list(collector))
    stats = collector.stats()
    assert stats["frames"] == 3 * N * T
    assert stats["completed"]
    assert stats["batches"] == 3
    assert stats["time/env"] > 0
    assert stats["time/policy"] > 0
    assert stats["time/env"] + stats["time/policy"] <= stats["time/rollout"]
    assert stats["env/worker_restarts"] == 1
    assert len(decisions) == 3 * T
    assert next(StepCollector(ToyEnv(N), policy, T, 0).iterator(), None) is None
    collector.shutdown()
    collector.shutdown()
    assert collector.env.is_closed


def test_same_seed_same_batch(policy):
    def run(seed):
        collector = StepCollector(ToyEnv(N), policy, T)
        collector.set_seed(seed)
        return collector.rollout()

    assert_same(run(1), run(1))
    assert not torch.equal(run(1)[ACTION], run(2)[ACTION])


def test_state_dict_continues_the_episode_sequence(policy):
    collector = StepCollector(ToyEnv(N), policy, T)
    batch = collector.next()
    state = collector.state_dict()
    other = StepCollector(ToyEnv(N), policy, T)
    other.load_state_dict(state)
    assert (other.stats()["frames"], other.stats()["batches"]) == (N * T, 1)
    trials = other.rollout()[TRIAL_ID]
    assert trials.min() > batch[TRIAL_ID].max()
    assert trials[:, 0].tolist() == sorted(trials[:, 0].tolist())


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"bootstrap": "always"}, "'truncation', 'none' or"), ({"decisions": 0}, "decisions=0: must be")],
)
def test_impossible_settings_say_what_would_be_right(policy, settings, message):
    with pytest.raises(ValueError, match=message):
        StepCollector(ToyEnv(N), policy, **{"decisions": T, **settings})


def test_a_collector_whose_environment_somebody_else_has_used_begins_anew(policy):
    def rollouts(between, reset):
        torch.manual_seed(0)
        env = ToyEnv(N)
        collector = StepCollector(env, policy, T)
        first = collector.rollout()
        between(env)
        if reset:
            collector.reset()
        return first, collector.rollout()

    def uses():
        yield lambda env: evaluate(env, policy, [Episode(1, trial) for trial in range(3)])
        yield lambda env: env.rollout(1)
        yield lambda env: StepCollector(env, policy, 1).rollout()

    for use in uses():
        for one, other in zip(rollouts(use, reset=False), rollouts(use, reset=True), strict=True):
            assert_same(one, other)
    first, second = rollouts(lambda env: evaluate(env, policy, []), reset=False)  # no episode ran
    running = ~first[NEXT, DONE][:, -1]
    assert (second[NEXT, EPISODE_LEN][:, 0] > first[NEXT, EPISODE_LEN][:, -1])[running].all()


def test_the_state_of_a_collector_after_an_evaluation_has_no_observation(policy):
    env = ToyEnv(N)
    collector = StepCollector(env, policy, T)
    collector.rollout()
    assert "observation" in collector.state_dict()["environment"]
    env.reset()
    assert "observation" not in collector.state_dict()["environment"]


def test_nobody_else_uses_the_environment_while_episodes_run(policy):
    env = ToyEnv(2)
    collector = EpisodeCollector(env, policy, [Episode(0, trial) for trial in range(9)])
    trials = []

    def disturb():
        for episode in collector.iterator():
            trials.append(episode[TRIAL_ID][0].item())
            evaluate(env, policy, [Episode(1, 0)])

    with pytest.raises(RuntimeError, match=r"the environment was used by others between.*in another make_env"):
        disturb()
    trials += [episode[TRIAL_ID][0].item() for episode in collector.iterator()]
    assert trials == list(range(9))  # nothing was lost
    hook = StepCollector(env, policy, 2, step_hook=lambda outcome: env.reset())
    with pytest.raises(RuntimeError, match="two decisions of StepCollector"):
        hook.rollout()


def test_a_listener_hears_how_far_a_batch_is(policy):
    heard = []
    with listening(lambda *told: heard.append(told)):
        StepCollector(ToyEnv(N), policy, T).rollout()
    assert heard == [("collecting", t, T) for t in range(1, T + 1)]
