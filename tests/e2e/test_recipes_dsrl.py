"""``recipes/dsrl.py``: it learns what its base does not do and resumes bit by bit; it steers pi0 and SmolVLA."""

import json
import math
import signal

import pytest
import torch
from running import recipe
from safetensors.torch import load_file
from simulators import some

from tests.storm import lives
from vla_algos import Replay
from vla_algos.run.checkpoints import open_checkpoint
from vla_policies.tiny import make_tiny

MORE = ("iterations=6", "evaluate_every=0", "eval.trials=8", "collector.episodes=32", "update.update_to_data=3")
MORE += (
    "update.lr=1e-3",
    "loss.width=32",
    "loss.alpha=0.01",
    "replay.batch_size=64",
    "replay.gamma=0.9",
    "replay.n_steps=1",
)
TOY = ["env.num_envs=2", "env.num_workers=1", "env.max_episode_steps=8", "env.image_size=32", "eval.trials=2"]
TOY += ["eval.videos=0", "iterations=2", "collector.episodes=2", "replay.batch_size=8", "update.warmup=1"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dsrl") / "whole"
    assert lives.wait(lives.live("dsrl", folder, more=MORE)) == 0, lives.last_words(folder)
    return folder


def lines_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def base_of(folder):
    return load_file(folder / "base" / "model.safetensors")


def test_it_learns_what_its_base_does_not_do_and_the_base_stays(whole):
    lines = [line for line in lines_of(whole) if "replay/decisions" in line]
    tried = [line["env/success_once"] for line in lines]
    assert tried[0] < 0.7 < 0.9 < tried[-1]
    first = base_of(whole / "checkpoints" / "step_00000006" / "policy")
    assert all(torch.equal(tensor, first[name]) for name, tensor in base_of(whole / "policy").items())


@pytest.mark.parametrize("call", some([4, 1], 2))
def test_a_run_that_was_killed_resumes_bit_by_bit(whole, tmp_path, call):
    folder = tmp_path / "again"
    assert (
        lives.wait(lives.live("dsrl", folder, None, lives.dies_in_extend(Replay, call), MORE)) == 128 + signal.SIGKILL
    )
    assert lives.wait(lives.live("dsrl", folder, more=MORE)) == 0, lives.last_words(folder)
    assert lives.difference(folder, lives.outcome(whole)) == ""
    for file in (whole / "replay").iterdir():
        assert (folder / "replay" / file.name).read_bytes() == file.read_bytes()
    base = base_of(whole / "policy")
    assert all(torch.equal(tensor, base[name]) for name, tensor in base_of(folder / "policy").items())


@pytest.mark.parametrize("kind", ["pi0", "smolvla_metaworld"])
def test_it_steers_a_checkpoint_and_evaluate_reads_what_it_wrote(kind, tmp_path):
    pytest.importorskip("metaworld", reason="Meta-World is not installed: pip install 'vla-torchrl[metaworld]'")
    chosen = {"pi0": ["policy=pi0", "policy.config_name=pi0_metaworld"], "smolvla_metaworld": ["policy=smolvla"]}
    checkpoint = f"policy.checkpoint={make_tiny(kind, tmp_path / 'tiny', 'metaworld')}"
    settings = [*chosen[kind], checkpoint, "policy.num_steps=2", "policy.num_action_chunks=2", *TOY]
    recipe("dsrl", tmp_path / "run", *settings)
    losses = [line["train/loss_qvalue"] for line in lines_of(tmp_path / "run") if "train/loss_qvalue" in line]
    assert len(losses) == 2
    assert all(map(math.isfinite, losses))
    policy = f"policy.checkpoint={tmp_path / 'run' / 'policy'}"
    recipe("evaluate", tmp_path / "evaluated", policy, "eval.trials=2", "eval.videos=0")
    assert json.loads((tmp_path / "evaluated" / "metrics.json").read_text())["eval/num_episodes"] == 2


def test_a_clone_of_the_expert_is_the_base_after_a_kill_too(tmp_path):
    folder = tmp_path / "cloned"
    more = ("iterations=2", "checkpoint_every=1", "demonstrations.episodes=4", "cloning.steps=20")
    # In the second iteration: the checkpoint after the first waited until that before it was written.
    assert lives.wait(lives.live("dsrl", folder, None, lives.dies_in_extend(Replay, 2), more)) == 128 + signal.SIGKILL
    cloned = base_of(folder / "checkpoints" / "step_00000000" / "policy")
    assert lives.wait(lives.live("dsrl", folder, more=more)) == 0, lives.last_words(folder)
    assert (folder / "warm_start" / "metrics.jsonl").read_text().count("train/loss") == 20
    assert cloned["action_out.weight"].any(), "a new one has zeros there"
    assert all(torch.equal(tensor, cloned[name]) for name, tensor in base_of(folder / "policy").items())
    more = (*more, "iterations=3", "resume=force", "update.lr=2e-5")
    assert lives.wait(lives.live("dsrl", folder, more=more)) == 0, lives.last_words(folder)
    saved = open_checkpoint(folder / "checkpoints" / "step_00000003").state["parts"]["optimizer"]
    assert saved["param_groups"][0]["lr"] == 2e-5
