"""Generalized advantage estimation, per decision and per primitive action, and weights of trajectories by hand.

Recorded numbers of the reference system are in test_golden.py.
"""

from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict
from toy import CHUNK, ToyActorCritic, ToyEnv

from vla_algos.advantages import check_levels, gae, normalize_advantages, trajectory_weights
from vla_algos.collectors import StepCollector
from vla_common.keys import (
    ADVANTAGE,
    CRASHED,
    DONE,
    NEXT,
    REWARD,
    STATE_VALUE,
    STEP_MASK,
    STEP_REWARDS,
    TERMINATED,
    VALUE_TARGET,
    WEIGHT,
)

NAN = float("nan")
BOOTSTRAPS = ("truncation", "none", "any_done")


def make_batch(value, next_value, reward, done, terminated, step_mask) -> TensorDict:
    """``[N, T]`` lists or tensors to a batch with one value per decision."""
    column = lambda x, dtype: torch.as_tensor(x, dtype=dtype).unsqueeze(-1)  # noqa: E731
    mask = torch.as_tensor(step_mask)
    after = {
        STATE_VALUE: column(next_value, torch.float32),
        REWARD: column(reward, torch.float32),
        DONE: column(done, torch.bool),
        TERMINATED: column(terminated, torch.bool),
        STEP_MASK: mask,
    }
    return TensorDict({STATE_VALUE: column(value, torch.float32), NEXT: after}, batch_size=mask.shape[:2])


def test_reference_numbers():
    done = [[False, True, True], [False, False, True]]
    step_mask = torch.ones(2, 3, 4, dtype=torch.bool)
    step_mask[0, 1, 2:] = False
    step_mask[0, 2] = False  # after the end of the episode
    batch = make_batch(torch.zeros(2, 3), torch.zeros(2, 3), [[0, 5, 0], [0, 0, 0]], done, done, step_mask)
    gae(batch, gamma=0.99, lmbda=0.95)
    assert torch.allclose(batch[VALUE_TARGET].squeeze(-1), torch.tensor([[4.7025, 5.0, 0.0], [0.0, 0.0, 0.0]]))
    expected = torch.tensor([[1.03865, 1.15052, -0.72972], [-0.72972] * 3])
    assert torch.allclose(batch[ADVANTAGE].squeeze(-1), expected, atol=1e-5)


def test_truncation_bootstraps_and_termination_does_not():
    everything = torch.ones(2, 2, 1, dtype=torch.bool)
    batch = make_batch(
        value=[[1.0, 2.0], [1.0, 2.0]],
        next_value=[[10.0, 20.0], [10.0, 20.0]],
        reward=[[0.5, 0.5], [0.5, 0.5]],
        done=[[True, False], [True, False]],
        terminated=[[True, False], [False, False]],
        step_mask=everything,
    )
    gae(batch, gamma=0.9, lmbda=0.8, normalize=False)
    # No advantage of the second episode leaks into the first; the rollout's end bootstraps from 20.
    assert torch.allclose(batch[VALUE_TARGET].squeeze(-1), torch.tensor([[0.5, 18.5], [9.5, 18.5]]))
    assert torch.allclose(batch[ADVANTAGE].squeeze(-1), torch.tensor([[-0.5, 16.5], [8.5, 16.5]]))


def test_without_bootstrap_running_out_of_time_is_worth_nothing_but_the_rollouts_end_still_is():
    batch = make_batch(
        value=[[0.0, 0.0, 0.0]],
        next_value=[[0.0, 8.0, 4.0]],
        reward=[[0.0, 1.0, 0.0]],
        done=[[False, True, False]],  # truncated after the second decision, the rollout ends after the third
        terminated=[[False, False, False]],
        step_mask=torch.ones(1, 3, 2, dtype=torch.bool),
    )
    targets = gae(batch, gamma=0.5, lmbda=1.0, bootstrap="none")[VALUE_TARGET].flatten()
    assert targets.tolist() == [0.5, 1.0, 2.0]
    targets = gae(batch, gamma=0.5, lmbda=1.0, bootstrap="truncation")[VALUE_TARGET].flatten()
    assert targets.tolist() == [2.5, 5.0, 2.0]
    with pytest.raises(ValueError, match="truncation"):
        gae(batch, bootstrap="always")


