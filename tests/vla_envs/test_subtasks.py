"""How much of a chain of tasks is solved: from the simulator to environments, Gymnasium, evaluation and logs."""

import contextlib
import json
import math
from dataclasses import replace
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
import torch
from chained import KILL, chained_spec
from forked import together
from gym_vector import assert_same
from gymnasium.vector import AutoresetMode
from scipy import stats

from vla_algos.collectors import EpisodeCollector, StepCollector
from vla_algos.evaluation import EpisodeResult, EvaluationResult, evaluate
from vla_algos.groups import collect_groups, concatenate
from vla_algos.intervals import mean_interval, wilson_interval
from vla_algos.metrics import env_metrics
from vla_algos.run import HeldOut
from vla_algos.run.environments import as_evaluated, describe_spec, facts_of
from vla_algos.run.evaluator import Evaluator
from vla_algos.run.folder import finish_folder
from vla_common.keys import (
    ACTION,
    CRASHED,
    DONE,
    EPISODE_LEN,
    NEXT,
    STATES,
    STEP_MASK,
    SUBTASKS,
    SUCCESS,
    TERMINATED,
    TRUNCATED,
)
from vla_envs import make_env, make_spec
from vla_envs.episodes import EpisodeQueue, EpisodeSampler, evaluation_episodes
from vla_envs.gym import SimulatorEnv, SimulatorVectorEnv
from vla_envs.simulator import Episode, Task

# Solved by these actions; given up after four without one. The chains solve 3, 1, 0, 2 and 3, 0, 0, 1 of 3 tasks.
FIRST, SECOND = [(2, 3, 7), (4,), (), (1, 2)], [(1, 2, 3), (), (), (3,)]
SOLVED, LENGTHS = [3, 1, 0, 2, 3, 0, 0, 1], [7, 8, 4, 6, 3, 4, 4, 7]


class Still(torch.nn.Module):
    in_keys, out_keys = [STATES], [ACTION]

    def __init__(self, chunk):
        super().__init__()
        self.chunk = chunk

    def forward(self, td):
        return td.set(ACTION, torch.zeros(*td.shape, self.chunk, 1))


@pytest.fixture
def make():
    made = []

    def make(spec=None, num_envs=3, chunk_size=2, num_workers=2, **options):
        spec = chained_spec(FIRST, SECOND) if spec is None else spec
        made.append(make_env(spec, num_envs, chunk_size, num_workers=min(num_envs, num_workers), **options))
        return made[-1]

    yield make
    for env in made:
        if not env.is_closed:
            env.close()


def steps(env, td, number, action=0.0):
    """Step so many times; returns the outcomes, and what follows."""
    found = []
    for _ in range(number):
        td[ACTION] = torch.full((*env.batch_size, env.chunk_size, 1), action)
        outcome, td = env.step_and_maybe_reset(td)
        found.append(outcome[NEXT])
    return found, td


# ---- the environment


def test_a_decision_says_how_much_of_the_chain_is_solved(make):
    env = make(num_envs=1, chunk_size=4, episodes=EpisodeQueue([Episode(0, 0), Episode(0, 2)]))
    td = env.reset()
    assert SUBTASKS not in td
    found, _ = steps(env, td, 6)
    assert [row[SUBTASKS].item() for row in found] == [1, 2, 3, 0, 0, 0]  # two episodes, and an idle slot
    assert [row[EPISODE_LEN].item() for row in found] == [2, 3, 7, 4, 0, 0]
    assert [row[STEP_MASK].sum().item() for row in found] == [2, 1, 4, 4, 0, 0]
    assert [row[TERMINATED].item() for row in found] == [False, False, True, False, False, False]
    assert [row[TRUNCATED].item() for row in found][:4] == [False, False, False, True]
    assert found[0][SUBTASKS].shape == (1, 1)
    assert found[0][SUBTASKS].dtype == env.reward_spec[SUBTASKS].dtype == torch.int64


