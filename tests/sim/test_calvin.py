"""CALVIN: the real scenes; an episode is the same in every process and order; chains as both protocols have them."""

import itertools
import os
from dataclasses import replace
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from calvin_commands import actions, trajectory

import vla_envs.calvin.package as package
import vla_envs.calvin.spec as spec_of_calvin
from vla_algos.evaluation import evaluate
from vla_common import keys
from vla_envs import Episode, make_env, make_spec
from vla_envs.calvin import chains
from vla_envs.calvin.expert import Expert, expert_tasks
from vla_envs.calvin.scenes import BLOCKS
from vla_envs.calvin.states import published_state
from vla_envs.episodes import EpisodeQueue

pytestmark = pytest.mark.skipif(
    bool(package.CHECKOUT.missing(package.CHECKOUT.places()[0])),
    reason="no checkout of calvin_env: type python -m vla_envs fetch calvin",
)
OPEN = np.array([0, 0, 0, 0, 0, 0, 1], np.float32)


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
        others = with_others.pool.map("calvin_commands:trajectory_after", [(), (1, 2, 3), (7,)])
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
        simulator.world.reset(scene, *published_state(condition, scene))
        for _ in range(2):  # at once, and when all has come to rest
            info = simulator.world.info()["scene_info"]
            table = info["fixed_objects"]["table"]
            for color in BLOCKS:
                contacts = info["movable_objects"][f"block_{color}"]["contacts"]
                link = "base_link" if condition[f"{color}_block"] == "table" else "plank_link"
                touched = {(contact[2], contact[4]) for contact in contacts}
                assert touched == {(table["uid"], table["links"][link])}, (condition, color)  # nothing but its place
            for _ in range(20):
                simulator.world.step(OPEN.astype(float))
        lights = {name: light["logical_state"] for name, light in info["lights"].items()}
        assert lights == {"lightbulb": condition["lightbulb"], "led": condition["led"]}


def test_upstreams_scenes_are_upstreams():
    made = make_spec("calvin/ABC", scene_fixes=False, chains="published").make()
    for number, order in enumerate([("pink", "blue", "red"), BLOCKS, ("blue", "red", "pink")]):
        made.reset(Episode(number, 0))
        placed = published_state(chains.published_chains()[0][0], "D")[1]
        for index, color in enumerate(order):
            assert made.world.block(color)[0][:2] == pytest.approx(placed[6 + 6 * index :][:2], abs=0.01)
    made.close()
    alone = make_spec("calvin/push_red_block_left", scene="B", scene_fixes=False).make()
    places = set()
    for trial in range(16):
        alone.reset(Episode(0, trial))
        places.add(round(alone.world.block("red")[0][0], 2))
    alone.close()
    assert places == {0.05, 0.23}  # the latter is on the button


def test_upstream_drops_blocks_where_ours_does_not():
    condition = next(c for c in chains.conditions() if c["red_block"] == "slider_left")
    for fixes, lies in ((True, True), (False, False)):
        made = make_spec("calvin/B", scene_fixes=fixes).make()
        made.world.reset("B", *published_state(condition, "B" if fixes else "D"))
        height = made.world.states()[1][8]
        for _ in range(30):
            made.world.step(OPEN.astype(float))
        assert (abs(made.world.states()[1][8] - height) < 0.01) == lies
        made.close()


@pytest.mark.parametrize("task", expert_tasks())
def test_the_expert_solves_its_task(task):
    made = make_spec(f"calvin/{task}", wrist_camera=False).make()
    solved = []
    for trial in range(8):
        made.reset(Episode(0, trial, seed=31))
        solved.append(any(made.step(made.expert_action()).success for _ in range(120)))
    made.close()
    assert sum(solved) >= 7


def test_the_oracle_compares_with_where_the_last_task_ended():
    made = make_spec("calvin/D", image_size=32, wrist_camera=False).make()
    made.reset(Episode(0, 0))
    is_on = made.world.info()["scene_info"]["lights"]["led"]["logical_state"]
    made.chain = ("turn_off_led", "turn_on_led") if is_on else ("turn_on_led", "turn_off_led")  # the same at both ends
    for number, task in enumerate(made.chain):
        expert = Expert(made.world, task)
        assert any(made.step(expert.action()).subtasks == number + 1 for _ in range(100)), task
    made.close()


