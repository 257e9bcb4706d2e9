"""``vla-recipe merge`` and ``vla-recipe card``: a policy made ready for others, without a network."""

import json
import shutil
import socket

import pytest
import torch
from huggingface_hub import ModelCard
from openvla_checkpoint import make_checkpoint
from tiny_policies import SIZES
from torch import nn

from recipes.__main__ import main
from vla_algos.evaluation import TRAINING_ENV, EvaluationResult
from vla_algos.results import EpisodeResult, as_lines
from vla_algos.run.environments import make_env_spec
from vla_algos.run.training_env import save_training_env
from vla_common.checksums import add_checksum, identity, verify_checksums
from vla_envs import Episode
from vla_policies import OpenVLA, load_policy
from vla_policies.checkpoint.lora import add_lora, has_lora
from vla_policies.small import SmallVLA, SmallVLAConfig

FAUCET = {"id": "metaworld/faucet-open-v3", "image_size": 64, "render_quality": "minimal"}
SOLVED = [True, True, False, True]


@pytest.fixture
def no_network(monkeypatch):
    """Fails every connection."""

    def refuse(*_, **__):
        raise AssertionError("something wants to connect")

    monkeypatch.setattr(socket.socket, "connect", refuse)


def refused(capsys, *typed):
    assert main(list(map(str, typed))) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    return line


# ---- merge


@pytest.fixture
def adapted(tmp_path):
    """A policy with an adapter that matters, saved as a recipe does."""
    policy = OpenVLA.from_pretrained(make_checkpoint(tmp_path / "base"), benchmark="metaworld")
    add_lora(policy, 4)
    generator = torch.Generator().manual_seed(7)
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.05, generator=generator)
    policy.save_pretrained(tmp_path / "policy")
    (tmp_path / "policy" / TRAINING_ENV).write_text("{}")
    add_checksum(tmp_path / "policy", TRAINING_ENV)
    return policy


def test_a_merged_policy_acts_as_with_its_adapter(adapted, tmp_path, capsys, no_network):
    new = tmp_path / "somewhere" / "merged"
    assert main(["merge", str(tmp_path / "policy"), "--to", str(new)]) == 0
    assert f"policy.checkpoint={new}" in capsys.readouterr().out
    merged, base = load_policy(new), load_policy(tmp_path / "base", benchmark="metaworld")
    assert not has_lora(merged)
    assert not (new / "lora_adapter").exists()
    assert (new / TRAINING_ENV).read_text() == "{}"
    verify_checksums(new)
    weights = dict(base.model.named_parameters())
    for name, parameter in merged.model.named_parameters():
        layer, _, kind = name.rpartition(".")
        module = adapted.model.get_submodule(layer)
        expected = weights[name]
        if kind == "weight" and hasattr(module, "get_delta_weight"):
            expected = expected + module.get_delta_weight("default")
            assert not torch.equal(expected, weights[name])
        torch.testing.assert_close(parameter, expected)
    assert main(["merge", str(tmp_path / "policy"), "--to", str(tmp_path / "again")]) == 0, "the original stays"


def test_what_cannot_be_merged_is_one_line(adapted, tmp_path, capsys):
    assert "base has no adapter to merge; type the folder of a policy trained with policy.lora_rank" in refused(
        capsys, "merge", tmp_path / "base", "--to", tmp_path / "new"
    )
    load_policy(tmp_path / "base", benchmark="metaworld").save_pretrained(tmp_path / "run" / "policy")
    line = refused(capsys, "merge", tmp_path / "run", "--to", tmp_path / "new")
    assert "run/policy has no adapter to merge" in line
    assert "no such folder" in refused(capsys, "merge", tmp_path / "none", "--to", tmp_path / "new")
    line = refused(capsys, "merge", tmp_path / "policy", "--to", tmp_path / "base")
    assert "base is there already; type another folder: --to NEW" in line
    assert not (tmp_path / "new").exists()


# ---- card


@pytest.fixture
def policy(tmp_path):
    """The folder of a small policy, as a recipe leaves it."""
    folder = tmp_path / "policy"
    SmallVLA(SmallVLAConfig(num_bins=8, **SIZES)).save_pretrained(folder)
    note_faucet(folder)
    return folder


def note_faucet(folder):
    save_training_env(folder, "ppo", FAUCET, make_env_spec(FAUCET), chunk_size=2, evaluation={"trials": 4, "seed": 9})


@pytest.fixture
def evaluation(policy, tmp_path):
    """The folder of an evaluation of four episodes, as recipes/evaluate.py leaves it."""
    return evaluate(policy, tmp_path / "evaluation")


def evaluate(policy, folder):
    folder.mkdir()
    episodes = [
        EpisodeResult(Episode(0, trial, 9), "faucet-open", solved, solved, 1.0, 10, index=trial)
        for trial, solved in enumerate(SOLVED)
    ]
    (folder / "episodes.jsonl").write_text(as_lines(episodes))
    said = {"greedy": True, "protocol": "metaworld/tests", "protocol_deviations": ["64 pixels instead of 480"]}
    said["differs_from_training"] = {"env.image_size": [64, 32]}
    said["policy_identity"] = identity(policy)
    (folder / "metrics.json").write_text(json.dumps({**EvaluationResult(episodes).metrics(), **said}))
    settings = {"recipe": "evaluate", "policy": {"family": "small"}}
    settings |= {"env": {**FAUCET, "camera": {"distance": 1.5}}, "eval": {"trials": 2, "seed": 9}}
    settings["policy"] |= {"checkpoint": str(policy), "temperature": 1.6, "top_k": None}
    (folder / "config.yaml").write_text(json.dumps(settings))
    process = {"versions": {"torch": "2.13.0"}, "code": {"commit": "0123456789abcdef", "changes": None}}
    (folder / "run.json").write_text(json.dumps({"processes": [process]}))
    return folder


