"""What a simulator has to say of an episode stands beside its result, wherever that is shown."""

import json

import gymnasium
import pytest
import torch
from tensordict.nn import TensorDictModule
from whole import whole_spec

from vla_algos.evaluation import evaluate
from vla_algos.results import as_lines, finished_episodes
from vla_common import keys
from vla_envs import Episode, Task, make_env
from vla_envs.gym import SimulatorEnv, SimulatorVectorEnv

SAID = "trial 2 ran as trial 3"


def spec():
    return whole_spec(options={"remarks": {2: SAID}})


def test_results_have_it_beside_the_episode(caplog, tmp_path):
    episodes = [Episode(0, trial) for trial in (0, 2, 1, 2)]
    env = make_env(spec(), num_envs=2, chunk_size=4, num_workers=1)
    still = TensorDictModule(lambda x: torch.zeros(x.shape[0], 4, 1), in_keys=[keys.STATES], out_keys=[keys.ACTION])
    evaluation = evaluate(env, still, episodes)
    results = evaluation.episodes
    env.close()
    assert [result.remark for result in results] == ["", SAID, "", SAID]
    assert f"with a remark: 2, such as far trial 2 seed 0: {SAID}" in evaluation.table()
    assert f"toy/whole task far trial 2 seed 0: {SAID}" in caplog.text
    for result in results:
        entry = as_lines([result])
        assert json.loads(entry).get("remark", "") == result.remark
    (tmp_path / "episodes.jsonl").write_text(as_lines(results))
    assert finished_episodes(tmp_path / "episodes.jsonl", episodes) == dict(enumerate(results))


def test_what_is_said_in_an_episodes_last_chunk_is_not_lost():
    env = make_env(whole_spec(options={"last_word": SAID}), num_envs=1, chunk_size=4, num_workers=1)
    run = TensorDictModule(lambda x: torch.ones(x.shape[0], 4, 1), in_keys=[keys.STATES], out_keys=[keys.ACTION])
    results = evaluate(env, run, [Episode(0, 0), Episode(0, 1)]).episodes
    env.close()
    assert [result.remark for result in results] == [SAID, SAID]


def test_gymnasium_has_it_in_its_infos():
    single, many = SimulatorEnv(spec(), chunk_size=4), SimulatorVectorEnv(spec(), 2, chunk_size=4, num_workers=1)
    for trial, expected in ((2, SAID), (1, None)):
        assert single.reset(options={"trial_id": trial})[1].get("remark") == expected
        assert single.step(single.action_space.sample())[4].get("remark") == expected
    infos = many.reset(options={"trial_id": [1, 2]})[1]
    assert infos["remark"].tolist() == [None, SAID]
    assert infos["_remark"].tolist() == [False, True]
    assert many.step(many.action_space.sample())[4]["remark"].tolist() == [None, SAID]
    assert isinstance(single, gymnasium.Env)
    single.close()
    many.close()


def told(caplog, *tasks, chain_length=1):
    """What is said of the instruction, always that of the first task, while episodes of all tasks run."""
    caplog.clear()
    env = make_env(whole_spec(tasks=tasks, chain_length=chain_length), num_envs=2, chunk_size=4, num_workers=2)
    still = TensorDictModule(lambda x: torch.zeros(x.shape[0], 4, 1), in_keys=[keys.STATES], out_keys=[keys.ACTION])
    evaluate(env, still, [Episode(task, trial) for task in range(len(tasks)) for trial in (0, 1)])
    env.close()
    return [record.getMessage() for record in caplog.records if "instruction" in record.getMessage()]


def test_an_instruction_that_no_task_declares_is_said_once(caplog):
    (said,) = told(caplog, Task("far", "go far"), Task("near", "go near"))
    assert said.startswith("toy/whole task near trial ")
    assert "returned the instruction 'go far', its task has 'go near'; return that of the running episode" in said
    (said,) = told(caplog, Task("near", "go {where}", instructions=("go near", "go on")))
    assert "its task has 'go {where}' and the 2 of Task.instructions; " in said


@pytest.mark.parametrize(
    ("task", "chain_length"),
    [
        (Task("far", "go {where}", instructions=("go near", "go far")), 1),
        (Task("far", "go somewhere", instructions=("the longest",), sentence_per_episode=True), 1),
        (Task("far", "go {where}"), 1),
        (Task("far", "one after the other"), 2),
    ],
    ids=["listed", "sentence per episode", "pattern", "chain"],
)
def test_an_instruction_that_may_be_one_of_the_tasks_is_not_remarked_on(task, chain_length, caplog):
    assert told(caplog, task, chain_length=chain_length) == []
