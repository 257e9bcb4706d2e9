"""Every recipe runs for two iterations: as programs, and with other settings in this process."""

import json

import pytest
from running import recipe, recipe_here
from safetensors.torch import load_file

pytest.importorskip("metaworld", reason="Meta-World is not installed: pip install 'vla-torchrl[metaworld]'")
TOY = ["env.num_envs=2", "env.num_workers=1", "env.max_episode_steps=10", "env.image_size=32", "eval.trials=2"]
TOY_SFT = ["demonstrations.episodes=2", "cloning.steps=5", "demonstrations.max_steps=150"]
TOY_GRPO = [
    *TOY,
    *TOY_SFT,
    "iterations=2",
    "group_size=3",
    "collector.groups=2",
    "collector.max_groups=3",
    "eval.videos=1",
]
TOY_PPO = [*TOY, *TOY_SFT, "iterations=2", "collector.decisions=4", "update.epochs=1", "eval.videos=1"]


@pytest.fixture(scope="module")
def ppo_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ppo") / "run"
    return recipe("ppo", folder, *TOY_PPO), folder


def test_ppo_leaves_policy_checkpoints_a_page_videos_and_a_table(ppo_run):
    run, folder = ppo_run
    assert run.returncode == 0, run.stderr
    for line in ("before PPO", "after PPO", "after - before, paired", "env steps/s", "horizon 10 instead of 100"):
        assert line in run.stdout
    assert f"policy.checkpoint={folder}/policy\n" in run.stdout  # whose folder says which episodes
    assert "in all 2 optimizer steps of this run only the critic learnt; type more iterations, or" in run.stdout
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    names = set().union(*lines)
    assert {
        "train/actor/policy_loss",
        "train/actor/approx_kl",
        "train/actor/clip_fraction",
        "train/actor/clipped_ratio",
        "train/actor/grad_norm",
        "train/actor/lr",
        "train/critic/value_loss",
        "train/critic/explained_variance",
        "train/entropy_loss",
        "train/loss",
        "rollout/rewards",
        "rollout/advantages_mean",
        "rollout/value_targets_mean",
        "env/return",
        "env/success_once",
        "env/episode_len",
        "env/worker_restarts",
        "eval/success_once",
        "time/env",
        "time/policy",
        "time/train",
        "env_steps_per_s",
        "decisions_per_s",
    } <= names
    assert (folder / "policy" / "model.safetensors").is_file()
    assert list((folder / "checkpoints").glob("step_*/training.json"))
    assert list((folder / "videos").rglob("*.mp4"))
    assert "same episode, before and after" in (folder / "report.html").read_text()
    assert list((folder / "tensorboard").glob("events.*"))
    assert (folder.parent / "latest").resolve() == folder.resolve()


def test_without_a_logger_metrics_are_named_at_the_end(tmp_path):
    folder = tmp_path / "run"
    run = recipe_here("ppo", folder, *TOY_PPO, "logger=[]", "evaluate_every=1")
    assert f"curves       {folder / 'metrics.jsonl'}\n" in run.stdout
    assert run.stdout.endswith(f"\nreport       {folder / 'report.html'}\n")
    assert "Does PPO raise success in metaworld/button-press-topdown-v3?" in (folder / "report.html").read_text()
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "train/loss" in line] == [1, 2]
    assert {line["step"] for line in lines if "eval/success_once" in line} == {0, 1, 2}
    assert not (folder / "tensorboard").exists()


@pytest.fixture(scope="module")
def grpo_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("grpo") / "run"
    return recipe("grpo", folder, *TOY_GRPO), folder


def test_grpo_leaves_policy_checkpoints_a_page_videos_and_a_table(grpo_run):
    run, folder = grpo_run
    assert run.returncode == 0, run.stderr
    for line in ("before GRPO", "after GRPO", "sampled:", "95 % interval", "env steps/s"):
        assert line in run.stdout
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert {
        "train/actor/policy_loss",
        "train/actor/approx_kl",
        "train/actor/clip_fraction",
        "train/actor/grad_norm",
        "train/entropy_loss",
        "rollout/groups",
        "rollout/groups_trained",
        "rollout/advantages_max",
        "env/return",
        "env/success_once",
        "eval/success_once",
        "eval_sampled/success_once",
        "time/idle_fraction",
    } <= set().union(*lines)
    assert not any(name.startswith("train/critic/value") for line in lines for name in line)
    assert (folder / "policy" / "model.safetensors").is_file()
    assert list((folder / "checkpoints").glob("step_*/training.json"))
    assert list((folder / "videos").rglob("*.mp4"))


