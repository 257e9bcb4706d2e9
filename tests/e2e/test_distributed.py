"""Recipes as torchrun starts them: several processes train, stop and resume together, and fail together."""

import json
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
from forked import Started
from running import RECIPES, TOY, TOY_OF, metrics, recipe
from simulators import some

pytest.importorskip("metaworld", reason="Meta-World is not installed: make setup")
pytestmark = pytest.mark.timeout(600)
SETTINGS = [
    *TOY,
    *[
        "env.num_envs=4",
        "demonstrations.episodes=2",
        "cloning.steps=3",
        "policy.chunk_size=3",
        "eval.trials=3",
        "iterations=12",
    ],
]
SHAPED = {"ppo": [], "grpo": ["env=metaworld_button"]}  # a reward in which runs of a random policy differ


def torchrun(script, *overrides):
    """The program itself; most tests here start what it would start, without its imports."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", script]
    return subprocess.Popen([*command, *map(str, overrides)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def several(name, *overrides, processes=2):
    return Started(name, *overrides, processes=processes)


def finished(name, folder, *overrides):
    settings = [*SHAPED[name], *SETTINGS, *TOY_OF[name], *overrides]
    process = several(name, *settings, f"hydra.run.dir={folder}")
    out, err = process.communicate(timeout=400)
    assert process.returncode == 0, err[-3000:]
    return out


@pytest.mark.parametrize(
    ("name", "sharding"),
    some(
        [
            ("ppo", ["sharding.shards=all", "sharding.compute=bf16"]),
            ("ppo", ["sharding.shards=1"]),
            ("grpo", ["sharding.shards=all", "sharding.cpu_offload=true", "sharding.reshard_after_forward=false"]),
        ],
        2,
    ),
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_recipes_of_two_processes_stop_and_go_on(name, sharding, tmp_path):
    out = finished(name, tmp_path / "whole", *sharding)
    assert out.count("env steps/s in training") == 1  # one process prints
    whole = metrics(tmp_path / "whole")
    folder = tmp_path / "stopped"
    settings = [*SHAPED[name], *SETTINGS, *TOY_OF[name], *sharding, "checkpoint_every=3"]
    process = several(name, *settings, f"hydra.run.dir={folder}")
    deadline = time.monotonic() + 200
    while not ((folder / "metrics.jsonl").exists() and '"step": 1' in (folder / "metrics.jsonl").read_text()):
        assert process.poll() is None, process.communicate()[1][-3000:]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)  # as torchrun passes it on
    out, err = process.communicate(timeout=60)
    assert process.returncode, err[-3000:]
    assert "stopped by SIGTERM; the same command resumes" in out, err[-3000:]
    assert metrics(folder) != whole
    shutil.copytree(folder, tmp_path / "elastic", symlinks=True)
    finished(name, folder, *sharding, "checkpoint_every=3")
    assert metrics(folder) == whole
    lines = [line for lines in whole.values() for line in lines]
    tolerance = 1e-2 if "sharding.compute=bf16" in sharding else 1e-5
    assert max(line.get("train/actor/log_ratio_at_start", 0.0) for line in lines) < tolerance
    assert sum(line["train/steps"] for lines in whole.values() for line in lines if "train/steps" in line) > 3
    record = json.loads((folder / "run.json").read_text())
    assert len(record["processes"]) == 2
    assert "finished" in record

    alone = recipe(name, tmp_path / "elastic", *settings)
    assert alone.returncode
    assert re.search("is of 2 processes, this run has 1: resume with as many, or with resume=elastic", alone.stderr)
    alone = recipe(name, tmp_path / "elastic", *settings, "resume=elastic")
    assert alone.returncode == 0, alone.stderr[-3000:]
    said = re.search(r"step_0*(\d+) is of 2 processes, this run has 1: weights and optimizer continue", alone.stdout)
    assert said
    log, done = metrics(tmp_path / "elastic"), int(said[1])
    assert log.keys() == whole.keys()
    assert all(log[key] == whole[key] for key in log if key[0] < done)
    assert log != whole


def test_an_evaluation_is_shared(tmp_path):
    """Bit by bit, where a process has as many environments and threads as one alone: they decide how torch rounds."""
    finished("ppo", tmp_path / "run", "iterations=1")
    settings = [*SETTINGS[:4], "eval.trials=5", "eval.videos=3"]
    settings += [f"policy.checkpoint={tmp_path / 'run' / 'policy'}", "seed=3"]
    found = []
    for processes in (1, 2):
        folder = tmp_path / f"by{processes}"
        shared = [f"env.num_envs={2 * processes}", f"hydra.run.dir={folder}"]
        process = several("evaluate", *settings, *shared, processes=processes)
        _, err = process.communicate(timeout=200)
        assert process.returncode == 0, err[-3000:]
        found.append((json.loads((folder / "metrics.json").read_text()), sorted((folder / "videos").iterdir())))
    (one, videos), (two, others) = found
    assert one["eval/num_episodes"] == 5
    assert [path.name for path in videos] == [path.name for path in others]
    assert two == one
    for path, other in zip(videos, others, strict=True):
        assert path.read_bytes() == other.read_bytes()


KILLED = """
import os
from vla_algos import distributed

