"""A policy says what it was trained on, and evaluate.py takes that where nothing else is typed."""

import importlib
import json
import sys

import pytest
from omegaconf import OmegaConf
from paths import CONF

from vla_algos.evaluation import TRAINING_ENV
from vla_algos.run import training_env as module
from vla_algos.run.arguments import compose_settings
from vla_algos.run.config import read_config
from vla_algos.run.environments import make_env_spec
from vla_algos.run.evaluator import Evaluator
from vla_algos.run.training_env import differences, env_of, evaluation_defaults, is_chosen, save_training_env
from vla_common import experiments
from vla_common.experiments import find_experiments

THAT_TRAIN = sorted(name for name, experiment in find_experiments(CONF).items() if not experiment.suite)
FAUCETS = {"id": "metaworld/faucet-open-v3", "image_size": 64, "render_quality": "minimal", "num_envs": 7, "gpus": [1]}


@pytest.fixture
def policy(tmp_path):
    """The folder of a policy that was trained on a faucet."""
    spec = make_env_spec(FAUCETS)
    save_training_env(tmp_path / "policy", "ppo", FAUCETS, spec, chunk_size=5, evaluation={"trials": 7, "seed": 3})
    return tmp_path / "policy"


def trained_by(experiment, folder):
    """The folder of a policy that an experiment would leave."""
    recipe, name = module._of_training(experiment, CONF)
    trained = compose_settings(recipe, [f"experiment={name}"], CONF)
    evaluated_on = make_env_spec({**trained.env, **(trained.eval.env or {})}).id
    settings = {name: OmegaConf.to_container(trained[name], resolve=True) for name in ("env", "eval")}
    spec = make_env_spec(trained.env)
    save_training_env(folder, recipe, settings["env"], spec, 5, settings["eval"], evaluated_on)
    return folder


def test_an_experiment_that_trains_stands_for_where_it_is_evaluated():
    found = composed_evaluation("experiment=metaworld_45_ppo_openpi", "policy.checkpoint=x")
    assert (found.env.id, found.env.max_episode_steps, found.env.image_size) == ("metaworld/ML45-test", 160, 480)
    assert not {"env", "temperature", "sampled"} & found.eval.keys()


def composed_evaluation(*typed):
    return compose_settings("evaluate", evaluation_defaults(typed, CONF), CONF)


def test_a_policy_is_evaluated_as_it_was_trained(policy):
    env = composed_evaluation("seed=1", f"policy.checkpoint={policy}").env
    assert (env.id, env.image_size, env.render_quality, env.num_envs) == ("metaworld/faucet-open-v3", 64, "minimal", 7)
    assert env.gpus is None  # of the machine it was trained on


def test_what_is_typed_counts(policy):
    typed = composed_evaluation(f"policy.checkpoint={policy}", "env.id=metaworld/faucet-close-v3", "env.num_envs=2")
    assert (typed.env.id, typed.env.num_envs, typed.env.image_size) == ("metaworld/faucet-close-v3", 2, 64)
    chosen = composed_evaluation(f"policy.checkpoint={policy}", "env=metaworld")
    assert chosen.env.id == "metaworld/MT50"


def test_a_policy_is_evaluated_on_the_episodes_of_its_training(policy):
    found = composed_evaluation(f"policy.checkpoint={policy}").eval
    assert (found.trials, found.seed, found.videos) == (7, 3, 4)
    assert composed_evaluation(f"policy.checkpoint={policy}", "eval.trials=2").eval.trials == 2
    assert composed_evaluation(f"policy.checkpoint={policy}", "eval.trials=null").eval.trials is None
    assert composed_evaluation(f"policy.checkpoint={policy}", "env=metaworld").eval.trials == 128


@pytest.mark.parametrize("name", THAT_TRAIN)
def test_the_policy_of_each_experiment_can_be_evaluated_by_its_folder(name, tmp_path):
    found = composed_evaluation(f"policy.checkpoint={trained_by(name, tmp_path)}")
    read_config(found, importlib.import_module("recipes.evaluate").SETTINGS)
    episodes = {key: found.eval[key] for key in ("trials", "repeats", "seed", "mean_of")}
    assert Evaluator(**episodes).episodes(make_env_spec(found.env))


def test_mt50_is_evaluated_by_its_folder_as_its_page_says(tmp_path):
    folder = trained_by("metaworld_mt50_ppo_small", tmp_path)
    found = composed_evaluation(f"policy.checkpoint={folder}").eval
    assert (found.trials, list(found.mean_of)) == (None, ["easy", "medium", "hard", "very_hard"])
    other = composed_evaluation(f"policy.checkpoint={folder}", "env.id=metaworld/reach-v3").eval
    assert (other.trials, list(other.mean_of)) == (None, []), "groups that another suite need not have"


def test_episodes_of_another_suite_are_not_those_of_trainings_suite(tmp_path):
    assert not composed_evaluation(f"policy.checkpoint={trained_by('metaworld_45_ppo_openpi', tmp_path)}").eval.mean_of
    noted = json.loads((tmp_path / TRAINING_ENV).read_text())
    assert noted["env"]["id"] == "metaworld/ML45-train"
    assert noted["evaluation"] == {"trials": None, "repeats": 1, "seed": 9_000_000, "mean_of": []}


def test_a_folder_is_found_at_home(policy, monkeypatch):
    monkeypatch.setenv("HOME", str(policy.parent))
    assert composed_evaluation("policy.checkpoint='~/policy'").env.id == FAUCETS["id"]


