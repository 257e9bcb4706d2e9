"""Storms of faults in simulators that fail on command, and what they do not show by themselves."""

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import gymnasium
import numpy as np
import pytest
import torch

from tests.storm import faulty, workers
from vla_common import keys
from vla_envs import Episode, EpisodeQueue, Observation, Outcome, SimulatorCrash, WorkerPool, make_env
from vla_envs.gym import SimulatorEnv
from vla_envs.workers.answers import WrongAnswer, check_observation, check_outcome

ACTION = torch.zeros(4, faulty.CHUNK, faulty.ACTIONS)


def always(what, where="step", step=2, trials=range(4)):
    return faulty.describe({trial: (where, step, what, "") for trial in trials})


def queue(*trials):
    return EpisodeQueue([Episode(0, trial) for trial in trials])


@pytest.mark.timeout(300)
def test_a_small_storm():
    tally = workers.run(5, seed=5)
    assert tally.clean, tally.failures


def test_an_error_of_several_lines_is_told_in_one(caplog):
    env = make_env(always("raise lines", "step", 1, [1]), 2, faulty.CHUNK, num_workers=1, episodes=queue(0, 1))
    env.step(env.reset().set(keys.ACTION, ACTION[:2]))
    env.close()
    assert "RuntimeError: on command. Looked in /nowhere Type: this, while running storm/faulty" in env.errors[1]
    assert 'in _fail\n    raise RuntimeError("on command' in caplog.text


def test_an_episode_that_cannot_be_started_is_lost_alone_and_named(caplog):
    episodes = queue(0, 1, 2, 3, 4)
    env = make_env(always("raise", "reset", 0, [1]), 4, faulty.CHUNK, num_workers=2, episodes=episodes)
    td = env.reset()
    assert env.unstarted.tolist() == [False, True, False, False]
    assert not td[keys.IMAGES][1].any()
    assert not td[keys.STATES][1].any()
    assert td[keys.TRIAL_ID].tolist() == [0, 1, 2, 3]
    assert "storm/faulty task go trial 1 seed 0" in caplog.text
    state = env.state_dict()  # in the middle of such an episode

    outcome, _ = env.step_and_maybe_reset(td.set(keys.ACTION, ACTION))
    after = outcome[keys.NEXT]
    assert after[keys.CRASHED].squeeze(-1).tolist() == [False, True, False, False]
    assert after[keys.TRUNCATED][1]
    assert after[keys.STEP_MASK].any(1).tolist() == [True, False, True, True]
    assert [episode.trial_id for episode in env.current_episodes] == [0, 4, 2, 3]
    assert not env.unstarted.any()
    env.close()

    again = make_env(always("raise", "reset", 0, [1]), 4, faulty.CHUNK, num_workers=1, episodes=queue())
    again.load_state_dict(state)
    assert again.unstarted.tolist() == [False, True, False, False]
    resumed, _ = again.step_and_maybe_reset(again.observe().set(keys.ACTION, ACTION))
    for key in (keys.IMAGES, keys.STATES, keys.REWARD, keys.CRASHED, keys.EPISODE_LEN):
        assert torch.equal(resumed[keys.NEXT, key], after[key]), key
    again.close()


def test_a_broken_simulator_stops_the_run_after_what_has_ended_was_told_and_may_be_tried_again():
    env = make_env(
        always("raise", "reset", 0, range(3, 99)), 3, faulty.CHUNK, num_workers=1, episodes=queue(*range(40))
    )
    td, ended, messages = env.reset(), 0, []
    for _ in range(30):
        try:
            outcome, td = env.step_and_maybe_reset(td.set(keys.ACTION, ACTION[:3]))
            ended += int((outcome[keys.NEXT, keys.EPISODE_LEN] == faulty.HORIZON).sum())
        except SimulatorCrash as error:
            messages.append(str(error))
            td = env.reset()
    assert ended == 3  # the good ones
    assert messages
    assert all("RuntimeError: on command, while running storm/faulty task go trial" in text for text in messages)
    assert not any("\n" in text for text in messages)
    env.close()
    with pytest.raises(RuntimeError, match="closed"):
        env.reset()