with distributed.process_group():
    distributed.barrier()
    if distributed.rank() == 1:
        os.kill(os.getpid(), 9)
    distributed.barrier()
"""


def test_a_killed_process_ends_the_others_in_seconds(tmp_path):
    (tmp_path / "work.py").write_text(KILLED)
    begun = time.monotonic()
    process = torchrun(tmp_path / "work.py")
    process.communicate(timeout=120)
    assert process.returncode == 1
    assert time.monotonic() - begun < 60


def test_what_several_processes_do_not_do(tmp_path):
    process = several("sft", f"hydra.run.dir={tmp_path}")
    assert "the recipe sft runs in one process, not in 2: leave out torchrun" in process.communicate(timeout=200)[1]
    process = several("ppo", "-m", "seed=0,1", f"hydra.sweep.dir={tmp_path}")
    assert "under torchrun start each by itself" in process.communicate(timeout=200)[1]


def test_one_of_three_collects_another_learns_and_the_first_has_no_part(tmp_path):
    roles = ["placement.actor=2", "placement.rollout=1", "sync.lag=1", "iterations=2"]
    settings = [*SETTINGS, *TOY_OF["ppo"], *roles, f"hydra.run.dir={tmp_path}"]
    process = several("ppo_async", *settings, processes=3)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err[-3000:]
    assert "disaggregated, 3 GPUs: actor 2, rollout 1, env 1; 0 idle" in out
    assert out.count("env steps/s in training") == 1
    assert sum("train/loss" in line for lines in metrics(tmp_path).values() for line in lines) == 2


LATE = """
import os, runpy, time
from vla_algos import distributed

def late(*given):
    time.sleep(2 * int(os.environ["RANK"]))
    return original(*given)

original, distributed.per_rank = distributed.per_rank, late
runpy.run_path({recipe!r}, run_name="__main__")
"""


def test_a_process_that_has_not_seen_a_mistake_yet_leaves_it_to_the_first_to_say(tmp_path):
    script = tmp_path / "late.py"
    script.write_text(LATE.format(recipe=str(RECIPES / "ppo.py")))
    process = torchrun(script, *SETTINGS, *TOY_OF["ppo"], "env.num_envs=3", f"hydra.run.dir={tmp_path / 'run'}")
    _, err = process.communicate(timeout=200)
    assert process.returncode
    said = [line for line in err.splitlines() if line.startswith("error: ")]
    assert said == ["error: env.num_envs=3 cannot be shared by 2 processes; try env.num_envs=4"]


FAILING = """
import os, runpy, sys
import vla_algos.collectors as collectors
collect, calls = collectors.StepCollector.rollout, []

def rollout(self):
    calls.append(1)
    if len(calls) == 2 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
        raise ArithmeticError("the second process has had enough")
    return collect(self)

collectors.StepCollector.rollout = rollout
sys.argv[0] = {recipe!r}
runpy.run_path({recipe!r}, run_name="__main__")
"""


def test_torchrun_starts_again_what_failed(tmp_path):
    script = tmp_path / "failing.py"
    script.write_text(FAILING.format(recipe=str(RECIPES / "ppo.py")))
    settings = [*SETTINGS, *TOY_OF["ppo"], "iterations=3", f"hydra.run.dir={tmp_path / 'run'}"]
    process = torchrun("--max-restarts=1", script, *settings)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err[-3000:]
    assert "ArithmeticError: the second process has had enough" in err
    finished("ppo", tmp_path / "whole", "iterations=3")
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")
