"""Runs that are killed at any operation on their files, or at any moment; and on a disk that is full for a while."""

import gc
import json
import os
import subprocess

import pytest
import torch.distributed as dist
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from benchmarks.storm import _lives, files, kills
from vla_algos import parallel
from vla_algos.run.checkpoints import checkpoints, open_checkpoint

pytestmark = pytest.mark.timeout(600)
NAMES = ("ppo", "grpo")


@pytest.mark.parametrize("storm", [files, kills], ids=["files", "kills"])
def test_nothing_is_lost(storm):
    tally = storm.run(8, 1)
    assert tally.clean, tally.failures


def test_a_life_leaves_alone_what_was_left_behind_before_it_was_forked(tmp_path):
    """A process group, destroyed and not collected yet, was ended again in each life, which died of it."""
    _lives.warm()
    gc.disable()
    mesh = parallel.device_mesh(1, "cpu")
    rest = [mesh, dist.group.WORLD]
    rest.append(rest)
    dist.destroy_process_group()
    del mesh, rest
    life = _lives.live("ppo", tmp_path / "run", _lives.Board(), gc.collect)
    gc.enable()
    assert _lives.wait(life) == 0


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 6 MB; a checkpoint has 1 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", disk], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no small file system can be mounted: {done.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


def fill_the_disk(folder, first, last, name):
    """Return what leaves no room in the folder of a run from the log of one iteration to that of another."""
    from vla_algos.run.run import Run

    ballast = folder.parent / "ballast"

    def prepare():
        log = Run.log

        def logged(run, *given):
            if run._iteration == first:
                with open(ballast, "wb", buffering=0) as file:
                    try:
                        while file.write(bytes(4096)) == 4096:
                            pass
                    except OSError:
                        pass
            log(run, *given)
            if run._iteration == last:
                ballast.unlink()

        Run.log = logged

    return prepare


@pytest.mark.parametrize("name", NAMES)
def test_a_full_disk_is_survived_and_nothing_is_missing_when_there_is_room_again(name, small_disk, tmp_path):
    _lives.warm()
    board = _lives.Board()
    folders = {"whole": tmp_path / "whole", "full": small_disk / "full"}
    videos = ("eval.videos=1",)
    assert _lives.wait(_lives.live(name, folders["whole"], board, more=videos), 120) == 0
    prepare = fill_the_disk(folders["full"], 2, 3, name)
    log = folders["full"].with_suffix(".log")
    log.symlink_to(tmp_path / "full.log")  # what it says has room elsewhere
    assert _lives.wait(_lives.live(name, folders["full"], board, prepare, videos), 120) == 0, log.read_text()
    said = log.read_text()
    assert said.count("metrics.jsonl could not be written") == 1
    assert said.count("metrics.jsonl is written again") == 1
    assert said.count("the checkpoint after iteration") == 1  # that of 2: there is room before 3 is saved
    assert "Traceback" not in said
    assert _lives.difference(folders["full"], _lives.outcome(folders["whole"])) == ""
    scalars = [
        [(event.step, event.value) for event in EventAccumulator(str(f / "tensorboard")).Reload().Scalars("train/loss")]
        for f in folders.values()
    ]
    assert len(scalars[0]) >= 3
    assert scalars[0] == scalars[1]
    found = checkpoints(folders["full"] / "checkpoints")
    assert [open_checkpoint(path).step for path in found] == [3, 4]


def test_a_disk_that_stays_full_ends_the_run_with_what_it_had(small_disk, tmp_path):
    _lives.warm()
    folder, board = small_disk / "full", _lives.Board()
    log = folder.with_suffix(".log")
    log.symlink_to(tmp_path / "full.log")
    prepare = fill_the_disk(folder, 1, 99, "ppo")
    assert _lives.wait(_lives.live("ppo", folder, board, prepare), 120) not in (0, None)
    assert "3 checkpoints in a row could not be saved" in log.read_text()
    assert open_checkpoint(folder / "checkpoints" / "latest").step == 0
    os.unlink(small_disk / "ballast")
    assert _lives.wait(_lives.live("ppo", folder, board), 120) == 0, log.read_text()
    assert board[_lives.Board.RESUMED] == 1
    assert json.loads((folder / "run.json").read_text())["metrics"]


def test_an_exception_while_collecting_saves_what_rarer_checkpoints_have_not(tmp_path):
    from vla_algos import StepCollector

    _lives.warm()
    board, calls = _lives.Board(), []

    def prepare():
        rollout = StepCollector.rollout

        def fails(self):
            calls.append(1)
            if len(calls) == 4:
                raise KeyError("a defect")
            return rollout(self)

        StepCollector.rollout = fails

    rare = ("checkpoint_every=100", "evaluate_every=0")
    assert _lives.wait(_lives.live("ppo", tmp_path / "whole", board, more=rare), 120) == 0
    folder = tmp_path / "run"
    assert _lives.wait(_lives.live("ppo", folder, board, prepare, rare), 120) == 70
    said = folder.with_suffix(".log").read_text()
    assert "KeyError: 'a defect'" in said
    assert "stopped by KeyError after 3 iterations\n" in said
    assert f"run          {folder}\nto go on     the same command with hydra.run.dir={folder}\n" in said
    assert _lives.wait(_lives.live("ppo", folder, board, more=rare), 120) == 0
    assert board[_lives.Board.RESUMED] == 4
    assert _lives.difference(folder, _lives.outcome(tmp_path / "whole")) == ""
