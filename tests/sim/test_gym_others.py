"""Gymnasium's vector interface over real simulators, forks, videos and windows, TorchRL's and SB3's use of the ids."""

import os
import subprocess
import sys
import time
import warnings

import gymnasium
import numpy as np
import pytest
from gym_vector import make_pair
from gymnasium.vector import AutoresetMode

from vla_common import keys

pytest.importorskip("metaworld", reason="needs Meta-World: pip install 'vla-torchrl[metaworld]'")
SMALL = {"image_size": 32, "render_quality": "fast"}
SUITE, REACH = "vla/MetaWorld-ML45-test-v0", "vla/MetaWorld-reach-v0"


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED])
def test_the_same_pixels_and_infos_as_gymnasiums_own(mode):
    """Several tasks, shaped rewards, episodes that end after three actions."""
    pair = make_pair(SUITE, 2, mode, horizon=3, reward_type="progress", **SMALL)
    pair.reset(seed=[3, 1], options={keys.TASK_ID: 2})
    actions = np.random.default_rng(0).uniform(-1, 1, (7, 2, 4)).astype(np.float32)
    for action in actions:
        _, _, terminated, truncated, _ = pair.step(action)
        assert pair.ours.call("task_description") == pair.theirs.call("task_description")
        if mode is AutoresetMode.DISABLED and (terminated | truncated).any():
            pair.reset(options={"reset_mask": np.array([True, False])})
            pair.reset(options={"reset_mask": np.array([False, True])})
    pair.close()


def test_make_vec_needs_neither_torch_nor_a_simulator_in_this_process():
    code = (
        "import sys, gymnasium\n"
        "envs = gymnasium.make_vec('vla_envs:vla/MetaWorld-reach-v0', 2, chunk_size=5, image_size=32)\n"
        "envs.reset(seed=0)\n"
        "envs.step(envs.action_space.sample())\n"
        "envs.close()\n"
        "print(sorted({'torch'} & set(sys.modules)), type(envs).__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[] SimulatorVectorEnv", done.stderr


def test_a_fork_of_a_process_that_draws_fails_at_once_with_what_to_type():
    env = gymnasium.make(REACH, **SMALL)
    env.reset(seed=0)
    started = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        envs = gymnasium.make_vec(REACH, 2, vectorization_mode="async", vector_kwargs={"context": "fork"}, **SMALL)
        with pytest.raises(RuntimeError, match=r'forked from one that draws with OpenGL.*context="spawn"') as caught:
            envs.reset(seed=0)
        envs.close(terminate=True)
    assert "\n" not in str(caught.value)
    assert time.monotonic() - started < 30
    env.step(np.zeros(4, np.float32))  # this process draws as before
    child = os.fork()
    if child == 0:
        try:
            env.step(np.zeros(4, np.float32))
        except RuntimeError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    env.close()


def test_gymnasium_records_a_video(tmp_path):
    pytest.importorskip("moviepy", reason="needs moviepy: pip install 'vla-torchrl[video]'")
    env = gymnasium.make(REACH, render_mode="rgb_array", horizon=8, image_size=64, render_quality="fast")
    env = gymnasium.wrappers.RecordVideo(env, str(tmp_path / "videos"), episode_trigger=lambda episode: True)
    env.reset(seed=0)
    frames = [env.render()]
    for _ in range(8):
        env.step(np.full(4, 0.5, np.float32))
        frames.append(env.render())
    env.close()
    import imageio.v3

    (path,) = tmp_path.glob("videos/*.mp4")
    video = imageio.v3.imread(path)
    assert video.shape == (9, 64, 64, 3)
    assert np.abs(video[-1].astype(int) - frames[-1]).mean() < 12  # it is compressed
    assert imageio.v3.immeta(path)["fps"] == 80


def test_a_window_shows_the_last_image(monkeypatch):
    pygame = pytest.importorskip("pygame", reason="needs pygame: pip install 'vla-torchrl[video]'")
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    env = gymnasium.make(REACH, render_mode="human", **SMALL)
    for act in (lambda: env.reset(seed=0), lambda: env.step(np.ones(4, np.float32))):
        observation = act()[0]
        shown = pygame.surfarray.array3d(pygame.display.get_surface()).swapaxes(0, 1)
        np.testing.assert_array_equal(shown, observation[keys.IMAGES])
    assert env.render() is None
    env.close()
    assert not pygame.display.get_init()


def test_torchrls_gym_env_and_wrapper():
    from torchrl.envs import GymEnv, GymWrapper
    from torchrl.envs.utils import check_env_specs

    env = GymEnv(SUITE, horizon=5, **SMALL)
    check_env_specs(env)
    env.set_seed(1)
    rollout = env.rollout(7, break_when_any_done=False)
    again = GymWrapper(gymnasium.make(SUITE, horizon=5, **SMALL))
    again.set_seed(1)
    steps = iter(rollout["action"])
    repeated = again.rollout(7, lambda td: td.set("action", next(steps)), break_when_any_done=False)
    for key in (keys.IMAGES, keys.STATES, ("next", "reward"), ("next", "done")):
        assert (rollout[key] == repeated[key]).all()
    assert rollout["next", "done"].flatten().tolist() == [False] * 4 + [True] + [False] * 2
    texts = list(rollout[keys.TASK_DESCRIPTIONS])
    assert len(set(texts[:5])) == len(set(texts[5:])) == 1
    assert texts[0] != texts[5]
    env.close()
    again.close()
    skipping = GymEnv(REACH, frame_skip=2, horizon=4, **SMALL)  # TorchRL's own, which repeats the action
    assert skipping.rollout(5)["next", "done"].flatten().tolist() == [False, True]
    skipping.close()


def test_stable_baselines3_trains_on_an_id_without_its_text():
    """The example of docs/how-to/stable-baselines3.md."""
    baselines = pytest.importorskip("stable_baselines3", reason="needs pip install stable-baselines3")

    env = gymnasium.make(REACH, image_size=64, render_quality="fast", horizon=10)
    env = gymnasium.wrappers.FilterObservation(env, [keys.IMAGES, keys.STATES])
    model = baselines.PPO("MultiInputPolicy", env, n_steps=16, batch_size=8, n_epochs=1, seed=0, device="cpu")
    before = [parameter.detach().clone() for parameter in model.policy.parameters()]
    model.learn(32)
    assert model.num_timesteps == 32
    assert len(model.ep_info_buffer) == 3
    assert any((old != new).any() for old, new in zip(before, model.policy.parameters(), strict=True))
    env.close()
