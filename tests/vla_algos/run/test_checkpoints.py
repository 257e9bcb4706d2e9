"""Checkpoints are whole or absent, and broken ones say what to do."""

import errno
import hashlib
import io
import json
import pickletools
import random
import re
import shutil
import subprocess
import threading
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from toy import ToyEnv, ToyPolicy

import vla_algos.run.checkpoints as checkpoint_module
import vla_policies.checkpoint.parts as parts
from tests.storm import corruption
from vla_algos.collectors import StepCollector
from vla_algos.run.checkpoints import (
    CheckpointError,
    Snapshot,
    begin_checkpoint,
    by_preference,
    checkpoints,
    open_checkpoint,
    save_checkpoint,
)
from vla_algos.run.plain_state import from_json, to_json
from vla_algos.run.saving import Saver
from vla_algos.run.seeds import random_state, set_random_state
from vla_common.checksums import ChecksumError, write_checksums
from vla_common.tensor_files import make_room


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


TENSORS = "tensors/process_00000.safetensors"


def save(root, step, common, own=None):
    """A whole checkpoint of one process."""
    snapshot = Snapshot.take(common, own or {})
    begin_checkpoint(root, step)
    return save_checkpoint(root, step, snapshot)


def load(folder):
    """What processes have in common, with its tensors."""
    saved = open_checkpoint(folder)
    state = make_room(saved.state)
    saved.fill(state)
    return state


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
    common = {"optimizer": optimizer.state_dict(), "environment_steps": batch.numel()}
    own = {"collector": collector.state_dict(), "random": random_state()}
    folder = save(tmp_path, 7, common, own)
    assert folder.name == "step_00000007"
    assert names(tmp_path) == [folder.name]
    loaded = load(by_preference(tmp_path)[0])
    assert loaded["environment_steps"] == 6
    assert open_checkpoint(folder).of_process(0)["collector"] == own["collector"]

    other = torch.optim.AdamW(SavablePolicy().parameters())
    other.load_state_dict(loaded["optimizer"])
    assert torch.equal(other.state_dict()["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"])
    assert other.state_dict()["state"][0]["step"].shape == ()


def test_a_snapshot_is_of_the_moment_in_which_it_was_taken(tmp_path):
    """Parts may give tensors that they go on with, as modules do, while a thread writes."""
    common, own = {"weight": torch.zeros(3), "done": [1]}, {"mean": torch.zeros(3), "seen": [1]}
    snapshot = Snapshot.take(common, own)
    for state in (common, own):
        for value in state.values():
            value += [2] if isinstance(value, list) else torch.ones(3)
    begin_checkpoint(tmp_path, 1)
    folder = save_checkpoint(tmp_path, 1, snapshot)
    assert repr(load(folder)) == repr({"weight": torch.zeros(3), "done": [1]})
    assert repr(open_checkpoint(folder).of_process(0)) == repr({"mean": torch.zeros(3), "seen": [1]})


def test_any_plain_state_comes_back(tmp_path):
    """Types, shapes and bits."""
    state = {
        "numbers": [1, -0.0, 0.1, float("inf"), float("nan"), 2**100, True, None, "\N{SNOWMAN}\x00"],
        "nested": ({"a.b": torch.zeros(0, 3), "a": {"b": torch.ones(2)}}, [(), [], {}]),
        "keys": {0: torch.tensor(3), (1, "x"): 2, "$tensor": "no tensor", None: 1, 0.5: 2},
        "dtypes": [torch.arange(5).to(d) for d in (torch.bool, torch.uint8, torch.bfloat16, torch.float64)],
        "strided": torch.arange(12).reshape(3, 4).T[1:],
    }
    folder = save(tmp_path, 1, {}, state)
    text, tensors = to_json(state)
    assert [*from_json(text, "cpu")[1]] == [*tensors]
    loaded = open_checkpoint(folder).of_process(0)
    assert loaded["keys"] == state["keys"]
    assert repr(loaded) == repr(state)
    assert load(save(tmp_path, 2, state)).keys() == state.keys()


def test_random_states_round_trip(tmp_path):
    def draw():
        return torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random()

    folder = save(tmp_path, 1, {}, {"random": random_state()})
    expected = draw()
    set_random_state(open_checkpoint(folder).of_process(0)["random"])
    assert draw() == expected


