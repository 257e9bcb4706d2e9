"""What recipes say of settings before any work: a wrong key or value is one error."""

import re
from types import SimpleNamespace

import pytest
import torch
import yaml
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import OmegaConf
from running import CONF, Started, composed, main_of

import vla_envs.make
from vla_algos.run.environments import make_env_spec
from vla_algos.run.folder import note_start
from vla_algos.run.launcher_settings import launcher_types
from vla_algos.run.policies import make_run_policy
from vla_algos.run.run import Run
from vla_common.settings import check_settings
from vla_envs import EpisodeSampler

ABLATIONS = (
    "'blank_images', 'do_nothing', 'other_trial', 'swapped_instructions', 'mirrored_images', 'rotated_images', "
    "'jpeg_images', 'cropped_images', 'resized_images' or 'other_axis_angle'"
)


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("ppo", ["gae.gama=0.9"], "gama"),
        ("ppo", ["+gae.gama=0.9"], "did you mean gae.gamma"),
        ("ppo", ["loss.critic_coeff=null"], "critic_warmup_steps=0"),
        ("ppo", ["loss.log_prob_level=tokens"], "must be 'token', 'action' or 'chunk'"),
        ("ppo", ["gae.reward_level=action"], "value_per_action=true"),
        ("ppo", ["gae.reward_level=action", "policy.value_per_action=true", "loss.log_prob_level=chunk"], "chunk"),
        ("ppo", ["loss.dual_clip=0.5"], "loss.dual_clip=0.5: must be greater than 1"),
        ("ppo", ["gae.bootstrap=always"], "gae.bootstrap=always: must be 'truncation', 'none' or 'any_done'"),
        (
            "ppo",
            ["update.aggregation=mean"],
            "update.aggregation=mean: must be 'token_mean' or 'trajectory_mean'; did you mean token_mean",
        ),
        ("ppo", ["optim.schedule=linear"], "'constant' or 'cosine'"),
        ("grpo", ["group_size=1"], "group of one"),
        ("grpo", ["collector.max_groups=2"], "groups <= max_groups"),
        (
            "grpo",
            ["collector.success_bounds=[0.5,4.5]"],
            "collector.success_bounds=[0.5, 4.5]: entry 1: must be less than or equal to 1",
        ),
        ("grpo", ["env.group_size=8"], "type group_size=8"),
        ("grpo", ["+loss.critic_coeff=1"], "unknown setting 'loss.critic_coeff'"),
        ("grpo", ["+loss.huber_delta=1"], "unknown setting 'loss.huber_delta'"),
        ("ppo", ["+loss.lr=1"], "unknown setting 'loss.lr'"),
        ("ppo", ["+optim.epochs=1"], "unknown setting 'optim.epochs'"),
        ("ppo", ["iterations=0"], "iterations=0: must be greater than or equal to 1"),
        ("ppo", ["iterations=2.5"], "iterations=2.5: must be a valid integer"),
        ("ppo", ["iterations=ten"], "iterations=ten: must be a valid integer"),
        ("ppo", ["seed=abc"], "seed=abc: must be a valid integer"),
        ("ppo", ["seed=-1"], "seed=-1: must be greater than or equal to 0"),
        ("ppo", ["optim.lr=-1"], "optim.lr=-1: must be greater than 0"),
        ("ppo", ["optim.lr=abc"], "optim.lr=abc: must be a valid number"),
        ("ppo", ["optim.lr=null"], "optim.lr=null: must be a valid number"),
        ("ppo", ["optim.max_grad_norm=0"], "optim.max_grad_norm=0: must be greater than 0"),
        ("ppo", ["gae.gamma=1.5"], "gae.gamma=1.5: must be less than or equal to 1"),
        ("ppo", ["gae.lmbda=-3"], "gae.lmbda=-3: must be greater than or equal to 0"),
        ("ppo", ["gae.normalize=no"], "gae.normalize=no: must be a valid boolean"),
        ("ppo", ["loss.clip_epsilon=-0.2"], "loss.clip_epsilon=-0.2: must be greater than 0"),
        ("ppo", ["evaluate_every=-5"], "evaluate_every=-5: must be greater than or equal to 0"),
        ("ppo", ["evaluate_every=ten"], "evaluate_every=ten: must be a valid integer"),
        ("ppo", ["checkpoint_every=0"], "checkpoint_every=0: must be greater than or equal to 1"),
        ("ppo", ["collector.decisions=0"], "collector.decisions=0: must be greater than or equal to 1"),
        ("ppo", ["eval.sampled=yess"], "eval.sampled=yess: must be a valid boolean"),
        ("ppo", ["eval.videos=-1"], "eval.videos=-1: must be greater than or equal to 0"),
        ("ppo", ["eval.trials=1.5"], "eval.trials=1.5: must be a valid integer"),
        ("ppo", ["cloning.steps=-1"], "cloning.steps=-1: must be greater than or equal to 1"),
        ("ppo", ["demonstrations.stride=0"], "demonstrations.stride=0: must be greater than or equal to 1"),
        ("ppo", ["cloning.batch_size=0"], "cloning.batch_size=0: must be greater than or equal to 1"),
        ("ppo", ["env.num_envs=two"], "env.num_envs=two: must be a valid integer"),
        ("ppo", ["env.num_envs=-3"], "env.num_envs=-3: must be greater than or equal to 1"),
        ("ppo", ["policy.chunk_size=0"], "policy.chunk_size=0: must be greater than or equal to 1"),
        ("ppo", ["policy.heads=3"], "policy.heads=3"),
        ("ppo", ["recipe=grpo"], "this experiment is for grpo.py, not for ppo.py"),
        ("sft", ["launcher=slurm", "launcher.gpus=-1"], "launcher.gpus=-1: must be greater than or equal to 0"),
        ("ppo", ["+cloning.stepps=9"], "did you mean cloning.steps"),
        ("ppo", ["+eval.trails=9"], "did you mean eval.trials"),
        ("ppo", ["+policy.num_bin=9"], "did you mean policy.num_bins"),
        ("ppo", ["+itrations=3"], "iterations"),
        ("ppo", ["+env.image_sise=3"], "image_sise"),
        ("ppo", ["env.id=metaworld/reech-v3"], "reach-v3"),
        ("ppo", ["policy.checkpoint=/nowhere"], "no folder /nowhere; pass a checkpoint folder"),
        ("ppo", ["policy.family=openvlaoft"], "did you mean openvla_oft"),
        ("ppo", ["policy=openvla"], "policy.checkpoint=FOLDER"),
        ("ppo", ["eval.seed=0"], "eval.seed=9000000"),
        ("ppo", ["episode_order=orderd"], "did you mean ordered"),
        ("grpo", ["episode_order=orderd"], "did you mean ordered"),
        ("ppo", ["update.minibatches=4"], "minibatch_size is 128 and minibatches 4: give one of them"),
        (
            "ppo",
            ["update.minibatch_size=null", "update.minibatches=2.5"],
            "update.minibatches=2.5: must be a valid integer",
        ),
        ("ppo", ["optim.betas=[0.9]"], "optim.betas=[0.9]: entry 1 is missing"),
        ("ppo", ["optim.betas=0.95"], "optim.betas=0.95: must be a list"),
        ("ppo", ["cloning.state_noise=[0.1,0.1]"], "one for each of the 4 states, got [0.1, 0.1]"),
        (
            "grpo",
            ["cloning.state_noise=null"],
            "cloning.state_noise=null: must be a valid number or a list",
        ),
        ("sft", ["cloning.state_noise=a"], "cloning.state_noise=a: must be a valid number or a list"),
        ("evaluate", [], "policy.checkpoint=runs/ppo/latest/policy"),
        (
            "evaluate",
            ["policy.checkpoint=x", "ablation=blank"],
            f"ablation=blank: must be {ABLATIONS} or a list; did you mean blank_images",
        ),
        (
            "evaluate",
            ["policy.checkpoint=x", "ablation=[swap_instructions]"],
            f"entry 0: must be {ABLATIONS}",
        ),
        (
            "evaluate",
            ["policy.checkpoint=.", "ablation=[other_trial,other_trial]"],
            "ablation=[other_trial,other_trial]: one of them stands there twice",
        ),
        ("evaluate", ["policy.checkpoint=x", "ablation=[]"], "ablation=[]: "),
        (
            "evaluate",
            ["policy.checkpoint=.", "ablation=other_trial", "eval.trials=1"],
            "button-press-topdown-v3 has one trial only; type eval.trials=2 or more",
        ),
        (
            "ppo",
            ["env=metaworld", "eval.trials=null", "eval.mean_of=[easy,very hard]"],
            "unknown group in eval.mean_of 'very hard'; did you mean very_hard",
        ),
        (
            "sac",
            ["policy.checkpoint=.", "demonstrations.folder=shown", "demonstrations.statistics=demonstrations"],
            "demonstrations.statistics=demonstrations: policy.checkpoint learns nothing; leave it out",
        ),
        ("ppo", ["env=calvin", "eval.mean_of=[easy]"], "unknown group in eval.mean_of 'easy'; known are none"),
    ],
)
def test_a_wrong_setting_is_one_clear_error_before_any_work(name, overrides, message, tmp_path, monkeypatch):
    def stop(*_, **__):
        raise Started

    monkeypatch.setattr(vla_envs.make, "VLAEnv", stop)
    try:
        with pytest.raises((ValueError, FileNotFoundError, HydraException), match=re.escape(message)):
            main_of(name)(composed(name, overrides, tmp_path / "run"))
    finally:
        GlobalHydra.instance().clear()


