"""An evaluation by import is written as one of a recipe is, comes back, and compares with it."""

from dataclasses import replace

import numpy as np
import pytest

from recipes.__main__ import main
from vla_algos import EvaluationResult, compare
from vla_algos.results import EpisodeResult
from vla_envs import Episode


def result(number, solved, **changes):
    episode = EpisodeResult(Episode(number % 2, number, 7), f"task-{number % 2}", solved, solved, float(solved), 9)
    return replace(episode, group="easy" if number % 2 else "hard", index=number, **changes)


@pytest.fixture
def found():
    episodes = [result(number, number % 3 == 0) for number in range(8)]
    episodes[5] = result(5, False, crashed=True, attempts=3, error="it died: é")
    episodes[6] = result(6, True, remark="ran as trial 7")
    return EvaluationResult(episodes, {0: np.zeros((2, 4, 4, 3), np.uint8)})


@pytest.mark.parametrize("place", ["results", "deep/er", "one.jsonl"])
def test_what_was_saved_comes_back(found, tmp_path, place):
    file = found.save(tmp_path / place)
    assert file == (tmp_path / place if place.endswith(".jsonl") else tmp_path / place / "episodes.jsonl")
    for path in (str(tmp_path / place), file):
        again = EvaluationResult.load(path, mean_of=["easy", "hard"])
        assert again.episodes == found.episodes
        assert again.table().splitlines()[:6] == replace(found, mean_of=("easy", "hard")).table().splitlines()[:6]
    assert [entry.name for entry in file.parent.iterdir()] == [file.name]


def test_deviations_from_the_protocol_are_saved_too(found, tmp_path):
    replace(found, protocol_deviations=("horizon 10", "64 pixels")).save(tmp_path)
    again = EvaluationResult.load(tmp_path)
    assert again.protocol_deviations == ("horizon 10", "64 pixels")
    assert "horizon 10" in again.table()
    found.save(tmp_path)
    assert EvaluationResult.load(tmp_path).protocol_deviations == ()


def test_an_evaluation_within_a_training_run_is_not_replaced(found, tmp_path):
    (tmp_path / "eval.jsonl").touch()
    with pytest.raises(FileExistsError, match="save elsewhere"):
        found.save(tmp_path)


def test_a_second_one_takes_the_place_of_the_first(found, tmp_path):
    (tmp_path / "episodes_rank1.jsonl").write_text("what another process had written\n")
    found.save(tmp_path)
    better = EvaluationResult([replace(each, success_once=True) for each in found.episodes[:4]])
    better.save(tmp_path)
    assert EvaluationResult.load(tmp_path).episodes == better.episodes


def test_episodes_that_were_not_tried_are_not_in_it(found, tmp_path):
    untried = result(8, False, crashed=True, attempts=0)
    EvaluationResult([*found.episodes, untried], broken="it died").save(tmp_path)
    assert EvaluationResult.load(tmp_path).episodes == found.episodes


def test_the_command_and_python_compare_what_was_saved(found, tmp_path, capsys):
    better = EvaluationResult([replace(each, success_once=True) for each in found.episodes])
    found.save(tmp_path / "one")
    better.save(tmp_path / "other.jsonl")
    assert main(["compare", str(tmp_path / "one"), str(tmp_path / "other.jsonl")]) == 0
    said = capsys.readouterr().out
    first, second = (EvaluationResult.load(tmp_path / name) for name in ("one", "other.jsonl"))
    compared = compare(first.episodes, second.episodes)
    assert compared.crashed == 1
    assert "paired over 7 episodes" in said
    assert compared.table("A", "B", tasks=True) in said


def test_chains_of_tasks_need_their_length(found, tmp_path):
    chains = [replace(each, subtasks=number % 4) for number, each in enumerate(found.episodes)]
    chained = EvaluationResult(chains, chain_length=5)
    chained.save(tmp_path / "chains")
    found.save(tmp_path / "plain")
    for length in (1, 2):
        with pytest.raises(ValueError, match=r"chains of tasks, of which 3 were solved; give .*chain_length=env"):
            EvaluationResult.load(tmp_path / "chains", chain_length=length)
    with pytest.raises(ValueError, match=r"no chains of tasks; give chain_length=1"):
        EvaluationResult.load(tmp_path / "plain", chain_length=5)
    again = EvaluationResult.load(tmp_path / "chains", chain_length=5)
    assert again == chained
    assert again.table() == chained.table()


def test_where_nothing_is_and_where_a_recipe_goes_on(found, tmp_path):
    for path in (tmp_path, tmp_path / "nowhere", tmp_path / "none.jsonl"):
        with pytest.raises(FileNotFoundError, match=r"there is no such file; give the folder or file of Eval") as error:
            EvaluationResult.load(path)
        assert "\n" not in str(error.value)
    (tmp_path / "evaluation.json").write_text("{}")
    with pytest.raises(FileExistsError, match="save elsewhere"):
        found.save(tmp_path)
    (tmp_path / "text.jsonl").write_text('{"loss": 1}\n')
    with pytest.raises(ValueError, match="line 1 is no result"):
        EvaluationResult.load(tmp_path / "text.jsonl")
