"""Worker processes that die, hang or fail lose their episode and nothing else. Real Meta-World throughout."""

import os
import signal
import time
from dataclasses import replace

import pytest
import torch

from vla_common import keys
from vla_envs import Episode, EpisodeQueue, SimulatorCrash, make_env, make_spec
from vla_envs.workers.pool import WorkerPool

pytest.importorskip("metaworld", reason="Meta-World is not installed: pip install 'vla-torchrl[metaworld]'")

OPTIONS = {"image_size": 32, "render_quality": "fast", "max_episode_steps": 40}


@pytest.fixture
def env():
    env = make_env("metaworld/reach-v3", 4, 5, seed=0, num_workers=2, step_timeout=5.0, **OPTIONS)
    yield env
    env.close(raise_if_closed=False)


def process_id(env, worker):
    return env.pool._processes[worker]._popen.pid


def act(env, td, action=0.0):
    td[keys.ACTION] = torch.full(env.action_spec.shape, action)
    return env.step_and_maybe_reset(td)


@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGSTOP])
def test_the_episodes_of_a_worker_that_dies_between_two_steps_go_on_as_if_nothing_had_happened(env, kill):
    undisturbed = make_env("metaworld/reach-v3", 4, 5, seed=0, num_workers=1, **OPTIONS)
    td, expected = env.reset(), undisturbed.reset()
    for decision in range(6):
        if decision == 3:
            os.kill(process_id(env, 1), kill)
        started = time.monotonic()
        outcome, td = act(env, td, 0.1 * decision)
        same, expected = act(undisturbed, expected, 0.1 * decision)
        assert time.monotonic() - started < 60
        assert not outcome[keys.NEXT, keys.CRASHED].any()
        for key in (keys.IMAGES, keys.STATES, keys.STEP_REWARDS, keys.STEP_MASK, keys.EPISODE_LEN):
            assert torch.equal(outcome[keys.NEXT, key], same[keys.NEXT, key]), key
    assert env.worker_restarts == 1
    undisturbed.close()


def test_only_the_guilty_one_of_a_workers_episodes_is_lost_and_the_others_are_the_same_to_the_bit():
    plain = make_spec("metaworld/reach-v3", **OPTIONS)
    episodes = [Episode(0, trial) for trial in (1, 2, 3, 5)]
    env, undisturbed = (
        make_env(spec, 4, 5, episodes=EpisodeQueue(episodes), num_workers=1)
        for spec in (replace(plain, entry_point="failing:KillsItself"), plain)
    )
    td, expected = env.reset(), undisturbed.reset()
    for decision in range(3):
        outcome, td = act(env, td, 0.2)
        same, expected = act(undisturbed, expected, 0.2)
        guilty = torch.tensor([False, decision == 1, False, False])
        assert outcome[keys.NEXT, keys.CRASHED].squeeze(-1).tolist() == guilty.tolist()
        alive = [0, 2, 3]
        for key in (keys.IMAGES, keys.STATES, keys.STEP_REWARDS, keys.STEP_MASK, keys.EPISODE_LEN):
            assert torch.equal(outcome[keys.NEXT, key][alive], same[keys.NEXT, key][alive]), key
    assert env.worker_restarts == 1
    env.close()
    undisturbed.close()


def test_a_worker_that_hangs_in_reset_is_started_again(env):
    env.reset()  # a first answer may take longer
    os.kill(process_id(env, 1), signal.SIGSTOP)
    td = env.reset()
    assert env.worker_restarts == 1
    outcome, _ = act(env, td)  # the new worker has reset its slots
    assert outcome[keys.NEXT, keys.STEP_MASK].all()
    assert not outcome[keys.NEXT, keys.CRASHED].any()


def test_a_worker_with_many_slots_may_take_longer_than_the_time_out_as_long_as_it_gets_on():
    spec = replace(make_spec("metaworld/reach-v3", **OPTIONS), entry_point="failing:SlowToReset")
    pool = WorkerPool(spec, 4, 1, 5, step_timeout=2.5)
    episodes = {slot: Episode(0, slot) for slot in range(4)}
    pool.reset(episodes)  # a first answer may take longer in any case
    started = time.monotonic()
    pool.reset(episodes)
    assert time.monotonic() - started > 3.2
    assert pool.restarts == 0
    pool.close()


