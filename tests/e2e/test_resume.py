"""A run that is interrupted, at whatever moment and however rudely, computes what it would have computed."""

import errno
import json
import os
import re
import shutil
import signal
import time
from dataclasses import replace

import forked
import pytest
import torch
from hydra.core.global_hydra import GlobalHydra
from running import TOY, TOY_OF, composed, differing, main_of, metrics
from safetensors.torch import load_file
from simulators import some

import vla_algos.run.checkpoints
from vla_algos.collectors import EpisodeCollector, StepCollector
from vla_algos.imitation import BehaviourCloning
from vla_algos.minibatches import Minibatch
from vla_algos.run import HeldOut
from vla_algos.run.checkpoints import CheckpointError, by_preference, open_checkpoint
from vla_envs import EpisodeSampler
from vla_envs.workers.pool import SimulatorCrash
from vla_policies.tiny import make_tiny

pytest.importorskip("metaworld", reason="Meta-World is not installed: make setup")
pytestmark = pytest.mark.timeout(900)  # whole runs, several of them
ITERATIONS = 4
# A chunk of 3 in episodes of 8 actions: iterations end in the middle of episodes.
SETTINGS = [
    f"iterations={ITERATIONS}",
    "demonstrations.episodes=2",
    "cloning.steps=3",
    "policy.chunk_size=3",
    "evaluate_every=2",
]


of_ppo = pytest.mark.parametrize("whole", some(["ppo", "grpo"], 2), indirect=True)


@pytest.fixture(autouse=True)
def hydra():
    yield
    GlobalHydra.instance().clear()


def overrides(name, *more):
    return [*TOY, *TOY_OF[name], *SETTINGS, *more]


def run(name, folder, *more):
    main_of(name)(composed(name, overrides(name, *more), folder))


@pytest.fixture(scope="module", params=["ppo", "grpo"])
def whole(request, tmp_path_factory):
    """An uninterrupted run."""
    folder = tmp_path_factory.mktemp(request.param) / "whole"
    run(request.param, folder)
    GlobalHydra.instance().clear()
    return request.param, folder, metrics(folder)


def interrupt(monkeypatch, owner, method, iteration, action):
    """Do something to this process in the given call of a method."""
    original, calls = getattr(owner, method), []

    def interrupted(*given, **named):
        calls.append(1)
        if len(calls) == iteration:
            action()
        return original(*given, **named)

    monkeypatch.setattr(owner, method, interrupted)


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(
    ("where", "number"),
    [("collecting", signal.SIGUSR2), ("learning", signal.SIGTERM), ("evaluating", signal.SIGTERM)],
)
def test_a_signal_costs_the_iteration_at_work(whole, where, number, monkeypatch, tmp_path, capsys):
    name, folder, expected = whole
    if where == "learning" and name == "grpo":
        pytest.skip("random policies give GRPO no group to learn from")
    owner, method, call = {
        "collecting": (StepCollector, "rollout", 3) if name == "ppo" else (EpisodeCollector, "extend", 5),
        "learning": (Minibatch, "step", 2),
        "evaluating": (EpisodeCollector, "_decide", 5),
    }[where]
    again = tmp_path / "run"
    with monkeypatch.context() as patch:
        interrupt(patch, owner, method, call, lambda: os.kill(os.getpid(), number))
        with pytest.raises(SystemExit) as stopped:
            run(name, again)
    GlobalHydra.instance().clear()
    assert stopped.value.code == 128 + number
    said = capsys.readouterr().out
    assert f"stopped by {signal.Signals(number).name}; the same command resumes after the last checkpoint" in said
    assert signal.getsignal(number) is not None
    run(name, again)
    assert metrics(again) == expected
    assert not differing(folder / "policy", again / "policy")


def test_what_was_told_of_tasks_is_resumed(monkeypatch, tmp_path):
    """Which task comes next hangs on the successes of the iterations before."""
    settings = ["env=metaworld_faucets", "episode_order=learnable", "evaluate_every=0"]
    told = []
    tell = EpisodeSampler.tell

    def listen(sampler, task_ids, solved):
        told.append(list(zip(task_ids, solved, strict=True)))
        tell(sampler, task_ids, solved)

    monkeypatch.setattr(EpisodeSampler, "tell", listen)
    run("ppo", tmp_path / "whole", *settings)
    GlobalHydra.instance().clear()
    expected, told[:] = list(told), []
    assert sum(map(len, expected)) > ITERATIONS
    with monkeypatch.context() as patch:
        interrupt(patch, StepCollector, "rollout", 3, terminate)
        with pytest.raises(SystemExit):
            run("ppo", tmp_path / "again", *settings)
    GlobalHydra.instance().clear()
    run("ppo", tmp_path / "again", *settings)
    assert told == expected
    assert metrics(tmp_path / "again") == metrics(tmp_path / "whole")


