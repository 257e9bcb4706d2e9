"""Bad initial states and simulators that fail often: a part of ``storm/episodes.py``, and by hand."""

from dataclasses import replace

import numpy as np
import pytest

from tests.storm import episodes
from tests.storm.toy import TRIALS, ToySimulator, make_toy_env, straight, tiny_policy, toy_spec
from vla_algos import StepCollector, evaluate, gae, record_demonstrations
from vla_algos.metrics import env_metrics, rollout_metrics
from vla_common.keys import CRASHED, NEXT, STEP_MASK
from vla_envs import Episode, Observation, Outcome, SimulatorCrash
from vla_envs.experts import demonstrate
from vla_envs.workers.answers import WrongAnswer


def test_a_demonstration_ends_where_the_simulator_ends_the_episode_or_its_expert_gives_up(tmp_path, monkeypatch):
    settings = {"chunk_size": 1, "stride": 1, "noise": 0.0, "max_steps": 50}
    simulator = ToySimulator(toy_spec({}, tmp_path))
    assert demonstrate(simulator, Episode(0, 0), **settings) is not None
    expert, step = ToySimulator.expert_action, ToySimulator.step
    monkeypatch.setattr(ToySimulator, "expert_action", lambda self: None if self.steps == 1 else expert(self))
    assert demonstrate(simulator, Episode(0, 0), **settings) is None
    monkeypatch.undo()
    monkeypatch.setattr(
        ToySimulator, "step", lambda self, action: replace(step(self, action), ends_episode=self.steps == 1)
    )
    assert demonstrate(simulator, Episode(0, 0), **settings) is None


def test_storm():
    tally = episodes.run(1, seed=1)
    assert tally.clean, tally.failures


def test_one_bad_state_costs_one_episode_whatever_there_is_beside_it(tmp_path):
    """Half of the states that 32 slots begin with: no reason to call the simulator broken."""
    bad = {trial: ("raise", 0, 0) for trial in range(0, TRIALS, 2)}
    env = make_toy_env(toy_spec(bad, tmp_path), 32, 2)
    result = evaluate(env, straight, [Episode(0, trial, 3) for trial in range(TRIALS)])
    assert [episode.crashed for episode in result.episodes] == [trial in bad for trial in range(TRIALS)]
    assert {episode.attempts for episode in result.episodes} == {1}
    for episode in result.crashed:
        assert f"this state cannot be simulated: trial {episode.episode.trial_id}, step 0" in episode.error
    env.close()


def test_a_batch_in_which_every_episode_crashed(tmp_path):
    spec = toy_spec({trial: ("raise", 0, 0) for trial in range(TRIALS)}, tmp_path)
    policy = tiny_policy(spec)
    env = make_toy_env(spec, 2, 1, seed=0)
    batch = StepCollector(env, policy, 3).rollout()
    assert batch[NEXT, CRASHED].all()
    assert not batch[NEXT, STEP_MASK].any()
    assert env_metrics(batch) == {"env/num_episodes": 0, "env/crashed_episodes": 6}
    assert not any(metric == metric for metric in rollout_metrics(gae(batch)).values())
    env.close()


def test_demonstrations_that_crash_are_left_out_and_counted(tmp_path):
    bad = {3: ("raise", 0, 0), 7: ("exit", 2, 0), 9: ("raise", 1, 1), 11: ("exit", 0, 2)}  # the last two come to work
    spec = toy_spec(bad, tmp_path)
    policy, env, solved = tiny_policy(spec), make_toy_env(spec, 2, 2), {}
    wanted = [Episode(0, trial, 3) for trial in range(12)]
    with pytest.warns(UserWarning, match=r"2 of 12 demonstrations crashed and are left out: the first is task left"):
        found = record_demonstrations(env, policy, wanted, noise=0.0, on_episode=solved.__setitem__)
    assert {episode.trial_id for episode, steps in solved.items() if steps is None} == {3, 7}
    assert len(solved) == 12
    kept = [episode for episode in wanted if episode.trial_id not in (3, 7)]
    alone = make_toy_env(toy_spec({}, tmp_path), 1, 1)
    assert (found == record_demonstrations(alone, policy, kept, noise=0.0)).all()
    with pytest.raises(SimulatorCrash, match="all of the first 1 failed like this"):
        record_demonstrations(env, policy, wanted[3:4])
    for used in (env, alone):
        used.close()


@pytest.mark.parametrize(
    ("method", "answer", "message"),
    [
        ("observe", Observation(np.zeros((16, 16, 3), np.uint8), np.array([np.nan, 0]), "go"), r"states\[0\] is nan"),
        ("step", Outcome(float("nan"), success=True), "reward is nan"),
        ("expert_action", np.array([0.0, np.inf]), r"the expert's action is \[0.0, inf\]"),
    ],
)
def test_what_a_simulator_shows_in_a_demonstration_is_checked_too(tmp_path, monkeypatch, method, answer, message):
    monkeypatch.setattr(ToySimulator, method, lambda *_: answer)
    settings = {"chunk_size": 2, "stride": 1, "noise": 0.0, "max_steps": 5}
    with pytest.raises(WrongAnswer, match=message):
        demonstrate(ToySimulator(toy_spec({}, tmp_path)), Episode(0, 0), **settings)
