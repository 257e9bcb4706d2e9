"""On the real Meta-World: resume under transforms, and what its simulator does with actions out of bounds."""

import pytest
import torch
from torchrl.envs import CatFrames, Compose, RewardSum, StepCounter, TransformedEnv

from vla_common import keys
from vla_envs import Episode, EpisodeQueue, make_env
from vla_envs.resume import load_state, save_state

pytest.importorskip("metaworld", reason="Meta-World is not installed: pip install 'vla-torchrl[metaworld]'")
OPTIONS = {"image_size": 32, "render_quality": "fast", "num_workers": 1}


def test_a_saved_state_goes_on_to_the_bit_under_transforms(tmp_path):
    def new():
        env = make_env("metaworld/reach-v3+faucet-open-v3", 2, 5, max_episode_steps=20, seed=3, **OPTIONS)
        frames = CatFrames(N=3, dim=-1, in_keys=[keys.STATES])
        return TransformedEnv(env, Compose(frames, RewardSum(in_keys=[keys.REWARD]), StepCounter()))

    def steps(env, td, actions):
        outcomes = []
        for action in actions:
            outcome, td = env.step_and_maybe_reset(td.set(keys.ACTION, action))
            outcomes.append(outcome)
        return outcomes, td

    torch.manual_seed(0)
    actions = torch.rand(10, 2, 5, 4) * 2 - 1
    env = new()
    _, td = steps(env, env.reset(), actions[:6])
    torch.save(save_state(env, td), tmp_path / "state.pt")
    expected, _ = steps(env, td, actions[6:])
    env.close()
    other = new()
    again, _ = steps(other, load_state(other, torch.load(tmp_path / "state.pt", weights_only=True)), actions[6:])
    other.close()
    for first, second in zip(expected, again, strict=True):
        assert first[keys.TASK_DESCRIPTIONS] == second[keys.TASK_DESCRIPTIONS]
        for key in set(first.keys(True, True)) - {keys.TASK_DESCRIPTIONS, ("next", keys.TASK_DESCRIPTIONS)}:
            assert torch.equal(first[key], second[key]), key


def test_metaworld_clips_actions_itself():
    """An action of twice the bound does to the bit what the bound does, and is counted."""
    after = []
    for size in (1.0, 2.0):
        env = make_env("metaworld/reach-v3", 1, 5, episodes=EpisodeQueue([Episode(0, 4)]), **OPTIONS)
        td = env.reset()
        for side in (size, -size, size):
            td = env.step(td.set(keys.ACTION, torch.full((1, 5, 4), side)))["next"]
        after.append(td)
        env.close()
    for key in (keys.IMAGES, keys.STATES, keys.STEP_REWARDS):
        assert torch.equal(after[0][key], after[1][key]), key
    assert [td[keys.ACTIONS_CLIPPED].item() for td in after] == [0, 1]
