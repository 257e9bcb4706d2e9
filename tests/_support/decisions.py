"""Decisions as a rollout or a data set has them, of any policy, made up from a seed: what a loss reads."""

import torch
from tensordict import NonTensorStack, TensorDict
from torchrl.envs.utils import ExplorationType, set_exploration_type
from toy import ToyActorCritic, ToyEnv

from vla_algos.collectors import StepCollector
from vla_common import keys


def decisions(policy, count, size=32, seed=0):
    """``count`` decisions of a policy on noise of ``size`` pixels, with advantages, some of their actions not done."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (count, size, size, 3), generator=generator, dtype=torch.uint8)
    texts = [f"pick up the {'green' if number % 2 else 'red'} cup" for number in range(count)]
    seen = {
        keys.IMAGES: pixels,
        keys.STATES: torch.randn(count, policy.state_dim, generator=generator),
        keys.TASK_DESCRIPTIONS: NonTensorStack(*texts),
    }
    torch.manual_seed(seed + 1)
    with torch.no_grad(), set_exploration_type(ExplorationType.RANDOM):
        acted = policy(TensorDict(seen, [count]))
    stored = (keys.ACTION, keys.ACTION_LOG_PROB, keys.STATE_VALUE)
    batch = acted.select(*policy.loss_keys, *stored, strict=False)
    mask = torch.rand(count, policy.chunk_size, generator=generator) < 0.8
    mask[:, 0] = True
    batch[keys.NEXT, keys.STEP_MASK] = mask
    batch[keys.ADVANTAGE] = torch.randn(count, 1, generator=generator)
    if policy.num_values:
        batch[keys.VALUE_TARGET] = torch.randn(count, policy.num_values, generator=generator)
    return batch


def collected(policy=ToyActorCritic):
    """A policy, and 42 decisions of 6 environments, of which one was never executed."""
    torch.manual_seed(0)
    policy = policy()
    return policy, StepCollector(ToyEnv(6, crashes={1: 1}), policy, 7).rollout()


def demonstrations(policy):
    """Eight steps of three states that count up, with black images and actions of zero."""
    data = {
        keys.IMAGES: torch.zeros(8, 16, 16, 3, dtype=torch.uint8),
        keys.STATES: torch.arange(24.0).reshape(8, 3),
        keys.PROMPT_TOKENS: policy.prompt_tokens(["push"] * 8),
        keys.ACTION: torch.zeros(8, 2, 2),
        keys.STEP_MASK: torch.ones(8, 2, dtype=torch.bool),
    }
    return TensorDict(data, [8])
