"""What a run shows beside its progress bars."""

import io
import re

import pytest
from toy import ToyPolicy, toy_suite
from tqdm import tqdm

from vla_algos.run.evaluator import Evaluator
from vla_algos.run.logging import show_iteration
from vla_common.keys import ACTION

NAN = float("nan")


@pytest.mark.parametrize("in_a_job", [False, True])
@pytest.mark.parametrize(
    ("metrics", "shown"),
    [
        ({"env/success_once": 0.25}, "success 25%, 80 env steps/s"),
        ({"env/success_once": NAN}, "no episode ended, 80 env steps/s"),
        ({}, "no episode ended, 80 env steps/s"),
        ({"env/success_once": 0.0, "env/avg_num_subtasks": 1.5}, "success 0%, 1.50 subtasks, 80 env steps/s"),
        ({"env/success_once": NAN, "env/avg_num_subtasks": NAN}, "no episode ended, 80 env steps/s"),
    ],
)
def test_an_iteration_in_which_no_episode_ended_is_shown_in_words(metrics, shown, in_a_job, monkeypatch, capsys):
    """A share of nothing is not a number, and ``nan%`` does not say so."""
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    if in_a_job:
        monkeypatch.setenv("SLURM_JOB_ID", "7")
    with tqdm(total=9, file=io.StringIO()) as bar:
        show_iteration(bar, 2, {"env_steps_per_s": 80.2, **metrics})
        assert bar.postfix == shown
    assert capsys.readouterr().out == (f"iteration 2 of 9: {shown}\n" if in_a_job else "")


class AlwaysUp(ToyPolicy):
    """Solves the task whose goal is up, and no other."""

    def forward(self, td):
        td = super().forward(td)
        td[ACTION].fill_(1.0)
        return td


def test_an_evaluation_that_has_not_ended_shows_no_share_of_success(tmp_path, capsys, monkeypatch):
    """Who succeeds ends first, so that the share so far would be too large; how many are solved is true."""
    monkeypatch.setenv("TQDM_MININTERVAL", "0")
    evaluator = Evaluator(trials=4, videos=0)
    result = evaluator.run("evaluation", toy_suite(), AlwaysUp(), tmp_path / "eval.jsonl")
    assert sum(episode.success_once for episode in result.episodes) == 4
    states = re.findall(r"evaluation: +\d+%\|.*?\| (\d+)/8 \[(.*?)\]", capsys.readouterr().err)
    assert [states[0][0], states[-1][0]] == ["0", "8"]
    beside = [shown.split(", ")[2:] for _, shown in states]  # after the time and the speed
    assert {text for texts in beside for text in texts} <= {f"solved={number}" for number in range(5)}
    assert beside[-1] == ["solved=4"]