def test_without_chains_nothing_is_there(make):
    spec = chained_spec(FIRST, chain_length=1, protocol="")
    env = make(spec, episodes=EpisodeSampler(spec, 0))
    assert SUBTASKS not in set(env.reward_spec.keys())
    batch = StepCollector(env, Still(2), 8).rollout()
    assert SUBTASKS not in batch[NEXT]
    assert not [name for name in env_metrics(batch) if "subtasks" in name]
    result = evaluate(env, Still(2), [Episode(0, trial) for trial in range(4)])
    assert {result.subtasks for result in result.episodes} == {None}
    assert not [name for name in result.metrics() if "subtasks" in name or "success_len" in name]
    assert list(result.intervals()) == ["eval/interval"]
    assert "chains of" not in result.table()
    assert describe_spec(spec) == "chained"


def test_a_chain_goes_on_where_it_was_saved(make):
    episodes = [Episode(task, trial) for task in range(2) for trial in range(4)]
    whole, _ = steps(env := make(episodes=EpisodeQueue(episodes)), env.reset(), 12)
    for saved_after in (1, 3, 6):
        first = make(episodes=EpisodeQueue(episodes))
        steps(first, first.reset(), saved_after)
        state = first.state_dict()
        second = make(episodes=EpisodeQueue(episodes))
        second.load_state_dict(state)
        rest, _ = steps(second, second.observe(), 12 - saved_after)
        for ours, theirs in zip(rest, whole[saved_after:], strict=True):
            assert torch.equal(ours[SUBTASKS], theirs[SUBTASKS])
            assert torch.equal(ours[DONE], theirs[DONE])


def test_a_worker_that_dies_takes_no_task_from_the_chains_beside_it(make):
    env = make(num_envs=2, num_workers=1, chunk_size=3, episodes=EpisodeQueue([Episode(0, 0), Episode(0, 1)]))
    found, td = steps(env, env.reset(), 2)
    assert found[-1][SUBTASKS].flatten().tolist() == [2, 1]
    td[ACTION] = torch.zeros(2, 3, 1)
    td[ACTION][1, 1] = KILL
    outcome = env.step(td)[NEXT]
    assert outcome[CRASHED].flatten().tolist() == [False, True]
    assert outcome[SUBTASKS].flatten().tolist() == [2, 1]  # four actions without one; what is lost counts nowhere
    assert outcome[EPISODE_LEN].flatten().tolist() == [6, 4]


# ---- Gymnasium


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_gymnasium_says_it_in_info(mode):
    spec = chained_spec(FIRST, SECOND)
    gymnasium.register(
        "mine/Chained-v0",
        "vla_envs.gym:SimulatorEnv",
        vector_entry_point="vla_envs.gym:SimulatorVectorEnv",
        kwargs={"name": spec},
    )
    try:
        kwargs = {"vector_kwargs": {"autoreset_mode": mode}, "vectorization_mode": "sync"}
        theirs = gymnasium.make_vec("mine/Chained-v0", 3, **kwargs)
        ours = gymnasium.make_vec("mine/Chained-v0", 3, num_workers=2, autoreset_mode=mode)
    finally:
        del gymnasium.registry["mine/Chained-v0"]
    first = assert_same(theirs.reset(seed=4), ours.reset(seed=4))
    assert first[1][SUBTASKS].tolist() == [0, 0, 0]
    most, finals = 0, []
    for _ in range(40):
        actions = np.zeros((3, 1), np.float32)
        _, _, _, _, infos = assert_same(theirs.step(actions), ours.step(actions))
        most = max(most, *infos.get(SUBTASKS, [0]))
        finals += list(infos.get("final_info", {}).get(SUBTASKS, []))
    assert most == 3 or 3 in finals
    theirs.close()
    ours.close()


