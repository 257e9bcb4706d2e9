"""Checkpoints are whole or absent, and broken ones say what to do."""

import errno
import hashlib
import io
import random
import shutil
import subprocess
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from toy import ToyEnv, ToyPolicy

import vla_algos.run.checkpoints as checkpoint_module
from benchmarks.storm import corruption
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
from vla_algos.run.resume import ResumableRun


class SavablePolicy(ToyPolicy):
    def start_iteration(self, iteration):
        """Nothing is annealed."""

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


# Damage


def run_of(folder):
    """A run of a tiny policy that can be resumed, and its learner's state."""
    learner = SimpleNamespace(values=torch.zeros(4))
    learner.state_dict = lambda: {"values": learner.values}
    learner.load_state_dict = lambda state: setattr(learner, "values", state["values"])
    return ResumableRun(folder, SavablePolicy(), {"learner": learner}, every=1), learner


def three_iterations(folder):
    run, learner = run_of(folder)
    for iteration in range(4):
        learner.values = torch.full((4,), float(iteration))
        run.finish(iteration)
    return folder / "checkpoints"


def damage(checkpoint):
    file = checkpoint / "training.pt"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_digests_are_those_of_sha256sum(tmp_path):
    folder = save_checkpoint(tmp_path, 1, None, {"x": torch.randn(1000)})
    expected = hashlib.sha256((folder / "training.pt").read_bytes()).hexdigest()
    assert (folder / "SHA256SUMS").read_text() == f"{expected}  training.pt\n"
    done = subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=folder, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "training.pt: OK\n")


def test_a_broken_checkpoint_falls_back_to_the_one_before(tmp_path, capsys):
    root = three_iterations(tmp_path)
    damage(root / "step_00000003")
    run, learner = run_of(tmp_path)
    assert run.resume() == 2
    assert learner.values.tolist() == [2.0] * 4
    said = capsys.readouterr().out
    assert said.count("\n") == 1
    assert "warning: " in said
    assert "step_00000003 has another training.pt than was written" in said
    assert "Going on from the checkpoint before it, " in said
    run.finish(3)  # in its place
    assert run_of(tmp_path)[0].resume() == 3


def test_no_checkpoint_that_is_whole(tmp_path):
    root = three_iterations(tmp_path)
    for step in (2, 3):
        damage(root / f"step_0000000{step}")
    with pytest.raises(CheckpointError, match=r"no checkpoint in .*step_00000003 has .*step_00000002 has .*hydra.run"):
        run_of(tmp_path)[0].resume()


@pytest.mark.parametrize("kind", ["gone", "dangling", "folder", "file"])
def test_a_broken_link_to_the_latest(kind, tmp_path):
    root = three_iterations(tmp_path)
    link = root / "latest"
    link.unlink()
    if kind == "dangling":
        link.symlink_to("step_00000009")
    elif kind == "folder":
        link.mkdir()
    elif kind == "file":
        link.write_text("")
    run, _ = run_of(tmp_path)
    assert run.resume() == 3
    run.finish(4)
    assert run_of(tmp_path)[0].resume() == 4


def test_exchanged_checkpoints(tmp_path):
    root = three_iterations(tmp_path)
    shutil.rmtree(root / "step_00000003")
    shutil.copytree(root / "step_00000002", root / "step_00000003")
    with pytest.raises(CheckpointError, match="is of iteration 2: exchanged"):
        load_training_state(root / "step_00000003")
    (root / "step_00000002" / "SHA256SUMS").unlink()
    with pytest.raises(CheckpointError, match=r"has no SHA256SUMS; .*type: \(cd .* && sha256sum training.pt > SHA256"):
        load_training_state(root / "step_00000002")


def test_a_disk_that_writes_something_else(tmp_path, monkeypatch):
    save_checkpoint(tmp_path, 1, None, {"x": torch.zeros(1000)})
    flush = checkpoint_module.flush

    def lie(path):
        if path.name == "training.pt":
            damage(path.parent)
        flush(path)

    monkeypatch.setattr(checkpoint_module, "flush", lie)
    with pytest.raises(
        OSError, match=r"step_00000002 could not be written: .* has another training.pt than was written"
    ):
        save_checkpoint(tmp_path, 2, None, {"x": torch.zeros(1000)})
    assert names(tmp_path) == ["step_00000001"]


def test_what_a_full_disk_says(tmp_path, monkeypatch):
    class Full(io.BytesIO):
        def write(self, _):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint_module, "open", lambda *_: Full(), raising=False)
    with pytest.raises(OSError, match=r"could not be written: .*No space left on device"):
        save_checkpoint(tmp_path, 2, None, {"x": torch.zeros(1000)})


@pytest.mark.parametrize("what", ["weights", "learner"])
def test_what_is_not_finite_is_not_saved(what, tmp_path):
    root = three_iterations(tmp_path)
    run, learner = run_of(tmp_path)
    run.resume()
    if what == "learner":
        learner.values = torch.tensor([0.0, float("nan")])
    else:
        next(run.policy.parameters()).data.view(-1)[0] = float("inf")
    message = (
        rf"the weights after iteration 4 are not finite \(1 tensors, such as {what}\..*the last good checkpoint is .*3;"
    )
    with pytest.raises(CheckpointError, match=message):
        run.finish(4)
    assert names(root) == ["step_00000002", "step_00000003"]


def test_the_format_before_says_which_version_reads_it(tmp_path):
    torch.save({"format": "vla-torchrl training state 4", "step": 1, "state": {}}, tmp_path / "training.pt")
    with pytest.raises(CheckpointError, match=r"is a 'vla-torchrl training state 4', .*resume with the version"):
        load_training_state(tmp_path)


def test_the_storm_of_corruptions():
    tally = corruption.run(count=30, seed=1)
    assert tally.clean, tally.failures
