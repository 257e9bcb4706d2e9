"""Whole toy runs whose processes have roles: where and when batches are collected and learnt from changes no number."""

import json
import os
import signal

import pytest
from simulators import some

from tests.storm import lives
from vla_algos.disaggregated.schedule import Schedule

pytestmark = pytest.mark.timeout(600)
TOY = ("eval.sampled=true",)


class DieInTurn:
    """Dies, in the process of a number, when the given turn begins."""

    number = signal.SIGKILL

    def __init__(self, iteration, rank):
        self.iteration, self.rank = iteration, rank

    def __call__(self):
        turn = Schedule.turn

        def dies(schedule, iteration, *others):
            if (iteration, schedule.roles.rank) == (self.iteration, self.rank):
                os.kill(os.getpid(), self.number)
            return turn(schedule, iteration, *others)

        Schedule.turn = dies


def alone(folder, *more, die=None, name="ppo_async"):
    """Run in a process of its own; returns how it ended."""
    lives.warm()
    prepare = die or (lambda: None)
    return lives.wait(lives.live(name, folder, lives.Board(), prepare, (*TOY, *more)), 200)


def placed(folder, actor, rollout, *more, processes=2, ends=None, die=lambda: None):
    settings = (*TOY, f"placement.actor={actor}", f"placement.rollout={rollout}", *more)
    started = lives.live_together("ppo_async", folder / "run", processes, die, settings)
    ended = [lives.wait(life, 200) for life in started]
    assert ended == list(ends or (0,) * processes), lives.last_words(folder / "run")
    return folder / "run"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Runs of one process, by lag; that of 0 is one of recipes/ppo.py."""
    lives.warm()
    folder, known = tmp_path_factory.mktemp("whole"), {}

    def of(lag):
        if lag not in known:
            known[lag] = folder / f"lag_{lag}"
            named = {"name": "ppo_async"} if lag else {"name": "ppo"}
            assert alone(known[lag], *([f"sync.lag={lag}"] if lag else []), **named) == 0, lives.last_words(known[lag])
        return known[lag]

    return of


@pytest.mark.parametrize("lag", [0, 2])
def test_other_processes_collect_than_learn(lag, whole, tmp_path):
    found = placed(tmp_path, 0, 1, f"sync.lag={lag}")
    assert lives.difference(found, lives.outcome(whole(lag))) == ""


def test_actors_may_be_the_later_processes(whole, tmp_path):
    """The first process of the launcher collects: the group numbers them again."""
    found = placed(tmp_path, 1, 0, "sync.lag=1")
    assert lives.difference(found, lives.outcome(whole(1))) == ""


def test_the_lag_is_what_it_says(whole):
    """With lag k the first k + 1 batches are of the weights that the run began with."""
    logs = [(whole(lag) / "metrics.jsonl").read_text().splitlines() for lag in (0, 1, 2)]
    trained = [[line for line in map(json.loads, lines) if "train/loss" in line] for lines in logs]
    ages = [[line.get("train/actor/behaviour_log_ratio") for line in lines] for lines in trained]
    assert ages[0] == [None] * 4
    assert ages[1][0] < 1e-6 < min(ages[1][1:])
    assert ages[2][0] < 1e-6 < min(ages[2][1:])
    assert ages[1][1] == ages[2][1]  # the second batch is of the first weights in both
    assert ages[1][2] < ages[2][2]


def test_a_run_with_a_lag_resumes_where_it_was(whole, tmp_path):
    assert alone(tmp_path / "run", "sync.lag=1", die=DieInTurn(3, 0)) == 128 + signal.SIGKILL
    assert alone(tmp_path / "run", "sync.lag=1") == 0
    assert lives.difference(tmp_path / "run", lives.outcome(whole(1))) == ""


@pytest.mark.parametrize(("lag", "dies"), [(0, 1), (1, 0), (2, 1)])
def test_processes_with_roles_resume_where_they_were(lag, dies, whole, tmp_path):
    ends = tuple(128 + signal.SIGKILL if rank == dies else 1 for rank in (0, 1))
    placed(tmp_path, 0, 1, f"sync.lag={lag}", ends=ends, die=DieInTurn(3, dies))
    found = placed(tmp_path, 0, 1, f"sync.lag={lag}")
    assert lives.difference(found, lives.outcome(whole(lag))) == ""


@pytest.mark.parametrize(
    ("actor", "rollout", "processes"), some([("0-1", "1", 2), ("0-1", "2", 3), ("0", "1-2", 3), ("0-1", "2-3", 4)], 3)
)
def test_every_arrangement_runs_and_repeats_itself(actor, rollout, processes, tmp_path):
    found = []
    for part in ("first", "second"):
        (tmp_path / part).mkdir()
        found.append(placed(tmp_path / part, actor, rollout, "sync.lag=1", processes=processes))
    assert lives.difference(found[0], lives.outcome(found[1])) == ""
    steps = [json.loads(line).get("train/steps") for line in (found[0] / "metrics.jsonl").read_text().splitlines()]
    assert any(steps)


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 0)])
def test_the_lag_may_be_changed_by_force(before, after, tmp_path):
    """With the new lag from the first iteration on: of a larger one the batches of the oldest weights are dropped."""
    folder = tmp_path / "run"
    assert alone(folder, f"sync.lag={before}", die=DieInTurn(3, 0)) == 128 + signal.SIGKILL

    def watched():
        turn = Schedule.turn

        def held_back(schedule, iteration, last, *others):
            result = turn(schedule, iteration, last, *others)
            with open(tmp_path / "ahead", "a") as file:
                file.write(f"{iteration} {schedule._ahead}\n")
            return result

        Schedule.turn = held_back

    assert alone(folder, f"sync.lag={after}", "resume=force", die=watched) == 0, lives.last_words(folder)
    held = [tuple(map(int, line.split())) for line in (tmp_path / "ahead").read_text().splitlines()]
    assert held[-2:] == [(3, after), (4, 0)]
    assert {ahead for _, ahead in held[:-1]} == {after}


def test_other_roles_are_refused(tmp_path):
    """As many processes, of which another collects: what it would continue with is not there."""
    placed(tmp_path, 0, 1, ends=(1, 128 + signal.SIGKILL), die=DieInTurn(3, 1))
    placed(tmp_path, "0-1", "0-1", "resume=force", ends=(2, 2))
    assert "is of a run with other parts" in lives.last_words(tmp_path / "run")