def test_chunks_and_single_steps_count_alike():
    spec = chained_spec(FIRST, SECOND)
    single, envs = SimulatorEnv(spec), SimulatorVectorEnv(spec, 1, chunk_size=4)
    try:
        for trial, expected in enumerate([3, 1, 0, 2]):
            _, info = single.reset(seed=0, options={"task_id": 0, "trial_id": trial})
            assert info[SUBTASKS] == 0
            ended = False
            while not ended:
                _, _, terminated, truncated, info = single.step(np.zeros(1, np.float32))
                ended = terminated or truncated
            assert info[SUBTASKS] == expected
            assert info["is_success"] == (expected == 3)
            envs.reset(seed=0, options={"task_id": 0, "trial_id": trial})
            ended = False
            while not ended:
                _, _, terminated, truncated, infos = envs.step(np.zeros((1, 4, 1), np.float32))
                ended = bool(terminated[0] or truncated[0])
            assert infos[SUBTASKS].tolist() == [expected]
    finally:
        single.close()
        envs.close()
    alone = SimulatorEnv(chained_spec(FIRST, chain_length=1))
    _, info = alone.reset(seed=0)
    assert SUBTASKS not in info
    assert SUBTASKS not in alone.step(np.zeros(1, np.float32))[-1]
    alone.close()


# ---- evaluation


@pytest.mark.parametrize("chunk_size", [1, 2, 5])
def test_evaluation_counts_what_the_simulator_says(make, chunk_size):
    env = make(chunk_size=chunk_size)
    result = evaluate(env, Still(chunk_size), evaluation_episodes(env.simulator_spec))
    rows = sorted(result.episodes, key=lambda row: (row.episode.task_id, row.episode.trial_id))
    assert [row.subtasks for row in rows] == SOLVED
    assert [row.episode_len for row in rows] == LENGTHS
    metrics = result.metrics()
    assert metrics["eval/avg_num_subtasks"] == sum(SOLVED) / 8 == 1.25
    assert [metrics[f"eval/success_len_{length}"] for length in (1, 2, 3)] == [5 / 8, 3 / 8, 2 / 8]
    assert metrics["eval/success_len_3"] == metrics["eval/success_once"]
    assert sum(metrics[f"eval/success_len_{length}"] for length in (1, 2, 3)) == metrics["eval/avg_num_subtasks"]
    assert metrics["eval/task/chains 0/avg_num_subtasks"] == 1.5
    assert metrics["eval/task/chains 1/avg_num_subtasks"] == 1.0
    assert metrics["eval/task/chains 1/success_len_1"] == 0.5
    intervals = result.intervals()
    assert intervals["eval/success_len_1/interval"] == wilson_interval(5, 8)
    assert intervals["eval/task/chains 1/success_len_2/interval"] == wilson_interval(1, 4)
    assert intervals["eval/avg_num_subtasks/interval"] == mean_interval(SOLVED, 3)
    assert len(intervals) == 1 + 3 * 4
    table = result.table().splitlines()
    start = table.index("of chains of 3 tasks, with 95 % intervals")
    assert table[start + 1].split() == ["task", "avg_num_subtasks", *(f"success_len_{n}" for n in (1, 2, 3))]
    assert [line.split("  ")[0] for line in table[start + 2 :]] == ["chains 0", "chains 1", "all tasks"]
    low, high = mean_interval(SOLVED, 3)
    assert f"1.25, {low:.2f} - {high:.2f}" in table[-1]
    assert "62.5%,  31 - 86" in table[-1]
    assert len({len(line) for line in table[start + 1 :]}) == 1


def test_crashed_chains_are_counted_and_have_no_subtasks():
    episodes = [EpisodeResult(Episode(0, trial), "a", False, False, 0.0, 9, subtasks=2) for trial in range(3)]
    crashed = replace(episodes[0], crashed=True, subtasks=3)
    result = EvaluationResult([*episodes, crashed], chain_length=5)
    metrics = result.metrics()
    assert (metrics["eval/num_episodes"], metrics["eval/crashed_episodes"]) == (3, 1)
    assert metrics["eval/avg_num_subtasks"] == 2
    assert metrics["eval/success_len_3"] == 0
    assert "crashed: 1" in result.table()
    none = EvaluationResult([crashed], chain_length=5)
    assert math.isnan(none.metrics()["eval/avg_num_subtasks"])
    assert "nan" not in none.table()
    assert none.intervals()["eval/avg_num_subtasks/interval"] == (0, 5)


