"""Gymnasium's vector interface over worker processes: step by step Gymnasium's own, and what is refused."""

import os
import signal
import time
from dataclasses import replace
from unittest import mock

import gymnasium
import numpy as np
import pytest
from gym_vector import HORIZON, counting_spec, make_pair
from gymnasium.vector import AutoresetMode
from walker import Walker, walker_spec

from vla_common import keys
from vla_envs.gym import SimulatorEnv, SimulatorVectorEnv
from vla_envs.workers.pool import WorkerPool

N = 4
ID = "mine/Counting-v0"


@pytest.fixture(autouse=True)
def registered():
    gymnasium.register(
        ID,
        "vla_envs.gym:SimulatorEnv",
        vector_entry_point="vla_envs.gym:SimulatorVectorEnv",
        kwargs={"name": counting_spec()},
    )
    yield
    del gymnasium.registry[ID]


@pytest.fixture
def actions():
    random = np.random.default_rng(0)
    return lambda *shape: random.uniform(-0.9, 0.9, (N, *shape, 2)).astype(np.float32)


@pytest.fixture
def make():
    made = []

    def make(**options):
        made.append(gymnasium.make_vec(ID, N, num_workers=2, **options))
        return made[-1]

    yield make
    for envs in made:
        envs.close()


@pytest.mark.parametrize("seed", [3, [5, 9, 2, 2], [5, 3, 3, 7]])
@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_step_by_step_the_same_as_gymnasiums_own(mode, seed, actions):
    pair = make_pair(ID, N, mode)
    assert pair.ours.observation_space == pair.theirs.observation_space
    assert pair.ours.action_space == pair.theirs.action_space
    assert pair.ours.single_observation_space == pair.theirs.single_observation_space
    assert pair.ours.single_action_space == pair.theirs.single_action_space
    assert pair.ours.metadata["autoreset_mode"] is pair.theirs.metadata["autoreset_mode"] is mode
    pair.reset(seed=seed)
    terminations, truncations, finals = 0, 0, 0
    for number in range(40):
        _, _, terminated, truncated, infos = pair.step(actions())
        terminations, truncations = terminations + terminated.sum(), truncations + truncated.sum()
        finals += "final_obs" in infos
        assert pair.ours.call("task_description") == pair.theirs.call("task_description")
        if number == 20:  # in the middle of episodes, some of which have just ended
            pair.reset(options={keys.TASK_ID: 1})
    assert terminations > 3
    assert truncations > 3
    assert bool(finals) == (mode is AutoresetMode.SAME_STEP)
    pair.close()


def test_disabled_autoreset_the_same_as_gymnasiums_own(actions):
    pair = make_pair(ID, N, "Disabled")
    pair.reset(seed=1)
    resets = 0
    for _ in range(40):
        _, _, terminated, truncated, _ = pair.step(actions())
        if (done := terminated | truncated).any():
            with pytest.raises(gymnasium.error.ResetNeeded, match=r"have ended: call reset\(options={\"reset_mask\""):
                pair.ours.step(actions())
            options = {"reset_mask": done}
            resets += not done.all()
            pair.reset(options=options, seed=7 if resets % 2 else None)
            assert "reset_mask" in options  # what is passed stays as it was
    assert resets > 3
    pair.close()


def test_seeds_and_options_of_each_environment(make):
    envs = make()
    _, infos = envs.reset(seed=4, options={keys.TASK_ID: [0, 1, 0, 1], keys.TRIAL_ID: np.array([3, 2, 1, 0])})
    assert infos["episode_seed"].tolist() == [4, 5, 6, 7]
    assert infos[keys.TASK_ID].tolist() == [0, 1, 0, 1]
    assert infos[keys.TRIAL_ID].tolist() == [3, 2, 1, 0]
    assert envs.call("task_description") == ("count to one", "count to two") * 2
    drawn = [envs.reset()[1][keys.TRIAL_ID].tolist() for _ in range(3)]
    envs.reset(seed=4)
    assert [envs.reset()[1][keys.TRIAL_ID].tolist() for _ in range(3)] == drawn
    other = make()
    assert other.reset()[1]["episode_seed"].tolist() != make().reset()[1]["episode_seed"].tolist()


