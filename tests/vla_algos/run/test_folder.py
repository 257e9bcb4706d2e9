"""A run's folder: one run at a time in it, files that are whole, and bookkeeping that ends nothing."""

import json
import os
import signal
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from vla_algos.files import FolderInUse, link_atomically, lock_folder, write_atomically, write_folder_atomically
from vla_algos.run.checkpoints import (
    Snapshot,
    begin_checkpoint,
    by_preference,
    checkpoints,
    save_checkpoint,
)
from vla_algos.run.folder import finish_folder, new_folder, note_start, open_folder, say_what_differs
from vla_algos.run.logging import RunLogger
from vla_algos.run.run import Run


def settings(**changed):
    usual = {"recipe": "ppo", "seed": 0, "resume": "auto", "policy": {}, "optim": {"lr": 1e-3}}
    return SimpleNamespace(**usual | changed)


def start(folder, **changed):
    lock = open_folder(settings(**changed), folder)
    note_start(settings(**changed), folder)
    lock.release()


def save(root, step):
    begin_checkpoint(root, step)
    save_checkpoint(root, step, Snapshot.take({"value": step}, {}))


def started(folder):
    """A folder with a run in it."""
    start(folder)
    save(folder / "checkpoints", 1)
    return folder


def as_nobody(work):
    """Do something in a process that is not root; returns whether it went well."""
    if os.getuid() != 0:
        pytest.skip("only root can become somebody who may not write")
    if (process := os.fork()) == 0:
        status = 1
        try:
            os.setuid(65534)
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitpid(process, 0)[1] == 0


# ---- the lock


def test_a_second_start_is_refused_in_one_line(tmp_path):
    first = lock_folder(tmp_path)
    with pytest.raises(FolderInUse, match=r"is in use by another process.*hydra.run.dir=") as refused:
        lock_folder(tmp_path)
    assert "\n" not in str(refused.value)
    first.release()
    lock_folder(tmp_path).release()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_lock_of_a_dead_process_is_free_at_once(number, tmp_path):
    mine, theirs = os.pipe()
    if (process := os.fork()) == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        lock = lock_folder(tmp_path)
        os.write(theirs, b"!")
        time.sleep(60)
        os._exit(lock is None)
    os.read(mine, 1)
    with pytest.raises(FolderInUse):
        lock_folder(tmp_path)
    os.kill(process, number)
    os.waitpid(process, 0)
    lock_folder(tmp_path).release()


@pytest.mark.parametrize("content", [b"", b"\xff\x00{", b"[1, 2]", b'{"pid": "x"}'])
def test_a_lock_file_of_whatever_content(content, tmp_path):
    (tmp_path / ".lock").write_bytes(content)
    lock_folder(tmp_path).release()


def test_default_names_are_of_one_run_each(tmp_path):
    names = [new_folder(str(tmp_path / "runs" / "now")) for _ in range(3)]
    assert [name.rpartition("/")[2] for name in names] == ["now", "now_2", "now_3"]
    config = OmegaConf.create({"dir": f"${{new_folder:{tmp_path}/a_b-c_${{seed}}}}", "seed": 3})
    assert config.dir == config.dir == f"{tmp_path}/a_b-c_3"


# ---- which run it has


def test_a_refused_or_failed_start_changes_nothing(tmp_path):
    folder = started(tmp_path)
    before = (folder / "config.yaml").read_bytes(), (folder / "run.json").read_bytes()
    with pytest.raises(ValueError, match=r"optim.lr: 0.001 there, 0.01 now"):
        open_folder(settings(optim={"lr": 0.01}), folder)
    open_folder(settings(optim={"lr": 0.01}, resume="force"), folder).release()  # then resuming fails
    assert before == ((folder / "config.yaml").read_bytes(), (folder / "run.json").read_bytes())
    start(folder)  # the right command


