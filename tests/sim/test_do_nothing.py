"""``ablation=do_nothing`` in every benchmark that this machine has: its arm stays where it is, gripper and all."""

import pytest
import torch

from vla_algos.ablations import DoNothing
from vla_common.keys import ACTION, STATES
from vla_envs import EpisodeQueue, evaluation_episodes, make_env, make_spec
from vla_envs.rendering.vulkan import VulkanError

STEPS = 20
SUITES = {  # and how far each number of the states may come away: what settles, and what gravity pulls down
    "metaworld/pick-place-v3": ({"image_size": 32, "render_quality": "minimal"}, 0.01),
    "libero/spatial": ({"image_size": 32, "task_ids": [0]}, 0.02),
    "maniskill/PutOnPlateInScene25MultiPlate-v1": ({"image_size": 32, "render_quality": "fast"}, 0.02),
    "calvin/place_in_slider": ({"image_size": 32}, 0.02),  # begins with a block in the hand
    "robotwin/click_bell": ({"render_quality": "fast"}, 0.02),
}


@pytest.mark.parametrize("suite", SUITES)
def test_nothing_moves(suite):
    options, tolerance = SUITES[suite]
    try:
        spec = make_spec(suite, **options)
        spec.check()
    except (ImportError, FileNotFoundError, VulkanError) as error:
        pytest.skip(str(error).splitlines()[-1].strip())
    chunk = 5 if spec.control_frequency else STEPS
    env = make_env(spec, 1, chunk, num_workers=1)
    try:
        env.set_episodes(EpisodeQueue(evaluation_episodes(spec, 1, seed=5)))
        td, policy = env.reset(), DoNothing(spec, chunk)
        before = td[STATES].clone()
        for _ in range(STEPS // chunk):
            after = env.step(policy(td))["next"]
            assert not after["crashed"].any()
            assert after["done"].any() or after["step_mask"].all()
            td = after.exclude(ACTION)
        moved = (after[STATES] - before).abs().max().item()
        assert moved < tolerance, (before, after[STATES])
        env.set_episodes(EpisodeQueue(evaluation_episodes(spec, 1, seed=5)))
        waved = env.reset()
        waved[ACTION] = policy(waved)[ACTION] + 0.5 * torch.tensor(spec.action_high).clamp(max=1)
        assert not torch.allclose(env.step(waved)["next", STATES], before, atol=2 * tolerance), "it could have moved"
    finally:
        env.close()
