"""The episode-bound collector: every episode once, in queue order, no slot waiting for another."""

import contextlib

import numpy as np
import pytest
import torch
from toy import CHUNK, DIM, ToyEnv, ToyPolicy

from vla_algos.collectors import EpisodeCollector, StepCollector
from vla_common.keys import (
    ACTION,
    ACTION_LOG_PROB,
    CRASHED,
    DONE,
    EPISODE_LEN,
    GROUP_ID,
    IMAGES,
    NEXT,
    REWARD,
    STATE_VALUE,
    STATES,
    STEP_MASK,
    SUCCESS,
    TASK_DESCRIPTIONS,
    TRIAL_ID,
)
from vla_envs.episodes import EpisodeQueue
from vla_envs.simulator import Episode


def queue(count, start=100):
    return [Episode(task_id=i % 2, trial_id=start + i, group_id=i // 2) for i in range(count)]


@pytest.fixture
def policy():
    torch.manual_seed(0)
    return ToyPolicy()


class LastWord(ToyPolicy):
    """Solves task 1 at once and never task 0, so that episodes take 5 and 7 steps."""

    def forward(self, td):
        super().forward(td)
        td[ACTION] = torch.ones(len(td), CHUNK, DIM)
        return td


@pytest.mark.parametrize("num_envs", [1, 3, 32])  # fewer and more slots than episodes
def test_every_episode_comes_once_whole_and_in_queue_order(policy, num_envs):
    episodes = list(EpisodeCollector(ToyEnv(num_envs), policy, queue(20)))
    assert len(episodes) == 20
    for place, episode in enumerate(episodes):
        assert (episode[TRIAL_ID] == 100 + place).all()
        assert (episode[GROUP_ID] == place // 2).all()
        assert episode[NEXT, DONE].squeeze(-1).tolist() == [False] * (len(episode) - 1) + [True]
        lengths = episode[NEXT, EPISODE_LEN].squeeze(-1)
        assert torch.equal(lengths, episode[NEXT, STEP_MASK].sum(-1).cumsum(0))
        assert torch.equal(episode[STATES][:, 0].long(), torch.cat([torch.zeros(1).long(), lengths[:-1]]))
        assert episode[NEXT, REWARD].sum() == float(episode[NEXT, SUCCESS][-1])


def test_episodes_may_be_long(policy):
    for episode in EpisodeCollector(ToyEnv(2, horizon=40 * CHUNK, goal=1000), policy, queue(3)):
        assert episode[STATES][:, 0].tolist() == list(range(0, 40 * CHUNK, CHUNK))


def test_they_finish_in_another_order_which_on_episode_sees():
    finished = []
    collector = EpisodeCollector(ToyEnv(4), LastWord(), queue(12), on_episode=lambda place, _: finished.append(place))
    trials = [int(episode[TRIAL_ID][0]) for episode in collector]
    assert trials == list(range(100, 112))
    assert sorted(finished) == list(range(12))
    assert finished != list(range(12))


def test_episodes_hold_what_learning_needs_and_no_more(policy):
    episode = next(iter(EpisodeCollector(ToyEnv(2), policy, queue(3))))
    assert {IMAGES, ACTION_LOG_PROB} < set(episode.keys())
    assert (NEXT, IMAGES) not in episode.keys(True)
    assert not {TASK_DESCRIPTIONS, STATE_VALUE} & set(episode.keys())
    episode = next(iter(EpisodeCollector(ToyEnv(2), policy, queue(3), for_learning=False)))
    assert IMAGES not in episode
    assert ACTION in episode


def test_concatenated_episodes_are_a_batch_that_ends_where_done_is(policy):
    batch = torch.cat(list(EpisodeCollector(ToyEnv(3), policy, queue(8))))
    ends = batch[NEXT, DONE].squeeze(-1)
    assert ends.sum() == 8
    assert ends[-1]
    assert torch.equal(batch[TRIAL_ID][1:] != batch[TRIAL_ID][:-1], ends[:-1])


def test_slots_are_only_idle_when_the_queue_is_empty():
    collector = EpisodeCollector(ToyEnv(4), LastWord(), queue(41))
    deciding = []
    collector.step_hook = lambda _: deciding.append([episode is not None for episode in collector.deciding])
    assert len(list(collector)) == 41
    first_idle = next(index for index, busy in enumerate(deciding) if not all(busy))
    assert not any(all(busy) for busy in deciding[first_idle:])  # the tail, and nothing but the tail
    idle = sum(busy.count(False) for busy in deciding)
    assert collector.stats()["time/idle_fraction"] == idle / (4 * len(deciding)) < 0.1
    assert collector.stats()["frames"] == sum(busy.count(True) for busy in deciding)


def test_the_queue_may_grow_while_it_is_worked_off(policy):
    collector = EpisodeCollector(ToyEnv(2), policy, queue(2))
    grown = []

    def grow(place, episode):
        if len(grown) < 5:
            grown.append(place)
            collector.extend(queue(1, start=200 + len(grown)))

    collector.on_episode = grow
    trials = [int(episode[TRIAL_ID][0]) for episode in collector]
    assert trials == [100, 101, 201, 202, 203, 204, 205]


def test_it_goes_on_after_it_was_exhausted_and_after_it_was_stopped(policy):
    collector = EpisodeCollector(ToyEnv(3), policy, queue(4))
    assert len(list(collector)) == 4
    assert list(collector) == []
    collector.extend(queue(6, start=200))
    trials = []
    for episode in collector:
        trials.append(int(episode[TRIAL_ID][0]))
        if len(trials) == 2:
            break
    trials += [int(episode[TRIAL_ID][0]) for episode in collector]
    assert trials == list(range(200, 206))


def test_the_environment_gets_its_own_episodes_back(policy):
    env = ToyEnv(3)
    own = env.episodes
    steps = StepCollector(env, policy, 3)
    steps.rollout()
    list(EpisodeCollector(env, policy, queue(4)))
    assert env.episodes is own
    steps.reset()
    assert (steps.rollout()[TRIAL_ID] < 100).all()


def test_crashed_episodes_run_again_and_are_marked_in_the_end(policy):
    env = ToyEnv(2, crashes={100: 2, 103: 99})
    collector = EpisodeCollector(env, policy, queue(6), max_attempts=3)
    episodes = list(collector)
    assert [bool(episode[NEXT, CRASHED].any()) for episode in episodes] == [False] * 3 + [True] + [False] * 2
    assert [collector.attempts[place] for place in range(6)] == [3, 1, 1, 3, 1, 1]
    assert episodes[3][NEXT, STEP_MASK][-1].sum() == 0


def test_same_seed_same_episodes(policy):
    def run(seed):
        collector = EpisodeCollector(ToyEnv(3), policy, queue(7))
        torch.manual_seed(seed)
        return torch.cat([episode[ACTION].flatten() for episode in collector])

    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(1)[:45], run(2)[:45])


def test_hooks_shutdown_and_state(policy):
    seen = []
    collector = EpisodeCollector(ToyEnv(2), policy, queue(3))
    collector.pre_collect_hook = lambda: seen.append("start")
    collector.post_collect_hook = lambda episode: seen.append(int(episode[TRIAL_ID][0]))
    list(collector)
    assert seen == ["start", 100, 101, 102]
    assert collector.stats()["batches"] == 1
    assert "completed" not in collector.stats()  # there is no number of frames to reach
    other = EpisodeCollector(ToyEnv(2), policy)
    other.load_state_dict(collector.state_dict())
    assert other.stats()["frames"] == collector.stats()["frames"] > 0
    assert other.stats()["batches"] == 1
    collector.shutdown()
    collector.shutdown()
    assert collector.env.is_closed


def test_impossible_attempts():
    with pytest.raises(ValueError, match="max_attempts"):
        EpisodeCollector(ToyEnv(2), ToyPolicy(), max_attempts=0)


class Failing(ToyEnv):
    """Fails at given steps: before it has done anything, or in the reset within the step, which has taken episodes."""

    def __init__(self, num_envs, steps, resets):
        self.failing_steps, self.failing_resets, self.taken = list(steps), list(resets), 0
        super().__init__(num_envs)

    def _step(self, tensordict):
        self.taken += 1
        if self.taken in self.failing_steps:
            raise RuntimeError("a step fails")
        return super()._step(tensordict)

    def _reset(self, tensordict=None):
        outcome = super()._reset(tensordict)
        if self.taken in self.failing_resets:
            self.failing_resets.remove(self.taken)
            raise RuntimeError("a reset fails")
        return outcome


@pytest.mark.parametrize("num_envs", [1, 3, 8])
def test_after_a_failure_nothing_is_lost_and_nothing_comes_twice(num_envs):
    env = Failing(num_envs, steps=[2, 3, 5, 11], resets=[0, 4, 6, 7, 8, 9])
    own, finished = env.episodes, []
    collector = EpisodeCollector(env, LastWord(), queue(20), on_episode=lambda index, _: finished.append(index))
    trials, failures = [], 0
    while len(collector):
        try:
            for episode in collector.iterator():
                trials.append(int(episode[TRIAL_ID][0]))
                assert episode[STATES][0, 0] == 0  # from its start
        except RuntimeError:
            failures += 1
            assert env.episodes is own
    assert trials == list(range(100, 120))
    assert sorted(finished) == list(range(20))
    assert failures >= 6


def test_a_hook_that_fails_loses_nothing(policy):
    calls = []

    def fail_sometimes(index, _):
        calls.append(index)
        if len(calls) in (1, 4, 5):
            raise KeyError

    collector = EpisodeCollector(ToyEnv(3), policy, queue(9), on_episode=fail_sometimes)
    trials = []
    while len(collector):
        with contextlib.suppress(KeyError):
            trials += [int(episode[TRIAL_ID][0]) for episode in collector.iterator()]
    assert sorted(calls) == list(range(9))


def test_slots_that_stay_idle_while_episodes_wait_are_an_error_and_not_an_endless_loop(policy):
    collector = EpisodeCollector(env := ToyEnv(2), policy, queue(6))
    collector.step_hook = lambda _: env.set_episodes(EpisodeQueue())  # the caller takes the environment away
    trials = []
    collector.post_collect_hook = lambda episode: trials.append(int(episode[TRIAL_ID][0]))
    with pytest.raises(RuntimeError, match="no slot of the environment takes one"):
        list(collector.iterator())
    collector.step_hook = None
    list(collector.iterator())
    assert trials == list(range(100, 106))


def test_an_episode_that_cannot_begin_is_not_tried_again(policy):
    env = ToyEnv(2, crashes={100: 99, 103: 99})
    type(env).unstarted = property(lambda env: np.array([e.trial_id == 100 for e in env.current_episodes]))
    try:
        collector = EpisodeCollector(env, policy, queue(4))
        assert [bool(episode[NEXT, CRASHED].any()) for episode in collector] == [True, False, False, True]
        assert [collector.attempts[index] for index in range(4)] == [1, 1, 1, 3]
    finally:
        del type(env).unstarted