def test_a_chunk_is_its_actions_one_after_the_other(make, actions):
    """The same episodes, rewards and last frames as single actions, with one frame per chunk."""
    single, chunked = make(autoreset_mode="Disabled"), make(autoreset_mode="Disabled", chunk_size=4)
    assert chunked.action_space.shape == (N, 4, 2)
    trials = {keys.TRIAL_ID: [0, 1, 3, 9]}
    single.reset(seed=0, options=trials)
    chunked.reset(seed=0, options=trials)
    chunk = actions(4)
    observations, rewards, terminated, truncated, infos = chunked.step(chunk)
    assert infos[keys.STEP_MASK].sum(1).tolist() == [2, 3, 4, 4]
    assert terminated.tolist() == [True, True, False, False]
    total, done = np.zeros(N), np.zeros(N, bool)
    for position in range(4):
        if done.any():
            single.reset(options={"reset_mask": done, keys.TRIAL_ID: 9})
        seen, paid, over, _, _ = single.step(chunk[:, position])
        total += np.where(infos[keys.STEP_MASK][:, position], paid, 0)
        np.testing.assert_array_equal(infos[keys.STEP_REWARDS][:, position][~done], paid[~done].astype(np.float32))
        for slot in np.flatnonzero(over & ~done):
            np.testing.assert_array_equal(observations[keys.STATES][slot], seen[keys.STATES][slot])
        done |= over
    np.testing.assert_array_equal(observations[keys.STATES][~done], seen[keys.STATES][~done])
    np.testing.assert_allclose(rewards, total, rtol=1e-6)
    assert not truncated.any()
    chunked.reset(options={"reset_mask": done, keys.TRIAL_ID: 9})
    _, _, terminated, truncated, infos = chunked.step(chunk)  # trial 3 is solved by its action 5, the last one never
    assert terminated.tolist() == [False, False, True, False]
    assert truncated.tolist() == [False, False, False, True]
    assert infos[keys.STEP_MASK].sum(1).tolist() == [4, 4, 1, HORIZON - 4]


def test_what_was_executed_is_told_in_every_mode(make):
    """Of all environments in each step, also of those that were only reset."""
    for mode, second in ((AutoresetMode.NEXT_STEP, 0), (AutoresetMode.SAME_STEP, HORIZON)):
        envs = make(autoreset_mode=mode, chunk_size=HORIZON)
        envs.reset(seed=0, options={keys.TRIAL_ID: 9})
        for executed in (HORIZON, second):
            *_, infos = envs.step(np.zeros((N, HORIZON, 2), np.float32))
            assert infos[keys.STEP_MASK][0].sum() <= executed
            assert infos[keys.STEP_MASK].shape == infos[keys.STEP_REWARDS].shape == (N, HORIZON)
            assert (infos[keys.STEP_REWARDS] > 0).tolist() == infos[keys.STEP_MASK].tolist()


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_a_simulator_that_fails_is_truncated_and_the_others_go_on(make, mode):
    envs = make(autoreset_mode=mode)
    before, _ = envs.reset(seed=0, options={keys.TRIAL_ID: 9})
    fatal = np.zeros((N, 2), np.float32)
    fatal[1] = 1.0
    observations, rewards, terminated, truncated, infos = envs.step(fatal)
    assert truncated.tolist() == [False, True, False, False]
    assert not terminated.any()
    assert rewards[1] == 0
    assert rewards[0] > 0
    if mode is AutoresetMode.SAME_STEP:
        assert infos["final_info"][keys.CRASHED][1]
        observations = {keys.STATES: [None, infos["final_obs"][1][keys.STATES]]}
    else:
        assert infos[f"_{keys.CRASHED}"].tolist() == [False, True, False, False]
    np.testing.assert_array_equal(observations[keys.STATES][1], before[keys.STATES][1])
    if mode is AutoresetMode.DISABLED:
        envs.reset(options={"reset_mask": truncated})
    for _ in range(2):
        *_, truncated, infos = envs.step(np.zeros((N, 2), np.float32))
        assert not truncated.any()
        assert keys.CRASHED not in infos


