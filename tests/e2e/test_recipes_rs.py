"""``recipes/rs.py``: it learns from what it has solved alone, and resumes bit by bit; on a toy benchmark."""

import json
import signal

import pytest

from tests.storm import lives
from vla_algos import SelfImitation

MORE = ("iterations=6", "evaluate_every=0", "eval.trials=8", "collector.episodes=64", "update.steps=100")
MORE += ("self_imitation.batch_size=8", "optim.lr=1e-3")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rs") / "whole"
    assert lives.wait(lives.live("rs", folder, more=MORE)) == 0, lives.last_words(folder)
    return folder


def learnt(tried):
    """From a quarter to three; by rounding and seed 77 to 89 % (eight runs, with AVX2 and AVX-512)."""
    return tried[0] < 0.3 < 0.7 < sum(tried[-2:]) / 2


def lines_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_it_solves_more_by_cloning_what_it_has_solved(whole):
    lines = lines_of(whole)
    tried = [line["env/success_once"] for line in lines if "env/success_once" in line]
    kept = [line["self_imitation/decisions"] for line in lines if "self_imitation/decisions" in line]
    assert learnt(tried)
    assert kept == sorted(kept)
    assert 0 < kept[0] < kept[-1]


def test_a_run_that_was_killed_resumes_bit_by_bit(whole, tmp_path):
    dies = lives.dies_in_extend(SelfImitation, 4)
    folder = tmp_path / "again"
    assert lives.wait(lives.live("rs", folder, None, dies, MORE)) == 128 + signal.SIGKILL
    assert lives.wait(lives.live("rs", folder, more=MORE)) == 0, lives.last_words(folder)
    assert lives.difference(folder, lives.outcome(whole)) == ""


@pytest.mark.timeout(600)
def test_two_processes_keep_what_both_have_solved(tmp_path):
    folder = tmp_path / "two"
    assert [lives.wait(each, 240) for each in lives.live_together("rs", folder, 2, more=MORE)] == [0, 0]
    tried = [line["env/success_once"] for line in lines_of(folder) if "env/success_once" in line]
    assert learnt(tried)