def test_keeps_the_newest(tmp_path):
    for step in (9, 10, 100):
        save(tmp_path, step, {})
    assert [path.name for path in checkpoints(tmp_path)] == ["step_00000010", "step_00000100"]
    # Resumed from step 10 and saved again: the later one stays, and so does what was just written.
    save(tmp_path, 10, {"again": 1})
    assert names(tmp_path) == ["step_00000010", "step_00000100"]
    assert load(tmp_path / "step_00000010") == {"again": 1}


def test_dying_while_saving_leaves_the_last_checkpoint(tmp_path):
    root = three_iterations(tmp_path)
    run, _ = run_of(tmp_path, DyingPolicy())
    with pytest.raises(KeyboardInterrupt):
        run.finish(4, publish=True)
    assert run_of(tmp_path)[0].resume() == 3
    run, _ = run_of(tmp_path)
    run.finish(4)
    run.wait()
    assert names(root) == ["step_00000003", "step_00000004"]


def test_truncated_file(tmp_path):
    folder = save(tmp_path, 1, {"x": torch.zeros(1000)})
    path = folder / TENSORS
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(CheckpointError, match=r"has another tensors/process.* resume from the checkpoint before"):
        open_checkpoint(folder)
    write_checksums(folder, ["training.json", "process_00000.json", TENSORS])  # as a user may have
    with pytest.raises(CheckpointError, match=r"tensors cannot be read \(.*resume from the checkpoint before"):
        open_checkpoint(folder).fill({"x": torch.zeros(1000)})


def test_foreign_files(tmp_path):
    with pytest.raises(CheckpointError, match="does not exist"):
        open_checkpoint(tmp_path)
    (tmp_path / "training.json").write_text('{"model": [1, 2]}')
    with pytest.raises(CheckpointError, match="load them as a policy"):
        open_checkpoint(tmp_path)
    for broken in ('{"format": ', "[" * 100_000, '{"x": {"$tensor": "x", "shape": 3, "dtype": "save"}}', "\x00"):
        (tmp_path / "training.json").write_text(broken)
        with pytest.raises(CheckpointError, match=r"training.json cannot be read \(.*copy it again"):
            open_checkpoint(tmp_path)


def test_state_that_cannot_be_loaded_again(tmp_path):
    with pytest.raises(CheckpointError, match=r"a\.1 is a ndarray; save tensors, numbers, text and None only"):
        Snapshot.take({"a": [0, np.zeros(2)]}, {})


def test_no_file_is_a_pickle(tmp_path):
    """By the heads of the files: of a zip as torch.save writes it, and of a pickle of any protocol."""
    run, _ = run_of(tmp_path)
    run.finish(1, publish=True)
    run.wait()
    files = [path for path in (tmp_path / "checkpoints").rglob("*") if path.is_file()]
    mine = [path for path in files if path.parent.name != "policy"]
    assert sorted({path.name for path in mine}) == [
        "SHA256SUMS",
        "process_00000.json",
        "process_00000.safetensors",
        "training.json",
    ]
    for path in mine:
        content = path.read_bytes()
        assert not content.startswith((b"PK", b"\x80"))
        if path.suffix == ".safetensors":
            header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
            assert header["__metadata__"]["DCP_VERSION"] == "1.0"
        elif path.suffix == ".json":
            json.loads(content)
        with pytest.raises(Exception, match=r"."):
            list(pickletools.genops(content))


def test_the_tensors_are_those_of_torch(tmp_path):
    """Its reader reads ours, and we read what its writer writes: the format is not ours."""
    tensors = {"a": torch.randn(5, 3), "b.c": torch.arange(4), "d": torch.randn(2).bfloat16()}
    folder = save(tmp_path, 1, tensors)
    found = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    dcp.load(found, storage_reader=HuggingFaceStorageReader(str(folder / "tensors")), no_dist=True)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    shutil.rmtree(folder / "tensors")
    more = {name: tensor + 1 for name, tensor in tensors.items()}
    dcp.save(
        more, storage_writer=HuggingFaceStorageWriter(str(folder / "tensors"), save_distributed=True), no_dist=True
    )
    [written] = (folder / "tensors").iterdir()
    theirs, ours = safe_open(written, "pt"), safe_open(save(tmp_path, 2, more) / TENSORS, "pt")
    assert json.loads(theirs.metadata()["DCP_SHARDING_INFO"]) == json.loads(ours.metadata()["DCP_SHARDING_INFO"])
    assert theirs.metadata().keys() == ours.metadata().keys()
    write_checksums(folder, ["training.json", "process_00000.json", f"tensors/{written.name}"])
    assert all(torch.equal(tensor, more[name]) for name, tensor in load(folder).items())