def test_a_worker_that_dies_does_not_hang(make):
    envs = make(step_timeout=8.0)
    envs.reset(seed=0)
    os.kill(envs._pool._processes[1]._popen.pid, signal.SIGKILL)
    started = time.monotonic()
    *_, truncated, infos = envs.step(np.zeros((N, 2), np.float32))
    assert time.monotonic() - started < 30
    assert not truncated.any()  # it was not working on any episode: both are repeated
    assert keys.CRASHED not in infos


def test_what_is_asked_of_each_environment(make):
    envs = make(render_mode="rgb_array")
    observations, _ = envs.reset(seed=0)
    assert envs.get_attr("simulator_spec")[0].id == "counting"
    assert [episode.seed for episode in envs.call("episode")] == [0, 1, 2, 3]
    np.testing.assert_array_equal(envs.render(), observations[keys.IMAGES])
    np.testing.assert_array_equal(envs.call("render"), observations[keys.IMAGES])
    with pytest.raises(AttributeError, match=r"unknown attribute 'task_descripton'; did you mean task_description\?"):
        envs.call("task_descripton")
    assert make().render() is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunk_size": 0}, "chunk_size=0: must be greater than or equal to 1"),
        ({"autoreset_mode": "samestep"}, "did you mean SameStep"),
        ({"render_mode": "human"}, "render_mode=human: must be 'rgb_array'"),
        ({"image_size": 3}, "image_size cannot be set beside the SimulatorSpec"),
    ],
)
def test_impossible_settings_are_refused(make, options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)
    with pytest.raises(ValueError, match="num_workers must be between 1 and num_envs=2, got 3"):
        gymnasium.make_vec(ID, 2, num_workers=3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seed": [1, 2]}, "one for each of 4 environments, got 2"),
        ({"options": {keys.TASK_ID: [0, 1]}}, "one for each of 4 environments, got 2"),
        ({"options": {"task": 0}}, "did you mean task_id"),
        ({"options": {keys.TASK_ID: 2}}, "task_id 0 to 1"),
        ({"options": {"reset_mask": np.zeros(N, bool)}}, r"bool \[4\] with a True in it"),
        ({"options": {"reset_mask": [True] * N}}, r"numpy array of bool \[4\].*got list"),
    ],
)
def test_impossible_resets_are_refused(make, arguments, message):
    with pytest.raises(ValueError, match=message):
        make().reset(**arguments)