def test_equal_settings_are_not_written_again(tmp_path):
    folder = started(tmp_path)
    before = os.stat(folder / "config.yaml")
    start(folder)
    assert os.stat(folder / "config.yaml").st_ino == before.st_ino
    assert len(json.loads((folder / "run.json").read_text())["processes"]) == 2


@pytest.mark.parametrize("content", [b"", b"\x00\x00", b"a: [", b"- 1", b"\xff\xfe"])
def test_a_broken_config_is_said_and_written_anew(content, tmp_path, capsys):
    folder = started(tmp_path)
    (folder / "config.yaml").write_bytes(content)
    start(folder)
    assert "could not be read" in capsys.readouterr().out
    assert OmegaConf.load(folder / "config.yaml").optim.lr == 1e-3


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"processes": 3}', b'{"processes": [1]}', b'{"submitted": []}', b"\xff"]
)
def test_a_broken_record_is_put_aside(content, tmp_path, capsys):
    folder = started(tmp_path)
    (folder / "run.json").write_bytes(content)
    say_what_differs(folder)
    start(folder)
    finish_folder(folder, {"x": 1.0}, 2.0, {})
    record = json.loads((folder / "run.json").read_text())
    assert record["metrics"] == {"x": 1.0}
    assert len(record["processes"]) == 1
    assert (folder / "run.json.broken").read_bytes() == content


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"seed": 1}, "seed"),
        ({"replay": {"gamma": 0.9}}, "replay.gamma"),
        ({"policy": {"checkpoint": "other", "num_steps": 5}}, "policy.checkpoint"),
        ({"policy": {"checkpoint": "one", "num_steps": 3}}, "policy.num_steps"),  # of which a noise is another action
        ({"loss": {"critics": 2}}, "loss.critics"),
    ],
)
def test_what_is_kept_was_made_with_cannot_be_forced(changed, name, tmp_path):
    kept = {"replay": {"gamma": 0.98}, "policy": {"checkpoint": "one", "num_steps": 5}, "loss": {"critics": 4}}
    start(tmp_path, **kept)
    save(tmp_path / "checkpoints", 1)
    again = {**kept, "iterations": 9, "resume": "force", "optim": {"lr": 1e-4}}
    start(tmp_path, **again)
    with pytest.raises(
        ValueError, match=rf"other settings:\n  {name}: \S+ there, \S+ now\n  take another folder: hydra"
    ):
        start(tmp_path, **again | changed)


def test_a_copy_beside_the_checkpoints_does_no_harm(tmp_path):
    folder = started(tmp_path)
    (folder / "checkpoints" / "step_00000009.bak").mkdir()
    start(folder)


def test_evaluations_are_not_mixed(tmp_path):
    evaluation = SimpleNamespace(recipe="evaluate", seed=0, policy={}, greedy=True)
    open_folder(evaluation, tmp_path).release()
    note_start(evaluation, tmp_path)
    open_folder(evaluation, tmp_path).release()  # it was broken off: again
    with pytest.raises(ValueError, match="greedy: True there, False now"):
        open_folder(SimpleNamespace(recipe="evaluate", seed=0, policy={}, greedy=False), tmp_path)
    with pytest.raises(ValueError, match=r"is of the recipe evaluate, not ppo"):
        open_folder(settings(), tmp_path)
    (tmp_path / "metrics.json").write_text("{}")
    with pytest.raises(ValueError, match="has a finished evaluation in it; take another folder"):
        open_folder(evaluation, tmp_path)


def test_another_commit_or_torch_is_said_in_one_line(tmp_path, capsys):
    folder = started(tmp_path)
    say_what_differs(folder)
    assert capsys.readouterr().out == ""
    record = json.loads((folder / "run.json").read_text())
    record["processes"][-1]["code"] = {"commit": "0123456789abcdef", "changes": None}
    record["processes"][-1]["versions"]["torch"] = "1.0"
    (folder / "run.json").write_text(json.dumps(record))
    say_what_differs(folder)
    said = capsys.readouterr().out
    assert said.count("\n") == 1
    assert "commit 012345678 then" in said
    assert "torch " in said
    assert "1.0 then" in said