# Damage


class TinyRun:
    """A tiny policy and a part that learns, saved and restored as a run does."""

    def __init__(self, folder, policy=None):
        self.saver, self.policy, self.state = Saver(folder / "checkpoints"), policy or SavablePolicy(), {}
        self.learner = SimpleNamespace(values=torch.zeros(4), replicated=True)
        self.learner.state_dict = lambda: {"values": self.learner.values}
        self.learner.load_state_dict = lambda state: setattr(self.learner, "values", state["values"])
        self.parts = {"policy": self.policy, "learner": self.learner}
        self.wait = self.saver.wait

    def resume(self):
        saved = self.saver.restore(self.parts)
        if saved is not None:
            self.state = saved["run"]
        return None if saved is None else saved["iteration"]

    def finish(self, iteration, publish=False):
        state = {"iteration": iteration, "run": self.state}
        self.saver.save(iteration, self.parts, state, self.policy.save_pretrained if publish else None)


def run_of(folder, policy=None):
    run = TinyRun(folder, policy)
    return run, run.learner


def three_iterations(folder):
    run, learner = run_of(folder)
    for iteration in range(4):
        learner.values = torch.full((4,), float(iteration))
        run.finish(iteration)
    run.wait()
    return folder / "checkpoints"


def damage(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_digests_are_those_of_sha256sum(tmp_path):
    folder = save(tmp_path, 1, {"x": torch.randn(1000)})
    files = ["training.json", "process_00000.json", TENSORS]
    expected = [f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}\n" for name in files]
    assert (folder / "SHA256SUMS").read_text() == "".join(expected)
    done = subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=folder, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "".join(f"{name}: OK\n" for name in files))


def test_a_policy_that_cannot_be_saved_and_does_not_say_why_leaves_no_checkpoint(tmp_path):
    run, _ = run_of(tmp_path)
    run.policy.save_pretrained = Mock(side_effect=RuntimeError)
    with pytest.raises(OSError, match=r"step_00000001 could not be written: RuntimeError"):
        run.finish(1, publish=True)
    assert not list((tmp_path / "checkpoints").iterdir())


@pytest.mark.parametrize("error", [ChecksumError("segment_00003 is not what the run wrote"), FileNotFoundError("none")])
def test_what_a_part_kept_elsewhere_may_be_broken_too(error, tmp_path, capsys):
    """As the replay of dsrl.py and sac.py."""
    three_iterations(tmp_path)
    run, learner = run_of(tmp_path)
    load = learner.load_state_dict

    def broken(state):
        if state["values"][0] == 3:
            raise error
        load(state)

    learner.load_state_dict = broken
    assert run.resume() == 2
    assert learner.values.tolist() == [2.0] * 4
    assert f"{error}. Continuing from the checkpoint before it, " in capsys.readouterr().out


@pytest.mark.parametrize("file", [TENSORS, "training.json", "process_00000.json"])
def test_a_broken_checkpoint_falls_back_to_the_one_before(file, tmp_path, capsys):
    root = three_iterations(tmp_path)
    damage(root / "step_00000003" / file)
    run, learner = run_of(tmp_path)
    assert run.resume() == 2
    assert learner.values.tolist() == [2.0] * 4
    said = capsys.readouterr().out
    assert said.count("\n") == 1
    assert "warning: " in said
    assert f"step_00000003 has another {file} than was written" in said
    assert "Continuing from the checkpoint before it, " in said
    run.finish(3)  # in its place
    run.wait()
    assert run_of(tmp_path)[0].resume() == 3


def test_no_checkpoint_that_is_whole(tmp_path):
    root = three_iterations(tmp_path)
    for step in (2, 3):
        damage(root / f"step_0000000{step}" / TENSORS)
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
    run.wait()
    assert run_of(tmp_path)[0].resume() == 4


