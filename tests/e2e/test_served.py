"""``policy=server``: an evaluation through ``vla-recipe serve`` is that of the policy's folder, bit by bit."""

import functools
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from paths import ROOT
from running import TOY, recipe

from vla_policies import SmallVLA, SmallVLAConfig

pytest.importorskip("metaworld", reason="Meta-World is not installed: make setup")
pytestmark = pytest.mark.timeout(600)
SETTINGS = [each for each in TOY if not each.startswith(("iterations", "update", "optim", "eval.trials"))]
SETTINGS += ["env=metaworld_button", "env.num_envs=4", "env.max_episode_steps=40", "eval.trials=24"]


@pytest.fixture
def folder(tmp_path):
    bounds = {"action_low": (-1.0,) * 4, "action_high": (1.0,) * 4}
    SmallVLA(SmallVLAConfig(state_dim=4, dim=16, heads=2, **bounds)).save_pretrained(tmp_path / "policy")
    return tmp_path / "policy"


def serve(folder, port, *more):
    command = [sys.executable, "-m", "recipes", "serve", str(folder), "--port", str(port), *more]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    listens = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # which a shell's background jobs ignore
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=environment, preexec_fn=listens)


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def test_an_evaluation_equals_that_of_the_folder_though_the_server_is_killed(folder, tmp_path):
    port, here, there = free_port(), tmp_path / "here", tmp_path / "there"
    assert recipe("evaluate", here, f"policy.checkpoint={folder}", *SETTINGS).returncode == 0
    server = [serve(folder, port)]
    assert f"ws://127.0.0.1:{port}" in server[0].stdout.readline()

    def kill():
        while not (there / "episodes.jsonl").is_file() or not (there / "episodes.jsonl").read_text():
            time.sleep(0.05)
        server[0].kill()
        server.append(serve(folder, port))

    killing = threading.Thread(target=kill)
    killing.start()
    ran = recipe("evaluate", there, "policy=server", f"policy.url=ws://127.0.0.1:{port}", *SETTINGS)
    killing.join()
    server[1].send_signal(signal.SIGINT)
    assert server[1].wait(30) == 130
    assert ran.returncode == 0, ran.stderr
    assert "was gone for" in ran.stdout
    assert (there / "episodes.jsonl").read_text() == (here / "episodes.jsonl").read_text()


def test_a_server_that_does_not_come_back_is_one_line_and_the_same_command_resumes(folder, tmp_path):
    port, run = free_port(), tmp_path / "run"
    server = serve(folder, port)
    assert f"ws://127.0.0.1:{port}" in server.stdout.readline()
    settings = ["policy=server", f"policy.url=ws://127.0.0.1:{port}", "policy.timeout=2", *SETTINGS]

    def kill():
        while not (run / "episodes.jsonl").is_file() or not (run / "episodes.jsonl").read_text():
            time.sleep(0.05)
        server.kill()

    killing = threading.Thread(target=kill)
    killing.start()
    ran = recipe("evaluate", run, *settings)
    killing.join()
    assert ran.returncode == 1
    assert f"error: no policy server at ws://127.0.0.1:{port} within policy.timeout=2 seconds" in ran.stderr
    kept = len((run / "episodes.jsonl").read_text().splitlines())
    assert 0 < kept < 24
    server = serve(folder, port)
    assert server.stdout.readline()
    assert recipe("evaluate", run, *settings).returncode == 0
    server.kill()
    assert len((run / "episodes.jsonl").read_text().splitlines()) == 24
