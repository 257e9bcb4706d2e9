"""Groups: which are run, which carry signal, and what their members are worth."""

import pytest
import torch
from tensordict import TensorDict
from toy import ToyEnv, ToyPolicy

from vla_algos.advantages import group_advantages
from vla_algos.collectors import EpisodeCollector
from vla_algos.evaluation import evaluate
from vla_algos.groups import (
    Group,
    check_signal,
    collect_groups,
    concatenate,
    group_metrics,
    grpo,
    score,
)
from vla_algos.learner import Learner
from vla_algos.losses import ChunkClipPPOLoss
from vla_algos.metrics import env_metrics
from vla_common.keys import ADVANTAGE, CRASHED, DONE, IMAGES, NEXT, REWARD, SUCCESS, TRIAL_ID
from vla_envs.simulator import Episode


class Groups:
    """An endless source of groups, each of one toy episode."""

    def __init__(self, group_size):
        self.group_size, self.drawn = group_size, 0

    def next(self):
        number = self.drawn // self.group_size
        self.drawn += 1
        return Episode(task_id=number % 2, trial_id=number, group_id=number)


def episode(rewards, success=None, crashed=False, done=None):
    done = done or [False] * (len(rewards) - 1) + [True]
    column = lambda x: torch.tensor(x).unsqueeze(-1)  # noqa: E731
    after = {
        REWARD: column([float(r) for r in rewards]),
        DONE: column(done),
        SUCCESS: column([False] * (len(rewards) - 1) + [bool(sum(rewards) > 0 if success is None else success)]),
        CRASHED: column([False] * (len(rewards) - 1) + [crashed]),
    }
    return TensorDict({NEXT: after}, batch_size=[len(rewards)])


def group(*scores, **options):
    return Group.of([episode([0, score], **options) for score in scores])


def test_a_score_ends_at_the_first_done():
    assert score(episode([1, 2, 4])) == 7
    assert score(episode([1, 2, 4, 8], done=[False, True, False, True])) == 3
    assert Group.of([episode([0, 0, 0, 1])]).solved


def test_advantages_by_hand():
    advantages = group_advantages(torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.tensor([5, 5, 2, 2]))
    assert advantages.tolist() == pytest.approx([0.7071058, -0.7071058, 0.0, 0.0], abs=1e-6)


def test_equal_scores_are_exactly_zero_whatever_their_rounding():
    scores = torch.full((7,), 0.1)
    assert group_advantages(scores, torch.zeros(7).long()).tolist() == [0.0] * 7
    assert group_advantages(torch.tensor([3.0]), torch.tensor([0])).tolist() == [0.0]


def test_groups_without_signal_are_dropped_and_change_nothing():
    mixed, failed, solved = group(1, 0, 0), group(0, 0, 0), group(1, 1, 1)
    alone, among = grpo([mixed]), grpo([failed, mixed, solved, failed])
    assert torch.equal(alone[ADVANTAGE], among[ADVANTAGE])
    assert len(among) == 6
    assert among[ADVANTAGE].flatten().tolist() == pytest.approx([1.1547, 1.1547] + [-0.57735] * 4, abs=1e-4)
    assert grpo([failed, solved]) is None
    state = {}
    said = (
        "iteration 3: none of 2 groups carries signal (1 failed every time, 1 succeeded every time); nothing was learnt"
    )
    assert check_signal(state, 3, [failed, solved], learnt=False, patience=2) == said
    assert check_signal(state, 4, [failed, mixed], learnt=True, patience=2) == ""
    for iteration in (5, 6):
        assert "ended" not in state
        check_signal(state, iteration, [failed], learnt=False, patience=2)
    assert state.pop("ended") == "2 iterations in a row without a group to learn from (patience=2)"
    for iteration in (7, 8):  # resume=force has it continue
        assert "ended" not in state
        check_signal(state, iteration, [failed], learnt=False, patience=2)
    assert state["ended"] == "4 iterations in a row without a group to learn from (patience=2)"


