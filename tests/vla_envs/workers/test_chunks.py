"""Simulators that execute a chunk as one motion: the same outcomes by make_env, make_vec and make; others unchanged."""

from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from gym_vector import counting_spec
from gymnasium.utils.env_checker import check_env
from whole import HORIZON, WholeSimulator, whole_spec

from vla_common import keys
from vla_envs import Episode, make_env
from vla_envs.episodes import EpisodeQueue
from vla_envs.experts import check_expert, demonstrate
from vla_envs.gym import SimulatorEnv, SimulatorVectorEnv
from vla_envs.workers.answers import WrongAnswer
from vla_envs.workers.chunks import run_chunk


def made(**arguments):
    options = {name: arguments.pop(name) for name in ("returns", "gives_up") if name in arguments}
    return make_env(whole_spec(options=options), num_envs=1, **{"chunk_size": 4, "num_workers": 1, **arguments})


def decisions(env, values, chunk_size=4):
    td, steps = env.reset(), []
    for value in values:
        td = env.step(td.set(keys.ACTION, torch.full((1, chunk_size, 1), value)))["next"]
        steps.append(td.clone())
    return steps


def test_a_chunk_is_executed_as_a_whole_and_stops_with_success():
    env = made(episodes=EpisodeQueue([Episode(0, 0)]))
    first, second = decisions(env, [0.1, 0.25])  # 0.4 and 1 by each action
    env.close()
    assert first[keys.STATES].item() == pytest.approx(1.6)
    assert first[keys.STEP_MASK].all()
    assert not first[keys.DONE]
    assert second[keys.STEP_MASK].tolist() == [[True, True, True, False]]
    assert second[keys.STEP_REWARDS].tolist() == [[0, 0, 1, 0]]
    assert second[keys.TERMINATED]
    assert second[keys.EPISODE_LEN].item() == 7


def test_what_is_solved_goes_on_paying_where_terminations_are_ignored():
    env = made(episodes=EpisodeQueue([Episode(0, 0)]), ignore_terminations=True, relative_reward=True)
    steps = decisions(env, [0.5, 0.5, 0.5])  # solved by the second action
    env.close()
    assert [step[keys.STEP_MASK].sum().item() for step in steps] == [4, 4, 3]
    assert [step[keys.REWARD].item() for step in steps] == [1, 0, 0]
    assert [step[keys.TRUNCATED].item() for step in steps] == [False, False, True]


@pytest.mark.parametrize(("gives_up", "lengths"), [(None, [4, 4, 3]), (6, [4, 2])])
def test_horizon_and_giving_up_end_it_within_a_chunk(gives_up, lengths):
    env = made(episodes=EpisodeQueue([Episode(0, 0)]), gives_up=gives_up)
    steps = decisions(env, [0.01] * len(lengths))
    env.close()
    assert [step[keys.STEP_MASK].sum().item() for step in steps] == lengths
    assert [step[keys.TRUNCATED].item() for step in steps] == [False] * (len(lengths) - 1) + [True]


def test_the_simulator_never_sees_an_action_past_the_horizon():
    simulator = WholeSimulator(whole_spec())
    simulator.reset(Episode(0, 0))
    for elapsed in (0, 8):
        list(run_chunk(simulator.spec, simulator, np.zeros((8, 1), np.float32), elapsed))
    assert simulator.chunks == [8, HORIZON - 8]


@pytest.mark.parametrize(
    ("returns", "message"),
    [
        ((), "execute returned 0 outcomes of 4 actions, must be 1 to 4"),
        ((None,) * 5, "execute returned 5 outcomes of 4 actions, must be 1 to 4"),
        (None, "execute returned NoneType, must be a list of Outcomes"),
        ((3,), "item 0 of what execute returned is 3, must be an Outcome"),
    ],
)
def test_what_execute_may_not_return(returns, message):
    simulator = WholeSimulator(whole_spec(options={"returns": returns}))
    simulator.reset(Episode(0, 0))
    with pytest.raises(WrongAnswer, match=message):
        list(run_chunk(simulator.spec, simulator, np.zeros((4, 1), np.float32), 0))
    env = made(episodes=EpisodeQueue([Episode(0, 0)]), returns=returns)
    (step,) = decisions(env, [0.0])
    assert step[keys.CRASHED]
    assert message in env.errors[0]
    env.close()