def test_exchanged_checkpoints(tmp_path):
    root = three_iterations(tmp_path)
    shutil.rmtree(root / "step_00000003")
    shutil.copytree(root / "step_00000002", root / "step_00000003")
    with pytest.raises(CheckpointError, match="is of iteration 2: exchanged"):
        open_checkpoint(root / "step_00000003")
    sums = root / "step_00000002" / "SHA256SUMS"
    sums.unlink()
    advice = r"has no SHA256SUMS; .*type: (\(cd .* && sha256sum .* > SHA256SUMS\))"
    with pytest.raises(CheckpointError, match=advice) as said:
        open_checkpoint(root / "step_00000002")
    subprocess.run(re.search(advice, str(said.value))[1], shell=True, check=True)
    assert open_checkpoint(root / "step_00000002").step == 2


def test_a_disk_that_writes_something_else(tmp_path, monkeypatch):
    save(tmp_path, 1, {"x": torch.zeros(1000)})
    flush = checkpoint_module.flush

    def lie(path):
        if path.name == Path(TENSORS).name:
            damage(path)
        flush(path)

    monkeypatch.setattr(checkpoint_module, "flush", lie)
    message = r"step_00000002 could not be written: .* has another tensors/process_00000.safetensors than was written"
    with pytest.raises(OSError, match=message):
        save(tmp_path, 2, {"x": torch.zeros(1000)})
    assert names(tmp_path) == ["step_00000001"]


class Full(io.BytesIO):
    def write(self, _):
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("module", [checkpoint_module, parts])
def test_what_a_full_disk_says(module, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "open", lambda *_: Full(), raising=False)
    with pytest.raises(OSError, match=r"could not be written: .*No space left on device"):
        save(tmp_path, 2, {"x": torch.zeros(1000)})
    assert not names(tmp_path)


# While training goes on


@pytest.fixture
def held(monkeypatch):
    """Writing that waits for an event, and what it then does."""
    write, event, more = save_checkpoint, threading.Event(), []

    def slow(*given, **named):
        event.wait(60)
        for each in more:
            each()
        return write(*given, **named)

    monkeypatch.setattr(checkpoint_module, "save_checkpoint", slow)
    yield event, more
    event.set()


def test_what_is_saved_is_what_was_there_when_it_was_saved(tmp_path, held):
    run, learner = run_of(tmp_path)
    weight = next(run.policy.parameters())
    expected = weight.detach().clone()
    learner.values = torch.ones(4)
    run.state["list"] = [1]
    run.finish(1)
    learner.values.zero_()  # learning goes on
    run.state["list"].append(2)
    with torch.no_grad():
        weight.zero_()
    held[0].set()
    run.wait()
    again, learner = run_of(tmp_path)
    assert again.resume() == 1
    assert again.state == {"list": [1]}
    assert learner.values.tolist() == [1.0] * 4
    assert torch.equal(next(again.policy.parameters()), expected)


def test_an_error_of_the_thread_is_not_lost(tmp_path, held):
    event, more = held
    run, _ = run_of(tmp_path)
    run.finish(1)
    event.set()
    run.wait()
    more.append(lambda: (_ for _ in ()).throw(ZeroDivisionError("a defect")))
    run.finish(2)
    with pytest.raises(ZeroDivisionError, match="a defect"):
        run.finish(3)
    more[:] = [lambda: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left on device"))]
    run.finish(2)
    with pytest.raises(OSError, match="No space left on device; make room, then type the same command"):
        run.wait()
    assert run_of(tmp_path)[0].resume() == 1


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
        rf"the weights after iteration 4 are not finite \(1 tensors, such as (parts\.)?{what}\..*"
        "the last good checkpoint is .*3;"
    )
    with pytest.raises(CheckpointError, match=message):
        run.finish(4)
    assert names(root) == ["step_00000002", "step_00000003"]


def test_another_format_says_which_version_reads_it(tmp_path):
    (tmp_path / "training.json").write_text('{"format": "vla-torchrl training state 1", "step": 1, "state": {}}')
    with pytest.raises(CheckpointError, match=r"is a 'vla-torchrl training state 1', .*resume with the version"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(("storm", "count"), [(corruption.policies, 15), (corruption.foreign, 15)])
def test_the_storm_of_corruptions(storm, count):
    tally = storm(count, seed=1)
    assert tally.clean, tally.failures
