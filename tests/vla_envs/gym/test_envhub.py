"""What LeRobot asks of ``examples/envhub/env.py``; LeRobot itself does in tests/cross/lerobot_envhub.py."""

import importlib.util
from dataclasses import replace

import numpy as np
import pytest
from gym_vector import HORIZON, counting_spec
from paths import ROOT

from vla_envs.gym import SimulatorEnv

SEED = 1000


@pytest.fixture
def hub():
    found = importlib.util.spec_from_file_location("hub_env", ROOT / "examples/envhub/env.py")
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    module.make_spec = lambda name, **_: replace(counting_spec(), id=name)
    return module


@pytest.fixture
def tasks(hub):
    made = hub.make_env(n_envs=3, use_async_envs=True)
    (tasks,) = made.values()
    yield tasks
    for envs in tasks.values():
        envs.close()


def test_a_group_of_tasks_whose_simulators_start_with_the_first_reset(hub, tasks):
    assert list(hub.make_env()) == ["metaworld-MT50"]
    assert list(tasks) == [0, 1]
    assert tasks[0].envs is None
    assert tasks[0].num_envs == 3
    config = type("Config", (), {"task": "calvin/D"})
    assert list(hub.make_env(cfg=config)) == ["calvin-D"]


def test_what_the_evaluation_loop_reads(tasks):
    envs = tasks[1]
    observation, _ = envs.reset(seed=[SEED, SEED + 1, SEED + 2], options={"lerobot_new_rollout": True})
    assert observation.pop("task") == ("count to two",) * 3
    assert envs.observation_space.contains(observation)
    assert observation["pixels"]["image"].dtype == np.uint8
    assert envs.call("task") == envs.get_attr("task_description") == ("count to two",) * 3
    assert envs.call("_max_episode_steps") == (HORIZON,) * 3
    assert len(envs.call("render")) == 3
    assert envs.unwrapped.metadata["render_fps"] > 0
    done, solved = np.zeros(3, bool), np.zeros(3, bool)
    for _ in range(HORIZON):
        observation, _, terminated, truncated, info = envs.step(np.zeros((3, 2), np.float32))
        solved |= info["is_success"] & ~done
        done |= terminated | truncated
    assert done.all()
    assert solved.all()  # trial t by action t + 2
    with pytest.raises(AttributeError):
        envs.call("task_descriptoin")


def test_seeds_are_the_trials_of_an_evaluation_with_the_first_as_its_seed(tasks):
    single = SimulatorEnv(counting_spec())
    for first in (SEED, SEED + 3, SEED + 9):  # there are ten initial states, and the next trial is the first
        observation, info = tasks[1].reset(seed=[first, first + 1, first + 2])
        for slot in range(3):
            trial = (first + slot - SEED) % 10
            expected, _ = single.reset(seed=SEED, options={"task_id": 1, "trial_id": trial})
            assert np.array_equal(observation["pixels"]["image"][slot], expected["images"])
            assert np.array_equal(observation["agent_pos"][slot], expected["states"])
            assert (info["trial_id"][slot], info["episode_seed"][slot]) == (trial, SEED)
    tasks[1].reset()
    assert tasks[1].envs.call("episode")[0].task_id == 1


def test_evaluation_trials_are_taken_where_a_benchmark_has_them(hub):
    hub.make_spec = lambda name: replace(counting_spec(), evaluation_trials=range(7, 9))
    envs = hub.make_env(n_envs=3)["counting"][0]
    _, info = envs.reset(seed=[0, 1, 2])
    envs.close()
    assert info["trial_id"].tolist() == [7, 8, 7]


def test_wrist_cameras_have_names_of_their_own(hub):
    envs = hub._OneTask(replace(counting_spec(), wrist_image_shape=(2, 4, 4)), 0, 3)
    wrists = np.arange(3 * 2 * 48, dtype=np.uint8).reshape(3, 2, 4, 4, 3)
    states, images = np.zeros((3, 1), np.float32), np.zeros((3, 2, 2, 3), np.uint8)
    (seen,) = envs.seen({"images": images, "wrist_images": wrists, "states": states, "task_descriptions": ("a",) * 3})
    assert list(seen["pixels"]) == ["image", "wrist_image0", "wrist_image1"]
    assert np.array_equal(seen["pixels"]["wrist_image1"], wrists[:, 1])
    seen.pop("task")
    assert envs.observation_space.contains(seen)
