"""Results of an evaluation are on disk as they come, and one that was broken off goes on there."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from forked import together
from toy import ToyEnv, ToyPolicy

from vla_algos.run.ablated import check_weights
from vla_algos.run.evaluator import Evaluator
from vla_envs.workers.pool import SimulatorCrash

EVALUATOR = Evaluator(trials=6, seed=1)


class Counting(ToyEnv):
    """Is broken from a step on; remembers which trials began."""

    def __init__(self, num_envs, broken_at=None, **options):
        self.begun, self.left = [], broken_at
        super().__init__(num_envs, **options)
        toy = vars(self.simulator_spec)
        self.simulator_spec = SimpleNamespace(**toy, id="toy", trials=6, initial_states=None, evaluation_trials=None)

    def _reset(self, tensordict=None):
        outcome = super()._reset(tensordict)
        self.begun += [(e.task_id, e.trial_id) for e in self.current_episodes if e is not None]
        return outcome

    def _step(self, tensordict):
        if self.left == 0:
            raise SimulatorCrash("it died\n  and died again")
        self.left = None if self.left is None else self.left - 1
        return super()._step(tensordict)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def policy():
    torch.manual_seed(0)
    return ToyPolicy()


@pytest.fixture
def whole(policy, tmp_path):
    return EVALUATOR.run("whole", Counting(4), policy, tmp_path / "whole.jsonl")


def test_a_line_for_each_episode_has_what_the_result_has(policy, whole, tmp_path):
    found = lines(tmp_path / "whole.jsonl")
    assert [line["index"] for line in found] == list(range(12))
    for line, result in zip(found, whole.episodes, strict=True):
        assert (line["task"], line["trial_id"], line["seed"]) == (result.task, result.episode.trial_id, 1)
        assert (line["success_once"], line["return"]) == (result.success_once, result.episode_return)
        assert (line["length"], line["crashed"], line["attempts"]) == (result.episode_len, False, 1)


@pytest.mark.parametrize("record", [0, 2])
@pytest.mark.parametrize("broken_at", [0, 3, 7])
def test_a_broken_evaluation_has_what_finished_and_goes_on(policy, whole, tmp_path, broken_at, record):
    path = tmp_path / "episodes.jsonl"
    evaluator = replace(EVALUATOR, videos=record)
    first = evaluator.run("", Counting(3, broken_at), policy, path, resume=True, record=True)
    assert first.broken == "it died and died again"
    assert f"{12 - len(first.finished)} of 12 episodes have no result; it died" in first.failure
    assert "not run" in first.table()
    assert (len(first.finished) > 0) == (broken_at > 0)
    assert [result for result in whole.episodes if result in first.finished] == first.finished
    assert [line["index"] for line in lines(path)] == [result.index for result in first.finished]
    with open(path, "a") as file:
        file.write('{"index": 11, "torn')
    env = Counting(4)
    second = evaluator.run("", env, policy, path, resume=True, record=True)
    assert second.episodes == whole.episodes
    assert sorted(second.videos) == list(range(record))
    done = {(result.episode.task_id, result.episode.trial_id) for result in first.finished if result.index >= record}
    assert not done & set(env.begun)
    assert [line["index"] for line in lines(path)] == list(range(12))


def test_crashed_episodes_run_again(policy, tmp_path):
    path = tmp_path / "episodes.jsonl"
    first = EVALUATOR.run("", Counting(2, crashes={3: 6}), policy, path, resume=True)
    assert [result.index for result in first.crashed] == [6, 7]
    assert [line["index"] for line in lines(path) if line["crashed"]]
    second = EVALUATOR.run("", Counting(2), policy, path, resume=True)
    assert not second.crashed


def test_the_files_of_several_processes_become_one(policy, whole, tmp_path):
    path = tmp_path / "episodes.jsonl"
    for rank in range(3):
        text = "".join(json.dumps(line) + "\n" for line in lines(tmp_path / "whole.jsonl")[rank::3])
        (path if rank == 0 else tmp_path / f"episodes_rank{rank}.jsonl").write_text(text)
    env = Counting(2)
    result = EVALUATOR.run("", env, policy, path, resume=True)
    assert result.episodes == whole.episodes
    assert env.begun == []
    assert [entry.name for entry in tmp_path.glob("episodes*")] == ["episodes.jsonl"]


def shared(folder):
    """An evaluation by all processes, and the episodes that the policy of this one was asked for."""
    torch.manual_seed(0)
    evaluator, asked = Evaluator(trials=6, seed=1, videos=3, mean_of=("",)), set()

    def observe(td):
        asked.update(td["episode_index"].tolist())
        return td

    path = folder / "shared.jsonl"
    return evaluator.run("", Counting(3), ToyPolicy(), path, record=True, observe=observe), asked - {-1}


def test_several_processes_share_an_evaluation(whole, tmp_path):
    alone, _ = shared(tmp_path)
    found = together(shared, tmp_path, tmp_path)
    assert [asked for _, asked in found] == [{*range(0, 12, 2)}, {*range(1, 12, 2)}]
    for result, _ in found:
        assert result.episodes == alone.episodes == whole.episodes
        assert list(result.videos) == list(result.captions) == [0, 1, 2]
        assert all((result.videos[index] == alone.videos[index]).all() for index in range(3))
        assert result.captions == alone.captions
        assert result.mean_of == ("",)


def test_other_weights_are_refused(policy, tmp_path):
    check_weights(tmp_path, policy)
    (tmp_path / "episodes.jsonl").write_text("")
    check_weights(tmp_path, policy)
    with torch.no_grad():
        policy.body[0].weight[0, 0] += 1e-6
    with pytest.raises(ValueError, match="other weights"):
        check_weights(tmp_path, policy)
    (tmp_path / "evaluation.json").unlink()
    with pytest.raises(ValueError, match=r"no readable evaluation.json"):
        check_weights(tmp_path, policy)
