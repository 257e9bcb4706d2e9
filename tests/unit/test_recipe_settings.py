"""What recipes say of settings before any work: every experiment composes, and a wrong key or value is one error."""

import re

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from running import CONF, Started, composed, main_of

import vla_envs.env
from vla_algos.run.run import env_spec, training_episodes


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("ppo", ["algo.gama=0.9"], "gama"),
        ("ppo", ["+algo.gama=0.9"], "did you mean algo.gamma"),
        ("ppo", ["algo.critic_coeff=null"], "critic_warmup_steps=0"),
        ("ppo", ["algo.log_prob_level=tokens"], "must be 'token', 'action' or 'chunk'"),
        ("ppo", ["algo.reward_level=action"], "value_per_action=true"),
        ("ppo", ["algo.reward_level=action", "policy.value_per_action=true", "algo.log_prob_level=chunk"], "chunk"),
        ("ppo", ["algo.dual_clip=0.5"], "larger than 1"),
        ("ppo", ["algo.bootstrap=always"], "any_done"),
        ("ppo", ["algo.aggregation=mean"], "trajectory_mean"),
        ("ppo", ["optim.schedule=linear"], "'constant' or 'cosine'"),
        ("grpo", ["algo.group_size=1"], "group of one"),
        ("grpo", ["algo.max_groups=2"], "groups <= max_groups"),
        ("grpo", ["algo.success_bounds=[0.5,4.5]"], "whatever the reward coefficient"),
        ("grpo", ["+env.group_size=8"], "algo.group_size"),
        ("grpo", ["+algo.critic_coeff=1"], "unknown setting 'algo.critic_coeff'"),
        ("grpo", ["+algo.huber_delta=1"], "unknown setting 'algo.huber_delta'"),
        ("ppo", ["+algo.lr=1"], "unknown setting 'algo.lr'"),
        ("ppo", ["+optim.epochs=1"], "unknown setting 'optim.epochs'"),
        ("ppo", ["iterations=0"], "iterations"),
        ("ppo", ["+sft.stepps=9"], "did you mean sft.steps"),
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
        ("ppo", ["algo.minibatches=4"], "minibatch_size is 128 and minibatches 4: give one of them"),
        ("ppo", ["algo.minibatch_size=null", "algo.minibatches=2.5"], "minibatches is 2.5, must be at least 1 and"),
        ("ppo", ["optim.betas=[0.9]"], "such as [0.9, 0.999]"),
        ("ppo", ["optim.betas=0.95"], "such as [0.9, 0.999]"),
        ("ppo", ["sft.state_noise=[0.1,0.1]"], "one for each of the 4 states, got [0.1, 0.1]"),
        ("grpo", ["sft.state_noise=null"], "one for each of the 4 states, got None"),
        ("sft", ["sft.state_noise=a"], "one for each of the 4 states, got a"),
        ("evaluate", [], "policy.checkpoint=runs/ppo/latest/policy"),
        ("evaluate", ["policy.checkpoint=x", "ablation=blank"], "blank_images"),
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
    sampler = training_episodes(config, env_spec(config), 2)
    drawn = [sampler.next() for _ in range(2 * 2 * 10)]
    assert drawn[::2] == drawn[1::2] and len({(e.task_id, e.trial_id) for e in drawn}) == 2 * 10


@pytest.mark.parametrize("experiment", sorted(path.stem for path in (CONF / "experiment").glob("*.yaml")))
def test_every_experiment_composes_and_explains_itself(experiment):
    head = (CONF / "experiment" / f"{experiment}.yaml").read_text()
    comment = head[: head.index("defaults:")]
    assert f"experiment={experiment}" in comment, "the head of an experiment says how to run it"
    name = next(name for name in ("evaluate", "ppo", "grpo") if f"_{name}_" in experiment)
    with initialize_config_dir(str(CONF), version_base=None):
        config = compose(name, overrides=[f"experiment={experiment}"])
    assert env_spec(config).id == config.env.id


@pytest.mark.parametrize("group", sorted(path.parent.name + "/" + path.stem for path in CONF.glob("*/*.yaml")))
def test_config_files_are_not_empty(group):
    assert yaml.safe_load((CONF / f"{group}.yaml").read_text())
