"""RoboTwin by Gymnasium and under TorchRL's transforms, and after faults: chunks are repeated to the bit.

What is seen are stand-in objects and arms, drawn fast and by the head camera alone.
"""

from dataclasses import replace

import gymnasium
import numpy as np
import pytest
import torch
from gym_vector import assert_same
from gymnasium.utils.env_checker import check_env
from simulators import need_robotwin
from torchrl.envs import Compose, RewardSum, StepCounter, TransformedEnv
from torchrl.envs.utils import check_env_specs

from vla_common import keys
from vla_envs import Episode, EpisodeQueue, InstructionsToBytes, make_env, make_spec
from vla_envs.gym import SimulatorEnv, SimulatorVectorEnv
from vla_envs.robotwin.spec import suites

need_robotwin()
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of SAPIEN, at RoboTwin
SMALL = {"render_quality": "fast", "collect_wrist_camera": False, "step_lim": 12, "seeds": "range"}
SHORT = {**SMALL, "step_lim": 6}  # two decisions
BELL = "vla_envs:vla/RoboTwin-click_bell-v0"


def actions(number, envs=2, length=3):
    """A smooth walk of all joints."""
    return np.random.default_rng(number).normal(0, 0.03, (envs, length, 14)).cumsum(1).astype(np.float32)


def test_every_suite_and_task_has_an_id_that_needs_a_chunk_size():
    import vla_envs  # noqa: F401

    ids = {id for id in gymnasium.registry if id.startswith("vla/RoboTwin-")}
    assert ids == {f"vla/RoboTwin-{suite}-v0" for suite in suites()}
    assert len(ids) == 46 + 1
    with pytest.raises(ValueError, match="chunk_size"):
        gymnasium.make("vla/RoboTwin-click_bell-v0")


def test_gymnasiums_checker_passes():
    env = gymnasium.make(BELL, chunk_size=3, render_mode="rgb_array", **SMALL)
    with pytest.warns(UserWarning, match="observation space m") as caught:
        check_env(env.unwrapped, skip_render_check=True)
    env.close()
    said = [str(warning.message) for warning in caught if warning.category is UserWarning]
    assert all("observation space m" in text for text in said)  # states have no natural bounds


def test_many_environments_are_gymnasiums_own():
    spec = make_spec("robotwin/click_bell", **SHORT)
    theirs = gymnasium.vector.SyncVectorEnv([lambda: SimulatorEnv(spec, chunk_size=3)] * 2)
    ours = SimulatorVectorEnv(spec, 2, chunk_size=3, num_workers=1)
    options = {keys.TRIAL_ID: 3}
    assert_same(theirs.reset(seed=[0, 1], options=dict(options)), ours.reset(seed=[0, 1], options=options))
    for number in range(3):  # the second ends the episode, the third begins the next one
        *one, info = theirs.step(actions(number))
        *other, same = ours.step(actions(number))
        assert_same(tuple(one), tuple(other))
        executed = (keys.STEP_MASK, keys.STEP_REWARDS) if number < 2 else ()
        for key in ("is_success", keys.TRIAL_ID, *executed):
            np.testing.assert_array_equal(info[key], same[key])
        assert ours.call("task_description") == theirs.call("task_description")
    theirs.close()
    ours.close()


def test_specs_under_transforms():
    env = make_env("robotwin/click_bell", 1, 3, num_workers=1, **{**SMALL, "collect_wrist_camera": True})
    transformed = TransformedEnv(env, Compose(InstructionsToBytes(), RewardSum(in_keys=[keys.REWARD]), StepCounter()))
    check_env_specs(transformed)
    transformed.close()


def rollout(env):
    """Two episodes in one worker, three decisions: what was seen and paid, and who was lost."""
    env.episodes = EpisodeQueue([Episode(0, trial) for trial in range(8)])
    td, found, lost = env.reset(), [], []
    for decision in range(3):  # the second ends the episodes
        td.set(keys.ACTION, torch.from_numpy(actions(decision)))
        outcome, td = env.step_and_maybe_reset(td)
        after = outcome[keys.NEXT]
        names = (keys.IMAGES, keys.STATES, keys.STEP_REWARDS, keys.STEP_MASK, keys.DONE, keys.EPISODE_LEN)
        found.append([after[name].clone() for name in names])
        lost.append(after[keys.CRASHED].squeeze(-1).tolist())
    return found, lost


def equal(first, second, slots):
    return all(torch.equal(a[slots], b[slots]) for a, b in zip(first, second, strict=True))


@pytest.mark.timeout(300)
def test_after_a_fault_all_others_go_on_as_if_nothing_had_happened(monkeypatch, tmp_path):
    monkeypatch.setenv("ROBOTWIN_FAULT", str(tmp_path / "asked" / "once"))
    spec = replace(make_spec("robotwin/place_empty_cup", **SHORT), entry_point="robotwin_commands:Dies")
    env = make_env(spec, 2, 3, num_workers=1)
    undisturbed, lost = rollout(env)
    assert (env.worker_restarts, sum(map(sum, lost))) == (0, 0)

    # In mid-chunk, which costs that episode.
    (tmp_path / "asked").mkdir()
    disturbed, lost = rollout(env)
    assert (env.worker_restarts, lost) == (1, [[True, False], *[[False, False]] * 2])
    env.close()
    assert all(equal(*rows, [1]) for rows in zip(undisturbed, disturbed, strict=True))