def test_a_card_says_protocol_deviations_and_results(policy, evaluation, capsys, no_network):
    typed = ["--repository", "me/faucets", "--base-model", "openvla/openvla-7b", "--license", "mit"]
    assert main(["card", str(policy), str(evaluation), *typed]) == 0
    said = capsys.readouterr().out
    assert "Nothing was uploaded" in said
    assert f"hf upload me/faucets {policy} . --private" in said
    card = ModelCard.load(policy / "README.md")
    assert (card.data.license, card.data.base_model, card.data.library_name) == (
        "mit",
        "openvla/openvla-7b",
        "vla-torchrl",
    )
    assert {"small", "metaworld", "reinforcement-learning"} <= set(card.data.tags)
    (result,) = card.data.eval_results
    assert (result.metric_type, result.metric_value, result.dataset_type) == ("success_rate", 75.0, FAUCET["id"])
    assert "deviating from its protocol" in result.dataset_name
    for text in (
        "# faucets",
        "trained by `ppo`",
        '| `render_quality` | `"minimal"` |',
        "- protocol: metaworld/tests",
        "- not the benchmark's: 64 pixels instead of 480",
        "- `env.image_size` is `32`, was `64` in training",
        "- episodes of `eval.seed=9`",
        "- `policy.temperature=1.6`",
        "- torch 2.13.0",
        "- vla-torchrl at 0123456789ab",
        "faucet-open         4    75.0%   30.1 -  95.4",
        "hf download me/faucets --local-dir faucets",
        "vla-recipe run evaluate policy.checkpoint=faucets policy=small policy.temperature=1.6 "
        "'env.camera={distance:1.5}' eval.trials=2\n",
    ):
        assert text in card.text, text
    assert str(policy) not in card.text
    assert "top_k" not in card.text
    verify_checksums(policy)  # the card is no part of what was trained
    assert main(["card", str(policy)]) == 0, "ours is replaced"
    card = (policy / "README.md").read_text()
    assert "No evaluation was given for this card (`vla-recipe card FOLDER EVALUATION`)." in card
    assert "vla-recipe run evaluate policy.checkpoint=REPOSITORY\n" in card


def test_a_card_has_a_video_of_the_evaluation_or_of_the_last_one_in_training(policy, evaluation, tmp_path, capsys):
    assert main(["card", str(policy), str(evaluation)]) == 0
    assert not (policy / "replay.mp4").exists()
    assert "replay.mp4" not in (policy / "README.md").read_text()

    def film(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(path.stem)

    training, video = tmp_path / "videos", policy / "replay.mp4"  # the policy lies in a run's folder
    film(training / "iteration_0002" / "000_open_trial0_success.mp4")
    film(training / "iteration_0010" / "000_open_trial0_failure.mp4")
    assert main(["card", str(policy), str(evaluation)]) == 0
    assert video.read_text() == "000_open_trial0_failure"
    film(evaluation / "videos" / "000_open_trial0_failure.mp4")
    film(evaluation / "videos" / "001_open_trial1_success.mp4")
    film(evaluation / "videos" / "blank_images" / "000_open_trial0_success.mp4")
    (evaluation / "videos" / "000_link_success.mp4").symlink_to(training / "iteration_0002")  # of a stranger's
    capsys.readouterr()
    assert main(["card", str(policy), str(evaluation)]) == 0
    assert video.read_text() == "001_open_trial1_success"
    assert "[An episode](replay.mp4), `001_open_trial1_success`" in (policy / "README.md").read_text()
    assert f"wrote {policy / 'README.md'} and replay.mp4. Nothing was uploaded." in capsys.readouterr().out
    verify_checksums(policy)


def test_a_copy_of_the_policy_has_its_evaluations(policy, evaluation, tmp_path):
    shutil.copytree(policy, tmp_path / "copy")
    assert main(["card", str(tmp_path / "copy"), str(evaluation)]) == 0


def test_an_evaluation_of_other_weights_is_refused(policy, evaluation, tmp_path, capsys):
    other = tmp_path / "other"
    SmallVLA(SmallVLAConfig(num_bins=9, **SIZES)).save_pretrained(other)
    note_faucet(other)
    line = refused(capsys, "card", other, evaluation)
    assert f"is no evaluation of what {other} has now, but of {policy} as it was then" in line
    shutil.copytree(policy, tmp_path / "kept")
    SmallVLA(SmallVLAConfig(num_bins=9, **SIZES)).save_pretrained(policy)  # training went on in the same folder
    note_faucet(policy)
    assert f"is no evaluation of what {policy} has now" in refused(capsys, "card", policy, evaluation)
    assert main(["card", str(tmp_path / "kept"), str(evaluation)]) == 0


def test_what_has_no_card_is_one_line(policy, evaluation, tmp_path, capsys):
    assert "no such folder" in refused(capsys, "card", tmp_path / "none")
    assert "does not say what it was trained on" in refused(capsys, "card", make_checkpoint(tmp_path / "published"))
    assert "--repository faucets: is no hub id" in refused(capsys, "card", policy, "--repository", "faucets")
    (evaluation / "metrics.json").unlink()
    assert "has no finished evaluation" in refused(capsys, "card", policy, evaluation)
    (policy / "README.md").write_text("mine")
    assert "--force replaces it" in refused(capsys, "card", policy)
    assert (policy / "README.md").read_text() == "mine"
    assert main(["card", str(policy), "--force"]) == 0
