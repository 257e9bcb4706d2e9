"""``protocol=lerobot``: the episodes of LeRobot's own evaluation loop, as ``tests/cross`` recorded them."""

import importlib.util

import numpy as np
import pytest
import torch
from paths import GOLDEN, ROOT
from simulators import libero_assets, some
from tensordict.nn import TensorDictModule

from vla_algos.evaluation import evaluate
from vla_common import keys
from vla_envs import Episode, EpisodeSampler, evaluation_episodes, make_env, make_spec
from vla_envs.libero.spec import suites

SCRIPT = importlib.util.spec_from_file_location("recorder", ROOT / "tests/cross/record_lerobot_environments.py")
recorder = importlib.util.module_from_spec(SCRIPT)
SCRIPT.loader.exec_module(recorder)
pytestmark = pytest.mark.timeout(600)


def recorded(benchmark):
    """The episodes of a recording, by suite, task and seed."""
    found = {}
    with np.load(GOLDEN / f"lerobot_{benchmark}.npz") as file:
        for name in file.files:
            number, _, field = name.partition("/")
            found.setdefault(number, {})[field] = file[name]
    return {f"{each['suite']}-{each['task']}-{each['seed']}-{len(each['actions'])}": each for each in found.values()}


METAWORLD, LIBERO = recorded("metaworld"), recorded("libero")
SHORT = 8  # actions of most recorded episodes; others end as LeRobot ends them


def chosen(episodes):
    """Episodes that ended, and some of those that were cut."""
    cut = [name for name, each in episodes.items() if len(each["actions"]) == SHORT]
    return [*some(cut, 6), *(name for name in episodes if name not in cut)]


def replay(simulator, episode, theirs, states, rewards):
    """Run LeRobot's actions: what the policy sees, would do and gets is what it saw, did and got there."""
    images = iter(theirs["images"])
    outcomes, paid = [], []
    simulator.reset(episode)
    for step, action in enumerate(theirs["actions"]):
        assert np.allclose(states(), theirs["states"][step], atol=1e-6)
        if step % recorder.EVERY == 0:
            seen = simulator.observe()
            cameras = [seen.images, *(() if seen.wrist_images is None else seen.wrist_images)]
            for camera, image in zip(cameras, next(images), strict=True):
                off = np.abs(camera[recorder.COARSE, recorder.COARSE].astype(int) - image)
                assert off.mean() < 2, off.max()  # of 255: another driver draws a little otherwise
            ours = recorder.steer(simulator.spec.benchmark, seen.states, cameras, step)
            assert np.allclose(ours, action, atol=1e-3)
            assert seen.task_description == theirs["sentence"]
        outcomes.append(simulator.step(action))
        paid.append(rewards(outcomes[-1]))
    assert [outcome.success for outcome in outcomes] == [False] * (len(outcomes) - 1) + [bool(theirs["success"])]
    assert np.isclose(sum(paid), theirs["sum_reward"], atol=1e-5)
    assert np.isclose(max(paid), theirs["max_reward"], atol=1e-5)
    assert simulator.spec.max_episode_steps == theirs["horizon"] >= len(outcomes)
    simulator.close()


@pytest.mark.parametrize("name", chosen(METAWORLD))
def test_an_episode_of_metaworld_is_lerobots(name):
    """In all tasks, of which LeRobot's draws begin twelve otherwise; its reward is Meta-World's shaped one."""
    pytest.importorskip("metaworld", reason="Meta-World is not installed: pip install 'vla-torchrl[metaworld]'")
    theirs = METAWORLD[name]
    simulator = make_spec(f"metaworld/{theirs['task']}", protocol="lerobot").make()
    simulator.reset(Episode(0, 7))  # whatever ran before
    simulator.step(np.ones(4, np.float32))
    states = lambda: simulator._world._get_curr_obs_combined_no_goal()[:4]  # noqa: E731
    replay(simulator, Episode(0, int(theirs["seed"])), theirs, states, lambda _: simulator._shaped)