def test_grpo_says_so_and_stops_when_nothing_can_be_learnt(tmp_path):
    settings = ["iterations=9", "patience=2", "env.reward_type=sparse"]  # 10 steps are too few to succeed
    run = recipe_here("grpo", tmp_path / "run", *TOY_GRPO, *settings)
    assert "iteration 2: none of 3 groups carries signal (3 failed every time" in run.stdout + run.stderr
    assert "stopped: 2 iterations in a row" in run.stdout
    assert "patience=2" in run.stdout
    assert "It ended early: 2 iterations in a row" in (tmp_path / "run" / "report.html").read_text()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert sum("rollout/groups" in line for line in lines) == 2
    assert not any("train/loss" in line for line in lines)
    # By force it continues where it had stopped, for as many again.
    run = recipe_here("grpo", tmp_path / "run", *TOY_GRPO, *settings, "resume=force")
    assert "iteration 3: none of 3 groups carries signal" in run.stdout + run.stderr
    assert "stopped: 4 iterations in a row" in run.stdout
    again = ["iterations=5", "patience=9", "resume=force", "env.reward_type=sparse"]  # and with more patience
    run = recipe_here("grpo", tmp_path / "run", *TOY_GRPO, *again)
    assert "iteration 5: none of 3 groups carries signal" in run.stdout + run.stderr
    assert "stopped:" not in run.stdout


@pytest.mark.parametrize(("name", "settings"), [("ppo", TOY_PPO), ("grpo", TOY_GRPO)])
def test_the_same_seed_is_the_same_run(name, settings, request, tmp_path):
    _, folder = request.getfixturevalue(f"{name}_run")
    recipe_here(name, tmp_path / "again", *settings)
    first, second = (load_file(f / "policy" / "model.safetensors") for f in (folder, tmp_path / "again"))
    assert all((first[name] == second[name]).all() for name in first)


EVERYTHING = [  # settings that the default leaves off
    "gae.reward_level=action",
    "policy.value_per_action=true",
    "loss.log_prob_level=action",
    "loss.dual_clip=3",
    "loss.entropy_coeff=0.001",
    "loss.entropy_level=chunk",
    "loss.clip_value=0.2",
    "loss.reference_kl_coeff=0.01",
    "update.aggregation=trajectory_mean",
    "gae.bootstrap=any_done",
    "update.micro_batch_size=3",
    "update.target_kl=0.5",
    "update.critic_warmup_steps=1",
    "policy.critic_detach=false",
    "optim.schedule=cosine",
    "optim.warmup_updates=1",
    "env.reward_type=sparse",
    "env.relative_reward=true",
    "env.reward_coef=5.0",
    "env.step_penalty=0.01",
    "env.ignore_terminations=true",
]


def test_the_loss_of_the_warm_start_is_logged(ppo_run):
    _, folder = ppo_run
    lines = [json.loads(line) for line in (folder / "warm_start" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert all(line["train/loss"] > 0 for line in lines)


def test_ppo_without_a_critic(tmp_path):
    recipe_here("ppo", tmp_path / "run", *TOY_PPO, "loss.critic_coeff=null", "update.critic_warmup_steps=0")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert any("train/actor/policy_loss" in line for line in lines)
    assert not any("train/critic/value_loss" in line or "train/critic/explained_variance" in line for line in lines)


def test_ppo_with_everything_switched_on(tmp_path):
    recipe_here("ppo", tmp_path / "run", *TOY_PPO, *EVERYTHING)
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-2])
    assert {"train/actor/dual_clip_fraction", "train/actor/reference_kl", "train/critic/value_clip_ratio"} <= set(last)


def test_ppo_goes_on_from_a_policy_even_if_it_is_the_latest(ppo_run):
    _, folder = ppo_run
    latest = folder.parent / "latest" / "policy"
    run = recipe_here("ppo", folder.parent / "next", *TOY_PPO, f"policy.checkpoint={latest}")
    assert "demonstrations:" not in run.stderr
    assert "demonstrations.* and cloning.* have no effect" in run.stdout
    assert (folder.parent / "latest").resolve() == (folder.parent / "next").resolve()
    began = (folder.parent / "next" / "config.yaml").read_text()
    assert f"checkpoint: {folder.resolve() / 'policy'}\n" in began  # the link leads elsewhere by now