def test_a_worker_that_dies_while_it_repeats_is_tried_again_and_then_costs_one_episode(tmp_path):
    spec = faulty.describe({})
    env = make_env(spec, 4, faulty.CHUNK, num_workers=1, episodes=queue(*range(8)))
    td = env.reset()
    for _ in range(2):
        _, td = env.step_and_maybe_reset(td.set(keys.ACTION, ACTION))
    state, expected = env.state_dict(), env.observe()
    env.close()
    for path, unstarted in ((str(tmp_path / "once"), False), ("", True)):
        failing = replace(spec, options={"faults": {2: ("step", 4, "kill", path)}})
        env = make_env(failing, 4, faulty.CHUNK, num_workers=1, episodes=queue())
        env.load_state_dict(state)
        assert env.unstarted.tolist() == [False, False, unstarted, False]
        same = (env.observe()[keys.IMAGES] == expected[keys.IMAGES]).flatten(1).all(1)
        assert same.tolist() == [True, True, not unstarted, True]
        env.close()


def test_a_simulator_that_hangs_while_it_is_built_is_named_in_a_line_and_started_again(tmp_path, caplog):
    options = {"faults": {}, "once": str(tmp_path / "once")}
    spec = replace(faulty.describe({}), entry_point="hanging:HangsInSetup", options=options)
    pool = WorkerPool(spec, 1, 1, faulty.CHUNK, step_timeout=2.0, start_timeout=3.0)
    pool.start_timeout = 60.0  # of the one that comes after it
    pool.reset({0: Episode(0, 0)})
    assert pool.step([0]) == []
    assert pool.restarts == 1
    pool.close()
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("simulator worker 0: gave no answer for 5 s, while running storm/faulty task go trial 0")
    assert "\n" not in line


def test_gymnasium_names_the_episode_and_goes_on():
    env = SimulatorEnv(always("raise", "reset", 0, [1]))
    with pytest.raises(SimulatorCrash, match="on command, while running storm/faulty task go trial 1 seed 0"):
        env.reset(seed=0, options={"task_id": 0, "trial_id": 1})
    env.reset(seed=0, options={"task_id": 0, "trial_id": 2})
    env.close()
    gymnasium.register(
        "storm/Faulty-v0",
        "vla_envs.gym:SimulatorEnv",
        vector_entry_point="vla_envs.gym:SimulatorVectorEnv",
        kwargs={"name": always("raise", "reset", 0, [1])},
    )
    envs = gymnasium.make_vec("storm/Faulty-v0", 2, num_workers=1)
    observations, _ = envs.reset(seed=0, options={"task_id": 0, "trial_id": [0, 1]})
    assert observations["images"].any((1, 2, 3)).tolist() == [True, False]
    _, _, _, truncated, infos = envs.step(np.zeros((2, 2), np.float32))
    assert truncated.tolist() == [False, True]
    assert infos["crashed"].tolist() == [False, True]
    envs.close()


def good():
    return Observation(np.zeros((8, 8, 3), np.uint8), np.zeros(3), "go")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"states": [0, float("nan"), 0]}, r"states\[1\] is nan"),
        ({"states": np.array([0, 0, 1e300])}, r"states\[2\] is 1e\+300"),
        ({"states": np.zeros(1)}, r"states are float64 \[1\], must be numbers \[3\]"),
        ({"states": None}, "states are object"),
        ({"images": np.zeros((8, 8, 3))}, r"images are float64 \[8, 8, 3\], must be uint8 \[8, 8, 3\]"),
        ({"images": None}, "images are None"),
        ({"wrist_images": np.zeros((1, 8, 8, 3), np.uint8)}, "wrist_images are uint8 .* must be None"),
        ({"task_description": b"go"}, "task_description is bytes"),
    ],
)
def test_a_wrong_observation_is_named(change, message):
    spec = faulty.describe({})
    assert check_observation(spec, good()).dtype == np.float32
    with pytest.raises(WrongAnswer, match=message):
        check_observation(spec, replace(good(), **change))


