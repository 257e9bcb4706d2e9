"""VLAEnv keeps the data contract on the real Meta-World."""

from dataclasses import replace

import pytest
import torch
from torchrl.envs.utils import check_env_specs

from vla_common import keys
from vla_envs import Episode, EpisodeQueue, make_env, make_spec

pytest.importorskip("metaworld", reason="Meta-World is not installed: pip install 'vla-torchrl[metaworld]'")
OPTIONS = {"image_size": 32, "render_quality": "fast"}


@pytest.fixture(scope="module")
def env():
    env = make_env("metaworld/reach-v3+faucet-open-v3", 4, 5, num_workers=2, max_episode_steps=12, seed=3, **OPTIONS)
    yield env
    env.close()


def test_specs(env):
    check_env_specs(env)
    assert env.action_spec.shape == (4, 5, 4)


def test_it_says_what_it_is_and_what_is_not_the_benchmarks(env):
    first, *deviations = str(env).splitlines()
    what = "2 tasks, 4 environments, 32 x 32 pixels, 12 actions in chunks of 5"
    assert first == f"VLAEnv(metaworld/reach-v3+faucet-open-v3: {what})"
    assert "  not the benchmark's: horizon 12 instead of 100" in deviations


def test_a_rollout_has_the_contracts_keys_shapes_and_types(env):
    td = env.rollout(3, break_when_any_done=False)
    expected = {
        keys.IMAGES: (torch.uint8, (32, 32, 3)),
        keys.STATES: (torch.float32, (4,)),
        keys.TASK_ID: (torch.int64, ()),
        keys.TRIAL_ID: (torch.int64, ()),
        keys.GROUP_ID: (torch.int64, ()),
        keys.ACTION: (torch.float32, (5, 4)),
        (keys.NEXT, keys.REWARD): (torch.float32, (1,)),
        (keys.NEXT, keys.STEP_REWARDS): (torch.float32, (5,)),
        (keys.NEXT, keys.STEP_MASK): (torch.bool, (5,)),
        (keys.NEXT, keys.TERMINATED): (torch.bool, (1,)),
        (keys.NEXT, keys.TRUNCATED): (torch.bool, (1,)),
        (keys.NEXT, keys.DONE): (torch.bool, (1,)),
        (keys.NEXT, keys.SUCCESS): (torch.bool, (1,)),
        (keys.NEXT, keys.EPISODE_RETURN): (torch.float32, (1,)),
        (keys.NEXT, keys.EPISODE_LEN): (torch.int64, (1,)),
    }
    for key, (dtype, shape) in expected.items():
        assert (td[key].dtype, td[key].shape) == (dtype, (4, 3, *shape)), key
    instructions = {0: "Reach a goal position", 1: "Rotate the faucet counter-clockwise"}
    for slot in range(4):
        assert td[keys.TASK_DESCRIPTIONS][slot][0] == instructions[int(td[keys.TASK_ID][slot, 0])]


def test_the_horizon_truncates_in_the_middle_of_a_chunk(env):
    after = env.rollout(3, lambda td: td.set(keys.ACTION, torch.zeros(4, 5, 4)), break_when_any_done=False)[keys.NEXT]
    assert after[keys.STEP_MASK][:, 2].tolist() == [[True, True, False, False, False]] * 4
    assert after[keys.EPISODE_LEN].squeeze(-1).tolist() == [[5, 10, 12]] * 4
    assert after[keys.TRUNCATED].squeeze(-1).tolist() == [[False, False, True]] * 4
    assert not after[keys.TERMINATED].any()


def expert_rollout(**options):
    """Drive one episode by the scripted expert, whose simulator runs the same episode beside the environment."""
    episode = Episode(0, 4)
    env = make_env("metaworld/reach-v3", 1, 5, episodes=EpisodeQueue([episode]), **OPTIONS, **options)
    twin = env.simulator_spec.make()
    twin.reset(episode)
    td, outcomes = env.reset(), []
    for _ in range(20):
        chunk = []
        for _ in range(5):
            chunk.append(torch.from_numpy(twin.expert_action()))
            twin.step(chunk[-1].numpy())
        td[keys.ACTION] = torch.stack(chunk).unsqueeze(0)
        outcome, td = env.step_and_maybe_reset(td)
        outcomes.append(outcome[keys.NEXT])
        if outcomes[-1][keys.DONE]:
            break
    env.close()
    return torch.stack(outcomes, 1)


def test_success_ends_the_episode_in_the_middle_of_a_chunk():
    after = expert_rollout()
    assert after[keys.TERMINATED][0, -1]
    assert after[keys.SUCCESS][0, -1]
    assert not after[keys.TRUNCATED].any()
    mask = after[keys.STEP_MASK][0, -1]
    steps = int(mask.sum())
    assert mask.tolist() == [True] * steps + [False] * (5 - steps)
    assert after[keys.STEP_REWARDS][0, -1].tolist() == [float(i == steps - 1) for i in range(5)]
    assert after[keys.EPISODE_RETURN][0, -1] == 1.0
    assert after[keys.EPISODE_LEN][0, -1] == after[keys.STEP_MASK].sum()


