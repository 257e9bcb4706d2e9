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
from vla_envs.metaworld.simulator import MetaWorldSimulator

OPTIONS = {"image_size": 32, "render_quality": "fast", "max_episode_steps": 40}


class SlowToReset(MetaWorldSimulator):
    def reset(self, episode):
        time.sleep(1.2)
        super().reset(episode)


@pytest.fixture
def env():
    env = make_env("metaworld/reach-v3", 4, 5, seed=0, num_workers=2, step_timeout=8.0, **OPTIONS)
    yield env
    env.close(raise_if_closed=False)


def process_id(env, worker):
    return env.pool._processes[worker]._popen.pid


def act(env, td, action=0.0):
    td[keys.ACTION] = torch.full(env.action_spec.shape, action)
    return env.step_and_maybe_reset(td)


@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGSTOP])
def test_a_killed_or_stopped_worker_loses_its_own_episodes_only(env, kill):
    td = env.reset()
    for _ in range(3):
        _, td = act(env, td)
    before = list(env.current_episodes)
    os.kill(process_id(env, 1), kill)
    started = time.monotonic()
    outcome, td = act(env, td)
    after = outcome[keys.NEXT]
    crashed = after[keys.CRASHED].squeeze(-1)
    assert crashed.tolist() == [False, True, False, True]  # slots are dealt out in turn: worker 1 has 1 and 3
    assert after[keys.TRUNCATED].squeeze(-1).tolist() == crashed.tolist()
    assert not after[keys.STEP_MASK][crashed].any()
    assert after[keys.STEP_MASK][~crashed].all()
    assert after[keys.REWARD][crashed].eq(0).all()
    assert env.worker_restarts == 1
    assert time.monotonic() - started < 60
    # The survivors continue their episodes, the others have new ones and run.
    for slot in range(4):
        assert (env.current_episodes[slot] == before[slot]) == (not crashed[slot])
    outcome, _ = act(env, td)
    assert outcome[keys.NEXT, keys.STEP_MASK].all()
    assert not outcome[keys.NEXT, keys.CRASHED].any()
    assert outcome[keys.NEXT, keys.EPISODE_LEN].squeeze(-1).tolist() == [25, 5, 25, 5]


def test_a_worker_that_hangs_in_reset_is_started_again(env):
    env.reset()  # a first answer may take longer
    os.kill(process_id(env, 1), signal.SIGSTOP)
    td = env.reset()
    assert env.worker_restarts == 1
    outcome, _ = act(env, td)  # the new worker has reset its slots
    assert outcome[keys.NEXT, keys.STEP_MASK].all()
    assert not outcome[keys.NEXT, keys.CRASHED].any()


def test_a_worker_with_many_slots_may_take_longer_than_the_time_out_as_long_as_it_gets_on():
    spec = replace(make_spec("metaworld/reach-v3", **OPTIONS), entry_point="test_workers:SlowToReset")
    pool = WorkerPool(spec, 4, 1, 5, step_timeout=4.0)
    episodes = {slot: Episode(0, slot) for slot in range(4)}
    pool.reset(episodes)  # a first answer may take longer in any case
    started = time.monotonic()
    pool.reset(episodes)
    assert time.monotonic() - started > 4.8
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


def test_an_episode_that_ran_when_its_neighbour_was_reset_in_a_dying_worker_is_lost_too():
    pool = WorkerPool(make_spec("metaworld/reach-v3", **OPTIONS), 2, 1, 5, step_timeout=8.0)
    pool.reset({0: Episode(0, 0), 1: Episode(0, 1)})
    pool._processes[0]._popen.kill()
    pool.reset({0: Episode(0, 2)})
    assert pool.step([0, 1]) == [1]
    pool.reset({1: Episode(0, 3)})
    assert pool.step([0, 1]) == []
    pool.close()


def test_a_restarted_simulator_shows_the_same_episode_bit_by_bit():
    env = make_env("metaworld/reach-v3", 1, 5, episodes=EpisodeQueue([Episode(0, 5)] * 2), **OPTIONS)
    first = env.reset()
    os.kill(process_id(env, 0), signal.SIGKILL)
    _, again = act(env, first.clone())
    assert [(episode.task_id, episode.trial_id) for episode in env.current_episodes] == [(0, 5)]
    for key in (keys.IMAGES, keys.STATES):
        assert torch.equal(first[key], again[key])
    env.close()


def test_a_simulator_that_crashes_again_and_again_stops_the_run_and_names_the_episode(env):
    td = env.reset()

    def kill_and_act(td):
        for _ in range(5):
            os.kill(process_id(env, 0), signal.SIGKILL)
            _, td = act(env, td)

    with pytest.raises(SimulatorCrash, match=r"metaworld/reach-v3 task reach-v3 trial \d+ seed 0"):
        kill_and_act(td)


def test_an_exception_inside_a_simulator_is_reported_with_its_episode(caplog):
    spec = make_spec("metaworld/reach-v3", reset_ranges={"reach-v3": [[0.0], [1.0]]}, **OPTIONS)
    pool = WorkerPool(spec, 1, 1, 5)
    with pytest.raises(SimulatorCrash, match="needs 6 numbers") as error:
        pool.reset({0: Episode(0, 12, seed=3)})
    assert "trial 12 seed 3" in str(error.value)
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


def where_and_what(simulator, item, fail=False):
    """Called in a worker by the next tests."""
    if fail:
        raise ValueError("this item cannot be done")
    return os.getpid(), item


def test_map_gives_results_in_order_and_survives_a_worker_that_dies(env):
    td = env.reset()
    os.kill(process_id(env, 0), signal.SIGKILL)
    results = env.pool.map("test_workers:where_and_what", list(range(6)))
    assert [item for _, item in results] == list(range(6))
    assert env.worker_restarts == 1
    with pytest.raises(RuntimeError, match="this item cannot be done"):
        env.pool.map("test_workers:where_and_what", list(range(6)), fail=True)
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
