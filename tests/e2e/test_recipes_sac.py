"""``recipes/sac.py``: half of what it learns from is demonstrated, after a kill too; it changes what its base does."""

import json
import signal

import pytest
from running import recipe
from safetensors.torch import load_file
from simulators import some

from tests.storm import lives
from vla_algos import Replay
from vla_policies import SmallVLA

MORE = ("iterations=3", "evaluate_every=0", "demonstrations.episodes=4", "cloning.steps=20")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sac") / "whole"
    assert lives.wait(lives.live("sac", folder, more=MORE)) == 0, lives.last_words(folder)
    return folder


def test_demonstrations_are_kept_and_learnt_from(whole):
    prior = load_file(whole / "prior" / "segment_00001.safetensors")
    assert prior["next.terminated"].any()
    assert prior["next.reward"].max() <= 1.0
    losses = [json.loads(line).get("train/loss_qvalue") for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert any(loss is not None for loss in losses)


@pytest.mark.parametrize("call", some([1, 2, 4], 2))  # the first is of the demonstrations
def test_a_run_that_was_killed_resumes_bit_by_bit(whole, tmp_path, call):
    folder = tmp_path / "again"
    killed = lives.wait(lives.live("sac", folder, None, lives.dies_in_extend(Replay, call), MORE))
    assert killed == 128 + signal.SIGKILL
    assert lives.wait(lives.live("sac", folder, more=MORE)) == 0, lives.last_words(folder)
    assert lives.difference(folder, lives.outcome(whole)) == ""
    for name in ("prior", "replay"):
        for file in (whole / name).iterdir():
            assert (folder / name / file.name).read_bytes() == file.read_bytes()


def test_statistics_of_demonstrations_are_taken_again_when_it_resumes(tmp_path):
    said, folder = tmp_path / "said", tmp_path / "run"

    def note():
        SmallVLA.take_statistics = lambda policy, name, *_: said.open("a").write(f"{name} ")

    def dies():
        note()
        lives.dies_in_extend(Replay, 2)()

    more = (*MORE, "demonstrations.statistics=demonstrations", f"demonstrations.folder={tmp_path / 'shown'}")
    assert lives.wait(lives.live("sac", folder, None, dies, more)) == 128 + signal.SIGKILL
    assert lives.wait(lives.live("sac", folder, None, note, more)) == 0, lives.last_words(folder)
    assert said.read_text() == "shown shown "


def test_a_policy_that_was_cloned_before_is_changed_on_meta_world(tmp_path):
    pytest.importorskip("metaworld", reason="Meta-World is not installed: pip install 'vla-torchrl[metaworld]'")
    toy = ["env.num_envs=2", "env.num_workers=1", "env.image_size=32", "eval.trials=2", "eval.videos=0"]
    toy += [f"demonstrations.folder={tmp_path / 'shown'}", "demonstrations.episodes=2"]
    recorded = ["demonstrations.noise=0", "demonstrations.stride=1", "env=metaworld_button", "cloning.steps=2"]
    recipe("sft", tmp_path / "cloned", *toy, *recorded, "policy.dim=32", "policy.layers=1")
    few = [
        "iterations=1",
        "collector.episodes=2",
        "update.warmup=1",
        "update.update_to_data=0.2",
        "replay.batch_size=8",
    ]
    recipe("sac", tmp_path / "run", *toy, *few, f"policy.checkpoint={tmp_path / 'cloned' / 'policy'}")
    assert not (tmp_path / "run" / "warm_start").exists()
    assert load_file(tmp_path / "run" / "prior" / "segment_00001.safetensors")["next.reward"].max() == 1.0
    recipe("evaluate", tmp_path / "evaluated", f"policy.checkpoint={tmp_path / 'run' / 'policy'}", *toy[:2], *toy[3:5])
    assert json.loads((tmp_path / "evaluated" / "metrics.json").read_text())["eval/num_episodes"] == 2
