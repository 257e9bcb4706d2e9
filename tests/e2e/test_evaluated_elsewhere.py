"""``eval.env``: a run is evaluated on another suite than it trains on, which training does not notice."""

import contextlib
import io
import json
import os
import shlex
import signal

import pytest
from hydra.core.global_hydra import GlobalHydra
from running import TOY, TOY_OF, composed, differing, main_of, metrics, recipe_here

from vla_algos.collectors import EpisodeCollector
from vla_algos.comparison import compare
from vla_algos.results import read_episodes
from vla_envs.workers.process import WorkerProcess

pytest.importorskip("metaworld", reason="Meta-World is not installed: make setup")
pytestmark = pytest.mark.timeout(900)
# A chunk of 3 in episodes of 8 actions: iterations end in the middle of episodes.
SETTINGS = ["iterations=3", "demonstrations.episodes=2", "cloning.steps=3", "policy.chunk_size=3"]
SUITE = "metaworld/reach-v3+push-v3"
ELSEWHERE = [f"eval.env.id={SUITE}", "eval.env.reset_ranges=null", "eval.env.num_envs=1"]
OFTEN = ["evaluate_every=1", "eval.sampled=true"]


@pytest.fixture(autouse=True)
def hydra():
    yield
    GlobalHydra.instance().clear()


def run(name, folder, *more):
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        main_of(name)(composed(name, [*TOY, *TOY_OF[name], *SETTINGS, *more], folder))
    GlobalHydra.instance().clear()
    (folder / "said.txt").write_text(said.getvalue())
    return folder


def trained(folder):
    """What was measured in training, by iteration."""
    return {step: numbers for (step, evaluated), numbers in metrics(folder).items() if not evaluated}


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """A run that is evaluated on two other tasks after every iteration, with random actions too."""
    return run("ppo", tmp_path_factory.mktemp("elsewhere") / "run", *ELSEWHERE, *OFTEN)


def test_training_is_that_of_a_run_that_is_not_evaluated_in_between(elsewhere, tmp_path):
    alone = run("ppo", tmp_path / "alone", "evaluate_every=0", "eval.sampled=false")
    assert len(trained(alone)) == 3
    assert trained(elsewhere) == trained(alone)
    assert not differing(elsewhere / "policy", alone / "policy")
    # The test can fail: evaluated on its own environment, PPO abandons the episodes that are running.
    own = run("ppo", tmp_path / "own", "evaluate_every=1", "eval.sampled=false")
    assert trained(own) != trained(alone)


def test_what_is_measured_elsewhere_says_so(elsewhere):
    lines = [json.loads(line) for line in (elsewhere / "metrics.jsonl").read_text().splitlines()]
    evaluations = [line for line in lines if "eval/success_once" in line]
    assert [line["step"] for line in evaluations] == [0, 1, 2, 3]
    for line in evaluations:
        assert line["evaluated_on"] == SUITE
        assert {"eval/task/reach-v3/success_once", "eval_sampled/task/push-v3/success_once"} <= line.keys()
        assert line["eval/num_episodes"] == 4
    assert not [line for line in lines if "evaluated_on" in line and line not in evaluations]
    ended = json.loads((elsewhere / "run.json").read_text())
    assert ended["evaluated_on"] == SUITE
    origin = json.loads((elsewhere / "policy" / "environment.json").read_text())
    assert origin["env"]["id"] == "metaworld/button-press-topdown-v3"
    assert origin["evaluated_on"] == SUITE
    said = (elsewhere / "said.txt").read_text()
    assert "trained on metaworld/button-press-topdown-v3" in said
    assert f"evaluated on {SUITE}" in said
    assert f"evaluation after 2 on {SUITE}" in said


def test_its_policy_is_evaluated_as_it_was_trained_or_where_the_run_was(elsewhere, tmp_path):
    *_, line = (each for each in (elsewhere / "said.txt").read_text().splitlines() if each.startswith("evaluate "))
    typed = shlex.split(line)[shlex.split(line).index("evaluate", 1) + 1 :]  # what the run said at its end
    assert typed[0] == f"policy.checkpoint={elsewhere / 'policy'}"
    assert {f"env.id={SUITE}", "env.reset_ranges=null", "env.num_envs=1", "eval.trials=2"} >= set(typed[1:])
    own = [*TOY[1:4], "policy.chunk_size=3", "eval.videos=0"]  # what the folder adds where it is typed in a shell
    done = recipe_here("evaluate", tmp_path / "there", *own, *typed)
    assert f"was trained otherwise: env.id={SUITE}, not metaworld/button" in done.stdout
    noted = json.loads((tmp_path / "there" / "metrics.json").read_text())
    assert noted["evaluated_on"] == SUITE
    assert list(noted["differs_from_training"]) == ["env.id", "env.reset_ranges"]
    last = read_episodes(elsewhere / "evaluations" / "iteration_0003" / "eval.jsonl")
    again = read_episodes(tmp_path / "there" / "episodes.jsonl")
    assert len(compare(last, again, []).pairs) == 4, "the same episodes"
    assert [each.episode_len for each in last] == [each.episode_len for each in again]


@pytest.mark.parametrize(("owner", "method", "call"), [(EpisodeCollector, "_decide", 20)])
def test_an_evaluation_elsewhere_that_is_broken_off_runs_again(elsewhere, owner, method, call, monkeypatch, tmp_path):
    original, calls = getattr(owner, method), []

    def interrupted(*given, **named):
        calls.append(1)
        if len(calls) == call:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(*given, **named)

    again = tmp_path / "again"
    with monkeypatch.context() as patch:
        patch.setattr(owner, method, interrupted)
        with pytest.raises(SystemExit):
            run("ppo", again, *ELSEWHERE, *OFTEN)
    GlobalHydra.instance().clear()
    assert not (again / "policy").exists()
    run("ppo", again, *ELSEWHERE, *OFTEN)
    assert metrics(again) == metrics(elsewhere)
    assert not differing(again / "policy", elsewhere / "policy")


def test_its_simulators_live_as_long_as_the_evaluation(monkeypatch, tmp_path):
    started, alive = [], []
    start = WorkerProcess.__init__

    def starting(worker, *given, **named):
        alive.append([is_alive(each.pid) for each in started])
        started.append(worker)
        start(worker, *given, **named)

    monkeypatch.setattr(WorkerProcess, "__init__", starting)
    run("grpo", tmp_path / "grpo", "iterations=1", *ELSEWHERE)
    assert alive == [[], [True], [True, False]], "training's, and those of the evaluations before and after"
    assert metrics(tmp_path / "grpo")[1, True][0]["eval/num_episodes"] == 4


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
