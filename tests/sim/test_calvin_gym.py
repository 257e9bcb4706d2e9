"""CALVIN by Gymnasium, in videos and after faults: the sentence is that of the running task, and no chain is lost."""

import itertools
import os
import signal

import gymnasium
import imageio.v3
import numpy as np
import pytest
import torch
from calvin_commands import SMALL, chunk, commanded
from gym_vector import assert_same
from gymnasium.utils.env_checker import check_env

import vla_envs.calvin.package as package
from vla_algos.evaluation import evaluate
from vla_algos.run.videos import caption, save_videos
from vla_common import keys
from vla_common.texts import to_strings
from vla_envs import Episode, EpisodeQueue, make_env
from vla_envs.calvin.chains import published_chains
from vla_envs.calvin.spec import spoken, suites
from vla_envs.gym import SimulatorEnv, SimulatorVectorEnv

pytestmark = pytest.mark.skipif(
    bool(package.CHECKOUT.missing(package.CHECKOUT.places()[0])),
    reason="no checkout of calvin_env: type python -m vla_envs fetch calvin",
)
SENTENCES = [spoken(task, "validation")[0] for task in published_chains()[0][1]]


def test_every_suite_and_task_has_an_id():
    ids = {id for id in gymnasium.registry if id.startswith("vla/CALVIN-")}
    assert ids == {f"vla/CALVIN-{suite}-v0" for suite in suites()}
    assert {"vla/CALVIN-lh-mtlc-v0", "vla/CALVIN-D-v0", "vla/CALVIN-ABC-v0", "vla/CALVIN-open_drawer-v0"} <= ids
    assert len(ids) == 7 + 34
    assert all(gymnasium.make(id).metadata["render_fps"] == 30 for id in ids)  # no simulator is started


def test_gymnasiums_checker_passes():
    env = gymnasium.make("vla_envs:vla/CALVIN-lh-mtlc-v0", render_mode="rgb_array", **SMALL)
    with pytest.warns(UserWarning, match="observation space m") as caught:
        check_env(env.unwrapped)
    env.close()
    assert all("observation space m" in str(warning.message) for warning in caught)  # states have no natural bounds


def test_one_environment_says_the_running_task():
    env = SimulatorEnv(commanded("calvin/lh-mtlc"))
    observation, _ = env.reset(seed=0, options={keys.TRIAL_ID: 0})
    said, rewards = [observation[keys.TASK_DESCRIPTIONS]], []
    for number in range(5):
        for action in chunk(2, 1)[0]:
            observation, reward, terminated, truncated, info = env.step(action)
            rewards.append(reward)
        said.append(observation[keys.TASK_DESCRIPTIONS])
        assert env.task_description == said[-1]
        assert (terminated, truncated, info["is_success"]) == (number == 4, False, number == 4)
    assert said == [*SENTENCES, SENTENCES[-1]]
    assert rewards == [0, 1] * 5
    env.close()


@pytest.mark.parametrize("suite", ["D", "lh-mtlc"])
def test_many_environments_say_the_running_tasks(suite):
    """The same as Gymnasium's own vector environment says, which makes one environment after the other."""
    spec = commanded(f"calvin/{suite}", **({"chains": "published"} if suite == "D" else {}))
    theirs = gymnasium.vector.SyncVectorEnv([lambda: SimulatorEnv(spec)] * 2)
    ours = SimulatorVectorEnv(spec, 2, num_workers=2)
    options = {keys.TRIAL_ID: 0}
    assert_same(theirs.reset(seed=[0, 0], options=dict(options)), ours.reset(seed=[0, 0], options=options))
    solving = np.concatenate([chunk(12, 2, 3, 6, 7, 9), chunk(12, 5)])  # the first chain ends and the next begins
    said = []
    for actions in solving.swapaxes(0, 1):
        observations = assert_same(theirs.step(actions), ours.step(actions))[0]
        said.append(observations[keys.TASK_DESCRIPTIONS])
        assert ours.call("task_description") == theirs.call("task_description") == said[-1]
    assert [texts[0] for texts in said[:9]] == [SENTENCES[number] for number in (0, 0, 1, 2, 2, 2, 3, 4, 4)]
    assert [texts[1] for texts in said] == [SENTENCES[0]] * 5 + [SENTENCES[1]] * 7
    theirs.close()
    ours.close()


def test_a_chunk_says_its_last_task():
    for suite, executed in (("calvin/lh-mtlc", [4, 8]), ("calvin/D", [8, 8])):
        envs = SimulatorVectorEnv(commanded(suite), 2, chunk_size=8, num_workers=1)
        envs.reset(seed=0, options={keys.TRIAL_ID: 0})
        before = envs.call("task_description")
        observations, _, _, _, infos = envs.step(np.concatenate([chunk(8, 3), chunk(8)]))
        assert infos["step_mask"].sum(1).tolist() == executed
        after = observations[keys.TASK_DESCRIPTIONS]
        assert after == envs.call("task_description")
        assert (after[0] != before[0], after[1] == before[1]) == (True, True)
        envs.close()


class Solving:
    """Solves a task with the last action of each decision."""

    def __init__(self, length):
        self.length = length

    def __call__(self, td):
        return td.set(keys.ACTION, torch.from_numpy(chunk(self.length, self.length - 1, envs=td.shape[0])))