def test_a_finished_chain_goes_on_where_that_is_asked_for():
    spec = make_spec("calvin/lh-mtlc", image_size=32, wrist_camera=False)
    made = replace(spec, entry_point="calvin_commands:Willing").make()
    made.reset(Episode(0, 0))
    made.done = len(made.chain) - 1
    outcomes = [made.step(OPEN) for _ in range(3 + 361)]
    assert [outcome.success for outcome in outcomes] == [False] * 2 + [True] * 362
    assert [outcome.reward for outcome in outcomes] == [0, 0, 1] + [0] * 361
    assert not any(outcome.ends_episode for outcome in outcomes)
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


def test_published_chains_can_be_cut_off():
    spec = make_spec("calvin/lh-mtlc", max_episode_steps=20, image_size=32, wrist_camera=False)
    assert "horizon 20 instead of 1800" in spec.protocol_deviations
    env = make_env(spec, num_envs=1, chunk_size=15)
    try:
        result = evaluate(env, lambda td: td.set(keys.ACTION, torch.zeros(1, 15, 7)), [Episode(0, 0)])
    finally:
        env.close()
    assert result.episodes[0].episode_len == 20


@pytest.mark.parametrize(
    ("suite", "solved", "length"),
    [("lh-mtlc", 3, 22 + 360), ("D", 4, 480)],  # the fourth comes 378 steps after the third: too late, and in time
)
def test_both_protocols_count_the_tasks_that_are_solved(suite, solved, length):
    spec = make_spec(f"calvin/{suite}", image_size=32, wrist_camera=False)
    env = make_env(replace(spec, entry_point="calvin_commands:Willing"), num_envs=1, chunk_size=50)
    still = torch.zeros(1, 50, 7)
    decided = []

    def policy(td):
        decided.append(td[keys.TASK_DESCRIPTIONS][0])
        return td.set(keys.ACTION, still)

    try:
        result = evaluate(env, policy, [Episode(0, 0)])
    finally:
        env.close()
    (episode,) = result.episodes
    assert (episode.subtasks, episode.episode_len, episode.episode_return) == (solved, length, solved)
    assert not episode.success_once
    assert result.metrics()["eval/avg_num_subtasks"] == solved
    assert [result.metrics()[f"eval/success_len_{n}"] for n in range(1, 6)] == [1.0] * solved + [0.0] * (5 - solved)
    # A new sentence begins a new decision in the evaluation; in training it waits for the chunk to end.
    chain = chains.published_chains()[0][1] if suite == "lh-mtlc" else chains.draw_chain(0, ord("D"), 0)[1]
    said = [spec_of_calvin.spoken(task, "validation")[0] for task in chain]
    told = [text for text, _ in itertools.groupby(decided)]
    assert told == (said[:4] if suite == "lh-mtlc" else [said[0], said[3], said[4]])
    assert len(decided) == (1 + 1 + 1 + 8 if suite == "lh-mtlc" else 10)


def test_gymnasium_shows_the_running_task():
    env = gymnasium.make("vla_envs:vla/CALVIN-D-v0", disable_env_checker=True, image_size=32)
    observation, info = env.reset(seed=1)
    assert info[keys.SUBTASKS] == 0
    assert observation[keys.IMAGES].shape == (32, 32, 3)
    assert observation[keys.WRIST_IMAGES].shape == (1, 84, 84, 3)
    assert observation[keys.STATES].shape == (7,)
    assert isinstance(observation[keys.TASK_DESCRIPTIONS], str)
    env.step(OPEN)
    env.close()


def test_what_is_missing_is_said(monkeypatch, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"(?s)no checkout of calvin_env.*vla_envs fetch calvin"):
        package.CHECKOUT.find(str(tmp_path))
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


def test_a_task_in_several_scenes_is_in_each_as_in_that_one_alone():
    several = make_spec("calvin/turn_on_led", scene="ABCD", wrist_camera=False, image_size=32).make()
    places = {"A": -0.28, "B": 0.28, "C": -0.12, "D": -0.12}  # of the button, m; by URDF
    found = {}
    for trial in range(24):
        several.reset(Episode(0, trial, seed=2))
        low, high = several.world.bounds("button_link")
        found.setdefault(round((low[0] + high[0]) / 2, 2), []).append((trial, np.concatenate(several.world.states())))
    assert set(found) == set(places.values())
    assert max(map(len, found.values())) < 20  # C and D are half
    alone = make_spec("calvin/turn_on_led", scene="B", wrist_camera=False, image_size=32).make()
    for trial, states in found[places["B"]]:
        alone.reset(Episode(0, trial, seed=2))
        assert np.array_equal(np.concatenate(alone.world.states()), states)
    several.close()
    alone.close()
