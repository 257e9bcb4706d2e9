"""RoboTwin's expert satisfies RoboTwin's own success checks; frames for small policies; seeds of evaluations."""

import numpy as np
import pytest
from simulators import need_robotwin

from vla_envs import Episode, make_spec
from vla_envs.experts import check_expert, demonstrate
from vla_envs.robotwin.expert import expert_tasks

need_robotwin()
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of SAPIEN, at RoboTwin
SMALL = {"collect_wrist_camera": False, "render_quality": "fast", "image_size": (60, 80)}


def press(simulator, length):
    chunk = simulator.expert_chunk(length)
    return chunk is not None and simulator.execute(chunk.astype(np.float32))[-1].success


@pytest.mark.parametrize(
    ("task", "length", "arms"),
    [*((task, 5, ["aloha-agilex"]) for task in expert_tasks()), (expert_tasks()[0], 25, ["piper", "piper", 0.6])],
)
def test_the_expert_solves_its_task(task, length, arms):
    simulator = make_spec(f"robotwin/{task}", embodiment=arms, **SMALL).make()
    solved = []
    for trial in range(6):
        simulator.reset(Episode(0, trial))
        solved.append(press(simulator, length))
    simulator.close()
    assert sum(solved) >= (4 if task == "turn_switch" else 6)  # some switches are out of reach


def test_it_comes_back_from_a_wrong_press_and_gives_up_what_is_out_of_reach(monkeypatch):
    simulator = make_spec("robotwin/click_bell", **SMALL).make()
    simulator.reset(Episode(0, 0))
    wrong = simulator.expert_chunk(5) + np.array([0.3] + [0.0] * 6 + [0.3] + [0.0] * 6)
    assert not simulator.execute(wrong.astype(np.float32))[-1].success
    assert press(simulator, 5)
    monkeypatch.setattr("vla_envs.robotwin.expert._reach", lambda robot, press: None)
    options = {"chunk_size": 5, "stride": 1, "noise": 0.0, "max_steps": 20}
    assert demonstrate(simulator, Episode(0, 1), **options) is None
    simulator.close()


def test_a_demonstration_has_a_label_for_each_action_that_was_executed():
    simulator = make_spec("robotwin/click_bell", **SMALL).make()
    options = {"chunk_size": 5, "stride": 1, "noise": 0.01, "max_steps": 20}
    found = demonstrate(simulator, Episode(0, 0), **options)
    again = demonstrate(simulator, Episode(0, 0), **options)
    simulator.close()
    assert found["images"].shape == (len(found["action"]), 60, 80, 3)
    assert found["action"].shape[1:] == (5, 14)
    assert found["step_mask"].any(1).all()
    assert all(np.array_equal(found[key], again[key]) for key in ("images", "states", "action", "step_mask"))


def test_tasks_without_expert_say_so_before_any_work():
    spec = make_spec("robotwin/place_empty_cup")
    with pytest.raises(ValueError, match="robotwin/place_empty_cup has no scripted expert"):
        check_expert(spec.simulator_class(), spec)


def test_smaller_frames_are_means_of_pixels():
    options = {"collect_wrist_camera": True, "render_quality": "fast"}
    whole, small = (make_spec("robotwin/click_bell", image_size=size, **options).make() for size in (None, (60, 80)))
    for simulator in (whole, small):
        simulator.reset(Episode(0, 3))
    seen, reduced = whole.observe(), small.observe()
    for frames, means in ((seen.images[None], reduced.images[None]), (seen.wrist_images, reduced.wrist_images)):
        blocks = frames.reshape(len(frames), 60, 4, 80, 4, 3).astype(float).mean((2, 4))
        assert means.shape == (len(frames), 60, 80, 3)
        assert np.abs(means - blocks).max() <= 0.5
    for simulator in (whole, small):
        simulator.close()


def test_evaluations_run_the_seeds_of_the_evaluation_list():
    simulator = make_spec("robotwin/click_bell", **SMALL).make()
    seeds = []
    for trial in (0, 1, 1_000_000, 1_000_001):
        simulator.reset(Episode(0, trial))
        seeds.append(simulator.seed)
    simulator.close()
    assert seeds == [100000, 100001, 100100001, 100100002]  # of RLinf's files