@pytest.mark.parametrize("name", ["ppo", "grpo"])
def test_a_policy_of_lerobot_resumes(name, monkeypatch, tmp_path):
    checkpoint = make_tiny("smolvla_metaworld", tmp_path / "checkpoint")
    settings = [*TOY, *TOY_OF[name], "iterations=3", "policy=smolvla", f"policy.checkpoint={checkpoint}"]
    settings += ["policy.num_steps=2", "policy.num_action_chunks=3", "update.recompute_log_prob=true"]
    settings += ["policy.value_head=false"] * (name == "grpo")

    def train(folder):
        main_of(name)(composed(name, settings, folder))
        GlobalHydra.instance().clear()
        return metrics(folder)

    expected = train(tmp_path / "whole")
    with monkeypatch.context() as patch:
        interrupt(patch, StepCollector if name == "ppo" else EpisodeCollector, "state_dict", 2, terminate)
        with pytest.raises(SystemExit):
            train(tmp_path / "again")
    GlobalHydra.instance().clear()
    assert train(tmp_path / "again") == expected
    assert not differing(tmp_path / "whole" / "policy", tmp_path / "again" / "policy")


def test_stopping_again_and_again(whole, monkeypatch, tmp_path):
    """At each iteration, and with checkpoints that are rarer than that."""
    name, _, expected = whole
    again = tmp_path / "run"
    finished = 0
    for _ in range(ITERATIONS + 2):
        with monkeypatch.context() as patch:
            interrupt(patch, StepCollector if name == "ppo" else EpisodeCollector, "state_dict", 2, terminate)
            try:
                run(name, again, "checkpoint_every=3")
                finished += 1
                break
            except SystemExit:
                pass
            finally:
                GlobalHydra.instance().clear()
    assert finished == 1
    assert metrics(again) == expected


def test_cloning_resumes(monkeypatch, tmp_path, capsys):
    sft = [
        *TOY[:5],
        "demonstrations.episodes=2",
        "cloning.steps=7",
        "cloning.batch_size=16",
        "checkpoint_every=2",
        "eval.videos=0",
    ]

    def clone(folder):
        main_of("sft")(composed("sft", sft, folder))
        GlobalHydra.instance().clear()
        return load_file(folder / "policy" / "model.safetensors"), metrics(folder)

    weights, expected = clone(tmp_path / "whole")
    again = tmp_path / "again"
    with monkeypatch.context() as patch:
        interrupt(patch, BehaviourCloning, "step", 4, terminate)
        with pytest.raises(SystemExit):
            clone(again)
    GlobalHydra.instance().clear()
    assert open_checkpoint(by_preference(again / "checkpoints")[0]).step == 2
    found, measured = clone(again)
    assert measured == expected
    assert all(torch.equal(found[name], weights[name]) for name in weights)


@of_ppo
def test_a_full_disk_ends_the_run_and_leaves_the_last_checkpoint(whole, monkeypatch, tmp_path):
    saves, save = [], vla_algos.run.checkpoints.write_safetensors

    def full(*given, **named):
        saves.append(1)
        save(*given, **named)  # there is a file
        if len(saves) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")

    name, _, expected = whole
    with monkeypatch.context() as patch:
        patch.setattr(vla_algos.run.checkpoints, "write_safetensors", full)
        with pytest.raises(
            OSError, match=r"step_00000002 could not be written: .*No space .*; make room, then type the"
        ):
            run(name, tmp_path / "run")
    GlobalHydra.instance().clear()
    assert open_checkpoint(by_preference(tmp_path / "run" / "checkpoints")[0]).step == 1
    assert not list((tmp_path / "run" / "checkpoints").glob(".unfinished*"))
    run(name, tmp_path / "run")
    assert metrics(tmp_path / "run") == expected


@of_ppo
def test_a_folder_with_another_run(whole, tmp_path):
    name, folder, _ = whole
    folder = shutil.copytree(folder, tmp_path / "copy", symlinks=True)
    message = r"has a run of other settings:\n  optim.lr: 0.001 there, 0.01 now\n.*resume=force"
    with pytest.raises(ValueError, match=message):
        run(name, folder, "optim.lr=0.01")
    GlobalHydra.instance().clear()
    with pytest.raises(ValueError, match="resume=never; take another folder"):
        run(name, folder, "resume=never")
    GlobalHydra.instance().clear()
    with pytest.raises(ValueError, match="resume=always: must be 'auto', 'elastic', 'force' or 'never'"):
        run(name, folder, "resume=always")
    GlobalHydra.instance().clear()
    with pytest.raises(CheckpointError, match=r"weights of another policy: .*policy settings of that run"):
        run(name, folder, "resume=force", "policy.dim=64")


