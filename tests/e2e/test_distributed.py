"""Several processes that train together do what one would do alone, stop together, and fail together."""

import json
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch
from running import RECIPES, TOY, TOY_OF, metrics, recipe
from toy import ToyActorCritic, ToyEnv

from vla_algos import parallel
from vla_algos.advantages import gae
from vla_algos.collectors import StepCollector
from vla_algos.evaluation import EpisodeResult, EvaluationResult
from vla_algos.learner import Learner
from vla_algos.losses import ChunkClipPPOLoss
from vla_common.keys import ADVANTAGE, NEXT, STATE_VALUE, VALUE_TARGET
from vla_envs.simulator import Episode

pytestmark = pytest.mark.timeout(600)
UPDATES = {
    "every token": {},
    "every trajectory": {"aggregation": "trajectory_mean"},
    "until the KL is too large": {"target_kl": 0.003, "epochs": 20},
    "so many steps": {"minibatch_size": None, "minibatches": 3},
    "the critic first": {"critic_warmup_steps": 3},
}
SPLITS = {
    "halves": [slice(0, 3), slice(3, 6)],
    "a part and the rest": [slice(0, 1), slice(1, 6)],
    "all and nothing": [slice(0, 6), slice(6, 6)],
}


def together(work, folder, *arguments, processes=2):
    """The results of ``work(*arguments)`` in processes that know of each other, by rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    running = [
        context.Process(target=_one, args=(rank, processes, port, folder, work, arguments), daemon=True)
        for rank in range(processes)
    ]
    try:
        for process in running:
            process.start()
        for process in running:
            process.join(240)
        assert [process.exitcode for process in running] == [0] * processes
    finally:
        for process in running:
            process.kill()
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(processes)]


def _one(rank, processes, port, folder, work, arguments):
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(processes), "LOCAL_RANK": str(rank)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ["TORCHELASTIC_RUN_ID"] = "test"
    with parallel.process_group():
        torch.save(work(*arguments), folder / f"{rank}.pt")


def collected():
    """A policy, and 42 decisions of 6 environments, of which one was never executed."""
    torch.manual_seed(0)
    policy = ToyActorCritic()
    return policy, StepCollector(ToyEnv(6, crashes={1: 1}), policy, 7).rollout()


def learn(settings, rows):
    """Three updates of this process's rows: weights, metrics and advantages."""
    policy, batch = collected()
    batch = batch[rows[parallel.rank()]]
    outcomes = parallel.gather(batch.select(NEXT, STATE_VALUE))
    gae(outcomes)
    batch.update(parallel.own_rows(outcomes, len(batch)).select(ADVANTAGE, VALUE_TARGET))
    loss = ChunkClipPPOLoss(policy, entropy_coeff=0.01, reference_kl_coeff=0.1)
    settings = {"epochs": 2, "minibatch_size": 16, "max_log_ratio": 10.0, **settings}
    learner = Learner(loss, lr=3e-3, **settings)
    torch.manual_seed(1 + parallel.rank())  # the order of decisions is the first process's
    seen = [learner.update(batch.clone() if len(batch) else None) for _ in range(3)]
    return dict(policy.state_dict()), seen, outcomes[ADVANTAGE]


def learn_everything():
    return {(name, split): learn(UPDATES[name], rows) for name in UPDATES for split, rows in SPLITS.items()}


@pytest.fixture(scope="module")
def learnt(tmp_path_factory):
    """Results by rank; one start of the processes for all cases."""
    return together(learn_everything, tmp_path_factory.mktemp("learnt"))


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("name", UPDATES)
def test_two_processes_learn_what_one_learns(name, split, learnt):
    alone = learn(UPDATES[name], [slice(0, 6)])
    results = [everything[name, split] for everything in learnt]
    for weights, seen, advantages in results:
        torch.testing.assert_close(advantages, alone[2], rtol=0, atol=0)
        for key, value in alone[0].items():
            torch.testing.assert_close(weights[key], value, rtol=0, atol=1e-6)
        for one, other in zip(seen, alone[1], strict=True):
            assert one == {key: pytest.approx(value, abs=1e-5, nan_ok=True) for key, value in other.items()}
    assert all(torch.equal(results[0][0][key], results[1][0][key]) for key in alone[0])