@pytest.mark.parametrize(
    ("bootstrap", "targets"),
    [
        # With gamma 0.5 and lmbda 1 the target of a decision is its reward plus half the target of the next one, or
        # plus half the value of the final observation where that counts.
        ("truncation", [1.25, 0.5, 3.5, 7.0, 12.0]),
        ("none", [1.25, 0.5, 0.5, 1.0, 12.0]),
        ("any_done", [3.75, 5.5, 3.5, 7.0, 12.0]),
    ],
)
def test_bootstraps_by_hand(bootstrap, targets):
    """Success after the second decision, out of time after the fourth, and the rollout ends within an episode.

    A value that a bootstrap does not look at may be missing.
    """
    beyond_success = 10.0 if bootstrap == "any_done" else NAN
    beyond_horizon = NAN if bootstrap == "none" else 12.0
    batch = make_batch(
        value=[[1.0, 3.0, 5.0, 7.0, 9.0]],
        next_value=[[3.0, beyond_success, 7.0, beyond_horizon, 20.0]],
        reward=[[1.0, 0.5, 0.0, 1.0, 2.0]],
        done=[[False, True, False, True, False]],
        terminated=[[False, True, False, False, False]],
        step_mask=torch.ones(1, 5, 2, dtype=torch.bool),
    )
    gae(batch, gamma=0.5, lmbda=1.0, bootstrap=bootstrap, normalize=False)
    assert batch[VALUE_TARGET].flatten().tolist() == targets
    assert torch.equal(batch[ADVANTAGE], batch[VALUE_TARGET] - batch[STATE_VALUE])


@pytest.mark.parametrize("reward_level", ["chunk", "action"])
def test_the_decision_before_a_crashed_one_ends_in_a_bootstrap_and_nothing_of_the_next_episode_reaches_it(reward_level):
    """The third decision was never executed; the fourth is the first of the next episode."""
    batch = make_batch(
        value=[[1.0, 3.0, NAN, 7.0]],
        next_value=[[3.0, 5.0, NAN, 20.0]],
        reward=[[1.0, 0.5, NAN, 2.0]],
        done=[[False, False, True, False]],
        terminated=[[False, False, False, False]],
        step_mask=[[[True], [True], [False], [True]]],
    )
    batch[NEXT, STEP_REWARDS] = batch[NEXT, REWARD]
    gae(batch, gamma=0.5, lmbda=1.0, normalize=False, reward_level=reward_level)
    assert batch[VALUE_TARGET][0, [0, 1, 3]].flatten().tolist() == [2.5, 3.0, 12.0]
    assert batch[ADVANTAGE][0, [0, 1, 3]].flatten().tolist() == [1.5, 0.0, 5.0]


@pytest.mark.parametrize("bootstrap", BOOTSTRAPS)
@pytest.mark.parametrize("collected", BOOTSTRAPS)
@pytest.mark.parametrize("reward_level", ["chunk", "action"])
def test_a_bootstrap_needs_the_values_it_was_collected_for(bootstrap, collected, reward_level):
    torch.manual_seed(0)
    policy = ToyActorCritic(CHUNK if reward_level == "action" else 1)
    batch = StepCollector(ToyEnv(4, crashes={6: 1}), policy, 12, bootstrap=collected).rollout()
    truncated = batch[NEXT, DONE] & ~batch[NEXT, TERMINATED] & ~batch[NEXT, CRASHED]
    assert truncated.any()
    assert batch[NEXT, TERMINATED].any()
    assert batch[NEXT, CRASHED].any()
    options = {"bootstrap": bootstrap, "reward_level": reward_level}
    looks_beyond = {"none": 0, "truncation": 1, "any_done": 2}
    if looks_beyond[bootstrap] <= looks_beyond[collected]:
        gae(batch, **options)
        assert batch[ADVANTAGE].isfinite().all()
        assert batch[VALUE_TARGET].isfinite().all()
        assert batch[ADVANTAGE].shape == batch[STATE_VALUE].shape == batch[VALUE_TARGET].shape
    else:
        with pytest.raises(ValueError, match=rf"StepCollector\(..., bootstrap='{bootstrap}'\)"):
            gae(batch, **options)


def action_batch(terminated=True) -> TensorDict:
    """Three decisions of two actions with a value each; the episode ends after the first action of the second one."""
    after = {
        STATE_VALUE: torch.tensor([[[3.0, 77.0], [50.0, 5.0], [8.0, -9.0]]]),
        STEP_REWARDS: torch.tensor([[[0.0, 1.0], [4.0, 99.0], [1.0, 0.0]]]),
        REWARD: torch.tensor([[[1.0], [4.0], [1.0]]]),
        STEP_MASK: torch.tensor([[[True, True], [True, False], [True, True]]]),
        DONE: torch.tensor([[[False], [True], [False]]]),
        TERMINATED: torch.tensor([[[False], [terminated], [False]]]),
    }
    return TensorDict({STATE_VALUE: torch.tensor([[[1.0, 2.0], [3.0, 77.0], [2.0, 4.0]]]), NEXT: after}, [1, 3])


