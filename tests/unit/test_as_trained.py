"""A policy says what it was trained on, and evaluate.py takes that where nothing else is typed."""

import importlib
import json
import sys

import pytest
import yaml
from paths import CONF

from vla_algos.run import as_trained as module
from vla_algos.run.arguments import compose_settings
from vla_algos.run.as_trained import as_trained, is_chosen
from vla_algos.run.config import read_config
from vla_algos.run.evaluated import make_env_spec
from vla_algos.run.origin import FILE, differences, env_of, note_origin

THAT_TRAIN = sorted(
    file.stem
    for file in (CONF / "experiment").glob("*.yaml")
    if yaml.safe_load(file.read_text()).get("recipe", "evaluate") != "evaluate"
)
FAUCETS = {"id": "metaworld/faucet-open-v3", "image_size": 64, "render_quality": "minimal", "num_envs": 7, "gpus": [1]}


@pytest.fixture
def policy(tmp_path):
    """The folder of a policy that was trained on a faucet."""
    spec = make_env_spec(FAUCETS)
    note_origin(tmp_path / "policy", "ppo", FAUCETS, spec, chunk_size=5)
    return tmp_path / "policy"


def test_an_experiment_that_trains_stands_for_where_it_is_evaluated():
    found = composed_evaluation("experiment=metaworld_45_ppo_openpi", "policy.checkpoint=x")
    assert (found.env.id, found.env.max_episode_steps, found.env.image_size) == ("metaworld/ML45-test", 160, 480)
    assert not {"env", "temperature", "sampled"} & found.eval.keys()


def composed_evaluation(*typed):
    return compose_settings("evaluate", as_trained(typed, CONF), CONF)


def test_a_policy_is_evaluated_as_it_was_trained(policy):
    env = composed_evaluation("seed=1", f"policy.checkpoint={policy}").env
    assert (env.id, env.image_size, env.render_quality, env.num_envs) == ("metaworld/faucet-open-v3", 64, "minimal", 7)
    assert env.gpus is None  # of the machine it was trained on


def test_what_is_typed_counts(policy):
    typed = composed_evaluation(f"policy.checkpoint={policy}", "env.id=metaworld/faucet-close-v3", "env.num_envs=2")
    assert (typed.env.id, typed.env.num_envs, typed.env.image_size) == ("metaworld/faucet-close-v3", 2, 64)
    chosen = composed_evaluation(f"policy.checkpoint={policy}", "env=metaworld")
    assert chosen.env.id == "metaworld/MT50"


def test_flags_of_hydra_may_stand_anywhere(policy):
    for typed in (["--cfg", "job", f"policy.checkpoint={policy}"], [f"policy.checkpoint={policy}", "--cfg", "job"]):
        completed = as_trained(typed, CONF)
        assert [each for each in completed if not each.startswith("env=")] == typed
        assert completed[completed.index(f"policy.checkpoint={policy}") - 1].startswith("env=")


def test_the_name_of_an_experiment_that_trains_stands_for_its_environment():
    training = compose_settings("ppo", ["experiment=metaworld_mt50_ppo_small"], CONF)
    evaluation = composed_evaluation(
        "experiment=metaworld_mt50_ppo_small", "policy.checkpoint=somewhere", "env.num_envs=4"
    )
    assert evaluation.env == {**training.env, "num_envs": 4}
    assert evaluation.policy == {**training.policy, "checkpoint": "somewhere"}
    assert evaluation.eval.mean_of == training.eval.mean_of
    assert "demonstrations" not in evaluation


@pytest.mark.parametrize("name", THAT_TRAIN)
def test_each_experiment_that_trains_can_be_evaluated(name):
    found = composed_evaluation(f"experiment={name}", "policy.checkpoint=somewhere")
    read_config(found, importlib.import_module("recipes.evaluate").SETTINGS)
    make_env_spec(found.env)


def test_an_experiment_of_an_installed_package_is_found_too(tmp_path, monkeypatch):
    folder = tmp_path / "strangers_conf" / "experiment"
    folder.mkdir(parents=True)
    (tmp_path / "strangers_conf" / "__init__.py").touch()
    for name, recipe in (("theirs", "ppo"), ("their_test", "evaluate")):
        (folder / f"{name}.yaml").write_text(f"# @package _global_\nrecipe: {recipe}\nseed: 3\n")
    monkeypatch.setattr(module, "config_packages", lambda: ["gone_conf", "strangers_conf"])
    monkeypatch.syspath_prepend(tmp_path)
    assert module._of_training("theirs", CONF) == ("ppo", "theirs")
    assert module._of_training("their_test", CONF) is None
    assert module._of_training("nobodys", CONF) is None
    sys.modules.pop("strangers_conf", None)


def test_an_experiment_that_evaluates_is_left_as_it_is():
    typed = ["experiment=metaworld_evaluate_openpi", "policy.checkpoint=somewhere"]
    assert as_trained(typed, CONF) == typed


def test_a_policy_that_does_not_say_changes_nothing(tmp_path):
    typed = [f"policy.checkpoint={tmp_path}"]
    assert as_trained(typed, CONF) == typed


def test_an_environment_is_chosen_by_a_group_its_id_or_an_experiment():
    for typed in ("env=metaworld", "env.id=metaworld/MT50", "experiment=libero_evaluate_openpi", "+experiment=mine"):
        assert is_chosen(["seed=1", typed])
    assert not is_chosen(["env.num_envs=2", "policy.checkpoint=experiment=x"])


def test_a_sweep_over_policies_says_in_which_environment(policy):
    with pytest.raises(ValueError, match="type env=NAME too"):
        as_trained(["-m", f"policy.checkpoint={policy},{policy}"], CONF)
    typed = ["-m", "env=metaworld", f"policy.checkpoint={policy},{policy}"]
    assert as_trained(typed, CONF) == typed


def test_a_broken_file_is_named(policy):
    for content in ("", "[]", '{"env": {}}', '{"env": 3}'):
        (policy / FILE).write_text(content)
        with pytest.raises(ValueError, match=f"{FILE} is broken"):
            env_of(policy)


def test_only_what_a_policy_sees_differs(policy):
    trained = env_of(policy)
    assert differences(trained, {**FAUCETS, "num_envs": 1, "gpus": None}) == {}
    assert differences(trained, {**FAUCETS, "image_size": 200}) == {"image_size": (64, 200)}
    assert differences(trained, {**FAUCETS, "camera": "corner"}) == {"camera": (None, "corner")}


def test_the_protocol_is_noted(policy):
    noted = json.loads((policy / FILE).read_text())
    assert noted["chunk_size"] == 5
    assert "64 x 64 pixels instead of 480 x 480" in noted["protocol_deviations"]
