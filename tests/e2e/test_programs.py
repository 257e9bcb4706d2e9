"""Recipes as programs of their own: no forks of a warm process, and what only a real process shows."""

import os
import signal
import subprocess
import sys
import time

import pytest
from paths import RECIPES, ROOT
from running import TOY

from vla_common.program import INTERRUPTED, UNREAD, WRONG_USE

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


def refused(done):
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: "), line
    assert done.returncode == WRONG_USE
    return line


def test_a_misspelt_task_is_one_line(tmp_path):
    command = [sys.executable, RECIPES / "ppo.py", "env.id=metaworld/reech-v3", f"hydra.run.dir={tmp_path / 'run'}"]
    line = refused(subprocess.run(command, capture_output=True, text=True))
    assert line.startswith(
        "error: env.id=metaworld/reech-v3: unknown Meta-World suite or task 'reech-v3'; did you mean reach-v3"
    )


def test_an_interpreter_without_our_packages_says_so(tmp_path):
    command = [sys.executable, "-S", RECIPES / "ppo.py", "seed=1"]
    line = refused(subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=ENVIRONMENT))
    assert "No module named 'lazy_loader' in " in line  # the first that is imported
    assert "docs/install.md" in line


def test_who_stops_reading_gets_no_traceback():
    """``python recipes/ppo.py --cfg job | head``: the pipe is closed before anything is written."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, RECIPES / "ppo.py", "--cfg", "job"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert done.stderr == ""
    assert done.returncode == UNREAD


@pytest.mark.parametrize("seconds", [0.5, 2.0])
def test_ctrl_c_before_work_is_one_line(seconds, tmp_path):
    command = [sys.executable, RECIPES / "ppo.py", *TOY, f"hydra.run.dir={tmp_path / 'run'}"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    time.sleep(seconds)  # while it imports
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert err == "error: interrupted; type the same command to start again\n"
    assert process.returncode == INTERRUPTED
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_mistake_that_all_processes_see_is_said_once(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", RECIPES / "ppo.py"]
    command += ["optim.lr=abc", f"hydra.run.dir={tmp_path / 'run'}"]
    done = subprocess.run(command, capture_output=True, text=True)
    said = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert said == ["error: optim.lr=abc: must be a valid number"], done.stderr
    assert done.returncode