@pytest.mark.parametrize(
    ("terminated", "bootstrap", "last_advantage"),
    # 4 - 3 where nothing counts beyond the end, 4 + 0.5 * 50 - 3 where the first value of what is there does
    [(True, "truncation", 1.0), (False, "truncation", 26.0), (False, "none", 1.0), (True, "any_done", 26.0)],
)
def test_an_episode_that_ends_in_mid_chunk_by_hand(terminated, bootstrap, last_advantage):
    batch = action_batch(terminated)
    gae(batch, gamma=0.5, lmbda=0.5, normalize=False, bootstrap=bootstrap, reward_level="action")
    # delta of the first decision: 0 + 0.5 * 2 - 1 = 0 and 1 + 0.5 * 3 - 2 = 0.5; of the third, in a new episode:
    # 1 + 0.5 * 4 - 2 = 1 and 0 + 0.5 * 8 - 4 = 0. The action that was not executed, 77 and 99, is in none of them.
    second = 0.5 + 0.25 * last_advantage
    expected = torch.tensor([[0.25 * second, second], [last_advantage, NAN], [1.0, 0.0]])
    executed = batch[NEXT, STEP_MASK][0]
    assert torch.allclose(batch[ADVANTAGE][0][executed], expected[executed])
    assert torch.allclose(batch[VALUE_TARGET][0][executed], (expected + batch[STATE_VALUE][0])[executed])


def test_normalisation_per_action_is_over_executed_actions():
    batch = gae(action_batch(), gamma=0.5, lmbda=0.5, reward_level="action")
    sample = torch.tensor([0.1875, 0.75, 1.0, 1.0, 0.0])
    executed = batch[ADVANTAGE][batch[NEXT, STEP_MASK]]
    assert torch.allclose(executed, (sample - sample.mean()) / (sample.std() + 1e-5))


def test_a_chunk_of_one_action_is_an_action():
    torch.manual_seed(0)
    done = torch.rand(3, 8) < 0.3
    arguments = [torch.randn(3, 8), torch.randn(3, 8), torch.randn(3, 8), done, done & (torch.rand(3, 8) < 0.5)]
    chunk = make_batch(*arguments, torch.ones(3, 8, 1, dtype=torch.bool))
    action = chunk.clone()
    action[NEXT, STEP_REWARDS] = action[NEXT, REWARD]
    gae(chunk)
    gae(action, reward_level="action")
    assert torch.equal(chunk[ADVANTAGE], action[ADVANTAGE])
    assert torch.equal(chunk[VALUE_TARGET], action[VALUE_TARGET])


@pytest.mark.parametrize(
    ("reward_level", "expected"),
    [
        # per decision: 1 + 0.5 * 4, then 4, then 1 of a new episode that the rollout cuts short
        ("chunk", [[3.0], [4.0], [1.0]]),
        # per action: 0 + 0.5 * (1 + 0.5 * 4), 1 + 0.5 * 4, 4 and nothing for what was not executed, 1 + 0.5 * 0, 0
        ("action", [[1.5, 3.0], [4.0, NAN], [1.0, 0.0]]),
    ],
)
@pytest.mark.parametrize("lmbda", [0.0, 0.95])
@pytest.mark.parametrize("bootstrap", BOOTSTRAPS)
def test_without_values_the_advantage_is_the_discounted_return(bootstrap, lmbda, reward_level, expected):
    batch = action_batch().exclude(STATE_VALUE, (NEXT, STATE_VALUE))
    gae(batch, gamma=0.5, lmbda=lmbda, normalize=False, bootstrap=bootstrap, reward_level=reward_level)
    expected = torch.tensor(expected)
    executed = ~expected.isnan()
    for key in (ADVANTAGE, VALUE_TARGET):
        assert torch.equal(batch[key][0][executed], expected[executed])


def test_lost_decision_changes_nothing_before_it():
    step_mask = torch.tensor([[[True], [False]]])
    flags = {"done": [[False, True]], "terminated": [[False, False]], "step_mask": step_mask}
    batch = make_batch([[1.0, 2.0]], [[2.0, 0.0]], [[0.5, 0.0]], **flags)
    for level in ("chunk", "action"):
        batch[NEXT, STEP_REWARDS] = batch[NEXT, REWARD]
        gae(batch, gamma=0.9, lmbda=0.8, normalize=False, reward_level=level)
        assert batch[VALUE_TARGET][0, 0].item() == pytest.approx(0.5 + 0.9 * 2.0)