def exchange():
    return {
        "objects": parallel.gather_objects(f"of {parallel.rank()}"),
        "largest": parallel.largest(parallel.rank() * 7),
        "main": parallel.from_main(parallel.rank()),
        "share": parallel.share(6, "env.num_envs"),
    }


def test_what_is_exchanged(tmp_path):
    expected = {"objects": ["of 0", "of 1"], "largest": 7, "main": 0, "share": 3}
    assert together(exchange, tmp_path) == [expected, expected]
    alone = {"objects": ["of 0"], "largest": 0, "main": 0, "share": 6}
    assert exchange() == alone


def fail_in_one():
    if parallel.rank() == 1:
        os._exit(0)  # without a word
    try:
        parallel.wait_for_all()
    except parallel.ProcessLost as error:
        return str(error)


def test_the_others_hear_of_a_process_that_died(tmp_path):
    torch.save(None, tmp_path / "1.pt")
    started = time.monotonic()
    said, _ = together(fail_in_one, tmp_path)
    assert "process 0 of 2 can no longer talk to the others" in said and time.monotonic() - started < 60


@pytest.mark.parametrize(("gpus", "chosen"), [(1, []), (2, [1]), (8, [1])])
def test_each_process_has_a_gpu(gpus, chosen, monkeypatch):
    seen = []
    monkeypatch.setattr(torch.cuda, "set_device", seen.append)
    parallel._choose_gpu(1, gpus)
    assert seen == chosen
    with pytest.raises(ValueError, match="process 9 of this machine has no GPU, there are 8: start as many processes"):
        parallel._choose_gpu(9, 8)


