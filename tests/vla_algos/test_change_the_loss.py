"""The loss of docs/how-to/change-the-loss.md that adds a term to PPO, as it stands there."""

import re
from typing import Any

import pytest
import torch
from paths import ROOT
from toy import CHUNK, DIM, ToyEnv

from vla_algos import ChunkClipPPOLoss, Learner, StepCollector, gae
from vla_common.settings import Fraction, check_settings, setting_types
from vla_policies import SmallVLA, SmallVLAConfig

PAGE = (ROOT / "docs" / "how-to" / "change-the-loss.md").read_text()


@pytest.fixture
def penalised():
    """The class of the page."""
    (code,) = re.findall(r"```python\n((?:from [^\n]*\n|\n)*class PenaltyPPOLoss.*?)```", PAGE, re.DOTALL)
    known = {"__name__": "my_loss"}
    exec(code, known)
    return known["PenaltyPPOLoss"]


@pytest.fixture
def small_batch():
    """A policy, and what it did 24 times; the weights have changed since, so that ratios are not 1."""
    torch.manual_seed(0)
    size = {
        "chunk_size": CHUNK,
        "num_bins": 5,
        "dim": 16,
        "layers": 1,
        "heads": 2,
        "keypoints": 4,
        "channels": (4, 4, 4),
    }
    policy = SmallVLA(SmallVLAConfig((-1.0,) * DIM, (1.0,) * DIM, 3, **size))
    batch = gae(StepCollector(ToyEnv(6, horizon=60, goal=99), policy, 4).rollout())
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter += 0.01 * torch.randn_like(parameter)
    return policy, batch


def test_its_term_is_added_and_logged(penalised, small_batch):
    policy, batch = small_batch
    plain, loss = ChunkClipPPOLoss(policy), penalised(policy, penalty_coeff=0.5)
    expected, found = plain(batch.reshape(-1)), loss(batch.reshape(-1))
    assert set(found.keys(True, True)) == set(loss.out_keys)
    for name, value in expected.items():
        if name != "weights":
            assert torch.equal(found[name], value), name
    executed = batch["next", "step_mask"].reshape(-1, CHUNK)
    log_prob = policy.evaluate_actions(batch.reshape(-1))[0]
    squares = (log_prob - batch["action_log_prob"].reshape(log_prob.shape))[executed] ** 2
    torch.testing.assert_close(found["loss_penalty"], 0.5 * squares.mean())
    torch.testing.assert_close(found["penalty"], squares.mean().detach())
    learner = Learner(loss, lr=1e-3, minibatch_size=24, max_log_ratio=None)
    assert learner.update(batch)["train/penalty"] == pytest.approx(squares.mean().item(), rel=1e-5)


def test_parts_of_a_minibatch_add_up(penalised, small_batch):
    policy, batch = small_batch
    gradients = []
    for micro_batch_size in (None, 5):
        learner = Learner(
            penalised(policy, penalty_coeff=5.0),
            lr=1e-12,
            minibatch_size=24,
            micro_batch_size=micro_batch_size,
            max_log_ratio=None,
            max_grad_norm=None,
        )
        learner.update(batch)
        gradients.append([each.grad.clone() for each in policy.parameters() if each.grad is not None])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-4)


def test_its_settings_are_its_own_and_those_of_ppo(penalised):
    types = setting_types(penalised, without=["policy", "decoupled"])
    assert set(types) == {"penalty_coeff", *setting_types(ChunkClipPPOLoss, without=["policy", "decoupled"])}
    with pytest.raises(ValueError, match=r"loss.penalty_coeff=-1: must be greater than or equal to 0"):
        check_settings("loss", {"penalty_coeff": -1, "clip_epsilon": 0.2}, types)
    with pytest.raises(ValueError, match=r"loss.clip_epsilon=2"):
        check_settings("loss", {"penalty_coeff": 1, "clip_epsilon": 2}, types)


def test_options_that_are_not_passed_on_are_no_settings():
    class Base:
        def __init__(self, policy, one: int = 1):
            pass

    class Closed(Base):
        def __init__(self, policy, two: int = 2):
            super().__init__(policy)

    class Renamed(Base):
        def __init__(this, policy, *, one: float = 1.0, **options):  # noqa: N805
            super().__init__(policy, **options)

    def function(three: int = 3, **options):
        pass

    assert set(setting_types(Closed)) == {"policy", "two"}
    assert setting_types(Renamed, without=["policy"]) == {"one": float}, "its own annotation, not that of the base"
    assert set(setting_types(function)) == {"three"}


def test_annotations_of_a_module_that_postpones_them_are_read():
    """They are texts then, as in a stranger's file; a name that only a type checker knows may be anything."""
    module = {"Fraction": Fraction}
    head = "from __future__ import annotations\n"
    exec(head + "def loss(clip: Fraction = 0.2, names: list[str] = (), env: Unknown = None): ...", module)
    assert setting_types(module["loss"]) == {"clip": Fraction, "names": list[str], "env": Any}
