"""The whole command that goes on with a run: what was typed, with its folder, for the shell and for Hydra."""

import json
import os
import shlex
import sys

import pytest
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from paths import RECIPES
from running import composed

from vla_algos.run import Evaluator, command
from vla_algos.run.command import Command, say_how_to_go_on, to_evaluate, to_go_on, typed
from vla_algos.run.phase import begin_anew, begin_work
from vla_common.started import handed_on, started


@pytest.fixture
def adopted():
    """Let a command be what was typed, until the test is over."""
    yield command.adopt
    command.adopt(None)


def given(*arguments):
    return Command(("python", "recipes/ppo.py"), arguments)


def test_all_that_was_typed_is_in_it_and_the_folder_takes_the_place_of_another(tmp_path):
    shown = given("seed=1", "hydra.run.dir=runs/x", "eval.mean_of=[easy,hard]").in_folder(tmp_path)
    words = ["python", "recipes/ppo.py", "seed=1", "eval.mean_of=[easy,hard]", f"hydra.run.dir={tmp_path}"]
    assert shlex.split(shown) == words


@pytest.mark.parametrize(
    "name", ["a b", "lr=1e-3,seed=0", "it's", 'say "yes"', "ä", "50%(1)", "{a}", "x:y", "back\\slash"]
)
def test_shell_and_hydra_read_the_folder_as_it_is(name, tmp_path):
    words = shlex.split(given("seed=1").in_folder(tmp_path / name))
    (override,) = OverridesParser.create().parse_overrides(words[3:])
    assert override.value() == str(tmp_path / name)


def test_flags_keep_their_place_and_settings_stay_side_by_side(tmp_path):
    shown = shlex.split(given("seed=1", "--config-dir", "mine").in_folder(tmp_path))
    assert shown[2:] == ["seed=1", f"hydra.run.dir={tmp_path}", "--config-dir", "mine"]
    assert shlex.split(given("-cd", "mine").in_folder(tmp_path))[2:] == ["-cd", "mine", f"hydra.run.dir={tmp_path}"]


def test_what_would_refuse_to_go_on_is_left_out(tmp_path):
    shown = shlex.split(given("resume=never", "seed=1").in_folder(tmp_path))
    assert shown[2:] == ["seed=1", f"hydra.run.dir={tmp_path}"]


def test_a_run_of_a_sweep_goes_on_alone_with_its_own_values(adopted, tmp_path, monkeypatch):
    adopted(given("-m", "seed=1,2", "+experiment=x", "iterations=3", "hydra.sweep.dir=runs/all"))
    composed("ppo", ["seed=2", "iterations=3", "hydra.mode=MULTIRUN"], tmp_path)
    try:
        shown = shlex.split(to_go_on(tmp_path))
    finally:
        HydraConfig.instance().cfg = None
    assert shown[2:] == ["seed=2", "+experiment=x", "iterations=3", f"hydra.run.dir={tmp_path}"]


def test_a_run_that_nobody_typed_is_the_same_command(tmp_path):
    assert typed() is None
    assert to_go_on(tmp_path) == f"the same command with hydra.run.dir={tmp_path}"


@pytest.mark.parametrize(
    ("start", "expected"),
    [
        (("python", "recipes/ppo.py"), "python recipes/evaluate.py"),
        (("python", "-u", "recipes/ppo.py"), "python recipes/evaluate.py"),
        ((".venv/bin/python", "recipes/ppo.py"), ".venv/bin/python recipes/evaluate.py"),
        (("torchrun", "--nproc-per-node", "2", "recipes/ppo.py"), "python recipes/evaluate.py"),
        (("vla-recipe", "run", "ppo"), "vla-recipe run evaluate"),
        (("python", "-m", "recipes", "run", "ppo"), "python -m recipes run evaluate"),
        (("python", "elsewhere/ppo.py"), "vla-recipe run evaluate"),
    ],
)
def test_a_policy_is_evaluated_the_way_it_was_trained(start, expected, adopted, tmp_path, monkeypatch):
    monkeypatch.chdir(RECIPES.parent)
    adopted(Command(start, ("seed=1",)))
    assert to_evaluate(tmp_path) == f"{expected} policy.checkpoint={tmp_path}"
    settings = Evaluator(trials=10, mean_of=["easy", "hard"]).settings_of_episodes()
    shown = f"policy.checkpoint={tmp_path} eval.trials=10 'eval.mean_of=[easy,hard]'"
    assert to_evaluate(tmp_path, settings) == f"{expected} {shown}"


def test_what_was_typed_is_what_the_interpreter_was_given(monkeypatch):
    monkeypatch.setattr(sys, "orig_argv", ["python", "-u", "recipes/ppo.py", "seed=1", "-m"])
    assert started(["seed=1", "-m"]) == ["python", "-u", "recipes/ppo.py"]
    assert started(["seed=2"]) is None


def test_a_program_that_became_another_one_hands_on_how_it_was_started(monkeypatch):
    environment = handed_on(["vla-recipe", "run", "ppo"])
    monkeypatch.setattr(os, "environ", dict(environment))
    assert started(["seed=1"]) == ["vla-recipe", "run", "ppo"]
    assert json.dumps(["vla-recipe", "run", "ppo"]) not in os.environ.values(), "its children are started otherwise"
    assert dict(handed_on(None)) == dict(os.environ)


def test_how_to_go_on_is_said_when_work_had_begun_and_ends_early(adopted, tmp_path, capsys):
    adopted(given("seed=1"))

    def fail(error):
        with pytest.raises(type(error)), say_how_to_go_on(tmp_path):
            raise error

    try:
        begin_anew()
        fail(ValueError("a setting"))
        assert capsys.readouterr().out == ""
        begin_work()
        with say_how_to_go_on(tmp_path):
            pass
        assert capsys.readouterr().out == ""
        for error in (KeyError("a defect"), KeyboardInterrupt(), SystemExit(143)):
            fail(error)
            said = capsys.readouterr().out
            assert said == (
                f"\nrun          {tmp_path}\nto go on     python recipes/ppo.py seed=1 hydra.run.dir={tmp_path}\n"
            )
    finally:
        begin_anew()