def test_a_video_shows_what_the_policy_is_told_in_each_frame(tmp_path):
    env = make_env(commanded("calvin/lh-mtlc", image_size=200), 1, 4, num_workers=1)
    result = evaluate(env, Solving(4), [Episode(0, 0)], record=1)
    env.close()
    told = [*SENTENCES, SENTENCES[-1]]
    (path,) = save_videos(tmp_path, result, fps=7.5)
    assert imageio.v3.immeta(path)["fps"] == 7.5
    video = imageio.v3.imread(path)
    lines = [f"{each}\nreturn {done:.2f}{', solved' if done == 5 else ''}" for done, each in enumerate(told)]
    assert result.captions == {0: lines}
    expected = caption(result.videos[0].repeat(2, axis=1).repeat(2, axis=2), lines)
    assert len(video) == len(expected)
    assert video.shape[1] - expected.shape[1] in (0, 1)  # made even
    assert np.abs(video[:, : expected.shape[1]].astype(int) - expected).mean() < 6  # it is compressed
    assert (expected[:, :400:2, ::2] == result.videos[0]).all()
    strips = expected[:, 400:]
    assert all((one != other).any() for one, other in itertools.pairwise(strips))


def rollout(spec, kill=None):
    """Two chains in one worker, twelve decisions: what was seen, told, paid; and the number of restarts."""
    env = make_env(spec, 2, 4, num_workers=1, episodes=EpisodeQueue([Episode(0, trial) for trial in range(8)]))
    td, found = env.reset(), []
    policy = Solving(4)
    for decision in range(12):
        if decision == kill:
            (process,) = env.pool._processes
            os.kill(process.pid, signal.SIGKILL)
        outcome, td = env.step_and_maybe_reset(policy(td))
        after = outcome[keys.NEXT]
        names = (keys.IMAGES, keys.STATES, keys.REWARD, keys.SUCCESS, keys.DONE, keys.EPISODE_LEN, keys.STEP_MASK)
        found.append([*(after[name].clone() for name in names), after[keys.CRASHED].clone(), to_strings(td)])
    restarts = env.worker_restarts
    env.close()
    return found, restarts


def equal(first, second, slot):
    for one, other in zip(first[:-1], second[:-1], strict=True):
        if not torch.equal(one[slot], other[slot]):
            return False
    return first[-1][slot] == second[-1][slot]


def test_the_other_chain_of_a_worker_goes_on_as_if_nothing_had_happened():
    undisturbed, restarts = rollout(commanded("calvin/lh-mtlc"))
    assert restarts == 0
    # In mid-chain: two tasks are done, of the third three actions.
    disturbed, restarts = rollout(commanded("calvin/lh-mtlc", fails=(0, 11, "kill", "")))
    assert restarts == 1
    assert [bool(row[-2][0]) for row in disturbed] == [number == 2 for number in range(12)]
    assert all(equal(*rows, slot=1) for rows in zip(undisturbed, disturbed, strict=True))
    assert undisturbed[2][-1][1] == disturbed[2][-1][1] != disturbed[0][-1][1]


def test_a_worker_that_is_killed_between_decisions_costs_nothing():
    undisturbed, _ = rollout(commanded("calvin/D", chains="published"))
    disturbed, restarts = rollout(commanded("calvin/D", chains="published"), kill=5)
    assert restarts == 1
    assert not any(row[-2].any() for row in disturbed)
    for slot in range(2):
        assert all(equal(*rows, slot=slot) for rows in zip(undisturbed, disturbed, strict=True))


def test_an_evaluation_runs_a_chain_again_and_has_the_same_result(tmp_path):
    episodes = [Episode(0, trial) for trial in range(3)]

    def run(**options):
        env = make_env(commanded("calvin/lh-mtlc", **options), 1, 4, num_workers=1)
        policy = Solving(4)
        result = evaluate(env, policy, episodes, record=3)
        env.close()
        return result

    undisturbed = run()
    again = run(fails=(1, 11, "raise", str(tmp_path / "once")))
    assert [row.attempts for row in undisturbed.episodes] == [1, 1, 1]
    assert [row.attempts for row in again.episodes] == [1, 2, 1]
    for one, other in zip(undisturbed.episodes, again.episodes, strict=True):
        assert (one.success_once, one.episode_return, one.crashed) == (other.success_once, other.episode_return, False)
        assert one.success_once
    lost = run(fails=(1, 11, "raise", ""))
    assert [row.crashed for row in lost.episodes] == [False, True, False]
    assert lost.metrics()["eval/crashed_episodes"] == 1


def test_actions_that_are_nothing_are_refused_and_the_grippers_sign_is_taken():
    env = gymnasium.make("vla/CALVIN-D-v0", disable_env_checker=True, **SMALL)
    states = {}
    for grip in (-0.2, 0.0, -1.0, 0.3, 1.0, 7.0):
        env.reset(seed=0, options={keys.TRIAL_ID: 0})
        action = chunk(1)[0, 0]
        action[6] = grip
        for _ in range(5):
            states[grip] = env.step(action)[0][keys.STATES]
    assert all((states[grip] == states[-1.0]).all() for grip in (-0.2, 0.0))
    assert all((states[grip] == states[1.0]).all() for grip in (0.3, 7.0))
    assert states[-1.0][6] < states[1.0][6]
    for wrong, message in ((np.nan, "is not finite"), (1e6, "more than 1000 times the bounds' width outside")):
        with pytest.raises(ValueError, match=message):
            env.step(np.full(7, wrong, np.float32))
    env.close()


def test_what_is_out_of_bounds_is_executed_as_calvin_env_does():
    moved = []
    for far in (1.0, 2.0):
        env = make_env("calvin/D", 1, 4, num_workers=1, episodes=EpisodeQueue([Episode(0, 0)]), **SMALL)
        td = env.reset()
        actions = chunk(4)
        actions[..., 2] = -far
        after = env.step(td.set(keys.ACTION, torch.from_numpy(actions)))[keys.NEXT]
        assert after[keys.ACTIONS_CLIPPED].item() == 0
        moved.append((td[keys.STATES] - after[keys.STATES])[0, 2].item())
        env.close()
    assert moved[1] > 1.5 * moved[0] > 0