def test_gymnasium_executes_chunks_as_make_vec_and_make_env_do():
    values = [0.1, 0.1, 0.1, 0.25]
    single = SimulatorEnv(whole_spec(), chunk_size=3)
    many = SimulatorVectorEnv(whole_spec(), 1, chunk_size=3, num_workers=1)
    assert single.action_space == many.single_action_space
    assert single.metadata["render_fps"] == many.metadata["render_fps"] == 2
    env = made(episodes=EpisodeQueue([Episode(0, 2, 5)]), chunk_size=3)
    chosen = {"task_id": 0, "trial_id": 2}
    single.reset(seed=5, options=chosen)
    many.reset(seed=5, options=chosen)
    for value, step in zip(values, decisions(env, values, chunk_size=3), strict=True):
        chunk = np.full((3, 1), value, np.float32)
        observation, reward, terminated, truncated, info = single.step(chunk)
        observations, rewards, terminations, truncations, infos = many.step(chunk[None])
        assert observation[keys.STATES] == observations[keys.STATES][0] == step[keys.STATES].numpy()[0]
        assert (reward, terminated, truncated) == (rewards[0], terminations[0], truncations[0])
        assert (reward, terminated) == (step[keys.REWARD].item(), step[keys.TERMINATED].item())
        for key in (keys.STEP_MASK, keys.STEP_REWARDS):
            assert np.array_equal(info[key], infos[key][0])
            assert np.array_equal(info[key], step[key].numpy()[0])
    assert info[keys.STEP_MASK].tolist() == [True, True, False]  # the horizon
    for each in (single, many, env):
        each.close()


def test_the_length_of_chunks_is_asked_for_and_is_another_environment():
    for kind in (SimulatorEnv, SimulatorVectorEnv, partial(make_env, num_envs=1)):
        with pytest.raises(
            ValueError, match="toy/whole executes a chunk of actions as one motion, so that each length is another"
        ):
            kind(whole_spec())
    far = []
    for size in (1, 4):
        env = SimulatorEnv(whole_spec(), chunk_size=size)
        env.reset(options={"trial_id": 0})
        for _ in range(4 // size):
            observation = env.step(np.full((size, 1), 0.1, np.float32))[0]
        far.append(observation[keys.STATES].item())
    assert far == pytest.approx([0.4, 1.6])


def test_gymnasiums_checker_and_what_is_refused():
    check_env(SimulatorEnv(whole_spec(), chunk_size=4), skip_render_check=True)
    with pytest.raises(ValueError, match="chunk_size=0: must be greater than or equal to 1"):
        SimulatorEnv(whole_spec(), chunk_size=0)
    for kind in (SimulatorEnv, SimulatorVectorEnv):
        with pytest.raises(ValueError, match="chunk_size=12: a chunk of toy/whole is one motion, and its episodes end"):
            kind(whole_spec(), chunk_size=12)
    with pytest.raises(ValueError, match=r"chunk_size is for many environments: gymnasium.make_vec"):
        SimulatorEnv(counting_spec(), chunk_size=4)
    env = SimulatorEnv(whole_spec(), chunk_size=4)
    env.reset()
    with pytest.raises(ValueError, match=r"takes actions of float32 \[4, 1\], got float32 \[1\]"):
        env.step(np.zeros(1, np.float32))
    with pytest.raises(ValueError, match="'action' is not finite; the policy has diverged"):
        env.step(np.full((4, 1), np.nan, np.float32))
    assert gymnasium.spaces.Box(-1, 1, (4, 1), np.float32) == env.action_space


def test_demonstrations_record_decisions():
    simulator = WholeSimulator(whole_spec())
    settings = {"chunk_size": 3, "noise": 0.0, "max_steps": 50}
    recording = demonstrate(simulator, Episode(0, 0), stride=1, **settings)
    assert recording[keys.ACTION].shape == (2, 3, 1)  # 0.75 by each action
    assert recording[keys.STATES][:, 0].tolist() == pytest.approx([0, 2.25])
    assert recording[keys.STEP_MASK].tolist() == [[True] * 3, [True] * 3]
    assert demonstrate(simulator, Episode(0, 0), stride=2, **settings)[keys.STATES].shape == (1, 1)
    disturbed = demonstrate(simulator, Episode(0, 0), stride=1, **{**settings, "noise": 0.2})
    assert np.all(disturbed[keys.ACTION] == 0.25)  # what was wanted
    assert disturbed[keys.STATES][1] != recording[keys.STATES][1]
    assert demonstrate(simulator, Episode(0, 0), stride=1, **{**settings, "chunk_size": 1}) is None  # the horizon
    with pytest.raises(ValueError, match="toy/whole has no scripted expert"):
        check_expert(type("Dumb", (), {"execute": None, "expert_action": None}), whole_spec())
    with pytest.raises(ValueError, match="toy/whole simulates all worlds together, where no expert acts"):
        check_expert(WholeSimulator, whole_spec(batched="module:Batch"))


def test_a_run_goes_on_from_its_saved_state():
    settings = {"seed": 1, "ignore_terminations": True, "relative_reward": True}
    whole, again = made(**settings), made(**settings)
    assert decisions(whole, [0.5])[0][keys.REWARD] == 1  # solved: to stay so is no change
    again.load_state_dict(whole.state_dict())
    assert torch.equal(again.observe()[keys.STATES], whole.observe()[keys.STATES])
    for env in (whole, again):
        after = env.step(env.observe().set(keys.ACTION, torch.full((1, 4, 1), 0.5)))["next"]
        assert (after[keys.REWARD].item(), after[keys.EPISODE_RETURN].item()) == (0, 1)
        env.close()