def test_a_first_reset_that_was_interrupted_leaves_no_episode(make, monkeypatch):
    envs = make()
    monkeypatch.setattr(WorkerPool, "reset_recv", mock.Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        envs.reset()
    assert envs.call("episode") == (None,) * N
    with pytest.raises(gymnasium.error.ResetNeeded, match="call reset"):
        envs.step(np.zeros((N, 2), np.float32))


def test_bad_actions_and_steps_without_an_episode_are_refused(make):
    envs = make(chunk_size=3)
    good = np.zeros((N, 3, 2), np.float32)
    with pytest.raises(gymnasium.error.ResetNeeded, match="call reset"):
        envs.step(good)
    envs.reset(seed=0)
    with pytest.raises(ValueError, match=r"float32 \[4, 3, 2\], got float32 \[4, 2\]"):
        envs.step(good[:, 0])
    with pytest.raises(ValueError, match=r"not finite in environments \[2\]"):
        envs.step(np.where(np.arange(N)[:, None, None] == 2, np.nan, good))
    with pytest.raises(ValueError, match=r"1000 times.*environments \[2\].*units"):
        envs.step(np.where(np.arange(N)[:, None, None] == 2, 1e6, good).astype(np.float32))


def test_an_absurd_action_of_one_environment_is_refused():
    env = gymnasium.make(ID)
    env.reset(seed=0)
    for action, message in ((1e6, "1000 times.*units"), (np.nan, "not finite")):
        with pytest.raises(ValueError, match=message):
            env.step(np.full(2, action, np.float32))
    env.close()


@pytest.mark.parametrize("number", [1, N])
def test_after_close_everything_is_refused(number):
    env = gymnasium.make(ID) if number == 1 else gymnasium.make_vec(ID, N, num_workers=1)
    env.reset(seed=0)
    env.close()
    env.close()
    for use in (env.reset, lambda: env.unwrapped.step(env.action_space.sample())):
        with pytest.raises(gymnasium.error.ClosedEnvironmentError, match=r"counting.*is closed: make a new one"):
            use()


def test_a_wrapper_of_gymnasium_records_the_returns(make):
    envs = gymnasium.wrappers.vector.RecordEpisodeStatistics(make(chunk_size=HORIZON))
    envs.reset(seed=0, options={keys.TRIAL_ID: 9})
    *_, truncated, infos = envs.step(np.zeros((N, HORIZON, 2), np.float32))
    assert truncated.all()
    np.testing.assert_allclose(infos["episode"]["r"], 0.1 * 21, rtol=1e-6)


def test_torchrl_wraps_it(make):
    """But for the texts, which TorchRL 0.14.1 keeps as one value of all environments (docs/environments.md)."""
    torch = pytest.importorskip("torch")
    from torchrl.envs import GymWrapper

    plain, envs = make(autoreset_mode="Disabled"), GymWrapper(make(autoreset_mode="Disabled"))
    envs.set_seed(2)
    rollout = envs.rollout(12, lambda td: td.set("action", torch.zeros(N, 2)), break_when_any_done=False)
    assert rollout.shape == (N, 12)
    plain.reset(seed=2)  # TorchRL resets to seed, and once more to start
    observations, _ = plain.reset()
    for step in range(12):
        for key in (keys.STATES, keys.IMAGES):
            np.testing.assert_array_equal(rollout[key][:, step].numpy(), observations[key])
        observations, _, terminated, truncated, _ = plain.step(np.zeros((N, 2), np.float32))
        done = terminated | truncated
        assert rollout["next", "done"][:, step, 0].tolist() == done.tolist()
        if done.any():
            observations, _ = plain.reset(options={"reset_mask": done})


def test_what_one_environment_showed_stays_as_it_was(monkeypatch):
    """Where a simulator shows the memory that it writes its next state into."""
    states, observe = np.zeros(3, np.float32), Walker.observe

    def shown(self):
        states[:] = self.position
        return replace(observe(self), states=states)

    monkeypatch.setattr(Walker, "observe", shown)
    env = SimulatorEnv(walker_spec())
    seen, _ = env.reset(seed=0)
    after = env.step(np.ones(2, np.float32))[0]
    assert (seen[keys.STATES] != after[keys.STATES]).all()


def test_sentences_have_the_letters_of_their_tasks():
    spec = counting_spec()
    french = replace(spec, tasks=tuple(replace(task, instruction="compter jusqu'à un") for task in spec.tasks))
    for tasks, known in ((french, True), (spec, False)):
        assert ("compter jusqu'à un" in SimulatorEnv(tasks).observation_space[keys.TASK_DESCRIPTIONS]) is known


@pytest.mark.parametrize("make", [SimulatorEnv, SimulatorVectorEnv])
def test_worlds_that_are_simulated_together_are_for_make_env(make):
    with pytest.raises(ValueError, match=r"leaves its images on the GPU: take make_env, or type backend='processes'"):
        make(replace(counting_spec(), batched="mine:Worlds"))
