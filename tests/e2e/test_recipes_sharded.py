"""The large policies, tiny, trained by two processes that have half of the weights each."""

import json
import math
import shutil
import signal
import time

import pytest
import torch
from forked import Started
from hydra.core.global_hydra import GlobalHydra
from openvla_checkpoint import make_checkpoint
from paths import ROOT
from pi0_checkpoint import make_checkpoint as make_pi0_checkpoint
from running import TOY, TOY_OF, differing, metrics, train
from simulators import some

from vla_policies import load_policy, make_example
from vla_policies.checkpoint.lora import has_lora

pytest.importorskip("metaworld", reason="Meta-World is not installed: make setup")
pytestmark = pytest.mark.timeout(300)
SHARED = ["env.num_envs=4", "iterations=3", "eval.trials=1"]
ADAPTER = "lora_adapter/adapter_model.safetensors"


def started(name, folder, settings):
    typed = [*TOY, *TOY_OF[name], *SHARED, *settings, f"hydra.run.dir={folder}"]
    return Started(name, *typed, processes=2)


def finished(name, folder, settings):
    process = started(name, folder, settings)
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err[-3000:]
    return out


def stop_after(iteration, name, folder, settings):
    process = started(name, folder, settings)
    deadline = time.monotonic() + 150
    while not ((log := folder / "metrics.jsonl").exists() and f'"step": {iteration}, "env/' in log.read_text()):
        assert process.poll() is None, process.communicate()[1][-3000:]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode, err[-3000:]
    assert "stopped by SIGTERM; the same command resumes" in out, err[-3000:]


def as_killed_after(iteration, folder):
    """Take from the folder of a complete run what it would not have if it had been killed after an iteration."""
    shutil.rmtree(folder / "policy")
    for checkpoint in (folder / "checkpoints").glob("step_*"):
        if int(checkpoint.name.removeprefix("step_")) > iteration:
            shutil.rmtree(checkpoint)
    (folder / "checkpoints" / "latest").unlink()


def acts(folder, benchmark="metaworld"):
    """Load a saved policy in this process, which is alone, and let it act."""
    policy = load_policy(folder)
    assert all(type(parameter) is torch.nn.Parameter for parameter in policy.parameters())
    with torch.no_grad():
        td = policy(make_example(benchmark))
    assert td["action"].isfinite().all()
    return policy


def test_grpo_of_a_whole_openvla_oft_in_bfloat16(tmp_path):
    checkpoint = make_checkpoint(tmp_path / "checkpoint")
    chosen = ["policy=openvla_oft", f"policy.checkpoint={checkpoint}", "policy.layout=official"]
    chosen += ["policy.num_action_chunks=2", "policy.value_head=false", "env=metaworld_button", "sharding.compute=bf16"]
    finished("grpo", tmp_path / "whole", chosen)
    whole = metrics(tmp_path / "whole")
    learnt = [line for [line] in whole.values() if "train/loss" in line]
    assert len(learnt) == 3
    for line in learnt:
        assert math.isfinite(line["train/loss"])
        assert line["train/actor/grad_norm"] > 0
        assert line["train/actor/log_ratio_at_start"] < 1e-2  # bfloat16, and other batches than those that acted
        assert line["train/imbalance"] == 1.0
    changed = differing(tmp_path / "whole" / "policy", checkpoint)
    for part in ("vision_backbone", "projector", "language_model"):
        assert any(key.startswith(part) for key in changed), f"{part} has not learnt"
    acts(tmp_path / "whole" / "policy")

    stop_after(1, "grpo", tmp_path / "stopped", chosen)
    finished("grpo", tmp_path / "stopped", chosen)
    assert metrics(tmp_path / "stopped") == whole
    assert not differing(tmp_path / "stopped" / "policy", tmp_path / "whole" / "policy")


@pytest.mark.parametrize(
    ("family", "settings"),
    some(
        [
            ("pi0", ["policy.config_name=pi05_metaworld", "policy.num_steps=2", "policy.num_action_chunks=2"]),
            ("openvla", []),
        ],
        2,
    ),
)
def test_ppo_of_an_adapter_that_is_held_to_its_reference(family, settings, tmp_path):
    make = {"openvla": make_checkpoint, "pi0": lambda folder: make_pi0_checkpoint(folder, "pi05_tiny")}[family]
    checkpoint = make(tmp_path / "checkpoint")
    chosen = [f"policy={family}", f"policy.checkpoint={checkpoint}", "policy.lora_rank=2", *settings]
    chosen += ["iterations=2", "loss.reference_kl_coeff=0.5", "update.minibatch_size=null", "update.minibatches=2"]
    run = tmp_path / "run"
    out = finished("ppo", run, chosen)
    assert out.count("of them trained") == 1  # one process prints
    whole = metrics(run)
    learnt = [line for [line] in whole.values() if "train/loss" in line]
    assert all(line["train/actor/log_ratio_at_start"] < 1e-5 for line in learnt)
    assert [line["train/steps"] for line in learnt] == [2.0] * 2
    assert learnt[-1]["train/actor/reference_kl"] > 0
    before = tmp_path / "before"
    shutil.copytree(run / "policy", before)
    assert has_lora(acts(before))

    as_killed_after(1, run)
    finished("ppo", run, chosen)
    assert metrics(run) == whole
    assert not differing(run / "policy", before, ADAPTER)
    assert json.loads((run / "run.json").read_text())["finished"]


@pytest.mark.parametrize(
    "sharding", some([["sharding.compute=bf16", "offload.optimizer=true"], ["sharding.cpu_offload=true"]], 2)
)
def test_one_process_that_computes_otherwise(sharding, tmp_path):
    checkpoint = make_checkpoint(tmp_path / "checkpoint")
    chosen = ["policy=openvla_oft", f"policy.checkpoint={checkpoint}", "policy.layout=official", *sharding]
    chosen += ["policy.num_action_chunks=2", "iterations=2"]
    run = tmp_path / "run"
    learnt, folder = train("ppo", run, chosen)
    GlobalHydra.instance().clear()
    whole = metrics(run)
    assert learnt["train/actor/log_ratio_at_start"] < 1e-2
    assert "train/imbalance" not in learnt
    assert not torch.distributed.is_initialized()
    before = tmp_path / "before"
    shutil.copytree(folder, before)
    assert learnt["train/actor/grad_norm"] > 0
    acts(before)
    as_killed_after(1, run)
    train("ppo", run, chosen)
    GlobalHydra.instance().clear()
    assert metrics(run) == whole
    assert not differing(folder, before)


def test_a_script_of_ones_own(tmp_path):
    script = ROOT / "examples" / "several_gpus.py"
    process = Started(script, f"--save={tmp_path}", "--iterations=2", "--num-envs=2", processes=2)
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err[-3000:]
    assert out.count("iteration 1: ") == 1  # one process prints
    acts(tmp_path)
