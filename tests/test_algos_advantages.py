"""Generalized advantage estimation over decisions."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from vla_algos.advantages import gae, normalize_advantages
from vla_keys import (
    ADVANTAGE,
    DONE,
    NEXT,
    REWARD,
    STATE_VALUE,
    STEP_MASK,
    TERMINATED,
    VALUE_TARGET,
)

# Inputs and outputs of the advantage and loss functions of RLinf (github.com/RLinf/RLinf, commit
# a3816b596) on random data, recorded by running them.
GOLDEN = np.load(Path(__file__).parent / "golden" / "algos.npz")


def make_batch(value, next_value, reward, done, terminated, step_mask) -> TensorDict:
    """``[N, T]`` lists or tensors to a batch with feature dimensions."""
    column = lambda x, dtype: torch.as_tensor(x, dtype=dtype).unsqueeze(-1)  # noqa: E731
    mask = torch.as_tensor(step_mask)
    after = {
        STATE_VALUE: column(next_value, torch.float32),
        REWARD: column(reward, torch.float32),
        DONE: column(done, torch.bool),
        TERMINATED: column(terminated, torch.bool),
        STEP_MASK: mask,
    }
    return TensorDict({STATE_VALUE: column(value, torch.float32), NEXT: after}, batch_size=mask.shape[:2])


def test_reference_numbers():
    done = [[False, True, True], [False, False, True]]
    step_mask = torch.ones(2, 3, 4, dtype=torch.bool)
    step_mask[0, 1, 2:] = False
    step_mask[0, 2] = False  # after the end of the episode
    batch = make_batch(torch.zeros(2, 3), torch.zeros(2, 3), [[0, 5, 0], [0, 0, 0]], done, done, step_mask)
    gae(batch, gamma=0.99, lmbda=0.95)
    assert torch.allclose(
        batch[VALUE_TARGET].squeeze(-1), torch.tensor([[4.7025, 5.0, 0.0], [0.0, 0.0, 0.0]])
    )
    expected = torch.tensor([[1.03865, 1.15052, -0.72972], [-0.72972] * 3])
    assert torch.allclose(batch[ADVANTAGE].squeeze(-1), expected, atol=1e-5)


@pytest.mark.parametrize("masked", ["masked", "unmasked"])
def test_recorded_reference(masked):
    values = torch.tensor(GOLDEN[f"gae/chunk_level/{masked}/values"]).squeeze(-1).T  # [B, S + 1]
    done = torch.tensor(GOLDEN["dones"]).any(-1).T[:, 1:]
    reward = torch.tensor(GOLDEN["rewards"]).sum(-1).T
    mask = torch.tensor(GOLDEN["loss_mask"]).transpose(0, 1)
    mask = mask if masked == "masked" else torch.ones_like(mask)
    # The reference bootstraps at no kind of episode end: terminated wherever done.
    batch = gae(make_batch(values[:, :-1], values[:, 1:], reward, done, done, mask), gamma=0.99, lmbda=0.95)
    valid = mask.any(-1)
    for key, name in [(ADVANTAGE, "advantages"), (VALUE_TARGET, "returns")]:
        expected = torch.tensor(GOLDEN[f"gae/chunk_level/{masked}/{name}"]).squeeze(-1).T
        assert torch.allclose(batch[key].squeeze(-1)[valid], expected[valid], atol=1e-5)


def test_truncation_bootstraps_and_termination_does_not():
    everything = torch.ones(2, 2, 1, dtype=torch.bool)
    batch = make_batch(
        value=[[1.0, 2.0], [1.0, 2.0]],
        next_value=[[10.0, 20.0], [10.0, 20.0]],
        reward=[[0.5, 0.5], [0.5, 0.5]],
        done=[[True, False], [True, False]],
        terminated=[[True, False], [False, False]],
        step_mask=everything,
    )
    gae(batch, gamma=0.9, lmbda=0.8, normalize=False)
    # No advantage of the second episode leaks into the first; the rollout's end bootstraps from 20.
    assert torch.allclose(batch[VALUE_TARGET].squeeze(-1), torch.tensor([[0.5, 18.5], [9.5, 18.5]]))
    assert torch.allclose(batch[ADVANTAGE].squeeze(-1), torch.tensor([[-0.5, 16.5], [8.5, 16.5]]))


def test_without_bootstrap_running_out_of_time_is_worth_nothing_but_the_rollouts_end_still_is():
    batch = make_batch(
        value=[[0.0, 0.0, 0.0]],
        next_value=[[0.0, 8.0, 4.0]],
        reward=[[0.0, 1.0, 0.0]],
        done=[[False, True, False]],  # truncated after the second decision, the rollout ends after the third
        terminated=[[False, False, False]],
        step_mask=torch.ones(1, 3, 2, dtype=torch.bool),
    )
    targets = gae(batch, gamma=0.5, lmbda=1.0, bootstrap="none")[VALUE_TARGET].flatten()
    assert targets.tolist() == [0.5, 1.0, 2.0]
    targets = gae(batch, gamma=0.5, lmbda=1.0, bootstrap="truncation")[VALUE_TARGET].flatten()
    assert targets.tolist() == [2.5, 5.0, 2.0]
    with pytest.raises(ValueError, match="truncation"):
        gae(batch, bootstrap="always")


def test_lost_decision_changes_nothing_before_it():
    step_mask = torch.tensor([[[True], [False]]])
    flags = {"done": [[False, True]], "terminated": [[False, False]], "step_mask": step_mask}
    batch = make_batch([[1.0, 2.0]], [[2.0, 0.0]], [[0.5, 0.0]], **flags)
    gae(batch, gamma=0.9, lmbda=0.8, normalize=False)
    assert batch[VALUE_TARGET][0, 0].item() == pytest.approx(0.5 + 0.9 * 2.0)


def test_normalisation_needs_two_samples():
    one = torch.tensor([3.0, 7.0])
    assert normalize_advantages(one, torch.tensor([True, False])).tolist() == [0.0, 0.0]
    sample = torch.tensor([1.0, 2.0, 6.0, 100.0])
    normal = normalize_advantages(sample, torch.tensor([True, True, True, False]))
    assert normal[:3].mean().abs() < 1e-6 and normal[:3].std() == pytest.approx(1.0, abs=1e-4)