@pytest.mark.parametrize("finished", [1, 4, 7])
def test_an_evaluation_that_was_broken_off_gives_the_same_numbers(make, tmp_path, finished):
    env, evaluator = make(num_envs=1), Evaluator(videos=0)
    whole = evaluator.run("", env, Still(2), tmp_path / "whole.jsonl")
    lines = (tmp_path / "whole.jsonl").read_text().splitlines(keepends=True)
    assert [json.loads(line)["subtasks"] for line in lines] == [row.subtasks for row in whole.episodes]
    path = tmp_path / "broken.jsonl"
    damaged = json.loads(lines[finished]) | {"subtasks": 4}  # of three
    unnamed = {name: value for name, value in json.loads(lines[-1]).items() if name != "subtasks"}
    path.write_text("".join([*lines[:finished], *(f"{json.dumps(line)}\n" for line in (damaged, unnamed))]))
    begun = env.interactions
    again = evaluator.run("", env, Still(2), path, resume=True)
    assert env.interactions > begun
    assert again == whole
    assert again.metrics() == whole.metrics()
    assert again.table() == whole.table()
    assert path.read_text() == (tmp_path / "whole.jsonl").read_text()


def shared(folder):
    env = make_env(chained_spec(FIRST, SECOND), 2, 2, num_workers=1)
    with contextlib.closing(env):
        return Evaluator(videos=0).run("", env, Still(2), folder / "episodes.jsonl")


def test_parts_of_several_processes_become_one(make, tmp_path):
    env = make()
    whole = evaluate(env, Still(2), evaluation_episodes(env.simulator_spec))
    for joined in together(shared, tmp_path, tmp_path):
        assert joined.metrics() == whole.metrics()
        assert joined.intervals() == whole.intervals()


# ---- intervals


def test_the_interval_of_a_mean():
    # Agresti and Coull's of a proportion: here of 15 in 20, from its formula with scipy's quantile.
    z2 = stats.norm.ppf(0.975) ** 2
    rate = (15 + z2 / 2) / (20 + z2)
    margin = math.sqrt(z2 * rate * (1 - rate) / (20 + z2))
    assert mean_interval([1.0] * 15 + [0.0] * 5, 1) == pytest.approx((rate - margin, rate + margin))
    assert mean_interval([5] * 15 + [0] * 5, 5) == pytest.approx((5 * (rate - margin), 5 * (rate + margin)))
    # With many the normal interval.
    values = np.random.default_rng(0).integers(0, 6, 5000)
    normal = stats.norm.interval(0.95, values.mean(), stats.sem(values))
    assert mean_interval(values.tolist(), 5) == pytest.approx(normal, abs=2e-3)
    # Never certain, never out of bounds.
    low, high = mean_interval([0] * 10, 5)
    assert low == 0
    assert 1 < high < 2
    assert mean_interval([5] * 10, 5) == pytest.approx((5 - high, 5))
    assert mean_interval([], 5) == (0, 5)


@pytest.mark.parametrize("rates", [(0.95, 0.9, 0.85, 0.8, 0.7), (0.5, 0.3, 0.1, 0.05, 0.0), (0.05, 0.0, 0.0, 0.0, 0.0)])
@pytest.mark.parametrize("number", [8, 50])
def test_the_interval_has_the_mean_in_it_as_often_as_it_says(rates, number):
    random = np.random.default_rng(1)
    hits = 0
    for draw in random.random((2000, number)):
        low, high = mean_interval((draw[:, None] < np.array(rates)).sum(1).tolist(), 5)
        hits += low <= sum(rates) <= high
    assert hits / 2000 > 0.935


# ---- training