def test_a_policy_that_sees_otherwise_than_in_its_training_is_named(ppo_run, tmp_path):
    _, folder = ppo_run
    settings = [*TOY, "eval.videos=0", f"policy.checkpoint={folder / 'policy'}"]
    run = recipe_here("evaluate", tmp_path / "same", *settings)
    assert "was trained otherwise" not in run.stdout
    assert json.loads((tmp_path / "same" / "metrics.json").read_text())["differs_from_training"] == {}
    run = recipe_here("evaluate", tmp_path / "other", *settings, "env.image_size=40")
    assert "was trained otherwise: env.image_size=40, not 32" in run.stdout
    noted = json.loads((tmp_path / "other" / "metrics.json").read_text())["differs_from_training"]
    assert noted == {"env.image_size": [32, 40]}


def test_evaluate_with_ablations_reads_what_ppo_wrote(ppo_run, tmp_path):
    _, folder = ppo_run
    settings = [
        *TOY,
        "env=metaworld_button",  # what a shell would take from the folder, which the second start here does not
        "eval.videos=1",
        f"policy.checkpoint={folder / 'policy'}",
        "ablation=[other_trial,blank_images,do_nothing]",
    ]
    there = tmp_path / "eval"
    run = recipe("evaluate", there, *settings)
    assert run.returncode == 0, run.stderr
    assert "ablation other_trial, paired" in run.stdout
    metrics = json.loads((there / "metrics.json").read_text())
    for name in ("other_trial", "blank_images", "do_nothing"):
        assert metrics[f"eval_{name}/paired_episodes"] == 2
        difference = metrics[f"eval_{name}/success_once"] - metrics["eval/success_once"]
        assert metrics[f"eval_{name}/difference"] == pytest.approx(difference)
        low, high = metrics[f"eval_{name}/difference/interval"]
        assert low < difference < high
        assert len((there / f"episodes_{name}.jsonl").read_text().splitlines()) == 2
        assert list((there / "videos" / name).glob("*.mp4"))
    assert not list(there.glob(".seen*"))
    lines = (there / "episodes_other_trial.jsonl").read_text().splitlines(True)
    (there / "metrics.json").unlink()  # as if it had been killed in the second evaluation
    (there / "episodes_blank_images.jsonl").unlink()
    (there / "episodes_other_trial.jsonl").write_text(lines[0])
    recipe_here("evaluate", there, *settings)
    assert (there / "episodes_other_trial.jsonl").read_text().splitlines(True) == lines
    assert json.loads((there / "metrics.json").read_text()) == metrics


def test_an_evaluation_goes_on_where_it_stopped(ppo_run, tmp_path):
    _, folder = ppo_run
    settings = [*TOY[:-1], "eval.trials=4", "eval.videos=0", f"policy.checkpoint={folder / 'policy'}"]
    there = tmp_path / "eval"
    recipe_here("evaluate", there, *settings)
    metrics, lines = (there / "metrics.json").read_text(), (there / "episodes.jsonl").read_text().splitlines(True)
    assert [json.loads(line)["index"] for line in lines] == list(range(4))
    with pytest.raises(ValueError, match="has a finished evaluation in it; take another folder"):
        recipe_here("evaluate", there, *settings)
    (there / "metrics.json").unlink()  # as if it had been killed
    (there / "episodes.jsonl").write_text("".join(lines[1:3]))
    run = recipe_here("evaluate", there, *settings)
    assert "2/4" in run.stderr  # the bar began there
    assert (there / "metrics.json").read_text() == metrics
    assert (there / "episodes.jsonl").read_text().splitlines(True) == lines
    (there / "metrics.json").unlink()
    before = (there / "config.yaml").read_text()
    with pytest.raises(ValueError, match=r"run of other settings:\n  greedy: True there, False now"):
        recipe_here("evaluate", there, *settings, "greedy=false")
    assert (there / "config.yaml").read_text() == before


def test_sft_writes_a_policy(tmp_path):
    run = recipe("sft", tmp_path / "sft", *TOY, *TOY_SFT)
    assert run.returncode == 0, run.stderr
    assert (tmp_path / "sft" / "policy" / "config.json").is_file()
