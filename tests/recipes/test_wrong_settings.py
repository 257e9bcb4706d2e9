"""Wrong settings are refused by name before work: a small storm, and wrong arguments from Python."""

import re

import gymnasium
import numpy as np
import pytest
import torch
from torch import nn

from tests.storm import configurations
from vla_algos import BehaviourCloning, ChunkClipPPOLoss, Learner, gae
from vla_common.settings import Count, Fraction, Positive, check_settings, checked
from vla_envs import EpisodeSampler, evaluation_episodes, make_env, make_spec
from vla_envs.gym.env import EpisodeStream
from vla_policies import SmallFlow, SmallVLA, register_policy
from vla_policies.small import SmallVLAConfig

SPEC = make_spec("metaworld/reach-v3")


def test_wrong_configurations_are_refused_by_name():
    tally = configurations.run(20, seed=7)
    assert tally.clean, "\n".join(tally.failures)
    assert set(tally.kinds) == {"mistake", "nonsense"}


def test_every_mistake_is_another_one():
    assert len({tuple(mistake) for mistake in configurations.MISTAKES}) == len(configurations.MISTAKES) >= 300


@pytest.fixture(scope="module")
def policy():
    return SmallVLA.make(SPEC, dim=16, heads=2, layers=1)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda policy: ChunkClipPPOLoss(policy, clip_epsilon=-1), "clip_epsilon=-1: must be greater than 0"),
        (lambda policy: ChunkClipPPOLoss(policy, clip_epsilon=(1.0, 0.2)), "clip_epsilon=.*entry 0: must be less"),
        (lambda policy: ChunkClipPPOLoss(policy, clip_epsilonn=0.2), "unknown argument .*did you mean clip_epsilon"),
        (lambda policy: ChunkClipPPOLoss(policy, huber_delta=float("nan")), "huber_delta=NaN: must be a finite number"),
        (lambda policy: gae(None, gamma=2.0), "gamma=2.0: must be less than or equal to 1"),
        (lambda policy: gae(None, lmbda=95), r"lmbda=95: .*did you mean 0\.95"),
        (lambda policy: gae(None, normalize="no"), "normalize=no: must be a valid boolean; write false"),
        (lambda policy: gae(None, gama=0.9), "did you mean gamma"),
        (lambda policy: Learner(ChunkClipPPOLoss(policy), lr=-1), "lr=-1: must be greater than 0"),
        (lambda policy: Learner(ChunkClipPPOLoss(policy), lr=1e-3, betas=(0.99, 0.9)), r"write \[0.9, 0.99\]"),
        (lambda policy: Learner(ChunkClipPPOLoss(policy), lr=1e-3, micro_batch_size=256), "micro_batch_size=256"),
        (lambda policy: Learner(ChunkClipPPOLoss(policy), lr=1e-3, warmup_updates=50, updates=45), "warmup_updates=50"),
        (lambda policy: Learner(nn.MSELoss(), lr=1e-3), "not MSELoss; such as ChunkClipPPOLoss"),
        (lambda policy: BehaviourCloning(policy, None, steps=0), "steps=0: must be greater than or equal to 1"),
        (lambda policy: SmallVLA.make(SPEC, num_bin=3), "unknown setting 'num_bin'; did you mean num_bins"),
        (lambda policy: SmallVLA.make(SPEC, num_bins=1), "num_bins=1: must be greater than or equal to 2"),
        (lambda policy: SmallFlow.make(SPEC, noise_std_range=(0.2, 0.1)), "noise_std_range=.*smallest first"),
        (lambda policy: SmallVLAConfig((-1.0,), (1.0,), 3, dim=0), "dim=0: must be greater than or equal to 1"),
        (lambda policy: policy(image=torch.zeros(1, 8, 8, 3)), "unknown observation 'image'; did you mean images"),
        (lambda policy: register_policy("x", nn.Linear), "Linear is no VLAPolicy"),
        (lambda policy: evaluation_episodes(policy), "takes a SimulatorSpec, not SmallVLA"),
        (lambda policy: evaluation_episodes(SPEC, trials=0), "trials=0: must be greater than or equal to 1"),
        (lambda policy: evaluation_episodes(SPEC, 1_000_000, repeats=2), "make 2000000 episodes"),
        (lambda policy: EpisodeSampler(SPEC, mode="orderd"), "mode=orderd: .*did you mean ordered"),
        (lambda policy: make_env(SPEC, num_envs=1_000_000), "num_envs=1000000: need at least .* GB of memory"),
        (lambda policy: make_env(SPEC, num_envs=2, step_penalty=-1), "step_penalty=-1: must be greater than or equal"),
    ],
)
def test_wrong_arguments_are_one_line_that_says_what_is_right(policy, wrong, message):
    with pytest.raises((ValueError, TypeError), match=message) as error:
        wrong(policy)
    assert "\n" not in str(error.value)


def test_images_of_floats_are_refused(policy):
    seen = {"images": torch.rand(2, 64, 64, 3), "states": torch.zeros(2, 4), "task_descriptions": ["reach", "reach"]}
    with pytest.raises(ValueError, match=r"images are uint8.*got torch\.float32"):
        policy(**seen)


@pytest.mark.parametrize("options", [{"trial_id": "a"}, {"task_id": 3.7}, {"task_id": None}, {"trial_id": [1]}])
def test_options_of_a_reset_are_whole_numbers(options):
    with pytest.raises(ValueError, match="has task_id 0 to 0"):
        EpisodeStream(SPEC).next(np.random.default_rng(0), 0, options)


def test_an_environment_of_gymnasium_is_named_as_a_mistake():
    env = gymnasium.make("vla/MetaWorld-reach-v0", image_size=32).unwrapped
    with pytest.raises(TypeError, match=r"pass its \.simulator_spec"):
        evaluation_episodes(env)


def test_what_is_no_setting_is_left_alone():
    calls = []

    @checked
    def learn(batch: torch.Tensor, rate: Positive, parts: tuple[Count, Count] = (1, 2), *, share: Fraction = 0.5):
        calls.append((batch, rate, parts, share))

    learn(torch.ones(2), 0.1, (1, 3), share=np.float32(0.25))
    learn(torch.ones(2), torch.tensor(0.5))
    assert len(calls) == 2
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'rate'"):
        learn(torch.ones(2))


@pytest.mark.parametrize(
    ("value", "expected", "message"),
    [
        (4.0, Count, "n=4.0: must be a valid integer; write 4"),
        (1e3, Count, "n=1000.0: must be a valid integer; write 1000"),
        ("", str | None, 'n="": must not be empty'),
        ("???", str, "n=???: is missing"),
        ("x" * 10_000, str, "must have at most 4096 characters, not 10000"),
        ([0.1, 0.5, 0.9], tuple[Fraction, Fraction], "must have 2 entries, not 3"),
        (float("nan"), Fraction, "n=NaN: must be a finite number"),
        (10**400, Count, "must be less than or equal to 1000000"),
    ],
)
def test_slips_are_told_in_one_short_line(value, expected, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        check_settings("", {"n": value}, {"n": expected})
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 300
