"""A policy says what it was trained on, and evaluate.py takes that where nothing else is typed."""

import json

import pytest
from paths import CONF

from vla_algos.run.arguments import compose_settings
from vla_algos.run.as_trained import as_trained, is_chosen
from vla_algos.run.origin import FILE, differences, env_of, note_origin
from vla_algos.run.run import make_env_spec

FAUCETS = {"id": "metaworld/faucet-open-v3", "image_size": 64, "render_quality": "minimal", "num_envs": 7, "gpus": [1]}


@pytest.fixture
def policy(tmp_path):
    """The folder of a policy that was trained on a faucet."""
    spec = make_env_spec(FAUCETS)
    note_origin(tmp_path / "policy", "ppo", FAUCETS, spec, chunk_size=5)
    return tmp_path / "policy"


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