def test_with_ignore_terminations_the_episode_goes_on_to_the_horizon():
    after = expert_rollout(ignore_terminations=True)
    assert after[keys.TRUNCATED][0, -1]
    assert not after[keys.TERMINATED].any()
    assert after[keys.EPISODE_LEN][0, -1] == 100
    assert after[keys.SUCCESS][0, -1]
    assert after[keys.EPISODE_RETURN][0, -1] > 1.0


def test_training_reward_options():
    """Success is paid as it comes, as a change, times a coefficient, and every action may cost something."""
    plain = expert_rollout(ignore_terminations=True)[keys.STEP_REWARDS].flatten()
    assert set(plain.tolist()) == {0.0, 1.0}
    assert plain.sum() > 1
    options = {"ignore_terminations": True, "reward_coef": 5.0, "relative_reward": True, "step_penalty": 0.25}
    after = expert_rollout(**options)
    changes = torch.diff(plain, prepend=torch.zeros(1))
    assert torch.equal(after[keys.STEP_REWARDS].flatten(), 5.0 * changes - 0.25)
    assert torch.allclose(after[keys.REWARD].flatten(), after[keys.STEP_REWARDS].sum(-1).flatten())
    assert after[keys.EPISODE_RETURN][0, -1].item() == pytest.approx(5.0 * plain[-1].item() - 25.0)

    ended = expert_rollout(step_penalty=0.25)  # what was not executed costs nothing
    executed = ended[keys.STEP_MASK]
    assert (ended[keys.STEP_REWARDS][~executed] == 0).all()
    assert (~executed).any()
    assert ended[keys.EPISODE_RETURN][0, -1].item() == pytest.approx(1.0 - 0.25 * executed.sum().item())


def test_relative_rewards_start_anew_with_each_episode():
    episodes = EpisodeQueue([Episode(0, 4)] * 2)
    spec = make_spec("metaworld/reach-v3", max_episode_steps=5, reward_type="progress", **OPTIONS)
    spec = replace(spec, pays_once=False)  # any reward that is not 0 at once
    env = make_env(spec, 1, 5, episodes=episodes, relative_reward=True)
    action = torch.full((1, 5, 4), 0.5)
    after = env.rollout(2, lambda td: td.set(keys.ACTION, action), break_when_any_done=False)[keys.NEXT]
    env.close()
    assert torch.equal(after[keys.STEP_REWARDS][0, 0], after[keys.STEP_REWARDS][0, 1])
    assert after[keys.STEP_REWARDS].abs().sum() > 0


def test_groups_share_one_initial_state_to_the_pixel():
    env = make_env("metaworld/reach-v3+push-v3", 4, 5, seed=0, group_size=2, num_workers=2, **OPTIONS)
    td = env.reset()
    assert td[keys.GROUP_ID].tolist() == [0, 0, 1, 1]
    for key in (keys.IMAGES, keys.STATES, keys.TASK_ID, keys.TRIAL_ID):
        assert torch.equal(td[key][0], td[key][1])
        assert torch.equal(td[key][2], td[key][3])
    assert not torch.equal(td[keys.IMAGES][0], td[keys.IMAGES][2])
    env.close()


def test_the_same_seed_gives_the_same_rollout_whatever_the_number_of_workers():
    rollouts = []
    for workers in (1, 3):
        env = make_env("metaworld/reach-v3+push-v3", 3, 5, num_workers=workers, seed=9, max_episode_steps=15, **OPTIONS)
        torch.manual_seed(0)
        rollouts.append(
            env.rollout(8, lambda td: td.set(keys.ACTION, torch.rand(3, 5, 4) * 2 - 1), break_when_any_done=False)
        )
        env.close()
    for key in (keys.IMAGES, keys.STATES, keys.TRIAL_ID, (keys.NEXT, keys.IMAGES), (keys.NEXT, keys.SUCCESS)):
        assert torch.equal(rollouts[0][key], rollouts[1][key]), key


def test_slots_without_an_episode_are_idle():
    env = make_env("metaworld/reach-v3", 2, 5, episodes=EpisodeQueue([Episode(0, 0)]), **OPTIONS)
    td = env.reset()
    assert td[keys.TASK_ID].tolist() == [0, -1]
    td[keys.ACTION] = torch.zeros(2, 5, 4)
    after = env.step(td)[keys.NEXT]
    assert after[keys.DONE].squeeze(-1).tolist() == [False, True]
    assert after[keys.STEP_MASK].any(-1).tolist() == [True, False]
    assert not after[keys.CRASHED].any()
    env.close()


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (torch.zeros(4, 4, 4), r"\[4, 5, 4\].*got torch.float32 \[4, 4, 4\]"),
        (torch.zeros(4, 5, 4, dtype=torch.float64), "torch.float64"),
        (torch.full((4, 5, 4), torch.nan), "not finite in environments"),
    ],
)
def test_wrong_actions_are_one_clear_error(env, action, message):
    td = env.reset()
    td[keys.ACTION] = action
    with pytest.raises(ValueError, match=message):
        env.step(td)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_envs": 6, "group_size": 4}, "num_envs=8"),
        ({"num_envs": 0}, "num_envs"),
        ({"num_envs": 2, "chunk_size": 0}, "chunk_size"),
        ({"num_envs": 2, "num_workers": 3}, "num_workers"),
        ({"num_envs": 2, "image_size": 0}, "image_size"),
    ],
)
def test_impossible_numbers_say_what_would_be_right(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_env("metaworld/reach-v3", **arguments)
