"""The scripts in examples/ run as they are, two tiny iterations each; the packages beside them are in tests/plugin/."""

import importlib.util
import math

import numpy as np
import pytest
import torch
from paths import ROOT

from vla_envs import Episode
from vla_policies import SmallVLA, SmallVLAConfig, load_policy

pytest.importorskip("metaworld", reason="Meta-World is not installed: pip install 'vla-torchrl[metaworld]'")
EXAMPLES = ROOT / "examples"
TINY = ["--iterations=2", "--num-envs=2", "--decisions=4", "--max-episode-steps=10", "--demonstrations=2"]
TINY += ["--cloning-steps=3", "--held-out=2"]


def module_of(name):
    """An example, imported."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main_of(name):
    return module_of(name).main


def test_own_loop_has_everything_in_sight_and_leaves_a_policy(tmp_path):
    assert len((EXAMPLES / "own_loop.py").read_text().splitlines()) <= 150
    before, after = main_of("own_loop")([*TINY, "--epochs=1", f"--save={tmp_path / 'policy'}"])
    assert 0 <= before <= 1
    assert 0 <= after <= 1
    assert load_policy(tmp_path / "policy").chunk_size == 5


def test_the_gallery_films_a_world_that_moves():
    first, *_, last = module_of("gallery").film("metaworld/reach-v3", {"image_size": 32}, 3, 2)
    assert first.size == last.size == (256, 256)
    assert first.tobytes() != last.tobytes()


def test_two_policies_are_shown_on_the_same_episode():
    example = module_of("side_by_side")
    torch.manual_seed(0)
    specs = example.make_specs({"env": {"id": "metaworld/reach-v3", "image_size": 64, "num_envs": 4}})
    policy = SmallVLA(SmallVLAConfig((-1.0,) * 4, (1.0,) * 4, 4, chunk_size=50))
    moves = example.film(policy, specs, Episode(0, 0, seed=1), "after")
    first, *_, last = example.tiled([moves, moves[:1]])
    left, right = np.hsplit(first, 2)
    assert np.array_equal(left, right)  # the same initial state
    left, right = np.hsplit(last, 2)
    assert not np.array_equal(left, right)  # one has moved


def test_a_loss_of_ones_own_is_trained_and_what_it_returns_is_logged():
    metrics = main_of("custom_loss")(TINY)
    assert 0 < metrics["train/ratio_distance"] < 1
    assert math.isfinite(metrics["train/loss"])
    assert metrics["train/steps"] > 0


def test_a_reward_of_ones_own_is_learnt_from():
    rewards = main_of("custom_reward")(["--iterations=2", "--num-envs=2", "--decisions=2"])
    assert len(rewards) == 2
    assert max(rewards) < 0  # at random it costs more than it earns
