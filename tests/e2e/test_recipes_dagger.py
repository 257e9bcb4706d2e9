"""``recipes/dagger.py``: it learns from what the expert does alone, and resumes bit by bit; on a toy benchmark."""

import json
import signal

import pytest

from tests.storm import lives
from vla_algos import Interventions

MORE = (
    "iterations=4",
    "evaluate_every=0",
    "eval.trials=8",
    "collector.episodes=16",
    "update.steps=100",
    "update.lr=1e-3",
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dagger") / "whole"
    assert lives.wait(lives.live("dagger", folder, more=MORE)) == 0, lives.last_words(folder)
    return folder


def lines_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_it_learns_from_what_the_expert_does_where_it_has_led(whole):
    lines = [line for line in lines_of(whole) if "interventions/actions" in line]
    tried = [line["env/success_once"] for line in lines]
    assert tried[0] < 0.7 < 0.9 < tried[-1]
    kept = [line["interventions/decisions"] for line in lines]
    assert kept == sorted({*kept})


def test_a_run_that_was_killed_resumes_bit_by_bit(whole, tmp_path):
    dies = lives.dies_in_extend(Interventions, 3)
    folder = tmp_path / "again"
    assert lives.wait(lives.live("dagger", folder, None, dies, MORE)) == 128 + signal.SIGKILL
    assert lives.wait(lives.live("dagger", folder, more=MORE)) == 0, lives.last_words(folder)
    assert lives.difference(folder, lives.outcome(whole)) == ""


@pytest.mark.timeout(600)
def test_two_processes_keep_the_same_within_the_budget_of_both(tmp_path):
    folder, more = tmp_path / "two", (*MORE, "interventions.budget=60")
    assert [lives.wait(each, 240) for each in lives.live_together("dagger", folder, 2, more=more)] == [0, 0]
    lines = [line for line in lines_of(folder) if "interventions/actions" in line]
    kept = [line["interventions/actions"] for line in lines]
    assert kept[-1] == min(number for number in kept if number >= 60)
    assert lines[-1]["env/success_once"] > 0.9


def test_demonstrations_are_cloned_first_and_stay(tmp_path):
    folder = tmp_path / "shown"
    more = ("iterations=1", "evaluate_every=0", "cloning.steps=20", "demonstrations.episodes=4")
    assert lives.wait(lives.live("dagger", folder, more=more)) == 0, lives.last_words(folder)
    assert (folder / "warm_start" / "metrics.jsonl").read_text().count("train/loss") == 20
    assert (folder / "cloning" / "iteration_0001" / "metrics.jsonl").read_text().count("train/loss") == 3


def test_where_the_expert_solves_nothing_there_is_nothing_to_clone(tmp_path):
    folder, steps = tmp_path / "nothing", ("demonstrations.max_steps=1", "collector.episodes=1", "seed=3")
    assert lives.wait(lives.live("dagger", folder, more=("iterations=1", "evaluate_every=0", *steps))) == 0
    assert "the expert has solved nothing yet, so there is nothing to clone" in lives.last_words(folder)


def test_a_benchmark_without_an_expert_is_refused_before_work_begins(tmp_path):
    def lose():
        from tests.storm.line import Line

        del Line.expert_action

    folder = tmp_path / "none"
    assert lives.wait(lives.live("dagger", folder, None, lose)) == 2
    assert "line/all has no scripted expert" in lives.last_words(folder)
