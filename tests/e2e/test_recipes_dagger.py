"""``recipes/dagger.py``: it learns from the expert's answers alone, and resumes bit by bit; on a toy benchmark."""

import json
import os
import signal

import pytest

from tests.storm import lives
from vla_algos import ExpertLabels

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


def test_it_learns_from_what_the_expert_says_of_its_own_states(whole):
    lines = [line for line in lines_of(whole) if "labels/asked" in line]
    tried = [line["env/success_once"] for line in lines]
    assert tried[0] < 0.7 < 0.9 < tried[-1]
    asked = sum(round(line["env/episode_len"] * line["env/num_episodes"]) for line in lines)
    assert lines[-1]["labels/asked"] == asked  # every action that was executed


def test_a_run_that_was_killed_resumes_bit_by_bit(whole, tmp_path):
    def dies_after_it_has_asked():
        extend, calls = ExpertLabels.extend, []

        def dies(*given):
            extend(*given)
            calls.append(1)
            if len(calls) == 3:
                os.kill(os.getpid(), signal.SIGKILL)

        ExpertLabels.extend = dies

    folder = tmp_path / "again"
    assert lives.wait(lives.live("dagger", folder, None, dies_after_it_has_asked, MORE)) == 128 + signal.SIGKILL
    assert lives.wait(lives.live("dagger", folder, more=MORE)) == 0, lives.last_words(folder)
    assert lives.difference(folder, lives.outcome(whole)) == ""


def test_two_processes_ask_within_the_budget_of_both(tmp_path):
    folder, more = tmp_path / "two", (*MORE, "labels.budget=100")
    assert [lives.wait(each) for each in lives.live_together("dagger", folder, 2, more=more)] == [0, 0]
    lines = [line for line in lines_of(folder) if "labels/asked" in line]
    asked = [line["labels/asked"] for line in lines]
    assert all(now - before <= 100 for before, now in zip([0, *asked], asked, strict=False))
    assert asked[0] > 80  # nearly all episodes of a policy that has learnt nothing yet are long
    assert lines[-1]["env/success_once"] > 0.9


def test_demonstrations_are_cloned_first_and_stay(tmp_path):
    folder = tmp_path / "shown"
    more = ("iterations=1", "evaluate_every=0", "cloning.steps=20", "demonstrations.episodes=4", "labels.budget=1")
    assert lives.wait(lives.live("dagger", folder, more=more)) == 0, lives.last_words(folder)
    assert (folder / "warm_start" / "metrics.jsonl").read_text().count("train/loss") == 20
    assert (folder / "cloning" / "iteration_0001" / "metrics.jsonl").read_text().count("train/loss") == 3
    assert next(line["labels/decisions"] for line in lines_of(folder) if "labels/decisions" in line) == 0


def test_a_benchmark_without_an_expert_is_refused_before_work_begins(tmp_path):
    def lose():
        from tests.storm.line import Line

        del Line.expert_action

    folder = tmp_path / "none"
    assert lives.wait(lives.live("dagger", folder, None, lose)) == 2
    assert "line/all has no scripted expert" in lives.last_words(folder)