@pytest.mark.parametrize(
    ("name", "more", "runs"),
    [("ppo", [], 1), ("grpo", [], 8), ("rs", ["env.group_size=4"], 4), ("dagger", ["sharding.cpu_offload=true"], 1)],
)
def test_training_episodes_come_in_the_order_and_as_often_as_asked_for(name, more, runs, tmp_path, monkeypatch):
    begun = []

    def stop(spec, num_envs, chunk_size, episodes, **_):
        begun.append(episodes)
        raise Started

    monkeypatch.setattr(vla_envs.make, "VLAEnv", stop)
    try:
        with pytest.raises(Started):
            main_of(name)(composed(name, ["env=metaworld_faucets", "episode_order=ordered", *more], tmp_path))
    finally:
        GlobalHydra.instance().clear()
    (sampler,) = begun
    assert isinstance(sampler, EpisodeSampler)
    assert sampler.group_size == runs
    groups = [[sampler.next() for _ in range(sampler.group_size)] for _ in range(2 * 10)]
    assert all(episode == first for first, *others in groups for episode in others)
    assert len({(first.task_id, first.trial_id) for first, *_ in groups}) == 2 * 10


def test_a_run_resumes_in_what_auto_became_when_it_began(tmp_path, monkeypatch, capsys):
    def begun(*more):
        try:
            config = composed("sft", ["env=metaworld_faucets", "policy=small_mt50", *more], tmp_path)
        finally:
            GlobalHydra.instance().clear()
        return Run(SimpleNamespace(**OmegaConf.to_container(config, resolve=True)), tmp_path)

    def policy_of(run):
        return make_run_policy(run, make_env_spec(run.config.env), run.config.env)

    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    with begun() as run:
        policy = policy_of(run)
        note_start(run.config, tmp_path)
    assert policy.config.compute == "bf16"
    assert "policy.compute=auto: bf16 on this machine" in capsys.readouterr().out
    policy.save_pretrained(tmp_path / "elsewhere")
    (tmp_path / "checkpoints" / "step_00000001").mkdir(parents=True)
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)  # it is resumed on another machine
    with begun() as run, pytest.warns(UserWarning, match="no instructions for bfloat16"):
        assert policy_of(run).config.compute == "bf16"
    (tmp_path / "config.yaml").unlink()
    with begun() as run:
        assert policy_of(run).config.compute == "float32"
    for _ in range(2):
        with begun(f"policy.checkpoint={tmp_path / 'elsewhere'}") as run:
            with pytest.warns(UserWarning, match="bfloat16"):
                assert policy_of(run).config.compute == "bf16"
            note_start(run.config, tmp_path)


