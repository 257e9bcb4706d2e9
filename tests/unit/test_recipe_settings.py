"""What recipes say of settings before any work: every experiment composes, and a wrong key or value is one error."""

import re
from types import SimpleNamespace

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import OmegaConf
from running import CONF, Started, composed, main_of

import vla_envs.env
from vla_algos.run.arguments import check_experiment, translated
from vla_algos.run.evaluated import evaluated_env, make_env_spec
from vla_algos.run.evaluator import Evaluator
from vla_algos.run.launcher_settings import launcher_types
from vla_algos.run.run import Run
from vla_common.settings import check_settings
from vla_envs import EpisodeSampler


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
        ("ppo", ["experiment=metaworld_faucet_ppo"], "metaworld_faucets_ppo_small"),
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
        ("ppo", ["optim.betas=0.95"], "optim.betas=0.95: must be a valid array"),
        ("ppo", ["cloning.state_noise=[0.1,0.1]"], "one for each of the 4 states, got [0.1, 0.1]"),
        (
            "grpo",
            ["cloning.state_noise=null"],
            "cloning.state_noise=null: must be a valid number or must be a valid array",
        ),
        ("sft", ["cloning.state_noise=a"], "cloning.state_noise=a: must be a valid number or must be a valid array"),
        ("evaluate", [], "policy.checkpoint=runs/ppo/latest/policy"),
        (
            "evaluate",
            ["policy.checkpoint=x", "ablation=blank"],
            "ablation=blank: must be 'blank_images', 'do_nothing', 'other_trial' or 'swapped_instructions' or must be "
            "a valid array; did you mean blank_images",
        ),
        (
            "evaluate",
            ["policy.checkpoint=x", "ablation=[swap_instructions]"],
            "entry 0: must be 'blank_images', 'do_nothing', 'other_trial' or 'swapped_instructions'",
        ),
        (
            "evaluate",
            ["policy.checkpoint=x", "ablation=[other_trial,other_trial]"],
            "ablation=[other_trial,other_trial]: one of them stands there twice",
        ),
        ("evaluate", ["policy.checkpoint=x", "ablation=[]"], "ablation=[]: "),
        (
            "evaluate",
            ["policy.checkpoint=x", "ablation=other_trial", "eval.trials=1"],
            "button-press-topdown-v3 has one trial only; type eval.trials=2 or more",
        ),
        (
            "ppo",
            ["env=metaworld", "eval=benchmark", "eval.mean_of=[easy,very hard]"],
            "unknown group in eval.mean_of 'very hard'; did you mean very_hard",
        ),
    ],
)
def test_a_wrong_setting_is_one_clear_error_before_any_work(name, overrides, message, tmp_path, monkeypatch):
    def stop(*_, **__):
        raise Started

    monkeypatch.setattr(vla_envs.env, "VLAEnv", stop)
    try:
        with pytest.raises((ValueError, FileNotFoundError, HydraException), match=re.escape(message)):
            main_of(name)(composed(name, overrides, tmp_path / "run"))
    finally:
        GlobalHydra.instance().clear()


@pytest.mark.parametrize("name", ["ppo", "grpo"])
def test_training_episodes_come_in_the_order_that_is_asked_for(name, tmp_path):
    try:
        config = composed(name, ["env=metaworld_faucets", "episode_order=ordered"], tmp_path)
    finally:
        GlobalHydra.instance().clear()
    settings = SimpleNamespace(**OmegaConf.to_container(config, resolve=True))
    sampler = Run(settings, tmp_path).training_episodes(2)
    assert isinstance(sampler, EpisodeSampler)
    drawn = [sampler.next() for _ in range(2 * 2 * 10)]
    assert drawn[::2] == drawn[1::2]
    assert len({(e.task_id, e.trial_id) for e in drawn}) == 2 * 10


@pytest.mark.parametrize("experiment", sorted(path.stem for path in (CONF / "experiment").glob("*.yaml")))
def test_every_experiment_composes_and_explains_itself(experiment):
    head = (CONF / "experiment" / f"{experiment}.yaml").read_text()
    comment = head[: head.index("defaults:")]
    assert f"experiment={experiment}" in comment, "the head of an experiment says how to run it"
    name = next(name for name in ("evaluate", "ppo", "grpo", "sft") if f"_{name}_" in experiment)
    with initialize_config_dir(str(CONF), version_base=None):
        config = compose(name, overrides=[f"experiment={experiment}"])
    env, evaluation = OmegaConf.to_container(config.env), OmegaConf.to_container(config.eval)
    assert make_env_spec(env).id == config.env.id
    Evaluator(**evaluation).episodes(make_env_spec(evaluated_env(env, evaluation), "eval.env"))


@pytest.mark.parametrize("group", sorted(path.parent.name + "/" + path.stem for path in CONF.glob("*/*.yaml")))
def test_config_files_are_not_empty(group):
    assert yaml.safe_load((CONF / f"{group}.yaml").read_text())


def test_an_experiment_of_another_recipe_is_refused_by_name():
    with pytest.raises(
        ValueError, match=r"is for grpo\.py; type: python recipes/grpo\.py experiment=libero_10_grpo_openpi"
    ):
        check_experiment("ppo", ["experiment=libero_10_grpo_openpi"], CONF / "experiment")
    check_experiment("ppo", ["experiment=mine", "--config-dir", "elsewhere"], CONF / "experiment")
    check_experiment("ppo", ["experiment=metaworld_faucets_ppo_small", "seed=1"], CONF / "experiment")


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (["~iterations"], "iterations is missing; type iterations=VALUE"),
        (["~seed"], "seed is missing; type seed=VALUE"),
        (["~gae.reward_level"], "gae.reward_level is missing; type gae.reward_level=VALUE"),
        (["+algo.gamma=0.9"], "algo: is called gae, loss, update and collector now"),
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
    check_settings("launcher", {"memory_gb": None, "cpus": None, "minutes": 0, "gpus": None, "setup": None}, types)
    check_settings("launcher", {"account": 12345, "signal_delay_s": None}, types)


def test_names_with_hyphens_are_settings():
    typed = ["env.reset_ranges.button-press-topdown-v3=[[0,1,2],[0,1,2]]", "--info", "defaults"]
    assert translated(typed) == typed
