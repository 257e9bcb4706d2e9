"""``check_simulator`` finds each fault, in one line; a mistake that raises is one traceback and one line."""

import logging
import re
from dataclasses import replace

import pytest
from checked import checked_spec

from vla_envs import Episode, SimulatorCrash, Task, WorkerPool, check_simulator, make_env
from vla_envs.__main__ import main

EPISODE = "own/walk task left trial 0 seed 0"
DIFFERENCES = {
    "pixel": [r"images \(1 of 192, such as \d+ and \d+\) differ .* each time it is run: something random"],
    "episode before": [r"states \(1 of 2, such as 0.26.* and 0.51.*\) differ after reset after another episode: reset"],
    "process": [
        r"rewards \(5 of 5, such as .*\) differ in actions 1 to 5 in another process: it depends on the process"
    ],
    "shared": ["states .* after another episode: reset", "states .* beside another simulator in one process: they"],
}


def test_nothing_is_wrong_with_a_simulator_that_is_right():
    said = []
    assert check_simulator(checked_spec(), say=said.append) == ()
    assert said == [
        f"{EPISODE}: 12 actions, answers as described",
        "the same after another episode",
        "the same beside another simulator in one process",
        "the same in another process",
        "TorchRL's check_env_specs",
        "Gymnasium's check_env",
    ]


@pytest.mark.parametrize("fault", DIFFERENCES)
def test_an_episode_that_is_not_the_same_anywhere(fault):
    found = check_simulator(checked_spec(fault))
    for line, expected in zip(found, DIFFERENCES[fault], strict=True):
        assert re.fullmatch(f"{EPISODE}: {expected}.*", line), line


def test_a_horizon_that_is_not_the_described_one():
    (line,) = check_simulator(checked_spec("horizon"))
    assert line == "own/walk: episodes end by themselves after 9 actions, not 12; type max_episode_steps=9"
    said, third = [], Task("longer", "go on")  # which neither of the two episodes is of
    spec = checked_spec("horizon")
    assert check_simulator(replace(spec, tasks=(*spec.tasks, third)), say=said.append) == ()
    assert any("those of other tasks have to go on to max_episode_steps=12" in line for line in said)


@pytest.mark.parametrize(
    ("fault", "error", "when"),
    [
        ("shape", r"states are float32 \[1\], must be numbers \[2\]", "decision 2, of 5 actions"),
        ("raises in __init__", "KeyError: 'no such arm'", "reset"),
        ("raises in reset", "ZeroDivisionError: no table", "reset"),
        ("raises in step", "ZeroDivisionError: fell over", "decision 2, of 5 actions"),
    ],
)
def test_a_wrong_answer_and_what_raises_are_named_with_one_traceback(fault, error, when, caplog):
    (line,) = check_simulator(checked_spec(fault))
    assert re.fullmatch(f"{error}, while running {EPISODE}, in {when}", line), line
    assert caplog.text.count("Traceback") == ("raises" in fault)


def test_what_cannot_be_checked_is_refused():
    with pytest.raises(ValueError, match="own/walk simulates all worlds together"):
        check_simulator(checked_spec(batched="checked:Batched"))
    with pytest.raises(ValueError, match="metaworld"):
        check_simulator("metaword")


def test_the_command_says_what_is_right_and_what_is_not(monkeypatch, capsys):
    monkeypatch.setattr("vla_envs.check.make_spec", lambda name: checked_spec(name.partition("/")[2]))
    for fault, status in (("", 0), ("pixel", 1)):
        monkeypatch.setattr("sys.argv", ["vla_envs", "check", f"own/{fault}"])
        assert main() == status
    said = capsys.readouterr().out.splitlines()
    assert [line.partition(" ")[0] for line in said] == ["ok"] * 7 + ["problem"]


# ---- a mistake in a simulator, in an environment


@pytest.mark.parametrize("fault", ["raises in __init__", "raises in reset", "raises at once"])
@pytest.mark.parametrize("num_envs", [1, 4])
def test_a_mistake_ends_with_one_traceback_of_its_file_and_one_line(fault, num_envs, caplog):
    env = make_env(checked_spec(fault), num_envs, 5, seed=0, num_workers=1)
    with pytest.raises(SimulatorCrash, match="ended like this: repair checked:CheckedSimulator") as caught:
        env.rollout(10, break_when_any_done=False)
    env.close()
    assert "\n" not in str(caught.value)
    (text,) = [record.getMessage() for record in caplog.records if "Traceback" in record.getMessage()]
    assert re.findall(r'File ".*/(\w+).py"', text)[-1] == "checked"
    assert not re.search("workers/(worker|chunks).py", text)
    assert len(caplog.records) == max(3, num_envs)  # a line for each episode, not for each time it was tried again


def test_a_worker_that_dies_is_no_mistake_and_is_tried_as_often_as_before(caplog):
    pool = WorkerPool(checked_spec("dies in reset"), 3, 1, 5)
    pool.reset({slot: Episode(0, slot) for slot in range(3)})
    pool.check()
    assert pool.unstarted == {0, 1, 2}
    assert pool.restarts == 9
    pool.close()
    assert len([record for record in caplog.records if record.levelno == logging.WARNING]) == 9
