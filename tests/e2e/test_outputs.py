"""What a run leaves for a person: videos of training, and commands that can be pasted."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time

import imageio.v3
import pytest
from forked import Started
from hydra.core.global_hydra import GlobalHydra
from paths import ROOT
from running import TOY, TOY_OF, differing, metrics, recipe_here, train

from vla_algos.minibatches import Minibatches
from vla_algos.results import TRAINED, read_training
from vla_algos.run.rollouts import write_rollouts
from vla_envs import make_spec
from vla_policies import SmallVLA, SmallVLAConfig

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"}
FILMED = ["train_videos.environments=2", "train_videos.every=2", "train_videos.keep_actions=true"]


@pytest.fixture(autouse=True)
def forget_hydra():
    yield
    GlobalHydra.instance().clear()


@pytest.mark.parametrize(("name", "stages"), [("ppo", 2), ("grpo", 2)])
def test_a_run_that_is_filmed_is_the_same_run(name, stages, tmp_path):
    settings = ["iterations=2", "demonstrations.episodes=0", f"pipeline.stages={stages}"]
    train(name, tmp_path / "plain", settings)
    GlobalHydra.instance().clear()
    train(name, tmp_path / "filmed", [*settings, *FILMED])
    assert metrics(tmp_path / "filmed") == metrics(tmp_path / "plain")
    assert differing(tmp_path / "filmed" / "policy", tmp_path / "plain" / "policy") == set()
    folder = tmp_path / "filmed" / "videos" / "training"
    found = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.*"))
    assert found == [f"iteration_0002/environment_{slot}.mp4" for slot in (0, 1)]
    assert not (tmp_path / "plain" / "videos").exists()
    assert not (tmp_path / "plain" / TRAINED).exists()
    assert {each.episode_len for each in read_training(tmp_path / "filmed" / TRAINED)} == {8}


def test_an_iteration_that_is_run_again_is_filmed_again(tmp_path, monkeypatch):
    """And a run that was begun without may be filmed when it is resumed."""
    settings = [*TOY, *TOY_OF["ppo"], "demonstrations.episodes=0", "iterations=3"]
    recipe_here("ppo", tmp_path / "whole", *settings)
    GlobalHydra.instance().clear()
    learn, calls = Minibatches.metrics, []

    def stopped(*given, **named):
        calls.append(1)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return learn(*given, **named)

    with monkeypatch.context() as patch:
        patch.setattr(Minibatches, "metrics", stopped)
        with pytest.raises(SystemExit):
            recipe_here("ppo", tmp_path / "run", *settings)
    GlobalHydra.instance().clear()
    recipe_here("ppo", tmp_path / "run", *settings, *FILMED)
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")
    assert len(list((tmp_path / "run" / "videos" / "training" / "iteration_0002").glob("*.mp4"))) == 2


def test_what_is_kept_of_episodes_survives_a_kill(tmp_path):
    """With checkpoints after every second iteration, killed in the middle of one: as if it had not been."""
    settings = [
        *TOY,
        *TOY_OF["ppo"],
        "demonstrations.episodes=0",
        "policy.chunk_size=3",
        "train_videos.keep_actions=true",
    ]
    settings += ["iterations=12", "checkpoint_every=2"]
    recipe_here("ppo", tmp_path / "whole", *settings)
    whole, path = (tmp_path / "whole" / TRAINED).read_bytes(), tmp_path / "run" / TRAINED
    process, deadline = Started("ppo", *settings, f"hydra.run.dir={tmp_path / 'run'}"), time.monotonic() + 200
    while not (path.exists() and b'"step": 3' in path.read_bytes()):
        assert process.poll() is None, process.communicate()[1][-3000:]
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert b'"step": 12' not in path.read_bytes()
    assert read_training(path)
    GlobalHydra.instance().clear()
    recipe_here("ppo", tmp_path / "run", *settings)
    assert path.read_bytes() == whole
    said = list(write_rollouts(tmp_path / "run", tmp_path / "set"))
    assert said[0].startswith(f"wrote {len(read_training(path))} episodes with ")
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")


def test_more_environments_than_there_are_cannot_be_filmed(tmp_path):
    with pytest.raises(ValueError, match=r"train_videos.environments=9: there are 2 environments; type .*=2 or fewer"):
        recipe_here("ppo", tmp_path, *TOY, *TOY_OF["ppo"], "train_videos.environments=9")


def test_videos_of_evaluations_are_in_real_time(tmp_path):
    """One frame is a decision, which takes as long as its actions; the speed of another policy is another one."""
    spec, fps = make_spec("metaworld/button-press-topdown-v3"), {}
    for length in (4, 8):
        SmallVLA(SmallVLAConfig((-1.0,) * 4, (1.0,) * 4, 4, chunk_size=length)).save_pretrained(tmp_path / "policy")
        typed = [f"policy.checkpoint={tmp_path / 'policy'}", *TOY[:4], "eval.trials=1", "eval.videos=1"]
        recipe_here("evaluate", tmp_path / str(length), *typed)
        GlobalHydra.instance().clear()
        (path,) = (tmp_path / str(length) / "videos").glob("*.mp4")
        fps[length] = imageio.v3.immeta(path)["fps"]
    assert fps == {length: spec.control_frequency / length for length in (4, 8)}


def line_of(process, begin):
    """Read what a program says until a line begins so; returns that line."""
    for line in process.stdout:
        if line.startswith(begin):
            return line
    raise AssertionError(f"it has not said {begin!r}")


@pytest.mark.timeout(600)  # three programs
def test_what_is_printed_can_be_pasted(tmp_path):
    folder = tmp_path / "a run, of mine"
    typed = ["-m", "recipes", "run", "ppo", *TOY, *TOY_OF["ppo"], "demonstrations.episodes=0", "iterations=400"]
    command = ["python", *typed, f'hydra.run.dir="{folder}"', "resume=never"]
    shell = {"cwd": ROOT, "env": ENVIRONMENT, "text": True, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    first = subprocess.Popen(command, **shell)
    while not (folder / "metrics.jsonl").exists():
        time.sleep(0.2)
        assert first.poll() is None
    first.send_signal(signal.SIGTERM)
    advice = line_of(first, "to resume ")
    assert first.wait() == 128 + signal.SIGTERM
    [pasted] = shlex.split(advice.removeprefix("to resume    type the same command with "))

    second = subprocess.Popen([*command[:-2], pasted, "iterations=1", "resume=force"], **shell)
    said = line_of(second, "evaluate ")
    assert second.wait() == 0
    evaluate = said.removeprefix("evaluate").strip()
    third = subprocess.run(["bash", "-c", f"{evaluate} eval.trials=1 eval.videos=0"], **shell)
    assert third.returncode == 0
    assert re.search(r"button-press-topdown-v3 +1 ", third.stdout)