def test_wrist_images_are_checked_where_they_are_declared():
    spec = replace(faulty.describe({}), wrist_image_shape=(1, 4, 4))
    check_observation(spec, replace(good(), wrist_images=np.zeros((1, 4, 4, 3), np.uint8)))
    with pytest.raises(WrongAnswer, match="wrist_images are None"):
        check_observation(spec, good())


@pytest.mark.parametrize("success", [True, False, np.True_, 1, 0.0, np.array(True), torch.tensor(False)])
def test_what_may_be_a_success_is_one(success):
    checked = check_outcome(faulty.describe({}), Outcome(np.float32(1), success))
    assert checked == Outcome(1.0, bool(success))
    assert (type(checked.reward), type(checked.success)) == (float, bool)


@pytest.mark.parametrize(
    ("outcome", "message"),
    [
        (Outcome(float("nan"), True), "reward is nan"),
        (Outcome(1e39, True), "reward is 1e"),  # no float32
        (Outcome("1", True), "reward is '1'"),
        (Outcome(1.0, None), "success is None"),
        (Outcome(1.0, "yes"), "success is 'yes'"),
        (Outcome(1.0, np.zeros(2)), r"success is float64 \[2\]"),
        (Outcome(1.0, True, subtasks=2), "subtasks is 2, must be a whole number from 0 to 1"),
        ((1.0, True), "step returned tuple, must be an Outcome"),
    ],
)
def test_a_wrong_outcome_is_named(outcome, message):
    with pytest.raises(WrongAnswer, match=message):
        check_outcome(faulty.describe({}), outcome)


@pytest.mark.parametrize("subtasks", [3, np.int64(3), np.uint8(3)])
def test_how_much_of_a_chain_is_solved_is_a_plain_number(subtasks):
    chain = replace(faulty.describe({}), chain_length=3)
    checked = check_outcome(chain, Outcome(1.0, True, True, False, subtasks))
    assert checked == Outcome(1.0, True, True, False, 3)
    assert type(checked.subtasks) is int
    check_outcome(chain, Outcome(0.0, False, subtasks=2))


@pytest.mark.parametrize(
    ("outcome", "message"),
    [
        (Outcome(1.0, False, subtasks=4), "subtasks is 4, must be a whole number from 0 to 3"),
        (Outcome(1.0, False, subtasks=-1), "subtasks is -1, must be"),
        (Outcome(1.0, False, subtasks=1.0), r"subtasks is 1\.0, must be"),
        (Outcome(1.0, False, subtasks=True), "subtasks is True, must be"),
        (Outcome(1.0, False, subtasks=np.ones(1)), r"subtasks is float64 \[1\], must be"),
        (Outcome(1.0, True), "success after 0 of 3 tasks of a chain"),
    ],
)
def test_a_wrong_number_of_subtasks_is_named(outcome, message):
    with pytest.raises(WrongAnswer, match=message):
        check_outcome(replace(faulty.describe({}), chain_length=3), outcome)


def ended(processes, within=5.0):
    until = time.monotonic() + within
    while time.monotonic() < until:
        states = [state(process) for process in processes]
        if all(one in ("", "Z") for one in states):  # a zombie waits for the process that has adopted it
            return True
        time.sleep(0.02)
    return False


def state(process):
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def test_six_hung_workers_are_closed_at_once():
    pool = WorkerPool(faulty.describe({}), 6, 6, faulty.CHUNK)
    pool.reset({slot: Episode(0, slot) for slot in range(6)})
    processes = [process.pid for process in pool._processes]
    for process in processes:
        os.kill(process, signal.SIGSTOP)
    started = time.monotonic()
    pool.close()
    assert time.monotonic() - started < 10
    assert ended(processes)