def test_a_finished_run_says_what_it_has_and_is_neither_run_nor_evaluated_again(whole, capsys):
    name, folder, _ = whole
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    (folder / "report.html").unlink()  # a process that was killed may have missed it
    run(name, folder)
    assert re.search(rf"{folder} has this run already: it finished \S+ with eval/success_once", capsys.readouterr().out)
    GlobalHydra.instance().clear()
    with pytest.raises(
        ValueError, match=rf"has done {ITERATIONS}, more than iterations=1: type iterations={ITERATIONS}"
    ):
        run(name, folder, "iterations=1", "resume=force")
    after = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert after == before


def test_forced_settings_are_used(tmp_path):
    run("ppo", tmp_path / "run", "policy=small_flow", "optim.lr=1e-3", "iterations=2")
    GlobalHydra.instance().clear()
    new = ["policy=small_flow", "optim.lr=5e-5", "policy.noise_level=0.3", "resume=force", "iterations=4"]
    run("ppo", tmp_path / "run", *new)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    rates = [line["train/actor/lr"] for line in lines if "train/actor/lr" in line]
    assert rates == [1e-3, 1e-3, 5e-5, 5e-5]
    assert json.loads((tmp_path / "run" / "policy" / "config.json").read_text())["noise_level"] == 0.3


@pytest.mark.parametrize("which", ["eval", "eval_sampled"])
def test_a_last_evaluation_that_failed_is_no_result_for_the_next_start(which, tmp_path, monkeypatch):
    measure = HeldOut.measure

    def breaks(self, env, policy, iteration, collector=None):
        results = measure(self, env, policy, iteration, collector)
        if iteration:
            results[which] = replace(results[which], broken="no simulator starts")
        return results

    monkeypatch.setattr(HeldOut, "measure", breaks)
    for _ in range(2):
        with pytest.raises(SimulatorCrash, match=r"its last evaluation has no result: .*no simulator starts"):
            run("ppo", tmp_path / "run", "iterations=1", "eval.sampled=true")
        GlobalHydra.instance().clear()
    assert "finished" not in json.loads((tmp_path / "run" / "run.json").read_text())


def test_a_start_that_fails_does_not_lock_the_folder(tmp_path):
    with pytest.raises(FileNotFoundError):
        run("ppo", tmp_path / "run", "policy.checkpoint=/nowhere")
    GlobalHydra.instance().clear()
    run("ppo", tmp_path / "run", "iterations=1", "resume=never")


def test_a_signal_while_a_state_is_copied_waits_until_it_is_saved(monkeypatch, tmp_path):
    interrupt(monkeypatch, StepCollector, "state_dict", 2, terminate)
    with pytest.raises(SystemExit):
        run("ppo", tmp_path / "run", "evaluate_every=0")
    assert open_checkpoint(by_preference(tmp_path / "run" / "checkpoints")[0]).step == 1


def test_a_second_signal_does_not_break_off_the_save(monkeypatch, tmp_path):
    """Nor the Ctrl-C that torchrun passes on; the checkpoint that is being written is finished."""
    save, stopping = vla_algos.run.checkpoints.write_safetensors, []

    def slow(file, *given):
        while "step_00000002" in str(file) and not stopping:
            time.sleep(0.01)
        if stopping and stopping[0]:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGINT):
                os.kill(os.getpid(), number)
            time.sleep(0.5)
        return save(file, *given)

    monkeypatch.setattr(vla_algos.run.checkpoints, "write_safetensors", slow)
    interrupt(monkeypatch, StepCollector, "rollout", 3, lambda: (stopping.append(True), terminate()))
    with pytest.raises(SystemExit):
        run("ppo", tmp_path / "run", "evaluate_every=0")
    assert open_checkpoint(by_preference(tmp_path / "run" / "checkpoints")[0]).step == 2


@of_ppo
def test_a_second_start_is_refused_and_control_c_saves(whole, tmp_path):
    """As a terminal does it: the same command twice, then Ctrl-C, then the same command again."""
    name, _, expected = whole
    again = tmp_path / "run"
    command = [name, *overrides(name), f"hydra.run.dir={again}"]
    first = forked.Started(*command)
    while not (again / "checkpoints" / "latest").is_symlink() and first.poll() is None:
        time.sleep(0.05)
    first.send_signal(signal.SIGSTOP)
    second = forked.run(*command)
    first.send_signal(signal.SIGCONT)
    first.send_signal(signal.SIGINT)
    said, _ = first.communicate(timeout=120)
    assert second.returncode not in (0, None)
    assert f"{again} is in use by another process" in second.stderr
    assert first.returncode == 130
    assert "stopped by SIGINT" in said
    assert forked.run(*command).returncode == 0
    assert metrics(again) == expected