@pytest.mark.parametrize(
    ("episode", "message"),
    [(Episode(1, 0), "tasks 0 to 0, got task_id=1"), (Episode(-1, 0), "task_id=-1"), (Episode(0, -1), "from 0, got")],
)
def test_an_episode_that_does_not_exist_is_one_clear_error(episode, message):
    env = make_env("metaworld/reach-v3", 1, 5, num_workers=1, episodes=EpisodeQueue([episode]), **OPTIONS)
    with pytest.raises(ValueError, match=message):
        env.reset()
    assert env.worker_restarts == 0
    env.close()


def test_an_episode_that_ran_when_its_neighbour_was_reset_in_a_dying_worker_goes_on():
    pool = WorkerPool(make_spec("metaworld/reach-v3", **OPTIONS), 2, 1, 5, step_timeout=8.0)
    pool.reset({0: Episode(0, 0), 1: Episode(0, 1)})
    pool._processes[0]._popen.kill()
    pool.reset({0: Episode(0, 2)})
    assert pool.step([0, 1]) == []
    assert pool.restarts == 1
    pool.close()


def test_a_restarted_simulator_shows_the_same_episode_bit_by_bit():
    env = make_env("metaworld/reach-v3", 1, 5, episodes=EpisodeQueue([Episode(0, 5)] * 2), **OPTIONS)
    first = env.reset()
    os.kill(process_id(env, 0), signal.SIGKILL)
    again = env.reset()
    assert env.worker_restarts == 1
    for key in (keys.IMAGES, keys.STATES):
        assert torch.equal(first[key], again[key])
    env.close()


def test_an_exception_inside_a_simulator_is_reported_with_its_episode(caplog):
    spec = make_spec("metaworld/reach-v3", reset_ranges={"reach-v3": [[0.0], [1.0]]}, **OPTIONS)
    pool = WorkerPool(spec, 1, 1, 5)
    pool.reset({0: Episode(0, 12, seed=3)})
    assert pool.unstarted == {0}
    assert "needs 6 numbers" in caplog.text
    assert "trial 12 seed 3" in caplog.text
    for trial in range(9):
        pool.reset({0: Episode(0, trial)})
    with pytest.raises(SimulatorCrash, match=r"needs 6 numbers.*metaworld/reach-v3 task reach-v3 trial 8 seed 0"):
        pool.check()
    pool.close()


def test_an_interrupted_step_does_not_shift_later_answers(env, monkeypatch):
    td = env.reset()

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("vla_envs.workers.pool.wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            act(env, td)
    td = env.reset()
    outcome, _ = act(env, td, action=1.0)
    assert outcome[keys.NEXT, keys.EPISODE_LEN].eq(5).all()
    assert outcome[keys.NEXT, keys.STEP_MASK].all()
    assert not torch.equal(outcome[keys.NEXT, keys.IMAGES], td[keys.IMAGES])


def test_map_gives_results_in_order_and_survives_a_worker_that_dies(env):
    td = env.reset()
    os.kill(process_id(env, 0), signal.SIGKILL)
    results = env.pool.map("failing:where_and_what", list(range(6)))
    assert [item for _, item in results] == list(range(6))
    assert env.worker_restarts == 1
    with pytest.raises(RuntimeError, match="this item cannot be done"):
        env.pool.map("failing:where_and_what", list(range(6)), fail=True)
    outcome, td = act(env, td)  # whatever was lost on the way, the environment continues
    outcome, _ = act(env, td)
    assert outcome[keys.NEXT, keys.STEP_MASK].all()


def test_workers_import_neither_torch_nor_the_callers_script(env):
    env.reset()
    with open(f"/proc/{process_id(env, 0)}/maps") as maps:
        assert "libtorch" not in maps.read()


def test_workers_end_with_the_environment(env):
    env.reset()
    processes = [process_id(env, worker) for worker in range(2)]
    env.close()
    for process in processes:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)
    with pytest.raises(RuntimeError, match="closed"):
        env.reset()
