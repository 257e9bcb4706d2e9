"""The pages that add a collector, a loss or an algorithm, done as they say: copied recipes train."""

import json
import re
import shutil

import forked
import pytest
from paths import ROOT
from safetensors.torch import load_file

import recipes.__main__ as vla_recipe

pytest.importorskip("metaworld", reason="Meta-World is not installed: pip install 'vla-torchrl[metaworld]'")
TOY = ["env.num_envs=2", "env.num_workers=1", "env.max_episode_steps=10", "env.image_size=32", "eval.trials=2"]
TOY += ["eval.videos=0", "demonstrations.episodes=2", "demonstrations.max_steps=150", "cloning.steps=5", "logger=[]"]
TOY += ["optim.lr=1e-3", "seed=1"]
PPO = ["collector.decisions=4", "update.epochs=1", "update.critic_warmup_steps=0"]


def changed_as_the_page_says(page, recipe, example, folder):
    """A copy of a recipe beside an example, with each block of the page applied to the file that was named last."""
    assert vla_recipe.main(["copy", recipe, "--to", str(folder)]) == 0
    shutil.copy(ROOT / "examples" / example, folder)
    text_of_page = (ROOT / "docs" / "how-to" / page).read_text()
    for found in re.finditer(r"```diff\n(.*?)```", text_of_page, re.DOTALL):
        block, [*_, name] = found[1], re.findall(r"`my_\w+/([\w./]+)`", text_of_page[: found.start()])
        text = (folder / name).read_text()
        for old, new in re.findall(r"((?:^-.*\n)+)((?:^\+.*\n)*)", block, re.MULTILINE):
            before, after = (re.sub(r"^[-+]", "", lines, flags=re.MULTILINE) for lines in (old, new))
            assert text.count(before) == 1, before
            text = text.replace(before, after)
        (folder / name).write_text(text)


def run(folder, recipe, place, *settings):
    """The metrics of the iterations of a run of a copied recipe."""
    done = forked.run(folder / f"{recipe}.py", *TOY, *settings, f"hydra.run.dir={place}", cwd=folder, limit=180)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "train/loss" in line]


def test_a_collector_of_ones_own_trains_and_resumes_to_the_bit(tmp_path):
    folder = tmp_path / "my_ppo"
    changed_as_the_page_says("add-a-collector.md", "ppo", "custom_collector.py", folder)
    ppo = ["collector.decisions=12", "update.epochs=1", "update.critic_warmup_steps=0", "train_videos.environments=1"]
    ppo += ["train_videos.every=1"]
    ahead, again = tmp_path / "ahead", tmp_path / "again"
    trained = run(folder, "ppo", ahead, *ppo, "iterations=2")
    assert [line["env/num_episodes"] for line in trained] == [12, 12]  # of 10 actions: 2 x 12 decisions of 5
    assert len(run(folder, "ppo", again, *ppo, "iterations=1")) == 1
    assert len(run(folder, "ppo", again, *ppo, "iterations=2", "resume=force")) == 2
    first, second = (load_file(place / "policy" / "model.safetensors") for place in (ahead, again))
    assert all(first[name].equal(second[name]) for name in first)
    assert len(list((ahead / "videos" / "training").glob("iteration_*/*.mp4"))) == 2


def test_a_reward_of_ones_own_trains(tmp_path):
    folder = tmp_path / "my_ppo"
    changed_as_the_page_says("change-the-reward.md", "ppo", "custom_reward.py", folder)
    [line] = run(folder, "ppo", tmp_path / "run", *PPO, "env.reward_type=sparse", "iterations=1")
    assert line["rollout/rewards"] < 0 == line["env/reward"]  # what actions cost, and what the environment pays


def test_a_loss_of_ones_own_trains(tmp_path):
    folder = tmp_path / "my_ppo"
    changed_as_the_page_says("change-the-loss.md", "ppo", "custom_loss.py", folder)
    [line] = run(folder, "ppo", tmp_path / "run", *PPO, "loss.epsilon=0.3", "iterations=1")
    assert line["train/ratio_distance"] == pytest.approx(0, abs=1e-4)  # one step: the policy is the one that acted
    assert line["train/steps"] == 1


def test_an_algorithm_of_ones_own_trains(tmp_path):
    folder = tmp_path / "my_reinforce"
    changed_as_the_page_says("add-an-algorithm.md", "grpo", "reinforce.py", folder)
    groups = ["group_size=2", "collector.groups=1", "collector.max_groups=1", "env.reward_type=progress"]
    [line] = run(folder, "grpo", tmp_path / "run", *groups, "iterations=1", "optim.warmup_updates=0")
    assert line["train/steps"] == 1
    assert line["rollout/advantages_max"] == pytest.approx(
        -line["rollout/advantages_min"], rel=1e-5
    )  # each less the other
    assert line["rollout/advantages_max"] > 0