# ---- files


def test_a_kill_before_the_link_was_renamed_does_no_harm(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / ".unfinished_latest").symlink_to("elsewhere")
    finish_folder(tmp_path / "run", {}, 1.0, {})
    assert os.readlink(tmp_path / "latest") == "run"


def test_a_parent_folder_that_cannot_be_written_costs_the_link_only(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    for above in (tmp_path, *tmp_path.parents):
        if above.is_relative_to(tempfile.gettempdir()) and above != Path(tempfile.gettempdir()):
            above.chmod(0o755)
    assert as_nobody(lambda: finish_folder(folder, {"x": 1.0}, 1.0, {}))
    assert json.loads((folder / "run.json").read_text())["metrics"] == {"x": 1.0}
    assert not (tmp_path / "latest").is_symlink()


def test_latest_that_is_a_folder_is_left_alone(tmp_path, capsys):
    (tmp_path / "latest").mkdir()
    (tmp_path / "run").mkdir()
    finish_folder(tmp_path / "run", {}, 1.0, {})
    assert "is not a link" in capsys.readouterr().out
    with pytest.raises(FileExistsError):
        link_atomically(tmp_path / "latest", "run")


def test_a_run_that_does_not_begin_leaves_nothing(tmp_path):
    says = r"collector is a object, which has no state_dict\(\) and load_state_dict\(\)"
    with pytest.raises(TypeError, match=says), Run(settings(), tmp_path / "run") as run:
        run.restore(collector=object())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", ["folder", "dangling", "file"])
def test_latest_of_checkpoints_may_be_anything(kind, tmp_path):
    save(tmp_path, 1)
    (tmp_path / "latest").unlink()
    if kind == "folder":
        (tmp_path / "latest").mkdir()
        (tmp_path / "latest" / "training.json").write_bytes(b"a copy without links")
    elif kind == "dangling":
        (tmp_path / "latest").symlink_to("step_00000009")
    else:
        (tmp_path / "latest").write_text("step_00000001")
    assert by_preference(tmp_path)[0].name == "step_00000001"
    save(tmp_path, 2)
    assert os.readlink(tmp_path / "latest") == "step_00000002"
    assert len(checkpoints(tmp_path)) == 2


def test_files_and_folders_are_whole(tmp_path):
    path, folder = tmp_path / "file", tmp_path / "folder"
    write_atomically(path, "first")
    (tmp_path / ".unfinished_file").write_text("of a process that was killed")
    write_atomically(path, "first")
    assert [each.name for each in tmp_path.iterdir()] == ["file"]

    def fill(made):
        made.mkdir()
        (made / "one").write_text("1")

    write_folder_atomically(folder, fill)

    def fail(made):
        fill(made)
        raise OSError("No space left on device")

    with pytest.raises(OSError, match="No space"):
        write_folder_atomically(folder, fail)
    assert sorted(each.name for each in tmp_path.rglob("*")) == ["file", "folder", "one"]


# ---- numbers


def test_lines_of_others_stay_and_half_a_line_goes(tmp_path):
    path = tmp_path / "metrics.jsonl"
    ours = [b'{"step": 1, "x": 1.0}\n', b'{"step": 2, "x": 1.0}\n', b'{"step": 2, "eval/x": 1}\n']
    others = [b"# a note\n", b"[1]\n", b'{"note": 1}\n', b'{"step": "one"}\n', b"\xff\n", b"null\n"]
    path.write_bytes(b"".join([*others, *ours, b'{"step": 3}\n', b'{"step": 4, "x"']))
    logger = RunLogger(tmp_path, after=2)
    assert path.read_bytes() == b"".join([*others, *ours])
    logger.log({"x": 3.0}, 3)
    logger.close()
    assert path.read_bytes().splitlines()[-1] == b'{"step": 3, "x": 3.0}'