def test_training_logs_the_mean_of_the_episodes_that_ended(make):
    episodes = [Episode(task, trial) for task in range(2) for trial in range(4)]
    env = make(num_envs=1, episodes=EpisodeQueue(episodes))
    metrics = env_metrics(StepCollector(env, Still(2), 40).rollout())
    assert metrics["env/num_episodes"] == 8
    assert metrics["env/avg_num_subtasks"] == 1.25
    assert "env/avg_num_subtasks" not in env_metrics(StepCollector(make(), Still(2), 1).rollout())  # none has ended


def test_groups_log_it_too(make):
    env = make(num_envs=2)
    episodes = EpisodeSampler(env.simulator_spec, 0, group_size=2)
    groups = collect_groups(EpisodeCollector(env, Still(2)), episodes, 8, 8)
    solved = [episode[NEXT, SUBTASKS][-1].item() for group in groups for episode in group.episodes]
    assert set(solved) > {0}
    assert env_metrics(concatenate(groups))["env/avg_num_subtasks"] == sum(solved) / len(solved)
    full = [episode[NEXT, SUCCESS][-1].item() for group in groups for episode in group.episodes]
    assert full == [number == 3 for number in solved]


# ---- what it is called


def test_results_name_their_protocol(tmp_path):
    spec = chained_spec(FIRST, protocol_deviations=("two instead of three",))
    assert describe_spec(spec).splitlines() == [
        "chained",
        "  protocol: by hand",
        "  not the benchmark's: two instead of three",
    ]
    (tmp_path / "run").mkdir()
    finish_folder(tmp_path / "run", {"x": 1.0}, 2.0, facts_of(spec))
    assert json.loads((tmp_path / "run" / "run.json").read_text())["protocol"] == "by hand"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"chain_length": 0}, "chain_length is 0, must be a whole number"),
        ({"chain_length": 2.0}, r"chain_length is 2\.0, must be"),
        ({"chain_length": True}, "chain_length is True, must be"),
        ({"chain_length": "5"}, "chain_length is '5', must be"),
        ({"protocol": "two\nlines"}, "must be one line of text"),
        ({"protocol": None}, "protocol is None, must be one line"),
        ({"tasks": ()}, r"tasks is \(\), must be one or more"),
        ({"tasks": (Task("push", ""),)}, "tasks is .* must be one or more, with sentences"),
        ({"trials": 0}, "trials is 0, must be a whole number, at least 1"),
        ({"max_episode_steps": 0}, "max_episode_steps is 0, must be at least 1"),
        ({"perturbs": ("camrea",)}, "perturbs is .*camrea.* must be some of .*camera"),
        ({"action_low": (1.0,), "action_high": (-1.0,)}, r"action_low is \(1\.0,\), must be below action_high"),
        ({"action_low": (-1.0,), "action_high": (1.0, 1.0)}, r"action_high is .* must be 1 numbers like action_low"),
    ],
)
def test_a_description_that_cannot_be_is_refused(fields, message):
    with pytest.raises(ValueError, match=message) as raised:
        replace(chained_spec(FIRST), **fields)
    assert "\n" not in str(raised.value)


def test_fewer_initial_states_than_the_benchmark_has_are_said():
    published = make_spec("calvin/lh-mtlc")
    assert "2 of its 1000 initial states" in describe_spec(as_evaluated(published, 2))
    for trials in (None, 1000):
        assert as_evaluated(published, trials) is published
    drawn = make_spec("calvin/D")
    assert as_evaluated(drawn, 2) is drawn


def test_a_training_run_says_so_of_its_evaluations():
    run = SimpleNamespace(config=SimpleNamespace(eval={"trials": 2}, env={"id": "calvin/lh-mtlc"}), facts={})
    held_out = HeldOut(run, make_spec("calvin/lh-mtlc"))
    assert "2 of its 1000 initial states" in held_out.describe()
    assert "2 of its 1000 initial states" in str(run.facts["protocol_deviations"])
