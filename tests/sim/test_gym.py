"""The Gymnasium view: ids, the environment checker, reproducible episodes, vector environments, bad input."""

import subprocess
import sys
import warnings

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from vla_common import keys
from vla_envs import list_envs, make_spec

pytest.importorskip("metaworld", reason="needs Meta-World: pip install 'vla-torchrl[metaworld]'")
SMALL = {"image_size": 32, "render_quality": "fast"}
SPELLED = {
    "metaworld/reach-v3": "vla/MetaWorld-reach-v0",
    "metaworld/ML45-train": "vla/MetaWorld-ML45-train-v0",
    "metaworld/very_hard": "vla/MetaWorld-very_hard-v0",
    "libero/spatial": "vla/LIBERO-Spatial-v0",
    "libero/10": "vla/LIBERO-10-v0",
    "maniskill/PutOnPlateInScene25Main-v3": "vla/ManiSkill-PutOnPlateInScene25Main-v0",
    "maniskill/PutOnPlateInScene25VisionTexture03-v1": "vla/ManiSkill-PutOnPlateInScene25VisionTexture03-v0",
    "maniskill/plate25-ood": "vla/ManiSkill-plate25-ood-v0",
    "maniskill/PickCube-v1": "vla/ManiSkill-PickCube-v0",
}


@pytest.fixture(scope="module")
def reach():
    env = gymnasium.make("vla/MetaWorld-reach-v0", render_mode="rgb_array", **SMALL)
    yield env
    env.close()


def assert_equal_observations(first, second):
    assert first.keys() == second.keys()
    for name, value in first.items():
        np.testing.assert_array_equal(value, second[name], err_msg=name)


def test_every_environment_has_an_id():
    ids = {spec.kwargs["name"]: id for id, spec in gymnasium.registry.items() if id.startswith("vla/")}
    assert set(ids) == set(list_envs())
    assert {name: ids[name] for name in SPELLED} == SPELLED
    suites = {"MT50", "ML45-train", "ML45-test"}
    assert {f"vla/MetaWorld-{suite}-v0" for suite in suites} <= set(ids.values())
    single = [name for name in ids if name.startswith("metaworld/") and len(make_spec(name).tasks) == 1]
    assert len(single) == 50


