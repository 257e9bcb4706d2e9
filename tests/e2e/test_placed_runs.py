"""Whole toy runs whose processes have roles: where and when batches are collected and learnt from changes no number."""

import json
import os
import signal

import pytest

from benchmarks.storm import _lives
from vla_algos.run import turns

pytestmark = pytest.mark.timeout(600)
TOY = ("eval.sampled=true",)


class DieInTurn:
    """Dies, in the process of a number, when a turn begins that it is told of."""

    number = signal.SIGKILL

    def __init__(self, iteration, rank):
        self.iteration, self.rank = iteration, rank

    def __call__(self):
        turn = turns.Turns.__call__

        def dies(them, run, iteration, *others):
            if (iteration, them.roles.rank) == (self.iteration, self.rank):
                os.kill(os.getpid(), self.number)
            return turn(them, run, iteration, *others)

        turns.Turns.__call__ = dies


class AskedInTurn(DieInTurn):
    """Is asked to stop, in the process of a number, when a turn begins: the others are not."""

    number = signal.SIGTERM


def alone(name, folder, *more, die=None):
    """Run in a process of its own; returns how it ended."""
    _lives.warm()
    prepare = die or (lambda: None)
    return _lives.wait(_lives.live(name, folder, _lives.Board(), prepare, (*TOY, *more)), 200)


