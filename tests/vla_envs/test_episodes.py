"""Which episodes run: groups, ranks, passes, grids, and resuming after a restart."""

from dataclasses import replace

import pytest

from vla_envs import EpisodeQueue, EpisodeSampler, evaluation_episodes, make_spec

SPEC = make_spec("metaworld/ML45-test")  # 5 tasks
MODES = ("random", "balanced")


def take(sampler, count):
    return [sampler.next() for _ in range(count)]


@pytest.mark.parametrize("mode", ["random", "balanced", "learnable", "ordered", "fixed"])
def test_a_seed_fixes_the_stream_and_a_saved_state_continues_it(mode):
    sampler = EpisodeSampler(SPEC, seed=4, mode=mode, group_size=2)
    first = take(sampler, 30)
    again = EpisodeSampler(SPEC, seed=4, mode=mode, group_size=2)
    assert take(again, 11) == first[:11]
    resumed = EpisodeSampler(SPEC, seed=4, mode=mode, group_size=2)
    resumed.load_state_dict(again.state_dict())
    assert take(resumed, 19) == first[11:]
    assert take(EpisodeSampler(SPEC, seed=5, mode=mode, group_size=2), 30) != first


@pytest.mark.parametrize("mode", ["random", "balanced", "learnable", "ordered", "fixed"])
def test_groups_are_contiguous_and_identical(mode):
    episodes = take(EpisodeSampler(SPEC, mode=mode, group_size=4), 24)
    for start in range(0, 24, 4):
        assert len(set(episodes[start : start + 4])) == 1
        assert len({episode.group_id for episode in episodes[start : start + 4]}) == 1
    assert len({episode.group_id for episode in episodes}) == 6


@pytest.mark.parametrize("mode", ["random", "balanced", "learnable", "ordered", "fixed"])
def test_ranks_share_out_whole_groups_of_the_single_ranks_stream(mode):
    whole = take(EpisodeSampler(SPEC, mode=mode, group_size=2), 24)
    ranks = [take(EpisodeSampler(SPEC, mode=mode, group_size=2, rank=r, world_size=3), 8) for r in range(3)]
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


def test_what_was_told_is_resumed():
    def told(**ranks):
        return EpisodeSampler(SPEC, mode="learnable", **ranks)

    sampler = told(rank=1, world_size=2)
    take(sampler, 5)
    sampler.tell([0, 1, 2], [True, False, True])
    sampler.tell([0] * 60, [True] * 60)
    assert sampler.state_dict()["tried"] == [50, 1, 1, 0, 0]
    with pytest.raises(ValueError, match="shorter"):
        sampler.tell([3, 4], [True])
    resumed = told(rank=1, world_size=2)
    resumed.load_state_dict(sampler.state_dict())
    assert take(resumed, 20) == take(sampler, 20)


def test_a_group_is_of_one_episode_whatever_is_told_meanwhile():
    sampler, resumed = (EpisodeSampler(SPEC, mode="learnable", group_size=8) for _ in range(2))
    first = take(sampler, 4)
    sampler.tell(range(1, 5), [True] * 4)
    for task in range(5):
        sampler.tell([task] * 60, [True, False] * 30 if task != first[0].task_id else [True] * 60)
    resumed.load_state_dict(sampler.state_dict())
    rest = take(sampler, 20)
    assert set(first + rest[:4]) == {first[0]}
    assert take(resumed, 20) == rest


def test_ordered_visits_everything_once_per_pass_in_a_new_order():
    episodes = take(EpisodeSampler(replace(SPEC, trials=3), mode="ordered"), 30)
    first, second = episodes[:15], episodes[15:]
    everything = {(task, trial) for task in range(5) for trial in range(3)}
    assert {(e.task_id, e.trial_id) for e in first} == {(e.task_id, e.trial_id) for e in second} == everything
    assert first != second


def test_ordered_visits_the_initial_states_of_training_however_few_an_evaluation_has():
    spec = replace(SPEC, trials=2, initial_states=6, evaluation_trials=range(6, 8))
    assert {(e.task_id, e.trial_id) for e in take(EpisodeSampler(spec, mode="ordered"), 30)} == {
        (task, trial) for task in range(5) for trial in range(6)
    }


def test_fixed_repeats_and_random_does_not():
    assert len(set(take(EpisodeSampler(SPEC, mode="fixed"), 30))) == 1
    assert len(set(take(EpisodeSampler(SPEC), 1000))) == 1000


def test_a_queue_is_worked_off_once():
    grid = evaluation_episodes(SPEC, trials=2, seed=8)
    assert len(grid) == len(set(grid)) == 10
    assert {episode.seed for episode in grid} == {8}
    assert [(e.task_id, e.trial_id, e.group_id) for e in grid] == [(n % 5, n // 5, n) for n in range(10)]
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


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("random", [(3, 2025197565), (3, 503653708), (1, 771800721), (1, 1647624819)]),
        ("balanced", [(4, 1892783322), (2, 503653708), (0, 547780471), (2, 1647624819)]),
        ("learnable", [(4, 1892783322), (1, 396022191), (2, 547780471), (3, 1515498803)]),
        ("ordered", [(1, 1), (0, 0), (2, 1), (1, 2)]),
        ("fixed", [(3, 2025197565)] * 4),
    ],
)
def test_the_stream_of_a_seed_is_the_same_in_every_version(mode, expected):
    episodes = take(EpisodeSampler(replace(SPEC, trials=3), seed=4, mode=mode), 4)
    assert [(episode.task_id, episode.trial_id) for episode in episodes] == expected
    assert [(episode.seed, episode.group_id) for episode in episodes] == [(4, 0), (4, 1), (4, 2), (4, 3)]


def test_a_queue_gives_back_what_has_no_result_and_goes_on_from_its_state():
    def left(queue):
        return [(episode.task_id, episode.queue_index) for episode in iter(queue.next, None)]

    grid = evaluation_episodes(SPEC, trials=1, seed=8)
    queue, resumed = EpisodeQueue(grid), EpisodeQueue(grid)
    _, second, _ = (queue.next() for _ in range(3))
    queue.done(second)
    queue.give_back_all()
    assert queue.waiting == 4
    resumed.next()
    resumed.load_state_dict(queue.state_dict())
    resumed.give_back_all()  # of what the state replaced nothing comes
    resumed.extend(grid[:1])
    rest = left(queue)
    assert rest == [(0, 0), (2, 2), (3, 3), (4, 4)]
    assert left(resumed) == [*rest, (0, 5)]
    queue.clear()
    queue.give_back_all()
    assert (queue.waiting, len(queue)) == (0, 5)
    with pytest.raises(ValueError, match="of an EpisodeSampler, this is an EpisodeQueue"):
        queue.load_state_dict(EpisodeSampler(SPEC).state_dict())
    with pytest.raises(ValueError, match="of an EpisodeQueue, this is an EpisodeSampler"):
        EpisodeSampler(SPEC).load_state_dict(queue.state_dict())


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
    of_few = replace(SPEC, tasks=SPEC.tasks[1:])
    with pytest.raises(ValueError, match=f"had tasks=.*{SPEC.tasks[0].name}"):
        EpisodeSampler(of_few, seed=1).load_state_dict(state)
    state.pop("tasks")  # as before they were saved
    EpisodeSampler(of_few, seed=1).load_state_dict(state)
