"""CALVIN: the real scenes; an episode is the same in every process and order; chains as both protocols have them."""

import os
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch

import vla_envs.calvin.package as package
from vla_common import keys
from vla_envs import Episode, make_env, make_spec
from vla_envs.calvin import chains
from vla_envs.calvin.scenes import BLOCKS, CABINET_SHIFT
from vla_envs.calvin.states import published_state
from vla_envs.episodes import EpisodeQueue

pytestmark = pytest.mark.skipif(
    bool(package.missing_files(package.package_places()[0])), reason=f"no checkout of calvin_env: {package.CLONE}"
)
OPEN = np.array([0, 0, 0, 0, 0, 0, 1], np.float32)


def actions(number, steps):
    """A walk down to the table."""
    random = np.random.default_rng(number)
    for _ in range(steps):
        action = np.clip(random.normal(0, 1, 7) + np.array([0.3, 0.2, -0.6, 0, 0, 0, 0]), -1, 1)
        yield action.astype(np.float32)


def trajectory(simulator, episode, steps=40):
    simulator.reset(episode)
    seen = [simulator.observe()]
    found = [np.concatenate(simulator.world.states())]
    for action in actions(episode.trial_id, steps):
        simulator.step(action)
        found.append(np.concatenate(simulator.world.states()))
    seen.append(simulator.observe())
    return [np.stack(found), *(image for each in seen for image in (each.images, each.wrist_images))]


def trajectory_after(simulator, others):
    """What a worker process runs: an episode after others."""
    for trial in others:
        trajectory(simulator, Episode(trial % 4, trial), steps=15)
    return trajectory(simulator, Episode(3, 5))


def same(first, second):
    return all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.fixture(scope="module")
def simulator():
    made = make_spec("calvin/ABCD").make()
    yield made
    made.close()


def test_an_episode_is_the_same_in_any_order_and_process(simulator):
    alone = trajectory(simulator, Episode(3, 5))
    assert same(alone, trajectory(simulator, Episode(3, 5)))
    with_others = make_env("calvin/ABCD", num_envs=2, num_workers=2, seed=0)
    try:
        others = with_others.pool.map("test_calvin:trajectory_after", [(), (1, 2, 3), (7,)])
    finally:
        with_others.close()
    assert all(same(alone, each) for each in others)


def test_two_worlds_in_one_process_do_not_disturb_each_other(simulator):
    alone = trajectory(simulator, Episode(1, 3), steps=20)
    beside = make_spec("calvin/ABCD").make()
    beside.reset(Episode(2, 8))
    simulator.reset(Episode(1, 3))
    found = [np.concatenate(simulator.world.states())]
    for mine, theirs in zip(actions(3, 20), actions(8, 20), strict=True):
        beside.step(theirs)
        beside.observe()
        simulator.step(mine)
        found.append(np.concatenate(simulator.world.states()))
    beside.close()
    assert np.array_equal(alone[0], np.stack(found))


@pytest.mark.parametrize("scene", "ABCD")
def test_blocks_lie_where_the_condition_says(simulator, scene):
    for condition in chains.conditions()[::16]:
        simulator.world.reset(scene, *published_state(condition, CABINET_SHIFT[scene]))
        for _ in range(20):
            simulator.world.step(OPEN.astype(float))
        info = simulator.world.info()["scene_info"]
        table = info["fixed_objects"]["table"]
        for color in BLOCKS:
            touched = {(contact[2], contact[4]) for contact in info["movable_objects"][f"block_{color}"]["contacts"]}
            link = "base_link" if condition[f"{color}_block"] == "table" else "plank_link"
            assert (table["uid"], table["links"][link]) in touched, (condition, color)
        lights = {name: light["logical_state"] for name, light in info["lights"].items()}
        assert lights == {"lightbulb": condition["lightbulb"], "led": condition["led"]}


def test_upstream_drops_blocks_where_ours_does_not():
    condition = next(c for c in chains.conditions() if c["red_block"] == "slider_left")
    for fixes, lies in ((True, True), (False, False)):
        made = make_spec("calvin/B", scene_fixes=fixes).make()
        made.world.reset("B", *published_state(condition, CABINET_SHIFT["B"] * fixes))
        height = made.world.states()[1][8]
        for _ in range(30):
            made.world.step(OPEN.astype(float))
        assert (abs(made.world.states()[1][8] - height) < 0.01) == lies
        made.close()


def test_the_published_evaluation_gives_up_after_360_steps():
    env = make_env(
        "calvin/lh-mtlc",
        num_envs=1,
        chunk_size=50,
        image_size=32,
        wrist_camera=False,
        episodes=EpisodeQueue([Episode(0, 0)]),
    )
    td = env.reset()
    action = torch.zeros(1, 50, 7)
    action[..., 6] = 0.3  # rounded to 1
    for number in range(8):
        td[keys.ACTION] = action
        td = env.step(td)[keys.NEXT]
        assert bool(td[keys.DONE]) == (number == 7)
    assert td[keys.EPISODE_LEN].item() == 360
    assert td[keys.STEP_MASK].sum() == 10  # of the last chunk
    assert td[keys.TRUNCATED]
    assert not td[keys.TERMINATED]
    env.close()


def test_gymnasium_shows_the_running_task():
    env = gymnasium.make("vla_envs:vla/CALVIN-D-v0", disable_env_checker=True, image_size=32)
    observation, _ = env.reset(seed=1)
    assert observation[keys.IMAGES].shape == (32, 32, 3)
    assert observation[keys.WRIST_IMAGES].shape == (1, 84, 84, 3)
    assert observation[keys.STATES].shape == (7,)
    assert isinstance(observation[keys.TASK_DESCRIPTIONS], str)
    env.step(OPEN)
    env.close()


def test_what_is_missing_is_said(monkeypatch, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"(?s)no checkout of calvin_env.*git clone"):
        package.find_package(str(tmp_path))
    monkeypatch.setenv("VLA_TORCHRL_ASSETS", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("CALVIN_ENV_PATH", raising=False)
    with pytest.raises(FileNotFoundError, match="Looked in"):
        make_env("calvin/D", num_envs=1)


def test_a_folder_of_that_name_is_not_taken_for_the_package(monkeypatch, tmp_path):
    (tmp_path / "calvin_env").mkdir()
    (tmp_path / "calvin_env" / "__init__.py").write_text("raise RuntimeError('the wrong one')\n")
    monkeypatch.chdir(tmp_path)
    env = make_env("calvin/D", num_envs=1, image_size=32, wrist_camera=False, seed=0)
    env.reset()
    env.close()
    assert Path(os.getcwd()) == tmp_path
