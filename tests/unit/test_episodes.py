"""Which episodes run: groups, ranks, passes, grids, and resuming after a restart."""

import pytest

from vla_envs import EpisodeQueue, EpisodeSampler, evaluation_episodes, make_spec

SPEC = make_spec("metaworld/ML45-test")  # 5 tasks
MODES = ("random", "balanced")


def take(sampler, count):
    return [sampler.next() for _ in range(count)]


@pytest.mark.parametrize("mode", ["random", "balanced", "learnable", "ordered", "fixed"])
def test_a_seed_fixes_the_stream_and_a_saved_state_continues_it(mode):
    sampler = EpisodeSampler(SPEC, seed=4, mode=mode, group_size=2, groups=3)
    first = take(sampler, 30)
    again = EpisodeSampler(SPEC, seed=4, mode=mode, group_size=2, groups=3)
    assert take(again, 11) == first[:11]
    resumed = EpisodeSampler(SPEC, seed=4, mode=mode, group_size=2, groups=3)
    resumed.load_state_dict(again.state_dict())
    assert take(resumed, 19) == first[11:]
    assert take(EpisodeSampler(SPEC, seed=5, mode=mode, group_size=2, groups=3), 30) != first


@pytest.mark.parametrize("mode", ["random", "balanced", "learnable", "ordered", "fixed"])
def test_groups_are_contiguous_and_identical(mode):
    episodes = take(EpisodeSampler(SPEC, mode=mode, group_size=4, groups=3), 24)
    for start in range(0, 24, 4):
        assert len(set(episodes[start : start + 4])) == 1
        assert len({episode.group_id for episode in episodes[start : start + 4]}) == 1
    assert len({episode.group_id for episode in episodes}) == 6


@pytest.mark.parametrize("mode", ["random", "balanced", "learnable", "ordered", "fixed"])
def test_ranks_share_out_whole_groups_of_the_single_ranks_stream(mode):
    whole = take(EpisodeSampler(SPEC, mode=mode, group_size=2, groups=5), 24)
    ranks = [take(EpisodeSampler(SPEC, mode=mode, group_size=2, groups=5, rank=r, world_size=3), 8) for r in range(3)]
    dealt = [episode for turn in range(4) for rank in ranks for episode in rank[2 * turn : 2 * turn + 2]]
    assert dealt == whole
    assert [e.group_id for e in dealt] == [e.group_id for e in whole]


def test_balanced_draws_difficulties_alike_and_random_draws_tasks_alike():
    spec = make_spec("metaworld/MT50")  # 28 easy tasks, 5 very hard ones
    drawn = {mode: [spec.tasks[e.task_id] for e in take(EpisodeSampler(spec, mode=mode), 4000)] for mode in MODES}
    for group, tasks in {"easy": 28, "medium": 11, "hard": 6, "very_hard": 5}.items():
        shares = {mode: sum(task.group == group for task in drawn[mode]) / 4000 for mode in MODES}
        assert shares["balanced"] == pytest.approx(0.25, abs=0.03)
        assert shares["random"] == pytest.approx(tasks / 50, abs=0.03)
    assert {task.name for task in drawn["balanced"]} == {task.name for task in spec.tasks}


def test_what_is_sometimes_solved_comes_more_often():
    spec = make_spec("metaworld/MT50")
    sampler = EpisodeSampler(spec, mode="learnable")
    easy, hard = ([n for n, task in enumerate(spec.tasks) if task.group == name] for name in ("easy", "hard"))
    assert sampler.shares()[easy].sum() == pytest.approx(0.25)  # nothing is known yet
    for _ in range(40):
        sampler.tell([*easy, hard[0], hard[1]], [True] * len(easy) + [False, True])
        sampler.tell([hard[2]] * 2, [True, False])
    shares = sampler.shares()
    assert shares[easy[0]] / shares[hard[2]] == pytest.approx(0.1 * len(hard) / len(easy), rel=1e-3)
    assert shares[hard[0]] == shares[hard[1]] == pytest.approx(0.1 * shares[hard[2]], rel=1e-3)
    drawn = [episode.task_id for episode in take(sampler, 4000)]
    assert drawn.count(hard[2]) / 4000 == pytest.approx(shares[hard[2]], abs=0.03)
    sampler.tell([hard[0]] * 60, [True, False] * 30)  # what was long ago is forgotten
    assert sampler.shares()[hard[0]] > 0.9 * sampler.shares()[hard[2]]


