"""Checkpoints are whole or absent, and broken ones say what to do."""

import random

import numpy as np
import pytest
import torch
from toy import ToyEnv, ToyPolicy

from vla_algos.collectors import StepCollector
from vla_algos.run.checkpoints import (
    CheckpointError,
    checkpoints,
    latest_checkpoint,
    load_training_state,
    random_state,
    save_checkpoint,
    set_random_state,
)


class SavablePolicy(ToyPolicy):
    def save_pretrained(self, folder):
        folder.mkdir()
        torch.save(self.state_dict(), folder / "weights.pt")


class DyingPolicy(ToyPolicy):
    """The process is killed while its weights are written."""

    def save_pretrained(self, folder):
        folder.mkdir()
        (folder / "weights.pt").write_bytes(b"half of it")
        raise KeyboardInterrupt


def names(root):
    """Of the checkpoints, and what else should not be there."""
    return sorted(path.name for path in root.iterdir() if path.name != "latest")


def test_round_trip(tmp_path):
    policy = SavablePolicy()
    optimizer = torch.optim.AdamW(policy.parameters())
    collector = StepCollector(ToyEnv(2), policy, 3)
    batch = collector.next()
    sum(p.sum() for p in policy.parameters()).backward()
    optimizer.step()
    state = {
        "optimizer": optimizer.state_dict(),
        "collector": collector.state_dict(),
        "random": random_state(),
        "environment_steps": batch.numel(),
    }
    folder = save_checkpoint(tmp_path, 7, policy, state)
    loaded = load_training_state(latest_checkpoint(tmp_path))
    assert folder.name == "step_00000007"
    assert names(tmp_path) == [folder.name]
    assert loaded["collector"] == state["collector"]
    assert loaded["environment_steps"] == 6

    other = torch.optim.AdamW(SavablePolicy().parameters())
    other.load_state_dict(loaded["optimizer"])
    assert torch.equal(other.state_dict()["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"])


def test_random_states_round_trip(tmp_path):
    def draw():
        return torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random()

    folder = save_checkpoint(tmp_path, 1, SavablePolicy(), {"random": random_state()})
    expected = draw()
    set_random_state(load_training_state(folder)["random"])
    assert draw() == expected


def test_keeps_the_newest(tmp_path):
    for step in (9, 10, 100):
        save_checkpoint(tmp_path, step, SavablePolicy(), {}, keep=2)
    assert [path.name for path in checkpoints(tmp_path)] == ["step_00000010", "step_00000100"]
    # Resumed from step 10 and saved again: the later one stays, and so does what was just written.
    save_checkpoint(tmp_path, 10, SavablePolicy(), {"again": 1}, keep=1)
    assert names(tmp_path) == ["step_00000010", "step_00000100"]
    assert load_training_state(tmp_path / "step_00000010") == {"again": 1}


def test_dying_while_saving_leaves_the_last_checkpoint(tmp_path):
    save_checkpoint(tmp_path, 1, SavablePolicy(), {"value": 1})
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(tmp_path, 2, DyingPolicy(), {"value": 2})
    assert load_training_state(latest_checkpoint(tmp_path)) == {"value": 1}
    save_checkpoint(tmp_path, 2, SavablePolicy(), {"value": 3})
    assert names(tmp_path) == ["step_00000001", "step_00000002"]


def test_truncated_file(tmp_path):
    folder = save_checkpoint(tmp_path, 1, SavablePolicy(), {"x": torch.zeros(1000)})
    path = folder / "training.pt"
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(CheckpointError, match=r"truncated.*resume from the checkpoint before"):
        load_training_state(folder)


def test_foreign_files(tmp_path):
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        latest_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="does not exist"):
        load_training_state(tmp_path)
    torch.save({"model": torch.zeros(2)}, tmp_path / "training.pt")
    with pytest.raises(CheckpointError, match="load them as a policy"):
        load_training_state(tmp_path)
    torch.save(SavablePolicy(), tmp_path / "training.pt")  # would run code when unpickled
    with pytest.raises(CheckpointError, match=r"is refused: loading it would execute code \(.*SavablePolicy\)"):
        load_training_state(tmp_path)


def test_state_that_cannot_be_loaded_again(tmp_path):
    with pytest.raises(CheckpointError, match=r"state\['a'\]\[1\] is a ndarray"):
        save_checkpoint(tmp_path / "root", 1, SavablePolicy(), {"a": [0, np.zeros(2)]})
    assert not (tmp_path / "root").exists()