def placed(folder, name, actor, rollout, *more, processes=2, ends=None, die=lambda: None):
    settings = (*TOY, f"placement.actor={actor}", f"placement.rollout={rollout}", *more)
    lives = _lives.live_together(name, folder / "run", processes, die, settings)
    ended = [_lives.wait(life, 200) for life in lives]
    assert ended == list(ends or (0,) * processes), _lives.last_words(folder / "run")
    return folder / "run"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Runs of one process, by recipe and lag."""
    _lives.warm()
    folder, known = tmp_path_factory.mktemp("whole"), {}

    def of(name, lag):
        if (name, lag) not in known:
            known[name, lag] = folder / f"{name}_{lag}"
            assert alone(name, known[name, lag], f"sync.lag={lag}") == 0
        return known[name, lag]

    return of


@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("name", ["ppo", "grpo"])
def test_other_processes_collect_than_learn(name, lag, whole, tmp_path):
    found = placed(tmp_path, name, 0, 1, f"sync.lag={lag}")
    assert _lives.difference(found, _lives.outcome(whole(name, lag))) == ""


@pytest.mark.parametrize("lag", [0, 1])
def test_actors_may_be_the_later_processes(lag, whole, tmp_path):
    """The first process of the launcher collects: the group numbers them anew."""
    found = placed(tmp_path, "ppo", 1, 0, f"sync.lag={lag}")
    assert _lives.difference(found, _lives.outcome(whole("ppo", lag))) == ""


def test_the_lag_is_what_it_says(whole):
    """With lag k the first k + 1 batches are of the weights that the run began with."""
    logs = [(whole("ppo", lag) / "metrics.jsonl").read_text().splitlines() for lag in (0, 1, 2)]
    trained = [[line for line in map(json.loads, lines) if "train/loss" in line] for lines in logs]
    ages = [[line.get("train/actor/behaviour_log_ratio") for line in lines] for lines in trained]
    assert ages[0] == [None] * 4
    assert ages[1][0] < 1e-6 < min(ages[1][1:])
    assert ages[2][0] < 1e-6 < min(ages[2][1:])
    assert ages[1][1] == ages[2][1]  # the second batch is of the first weights in both
    assert ages[1][2] < ages[2][2]


@pytest.mark.parametrize(("name", "lag"), [("ppo", 1), ("grpo", 2)])
def test_a_run_with_a_lag_goes_on_where_it_was(name, lag, whole, tmp_path):
    settings = f"sync.lag={lag}"
    assert alone(name, tmp_path / "run", settings, die=DieInTurn(3, 0)) == 128 + signal.SIGKILL
    assert alone(name, tmp_path / "run", settings) == 0
    assert _lives.difference(tmp_path / "run", _lives.outcome(whole(name, lag))) == ""


@pytest.mark.parametrize(("lag", "dies"), [(0, 1), (1, 0), (1, 1), (2, 1)])
def test_processes_with_roles_go_on_where_they_were(lag, dies, whole, tmp_path):
    killed, hears = 128 + signal.SIGKILL, 70
    ends = (killed, hears) if dies == 0 else (hears, killed)
    placed(tmp_path, "ppo", 0, 1, f"sync.lag={lag}", ends=ends, die=DieInTurn(3, dies))
    found = placed(tmp_path, "ppo", 0, 1, f"sync.lag={lag}")
    assert _lives.difference(found, _lives.outcome(whole("ppo", lag))) == ""


@pytest.mark.parametrize(
    ("actor", "rollout", "processes"), [("0-1", "1", 2), ("0-1", "2", 3), ("0", "1-2", 3), ("0-1", "2-3", 4)]
)
@pytest.mark.parametrize(("name", "lag"), [("ppo", 0), ("grpo", 1)])
def test_every_arrangement_runs_and_repeats_itself(name, lag, actor, rollout, processes, tmp_path):
    found = []
    for part in ("first", "second"):
        (tmp_path / part).mkdir()
        settings = (
            (f"sync.lag={lag}", "group_size=2", "collector.max_groups=4") if name == "grpo" else (f"sync.lag={lag}",)
        )
        found.append(placed(tmp_path / part, name, actor, rollout, *settings, processes=processes))
    assert _lives.difference(found[0], _lives.outcome(found[1])) == ""
    steps = [json.loads(line).get("train/steps") for line in (found[0] / "metrics.jsonl").read_text().splitlines()]
    assert any(steps)


@pytest.mark.parametrize(("rollout", "lag", "asked"), [("0-1", 0, 1), ("2", 1, 1)])
def test_one_process_alone_may_be_asked_to_stop(rollout, lag, asked, tmp_path):
    """The other of a sharded policy waits in no exchange of weights for one that has left already."""
    processes, stopped = 3 if rollout == "2" else 2, 128 + signal.SIGTERM
    settings = ("0-1", rollout, f"sync.lag={lag}")
    ends = (stopped,) * processes
    placed(tmp_path, "ppo", *settings, processes=processes, ends=ends, die=AskedInTurn(3, asked))
    placed(tmp_path, "ppo", *settings, processes=processes)


@pytest.mark.parametrize(("before", "after"), [(0, 1), (2, 1), (1, 0)])
def test_the_lag_may_be_changed_by_force(before, after, tmp_path):
    """With the new lag from the first iteration on: of a larger one the batches of the oldest weights are dropped."""
    folder = tmp_path / "run"
    assert alone("ppo", folder, f"sync.lag={before}", die=DieInTurn(3, 0)) == 128 + signal.SIGKILL

    def watched():
        turn = turns.Turns.__call__

        def held_back(them, run, iteration, last, *others):
            result = turn(them, run, iteration, last, *others)
            with open(tmp_path / "ahead", "a") as file:
                file.write(f"{iteration} {them._ahead}\n")
            return result

        turns.Turns.__call__ = held_back

    assert alone("ppo", folder, f"sync.lag={after}", "resume=force", die=watched) == 0, _lives.last_words(folder)
    held = [tuple(map(int, line.split())) for line in (tmp_path / "ahead").read_text().splitlines()]
    assert held[-2:] == [(3, after), (4, 0)]
    assert {ahead for _, ahead in held[:-1]} == {after}


def test_other_roles_begin_anew_where_that_is_asked_for(tmp_path):
    """As many processes, of which another collects: what it would go on with is not there."""
    ends = (70, 128 + signal.SIGKILL)
    placed(tmp_path, "ppo", 0, 1, ends=ends, die=DieInTurn(3, 1))
    placed(tmp_path, "ppo", "0-1", "0-1", "resume=force", ends=(70, 70))
    assert "is of processes with other roles: resume with the placement of that run" in _lives.last_words(
        tmp_path / "run"
    )
    placed(tmp_path, "ppo", "0-1", "0-1", "resume=elastic")