def test_normalisation_needs_two_samples():
    one = torch.tensor([3.0, 7.0])
    assert normalize_advantages(one, torch.tensor([True, False])).tolist() == [0.0, 0.0]
    sample = torch.tensor([1.0, 2.0, 6.0, 100.0])
    normal = normalize_advantages(sample, torch.tensor([True, True, True, False]))
    assert normal[:3].mean().abs() < 1e-6
    assert normal[:3].std() == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("level", ["token", "action", "chunk"])
def test_trajectory_weights_by_hand(level):
    """Rows of three decisions of two actions: trajectories of 1 and of 2 decisions, and one of 2 whose third is lost.

    The second ends in mid-chunk: they have 2, 3 and 4 actions.
    """
    done = torch.tensor([[[True], [False], [True]], [[False], [False], [True]]])
    mask = torch.tensor([[[True, True], [True, True], [True, False]], [[True, True], [True, True], [False, False]]])
    batch = TensorDict({NEXT: {DONE: done, STEP_MASK: mask}}, [2, 3])
    total, lengths = (5.0, (1, 2, 2)) if level == "chunk" else (9.0, (2, 3, 4))
    first, second, third = (total / (3 * length) for length in lengths)
    expected = torch.tensor([[first, second, second], [third, third, 0.0]])
    assert trajectory_weights(batch, level) is batch
    assert torch.allclose(batch[WEIGHT].squeeze(-1), expected)
    valid = mask.any(-1).float() if level == "chunk" else mask.sum(-1)
    assert ((expected * valid).sum() / valid.sum()).item() == pytest.approx(1.0)

    flat = TensorDict({NEXT: {DONE: done.flatten(0, 1), STEP_MASK: mask.flatten(0, 1)}}, [6])
    assert torch.allclose(trajectory_weights(flat, level)[WEIGHT].squeeze(-1), expected.flatten())


def test_the_end_of_a_row_ends_a_trajectory():
    mask, done = torch.ones(2, 2, 1, dtype=torch.bool), torch.zeros(2, 2, 1, dtype=torch.bool)
    mask[1, 1] = False
    batch = TensorDict({NEXT: {DONE: done, STEP_MASK: mask}}, [2, 2])
    assert trajectory_weights(batch, "chunk")[WEIGHT].flatten().tolist() == [0.75, 0.75, 1.5, 0.0]


def test_trajectory_weights_of_nothing_are_zero():
    nothing = {DONE: torch.zeros(2, 3, 1, dtype=torch.bool), STEP_MASK: torch.zeros(2, 3, 4, dtype=torch.bool)}
    assert trajectory_weights(TensorDict({NEXT: nothing}, [2, 3]), "token")[WEIGHT].abs().sum() == 0


@pytest.mark.parametrize(
    ("values", "settings", "message"),
    [
        (1, {"bootstrap": "always"}, "bootstrap=always: must be 'truncation', 'none' or 'any_done'"),
        (1, {"reward_level": "step"}, "reward_level=step: must be 'chunk' or 'action'"),
        (1, {"reward_level": "action"}, "reward_level='action' needs 2 values per decision, the policy has 1"),
        (2, {"reward_level": "chunk"}, "reward_level='chunk' needs 1 values per decision, the policy has 2"),
        (3, {"reward_level": "action"}, "reward_level='action' needs 2 values per decision, the policy has 3"),
    ],
)
def test_settings_that_do_not_fit(values, settings, message):
    batch = action_batch()
    batch[STATE_VALUE] = batch[NEXT, STATE_VALUE] = torch.zeros(1, 3, values)
    with pytest.raises(ValueError, match=message):
        gae(batch, **settings)


def test_one_ratio_per_chunk_needs_one_advantage_per_chunk():
    per_action, per_chunk = (SimpleNamespace(num_values=values, chunk_size=4) for values in (4, 1))
    with pytest.raises(ValueError, match="reward_level='chunk', or log_prob_level='action'"):
        check_levels(SimpleNamespace(log_prob_level="chunk"), per_action, reward_level="action")
    for log_prob_level in ("token", "action", "chunk"):
        check_levels(SimpleNamespace(log_prob_level=log_prob_level), per_chunk, reward_level="chunk")
    with pytest.raises(ValueError, match="needs 4 values per decision, the policy has 1"):
        check_levels(SimpleNamespace(log_prob_level="token"), per_chunk, reward_level="action")
    check_levels(SimpleNamespace(log_prob_level="token", has_critic=False), per_chunk, reward_level="action")