def test_large_messages_to_and_from_a_stopped_worker_end():
    pool = WorkerPool(faulty.describe({}), 1, 1, faulty.CHUNK, step_timeout=3.0, start_timeout=30.0)
    pool.reset({0: Episode(0, 0)})
    os.kill(pool._processes[0].pid, signal.SIGSTOP)
    arguments = {"timeout": 3.0, "size": 10_000_000}
    answers = pool.map("hanging:echo", [b"x" * 5_000_000], **arguments)
    assert [len(answer) for answer in answers] == [15_000_000]
    assert pool.restarts == 1

    def stop():
        time.sleep(0.3)
        os.kill(pool._processes[0].pid, signal.SIGSTOP)

    threading.Thread(target=stop).start()
    answers = pool.map("hanging:echo", [b"x"] * 8, **{**arguments, "size": 20_000_000})
    assert {len(answer) for answer in answers} == {20_000_001}
    pool.close()


def test_a_forked_child_leaves_the_workers_to_its_parent():
    env = make_env(faulty.describe({}), 2, faulty.CHUNK, num_workers=1, episodes=queue(*range(9)))
    td = env.reset()
    child = os.fork()
    if not child:
        try:
            env.reset()
        except RuntimeError as error:
            refused = "forked" in str(error)
        env.close()
        os._exit(0 if refused else 1)
    assert os.waitpid(child, 0)[1] == 0
    outcome, _ = env.step_and_maybe_reset(td.set(keys.ACTION, ACTION[:2]))
    assert env.worker_restarts == 0
    assert outcome[keys.NEXT, keys.STEP_MASK].all()
    env.close()


PARENT = """
import sys, threading, time
from tests.storm import faulty
from vla_envs import Episode, WorkerPool
pools = []
def begin():  # in a thread that ends: workers live on
    faults = {trial: ("step", 1, what, "") for trial, what in enumerate(faulty.HANGS)}
    pool = WorkerPool(faulty.describe(faults), 4, 4, 3)
    pool.reset({slot: Episode(0, slot) for slot in range(4)})
    pools.append(pool)
thread = threading.Thread(target=begin)
thread.start()
thread.join()
time.sleep(0.5)
print(*[process.pid for process in pools[0]._processes], flush=True)
pools[0].step(range(4))
"""


def test_workers_die_with_their_parent_whatever_they_do_and_not_with_a_thread_of_it():
    path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True, env=os.environ | path
    ) as parent:
        processes = [int(number) for number in parent.stdout.readline().split()]
        time.sleep(1.0)  # now each of them hangs in its own way
        assert len(processes) == 4
        assert all(state(process) not in ("", "Z") for process in processes)
        parent.kill()
    assert ended(processes)


@pytest.mark.parametrize("what", ["ask", "kill"])
def test_what_a_crashed_chunk_had_done_counts_for_nothing(what):
    """The simulator fails in the second action of three; one that asks has crashed."""
    env = make_env(always(what, trials=[0]), 2, faulty.CHUNK, num_workers=1, episodes=queue(0, 1))
    after = env.step(env.reset().set(keys.ACTION, ACTION[:2]))[keys.NEXT]
    assert after[keys.CRASHED].squeeze(-1).tolist() == [True, False]
    for key in (keys.STEP_MASK, keys.STEP_REWARDS, keys.REWARD, keys.EPISODE_RETURN, keys.EPISODE_LEN):
        assert after[key].any(1).tolist() == [False, True], key
    env.close()


def test_the_doctor_does_not_call_usable_what_cannot_be_imported():
    from vla_envs import Benchmark, BenchmarkSchema
    from vla_envs.doctor import check_entry_point

    schema = BenchmarkSchema((8, 8), states=("x", "y", "z"), actions=("dx", "dy"), instruction="go")
    good = Benchmark("storm", "Storm", schema, make_spec=lambda suite: faulty.describe({}), suites=lambda: ["faulty"])
    assert check_entry_point(good) == []
    wrong = replace(faulty.describe({}), entry_point="tests.storm.faulty:NoSuchSimulator")
    (finding,) = check_entry_point(replace(good, make_spec=lambda suite: wrong))
    assert finding.required
    assert finding.status == "broken"
    assert "NoSuchSimulator" in finding.detail