def test_what_was_told_is_resumed_also_by_another_number_of_ranks():
    def told(**ranks):
        return EpisodeSampler(SPEC, mode="learnable", **ranks)

    sampler = told(rank=1, world_size=2)
    take(sampler, 5)
    sampler.tell([0, 1, 2], [True, False, True])
    sampler.tell([0] * 60, [True] * 60)
    resumed = told(rank=1, world_size=2)
    resumed.load_state_dict(sampler.state_dict())
    assert take(resumed, 20) == take(sampler, 20)
    alone = told()
    alone.begin_anew([sampler.state_dict()])
    assert (alone.shares() == sampler.shares()).all()


def test_ordered_visits_everything_once_per_pass_in_a_new_order():
    episodes = take(EpisodeSampler(SPEC, mode="ordered", trials=3), 30)
    first, second = episodes[:15], episodes[15:]
    everything = {(task, trial) for task in range(5) for trial in range(3)}
    assert {(e.task_id, e.trial_id) for e in first} == {(e.task_id, e.trial_id) for e in second} == everything
    assert first != second


def test_fixed_repeats_and_random_does_not():
    assert len(set(take(EpisodeSampler(SPEC, mode="fixed", groups=3), 30))) == 3
    assert len(set(take(EpisodeSampler(SPEC), 1000))) == 1000


def test_a_queue_is_worked_off_once():
    grid = evaluation_episodes(SPEC, trials=2, seed=8)
    assert len(grid) == len(set(grid)) == 10
    assert {episode.seed for episode in grid} == {8}
    queue = EpisodeQueue(grid)
    run = [queue.next() for _ in range(10)]
    assert [(e.task_id, e.trial_id, e.seed, e.group_id) for e in run] == [
        (e.task_id, e.trial_id, e.seed, e.group_id) for e in grid
    ]
    assert [episode.queue_index for episode in run] == list(range(10))
    assert queue.next() is None
    queue.extend(grid[:2])
    queue.give_back(run[3])
    assert [queue.next().queue_index for _ in range(3)] == [3, 10, 11]
    assert queue.next() is None
    assert len(queue) == 12
    assert len(evaluation_episodes(SPEC)) == 5 * 20  # the benchmark's own number of trials


def test_training_never_meets_the_evaluation_episodes():
    grid = set(evaluation_episodes(SPEC, trials=100, seed=9_000_000))
    assert not grid & set(take(EpisodeSampler(SPEC, seed=0), 5000))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "randm"}, "random"),
        ({"group_size": 0}, "group_size"),
        ({"rank": 2, "world_size": 2}, "rank"),
        ({"seed": -1}, "seed"),
    ],
)
def test_impossible_settings(arguments, message):
    with pytest.raises(ValueError, match=message):
        EpisodeSampler(SPEC, **arguments)


def test_a_state_of_another_stream_is_refused():
    state = EpisodeSampler(SPEC, seed=1).state_dict()
    with pytest.raises(ValueError, match="seed=1"):
        EpisodeSampler(SPEC, seed=2).load_state_dict(state)
    with pytest.raises(ValueError, match="world_size=1"):
        EpisodeSampler(SPEC, seed=1, world_size=2).load_state_dict(state)
    with pytest.raises(ValueError, match="metaworld/ML45-test"):
        EpisodeSampler(make_spec("metaworld/MT50"), seed=1).load_state_dict(state)


@pytest.mark.parametrize("mode", ["random", "balanced", "learnable", "ordered", "fixed"])
@pytest.mark.parametrize("drawn", [(0, 0, 0), (3, 0, 7), (4, 4, 4)])
def test_another_number_of_ranks_goes_on_after_what_was_begun(mode, drawn):
    settings = {"mode": mode, "group_size": 2, "groups": 5}
    whole = take(EpisodeSampler(SPEC, **settings), 60)
    before = [EpisodeSampler(SPEC, **settings, rank=rank, world_size=3) for rank in range(3)]
    begun = {episode.group_id for count, rank in zip(drawn, before, strict=True) for episode in take(rank, count)}
    first = max(begun, default=-1) + 1
    states = [rank.state_dict() for rank in before]
    after = [EpisodeSampler(SPEC, **settings, rank=rank, world_size=2) for rank in range(2)]
    for rank in after:
        rank.begin_anew(states)
    dealt = [take(rank, 7) for rank in after]
    groups = [{episode.group_id for episode in episodes} for episodes in dealt]
    assert groups == [set(range(first + rank, first + rank + 8, 2)) for rank in range(2)]
    assert all(episode in whole for episodes in dealt for episode in episodes)
    resumed = EpisodeSampler(SPEC, **settings, rank=1, world_size=2)
    resumed.load_state_dict(after[1].state_dict())
    assert take(resumed, 9) == take(after[1], 9)
    with pytest.raises(ValueError, match=r"had seed=0, this one has 3"):
        EpisodeSampler(SPEC, 3, **settings).begin_anew(states)