def test_results_of_an_evaluation_are_put_together():
    grid = [EpisodeResult(Episode(0, trial, 1), "reach", bool(trial % 2), False, 0.0, trial) for trial in range(5)]
    videos = {place: torch.full((1,), place).numpy() for place in range(5)}
    parts = [
        EvaluationResult(grid[rank::2], {place // 2: videos[place] for place in range(rank, 3, 2)}) for rank in (0, 1)
    ]
    whole = EvaluationResult.interleaved(parts)
    assert whole.episodes == grid and whole.videos == {place: videos[place] for place in range(3)}


# Whole recipes, as torchrun starts them.

SETTINGS = [
    *TOY,
    *["env.num_envs=4", "sft.episodes=2", "sft.steps=3", "policy.chunk_size=3", "eval.trials=3", "iterations=12"],
]
SHAPED = {"ppo": [], "grpo": ["env=metaworld_button"]}  # a reward in which runs of a random policy differ


@pytest.fixture(scope="module", autouse=True)
def simulator():
    pytest.importorskip("metaworld", reason="Meta-World is not installed: make setup")


def torchrun(script, *overrides, processes=2, **environ):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", script]
    return subprocess.Popen(
        [*command, *map(str, overrides)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | environ,
    )


def finished(name, folder, *overrides):
    settings = [*SHAPED[name], *SETTINGS, *TOY_OF[name], *overrides]
    process = torchrun(RECIPES / f"{name}.py", *settings, f"hydra.run.dir={folder}")
    out, err = process.communicate(timeout=400)
    assert process.returncode == 0, err[-3000:]
    return out


@pytest.mark.parametrize("name", ["ppo", "grpo"])
def test_recipes_of_two_processes_stop_and_go_on(name, tmp_path):
    out = finished(name, tmp_path / "whole")
    assert out.count("env steps/s in training") == 1  # one process prints
    whole = metrics(tmp_path / "whole")
    folder = tmp_path / "stopped"
    settings = [*SHAPED[name], *SETTINGS, *TOY_OF[name], "checkpoint_every=3"]
    process = torchrun(RECIPES / f"{name}.py", *settings, f"hydra.run.dir={folder}")
    deadline = time.monotonic() + 200
    while not ((folder / "metrics.jsonl").exists() and '"step": 1' in (folder / "metrics.jsonl").read_text()):
        assert time.monotonic() < deadline and process.poll() is None, process.communicate()[1][-3000:]
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)  # torchrun passes it on
    out, err = process.communicate(timeout=60)
    assert process.returncode and "stopped by SIGTERM after" in out, err[-3000:]
    assert metrics(folder) != whole
    finished(name, folder, "checkpoint_every=3")
    assert metrics(folder) == whole
    assert sum(line["train/steps"] for lines in whole.values() for line in lines if "train/steps" in line) > 3
    record = json.loads((folder / "run.json").read_text())
    assert len(record["processes"]) == 2 and "finished" in record

    alone = recipe(name, folder, *settings)
    assert alone.returncode and re.search("is of 2 processes, this run has 1: go on with as many", alone.stderr)


def test_an_evaluation_is_shared(tmp_path):
    """Bit by bit, where a process has as many environments and threads as one alone: they decide how torch rounds."""
    finished("ppo", tmp_path / "run", "iterations=1")
    settings = [*SETTINGS[:4], "eval.trials=5", "eval.videos=3"]
    settings += [f"policy.checkpoint={tmp_path / 'run' / 'policy'}", "seed=3"]
    found = []
    for processes in (1, 2):
        folder = tmp_path / f"by{processes}"
        shared = [f"env.num_envs={2 * processes}", f"hydra.run.dir={folder}"]
        process = torchrun(RECIPES / "evaluate.py", *settings, *shared, processes=processes, OMP_NUM_THREADS="1")
        out, err = process.communicate(timeout=200)
        assert process.returncode == 0, err[-3000:]
        found.append((json.loads((folder / "metrics.json").read_text()), sorted((folder / "videos").iterdir())))
    (one, videos), (two, others) = found
    assert one["eval/num_episodes"] == 5 and [path.name for path in videos] == [path.name for path in others]
    assert two == one
    for path, other in zip(videos, others, strict=True):
        assert path.read_bytes() == other.read_bytes()


FAILING = """
import os, runpy, sys
import vla_algos.collectors as collectors
collect, calls = collectors.StepCollector.rollout, []

def rollout(self):
    calls.append(1)
    if len(calls) == 2 and os.environ["RANK"] == "1":
        raise ArithmeticError("the second process has had enough")
    return collect(self)

collectors.StepCollector.rollout = rollout
sys.argv[0] = {recipe!r}
runpy.run_path({recipe!r}, run_name="__main__")
"""


def test_a_process_that_fails_ends_the_others(tmp_path):
    script = tmp_path / "failing.py"
    script.write_text(FAILING.format(recipe=str(RECIPES / "ppo.py")))
    process = torchrun(script, *SETTINGS, *TOY_OF["ppo"], "iterations=500", f"hydra.run.dir={tmp_path / 'run'}")
    _, err = process.communicate(timeout=200)
    assert process.returncode and "ArithmeticError: the second process has had enough" in err
    last = (tmp_path / "run" / "metrics.jsonl").stat().st_mtime
    assert time.time() - last < 60


def test_numbers_that_cannot_be_shared(tmp_path):
    process = torchrun(RECIPES / "ppo.py", *SETTINGS, *TOY_OF["ppo"], "env.num_envs=3", f"hydra.run.dir={tmp_path}")
    _, err = process.communicate(timeout=200)
    assert process.returncode and "env.num_envs=3 cannot be shared by 2 processes; try env.num_envs=4" in err
    process = torchrun(RECIPES / "sft.py", f"hydra.run.dir={tmp_path}")
    assert "recipes/sft.py runs in one process, not in 2: leave out torchrun" in process.communicate(timeout=200)[1]
    process = torchrun(RECIPES / "ppo.py", "-m", "seed=0,1", f"hydra.sweep.dir={tmp_path}")
    assert "under torchrun start each by itself" in process.communicate(timeout=200)[1]