@pytest.mark.parametrize("name", chosen(LIBERO))
def test_an_episode_of_libero_is_lerobots(name):
    """With the same stand-ins for meshes. Fixtures of later episodes depend on how often LeRobot has reset before."""
    if not (libero_assets() / "MANIFEST.md").is_file():
        pytest.skip("LeRobot's episodes were recorded with the stand-ins for LIBERO's assets")
    theirs = LIBERO[name]
    suite = str(theirs["suite"]).removeprefix("libero_")
    task = [task.name for task in suites()[suite]].index(str(theirs["task"]))
    simulator = make_spec(f"libero/{suite}", protocol="lerobot").make()
    episode = Episode(task, int(theirs["seed"]) - 1000)
    replay(simulator, episode, theirs, lambda: simulator._world.states(), lambda outcome: outcome.reward)


def test_an_evaluation_gives_lerobots_results():
    """The policy in our loop: as many actions to each success."""
    pytest.importorskip("metaworld", reason="Meta-World is not installed: pip install 'vla-torchrl[metaworld]'")
    theirs = [
        each for each in METAWORLD.values() if each["task"] == "drawer-close-v3" and len(each["actions"]) != SHORT
    ]
    env = make_env("metaworld/drawer-close-v3", 1, 1, protocol="lerobot", num_workers=1, seed=0)
    steps = iter([step for each in theirs for step in range(len(each["actions"]))])

    def act(states, images):
        action = recorder.steer("metaworld", states[0].numpy(), [images[0].numpy()], next(steps))
        return torch.from_numpy(action)[None, None]

    policy = TensorDictModule(act, in_keys=[keys.STATES, keys.IMAGES], out_keys=[keys.ACTION])
    result = evaluate(env, policy, evaluation_episodes(env.simulator_spec, trials=3))
    env.close()
    assert [each.episode.trial_id for each in result.episodes] == [int(each["seed"]) for each in theirs]
    assert [each.success_once for each in result.episodes] == [bool(each["success"]) for each in theirs]
    assert [each.episode_len for each in result.episodes] == [len(each["actions"]) for each in theirs]


def test_training_runs_other_initial_states_of_metaworld_than_evaluations():
    spec = make_spec("metaworld/MT50", protocol="lerobot")
    sampler = EpisodeSampler(spec, seed=3)
    assert max(sampler.next().trial_id for _ in range(300)) < 1000
    assert {episode.trial_id for episode in evaluation_episodes(spec)} == set(range(1000, 1010))


def test_it_is_not_the_benchmarks_protocol_of_metaworld_and_says_so():
    assert make_spec("metaworld/MT50") == make_spec("metaworld/MT50", protocol="rlinf")
    own = make_spec("metaworld/MT50", protocol="lerobot", max_episode_steps=100).protocol_deviations
    assert own[0].startswith("LeRobot's protocol: camera corner2, moved, instead of corner4, horizon 500")
    assert own[1:] == ("horizon 100 instead of 500",)


CAMERA = {"lookat": [0, 0, 0], "distance": 1, "azimuth": 0, "elevation": 0}


@pytest.mark.parametrize(
    ("id", "options", "message"),
    [
        ("metaworld/MT50", {"protocol": "leRobot"}, "must be 'rlinf' or 'lerobot'; did you mean lerobot"),
        ("libero/goal", {"protocol": "leRobot"}, "did you mean lerobot"),
        (
            "metaworld/MT50",
            {"protocol": "lerobot", "camera": CAMERA},
            "protocol=lerobot, which has its own: leave it out",
        ),
        ("calvin/D", {"protocol": "lerobot"}, "unknown option of calvin 'protocol'"),
        ("robotwin/click_bell", {"protocol": "lerobot"}, "unknown option of robotwin 'protocol'"),
    ],
)
def test_mistakes_are_one_line(id, options, message):
    with pytest.raises(ValueError, match=message) as refused:
        make_spec(id, **options)
    assert "\n" not in str(refused.value)