def test_bounds_are_success_rates_whatever_the_reward():
    """With a coefficient of 5 the mean reward of one success in 8 is 0.625, which reward bounds would have to know."""
    one, seven = group(5, 0, 0, 0, 0, 0, 0, 0), group(5, 5, 5, 5, 5, 5, 5, 0)
    for bounds, kept in [((0.1, 0.9), 2), ((0.2, 0.9), 1), ((0.1, 0.8), 1), ((0.125, 0.875), 2), (None, 2)]:
        batch = grpo([one, seven], bounds)
        assert len(batch) == 16 * kept
        assert group_metrics([one, seven], bounds)["rollout/groups_out_of_bounds"] == 2 - kept
    assert grpo([one], (0.3, 0.4)) is None


def test_lost_runs_are_left_out_of_their_group():
    runs = [episode([0, 1]), episode([0, 0]), episode([0, 0], crashed=True)]
    with_loss, without = Group.of(runs), Group.of(runs[:2])
    assert with_loss.crashed == 1
    assert torch.equal(grpo([with_loss])[ADVANTAGE], grpo([without])[ADVANTAGE])
    assert not Group.of([episode([0, 1]), episode([0, 0], crashed=True)]).has_signal  # nothing to compare with
    assert not Group.of([episode([0], crashed=True)]).has_signal


def test_moved_decisions_are_the_same_and_leave_what_happened(policy):
    collector = EpisodeCollector(ToyEnv(4), policy)
    groups = collect_groups(collector, Groups(4), groups=6, max_groups=6)
    copied = grpo(groups)
    frames = [IMAGES in episode for group in groups for episode in group.episodes]
    assert frames == [group.has_signal for group in groups for _ in group.episodes]  # none without signal keeps frames
    assert True in frames
    assert False in frames
    before = group_metrics(groups)
    moved = grpo(groups, move=True)
    assert set(copied.keys(True, True)) == set(moved.keys(True, True)) > {IMAGES, ADVANTAGE}
    for key in copied.keys(True, True):
        assert torch.equal(copied[key], moved[key])
    assert not any(IMAGES in episode for group in groups for episode in group.episodes)
    assert group_metrics(groups) == before
    assert len(concatenate(groups)) == sum(len(episode) for group in groups for episode in group.episodes)


def test_all_kinds_of_groups_are_counted():
    metrics = group_metrics([group(1, 0), group(0, 0), group(0, 0), group(1, 1), group(0.5, 0.2, success=False)])
    assert metrics == {
        "rollout/groups": 5,
        "rollout/groups_all_failed": 2,
        "rollout/groups_all_solved": 1,
        "rollout/groups_all_crashed": 0,
        "rollout/groups_out_of_bounds": 0,
        "rollout/groups_trained": 2,
    }


def test_runs_that_crashed_are_left_out_and_counted():
    some = Group.of([episode([0, 1]), episode([0, 0]), episode([0, 5], crashed=True)])
    assert some.has_signal
    assert (len(some.episodes), some.crashed) == (2, 1)
    assert not Group.of([episode([0, 1]), episode([0, 0], crashed=True)]).has_signal  # nothing to compare it with
    none = group(1, 0, crashed=True)
    assert [none.has_signal, none.failed, none.solved] == [False] * 3
    assert grpo([none, none]) is None
    assert group_metrics([none, none, some])["rollout/groups_all_crashed"] == 2
    assert "2 crashed every time" in check_signal({}, 1, [none, none], learnt=False, patience=9)
    assert env_metrics(concatenate([none, none]), 4) == {"env/num_episodes": 0, "env/crashed_episodes": 4}


def test_groups_of_which_every_run_crashes(policy):
    env = ToyEnv(3, crashes=dict.fromkeys(range(4), 99))
    groups = collect_groups(EpisodeCollector(env, policy), Groups(2), groups=4, max_groups=4)
    assert [(len(members.episodes), members.crashed) for members in groups] == [(0, 2)] * 4


