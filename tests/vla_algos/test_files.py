"""A power cut at any moment: what has a name is on the disk, whole, and what is replaced goes after that."""

import os
from pathlib import Path

import pytest
import torch

from vla_algos.files import link_atomically, write_atomically, write_folder_atomically
from vla_algos.run.checkpoints import Snapshot, begin_checkpoint, save_checkpoint
from vla_algos.run.logging import RunLogger


class Disk:
    """What files and folders held when they were last flushed, by inode: no more than that survives."""

    def __init__(self, monkeypatch):
        self.flushed, self.lost = {}, []
        fsync, rename, replace = os.fsync, os.rename, os.replace
        monkeypatch.setattr(os, "fsync", lambda handle: (fsync(handle), self.note(handle)))
        monkeypatch.setattr(os, "rename", lambda old, new: (self.check(old), rename(old, new))[1])
        monkeypatch.setattr(os, "replace", lambda old, new: (self.check(old), replace(old, new))[1])

    def note(self, handle):
        path = os.readlink(f"/proc/self/fd/{handle}")
        self.flushed[os.fstat(handle).st_ino] = held(path)

    def check(self, old):
        """Before a rename: the contents of what gets a name, or the folder in which something loses its name."""
        if os.path.basename(old).startswith("."):
            self.survives(*([] if os.path.islink(old) else [old, *Path(old).rglob("*")]))
        else:
            self.survives(os.path.dirname(old))

    def survives(self, *paths):
        for path in paths:
            if not held(path) <= self.flushed.get(os.stat(path).st_ino, set()):
                self.lost.append(os.path.basename(path))


def held(path):
    """The content of a file, or what a folder has under names that are not hidden."""
    if os.path.isfile(path):
        with open(path, "rb") as file:
            return {file.read()}
    entries = [entry for entry in os.scandir(path) if not entry.name.startswith(".")]
    return {(entry.name, os.readlink(entry.path) if entry.is_symlink() else entry.inode()) for entry in entries}


@pytest.fixture
def disk(monkeypatch):
    return Disk(monkeypatch)


def test_a_checkpoint(disk, tmp_path):
    root = tmp_path / "checkpoints"
    for number, step in enumerate([1, 2, 2, 3]):  # the second one comes by a second time
        begin_checkpoint(root, step)
        policy = root / f".unfinished_step_{step:08d}" / "policy"
        (policy / "adapter").mkdir(parents=True)
        for file in (policy / "weights", policy / "adapter" / "weights"):
            file.write_text(f"weights {number}")
        state = {"weight": torch.full((3,), float(number))}
        save_checkpoint(root, step, Snapshot.take(state, {"number": number}))
        disk.survives(root, tmp_path)
    assert not disk.lost


@pytest.mark.parametrize("before", [False, True])
def test_files_folders_and_links(before, disk, tmp_path):
    def write(folder):
        (folder / "inner").mkdir(parents=True)
        (folder / "inner" / "file").write_text("content")

    for time in range(1 + before):
        write_atomically(tmp_path / "file", f"content {time}")
        disk.survives(tmp_path)
        write_folder_atomically(tmp_path / "folder", write)
        disk.survives(tmp_path)
        link_atomically(tmp_path / "link", f"target_{time}")
        disk.survives(tmp_path)
    assert not disk.lost


def test_a_log_that_is_synced(disk, tmp_path):
    log = RunLogger(tmp_path)
    log.log({"x": 1.0}, 1)
    log.log({"x": 2.0}, 2)
    log.sync()
    disk.survives(tmp_path / "metrics.jsonl", tmp_path)
    assert not disk.lost