@pytest.mark.parametrize("setting", ["policy.chunk_size=500", "env.max_episode_steps=3", "seed=1"])
def test_a_chunk_that_is_longer_than_an_episode_is_pointed_out(tmp_path, capsys, setting):
    try:
        config = composed("ppo", [setting], tmp_path)
    finally:
        GlobalHydra.instance().clear()
    with Run(SimpleNamespace(**OmegaConf.to_container(config, resolve=True)), tmp_path) as run:
        make_run_policy(run, make_env_spec(run.config.env), run.config.env)
    said = "warning: a chunk has" in capsys.readouterr().out
    assert said is (setting != "seed=1")


@pytest.mark.parametrize("group", sorted(path.parent.name + "/" + path.stem for path in CONF.glob("*/*.yaml")))
def test_config_files_are_not_empty(group):
    assert yaml.safe_load((CONF / f"{group}.yaml").read_text()) or group == "logger/tensorboard"


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (["~iterations"], "iterations is missing; type iterations=VALUE"),
        (["~seed"], "seed is missing; type seed=VALUE"),
        (["~gae.reward_level"], "gae.reward_level is missing; type gae.reward_level=VALUE"),
    ],
)
def test_what_is_missing_or_has_moved_is_named(typed, message, tmp_path):
    try:
        with pytest.raises(ValueError, match=re.escape(message)):
            main_of("ppo")(composed("ppo", typed, tmp_path / "run"))
    finally:
        GlobalHydra.instance().clear()


def test_clusters_may_be_left_to_their_defaults():
    types = launcher_types("slurm")
    check_settings("launcher", {"memory_gb": None, "cpus": None, "gpus": None, "setup": None}, types)
    check_settings("launcher", {"account": 12345, "signal_delay_s": None}, types)