def test_after_a_failure_the_next_groups_are_whole(policy):
    collector, source = EpisodeCollector(ToyEnv(3), policy), Groups(2)
    decided = []

    def fail(_):
        decided.append(1)
        if len(decided) == 5:
            raise RuntimeError("the simulator is broken")

    collector.step_hook = fail
    with pytest.raises(RuntimeError, match="broken"):
        collect_groups(collector, source, groups=6, max_groups=6)
    groups = collect_groups(collector, source, groups=3, max_groups=3)
    trials = [{int(run[TRIAL_ID][0]) for run in members.episodes} for members in groups]
    assert trials == [{source.drawn // 2 - left} for left in (3, 2, 1)]
    collector.extend([Episode(0, 1)])
    with pytest.raises(ValueError, match="1 episodes wait in the collector"):
        collect_groups(collector, source, groups=3, max_groups=3)


@pytest.fixture
def policy():
    torch.manual_seed(0)
    return ToyPolicy()


def test_members_of_a_group_run_the_same_episode(policy):
    groups = collect_groups(EpisodeCollector(ToyEnv(3), policy), Groups(4), groups=5, max_groups=5)
    assert len(groups) == 5
    for number, members in enumerate(groups):
        assert len(members.episodes) == 4
        assert all((run[TRIAL_ID] == number).all() for run in members.episodes)


def test_dynamic_sampling_goes_on_until_enough_groups_carry_signal(policy):
    collector, source = EpisodeCollector(ToyEnv(6), policy), Groups(2)
    groups = collect_groups(collector, source, groups=6, max_groups=60)
    useful = sum(members.has_signal for members in groups)
    assert useful >= 6
    assert 6 < len(groups) < 60
    queued = []
    roomy = EpisodeCollector(ToyEnv(40), policy, step_hook=lambda _: queued.append(len(roomy.queue)))
    collect_groups(roomy, Groups(2), groups=6, max_groups=60)
    assert queued[0] == 12  # as many as are wanted, until some have turned out to have none
    fixed = collect_groups(collector, source, groups=6, max_groups=6)
    assert len(fixed) == 6
    assert fixed[0].episodes[0][TRIAL_ID][0] == len(groups)  # the source continues


def test_the_cap_ends_the_search_when_nothing_has_signal():
    hopeless = ToyEnv(6, goal=100)  # nothing ever succeeds
    groups = collect_groups(EpisodeCollector(hopeless, ToyPolicy()), Groups(3), groups=2, max_groups=7)
    assert len(groups) == 7
    assert grpo(groups) is None


def test_bounds_count_in_dynamic_sampling(policy):
    collector = EpisodeCollector(ToyEnv(6), policy)
    groups = collect_groups(collector, Groups(4), groups=3, max_groups=100, success_bounds=(0.2, 0.3))
    assert sum(members.has_signal and members.success == 0.25 for members in groups) >= 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"size": 1, "groups": 2, "max_groups": 2}, "group of one"),
        ({"size": 2, "groups": 3, "max_groups": 2}, "groups=3 and max_groups=2"),
        ({"size": 2, "groups": 0, "max_groups": 2}, "groups=0"),
        (
            {"size": 2, "groups": 1, "max_groups": 1, "success_bounds": (0.5, 4.5)},
            "success_bounds=.*entry 1: must be less",
        ),
        ({"size": 2, "groups": 1, "max_groups": 1, "success_bounds": (0.9, 0.1)}, r"try \[0.1, 0.9\]"),
    ],
)
def test_impossible_settings_say_what_would_be_right(settings, message):
    size = settings.pop("size")
    with pytest.raises(ValueError, match=message):
        collect_groups(EpisodeCollector(ToyEnv(2), ToyPolicy()), Groups(size), **settings)


@pytest.mark.parametrize(("aggregation", "level"), [("trajectory_mean", "token"), ("token_mean", "chunk")])
def test_grpo_learns(aggregation, level):
    torch.manual_seed(0)
    policy = ToyPolicy()
    grid = [Episode(task_id=i % 2, trial_id=1000 + i) for i in range(40)]
    before = evaluate(ToyEnv(8), policy, grid)
    collector, source = EpisodeCollector(ToyEnv(16, crashes={7: 1}), policy), Groups(8)
    loss = ChunkClipPPOLoss(policy, log_prob_level=level, critic_coeff=None)
    learner = Learner(loss, lr=1e-2, epochs=2, minibatch_size=64, aggregation=aggregation)
    for _ in range(15):
        batch = grpo(collect_groups(collector, source, groups=8, max_groups=16))
        if batch is not None:
            learner.update(batch)
    assert before.success_once < 0.6
    assert evaluate(ToyEnv(8), policy, grid).success_once > 0.95