def test_make_finds_an_id_without_importing_us_first_and_without_torch_or_a_simulator():
    code = (
        "import sys, gymnasium\n"
        "gymnasium.make('vla_envs:vla/MetaWorld-pick-place-v0')\n"
        "print(sorted({'torch', 'mujoco', 'metaworld'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_recorded_videos_are_in_real_time(reach):
    """As many frames per second as actions: what the benchmarks' own environments say."""
    assert reach.metadata["render_fps"] == reach.unwrapped.metadata["render_fps"] == 80
    names = {"LIBERO-Spatial": 20, "ManiSkill-PutOnPlateInScene25Main": 5, "ManiSkill-PickCube": 20}
    for name, frequency in names.items():
        env = gymnasium.make(f"vla/{name}-v0")  # no simulator is started
        assert env.metadata["render_fps"] == frequency


def test_environment_checker_passes():
    env = gymnasium.make("vla/MetaWorld-button-press-topdown-v0", render_mode="rgb_array", **SMALL)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_env(env.unwrapped)
    env.close()
    unexpected = [str(w.message) for w in caught if "observation space m" not in str(w.message)]
    assert not unexpected  # what remains: states have no natural bounds


def test_same_seed_gives_the_same_episodes(reach):
    def run():
        seen = []
        for seed in (7, None):  # the second episode continues the stream of the first
            observation, info = reach.reset(seed=seed)
            seen.append((observation, info))
            for value in (0.5, -0.5):
                observation, _, _, _, info = reach.step(np.full(4, value, np.float32))
                seen.append((observation, info))
        return seen

    first, second = run(), run()
    for (observation, info), (again, info_again) in zip(first, second, strict=True):
        assert_equal_observations(observation, again)
        assert info == info_again
    assert first[0][1][keys.TRIAL_ID] != first[3][1][keys.TRIAL_ID]


def test_options_choose_the_episode():
    env = gymnasium.make("vla/MetaWorld-MT50-v0", **SMALL)
    task_id = [task.name for task in make_spec("metaworld/MT50").tasks].index("reach-v3")
    observation, info = env.reset(seed=3, options={keys.TASK_ID: task_id, keys.TRIAL_ID: 5})
    assert (info[keys.TASK_ID], info[keys.TRIAL_ID], info["episode_seed"]) == (task_id, 5, 3)
    assert observation[keys.TASK_DESCRIPTIONS] == "Reach a goal position"
    env.reset(seed=4)
    again, _ = env.reset(seed=3, options={keys.TASK_ID: task_id, keys.TRIAL_ID: 5})
    assert_equal_observations(observation, again)
    env.close()


def test_same_episode_as_the_batched_environment(reach):
    from vla_envs import Episode, EpisodeQueue, make_env

    observation, _ = reach.reset(seed=11, options={keys.TASK_ID: 0, keys.TRIAL_ID: 2})
    env = make_env("metaworld/reach-v3", 1, episodes=EpisodeQueue([Episode(0, 2, seed=11)]), **SMALL)
    batch = env.reset()
    env.close()
    np.testing.assert_array_equal(batch[keys.IMAGES][0].numpy(), observation[keys.IMAGES])
    np.testing.assert_array_equal(batch[keys.STATES][0].numpy(), observation[keys.STATES])


def test_render_returns_the_last_image_and_does_not_follow_later_ones(reach):
    observation, _ = reach.reset(seed=0)
    first = reach.render()
    np.testing.assert_array_equal(first, observation[keys.IMAGES])
    kept = first.copy()
    for _ in range(5):
        reach.step(np.ones(4, np.float32))
    assert not np.array_equal(reach.render(), kept)
    np.testing.assert_array_equal(first, kept)


def test_truncated_at_the_horizon_and_over_after_that():
    env = gymnasium.make("vla/MetaWorld-assembly-v0", horizon=3, **SMALL)
    env.reset(seed=0)
    ends = [env.step(np.zeros(4, np.float32))[2:4] for _ in range(3)]
    assert ends == [(False, False), (False, False), (False, True)]
    with pytest.raises(gymnasium.error.ResetNeeded, match="reset"):
        env.step(np.zeros(4, np.float32))
    env.close()


def test_terminated_by_success():
    env = gymnasium.make("vla/MetaWorld-reach-v0", **SMALL)
    env.reset(seed=0)
    expert = env.unwrapped._simulator.expert_action
    for _ in range(100):
        _, reward, terminated, truncated, info = env.step(expert())
        assert terminated == info["is_success"] == bool(reward)
        if terminated or truncated:
            break
    assert terminated
    assert not truncated
    env.close()


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_vector_environment_keeps_text_up_to_date(mode):
    settings = {"vector_kwargs": {"context": "spawn"}} if mode == "async" else {}
    envs = gymnasium.make_vec("vla/MetaWorld-ML45-test-v0", 2, vectorization_mode=mode, **SMALL, **settings)
    instructions = [task.instruction for task in make_spec("metaworld/ML45-test").tasks]
    for seed in (0, 1, 2):
        observation, info = envs.reset(seed=seed)
        kept = observation[keys.TASK_DESCRIPTIONS]
        assert kept == tuple(instructions[task] for task in info[keys.TASK_ID])
        assert observation[keys.IMAGES].shape == (2, 32, 32, 3)
        assert observation[keys.IMAGES].std() > 1
        observation, reward, *_ = envs.step(envs.action_space.sample())
        assert observation[keys.TASK_DESCRIPTIONS] == kept
        assert reward.shape == (2,)
    envs.close()


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (np.zeros(3, np.float32), r"float32 \[4\], got float32 \[3\]"),
        (np.zeros((5, 4), np.float32), r"got float32 \[5, 4\]"),
        (np.zeros(4, np.int64), "got int64"),
        (np.array([0, np.nan, 0, 0], np.float32), "not finite"),
    ],
)
def test_bad_actions(action, message):
    env = gymnasium.make("vla/MetaWorld-reach-v0", **SMALL).unwrapped
    env.reset(seed=0)
    with pytest.raises(ValueError, match=message):
        env.step(action)
    env.close()


def test_bad_names_and_options(reach):
    with pytest.raises(gymnasium.error.NameNotFound, match="MetaWorld-reach"):
        gymnasium.make("vla/MetaWorld-reech-v0")
    with pytest.raises(ValueError, match="image_size"):
        gymnasium.make("vla/MetaWorld-reach-v0", image_size=0)
    with pytest.raises(ValueError, match="render_qualty"):
        gymnasium.make("vla/MetaWorld-reach-v0", render_qualty="fast")
    with pytest.raises(ValueError, match="did you mean task_id"):
        reach.reset(options={"task": 0})
    with pytest.raises(ValueError, match="task_id 0 to 0"):
        reach.reset(options={keys.TASK_ID: 1})