def test_a_hub_id_is_what_its_local_copy_says(policy, monkeypatch):
    monkeypatch.setattr(module, "find_cached", {"hf:me/faucet": policy}.get)
    assert composed_evaluation("policy.checkpoint=hf:me/faucet").env.id == FAUCETS["id"]
    with pytest.raises(ValueError, match=r"not known before it is downloaded; type: hf download me/other, and this"):
        evaluation_defaults(["policy.checkpoint=hf:me/other"], CONF)
    typed = ["env=metaworld", "policy.checkpoint=hf:me/other"]
    assert evaluation_defaults(typed, CONF) == typed


def test_an_experiment_with_sampled_evaluations_says_how_to_have_them(capsys):
    composed_evaluation("experiment=metaworld_button_ppo_smallflow", "policy.checkpoint=x")
    said = capsys.readouterr().err
    assert "evaluates sampled actions beside greedy ones: type greedy=false for these" in said
    composed_evaluation("experiment=metaworld_button_ppo_smallflow", "policy.checkpoint=x", "greedy=true")
    assert not capsys.readouterr().err


def test_flags_of_hydra_may_stand_anywhere(policy):
    for typed in (["--cfg", "job", f"policy.checkpoint={policy}"], [f"policy.checkpoint={policy}", "--cfg", "job"]):
        completed = evaluation_defaults(typed, CONF)
        chosen = ["env=trained_on", "experiment=trained_on"]
        place = completed.index(f"policy.checkpoint={policy}")
        assert completed[place - 2 : place] == chosen
        assert [each for each in completed if each not in chosen] == typed


def test_the_name_of_an_experiment_that_trains_stands_for_its_environment():
    training = compose_settings("ppo", ["experiment=metaworld_mt50_ppo_small"], CONF)
    evaluation = composed_evaluation(
        "experiment=metaworld_mt50_ppo_small", "policy.checkpoint=somewhere", "env.num_envs=4"
    )
    assert evaluation.env == {**training.env, "num_envs": 4}
    assert evaluation.policy == {**training.policy, "checkpoint": "somewhere"}
    assert evaluation.eval.mean_of == training.eval.mean_of
    assert "demonstrations" not in evaluation


def test_an_experiment_of_an_installed_package_is_found_too(tmp_path, monkeypatch):
    folder = tmp_path / "strangers_conf" / "experiment"
    folder.mkdir(parents=True)
    (tmp_path / "strangers_conf" / "__init__.py").touch()
    for name, recipe in (("theirs", "ppo"), ("their_test", "evaluate")):
        (folder / f"{name}.yaml").write_text(f"# @package _global_\nrecipe: {recipe}\nseed: 3\n")
    monkeypatch.setattr(experiments, "config_packages", lambda: ["gone_conf", "strangers_conf"])
    monkeypatch.syspath_prepend(tmp_path)
    assert module._of_training("theirs", CONF) == ("ppo", "theirs")
    assert module._of_training("their_test", CONF) is None
    assert module._of_training("nobodys", CONF) is None
    sys.modules.pop("strangers_conf", None)


def test_a_policy_that_does_not_say_changes_nothing(tmp_path):
    typed = [f"policy.checkpoint={tmp_path}"]
    assert evaluation_defaults(typed, CONF) == typed


def test_an_environment_is_chosen_by_a_group_its_id_or_an_experiment():
    for typed in ("env=metaworld", "env.id=metaworld/MT50", "experiment=libero_ppo_openpi", "+experiment=mine"):
        assert is_chosen(["seed=1", typed])
    assert not is_chosen(["env.num_envs=2", "policy.checkpoint=experiment=x"])


def test_a_sweep_over_policies_says_in_which_environment(policy):
    with pytest.raises(ValueError, match="type env=NAME too"):
        evaluation_defaults(["-m", f"policy.checkpoint={policy},{policy}"], CONF)
    typed = ["-m", "env=metaworld", f"policy.checkpoint={policy},{policy}"]
    assert evaluation_defaults(typed, CONF) == typed


def test_a_broken_file_is_named(policy):
    for content in ("", "[]", '{"env": {}}', '{"env": 3}'):
        (policy / TRAINING_ENV).write_text(content)
        with pytest.raises(ValueError, match=f"{TRAINING_ENV} is broken"):
            env_of(policy)


def test_only_what_a_policy_sees_differs(policy):
    trained = env_of(policy)
    assert differences(trained, {**FAUCETS, "num_envs": 1, "gpus": None}) == {}
    assert differences(trained, {**FAUCETS, "image_size": 200}) == {"image_size": (64, 200)}
    assert differences(trained, {**FAUCETS, "camera": "corner"}) == {"camera": (None, "corner")}


def test_where_assets_are_and_what_is_paid_differs_for_no_policy(tmp_path):
    env = {"id": "maniskill/PickCube-v1", "assets": "/mine", "reward_type": "dense", "num_envs": 2}
    save_training_env(tmp_path, "ppo", env, make_env_spec(FAUCETS), 5, {})
    assert env_of(tmp_path) == {"id": env["id"], "num_envs": 2}
    assert differences({"id": env["id"]}, env) == {}
    theirs = {"id": "nobodys/suite", "assets": "/mine"}  # of a package that is not installed
    assert differences(theirs, {**theirs, "assets": "/yours"}) == {"assets": ("/mine", "/yours")}


def test_the_protocol_is_noted(policy):
    noted = json.loads((policy / TRAINING_ENV).read_text())
    assert noted["chunk_size"] == 5
    assert "64 x 64 pixels instead of 480 x 480" in noted["protocol_deviations"]
