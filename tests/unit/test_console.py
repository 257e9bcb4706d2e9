"""What a run says is in its folder too."""

import sys

import pytest
from forked import ForkedPrograms
from paths import CONF
from tqdm import tqdm

from vla_algos.run import files, phase, program
from vla_algos.run.console import NAME, console_file
from vla_common.program import FAILED, WRONG_USE


@pytest.fixture(autouse=True)
def _work_has_begun(monkeypatch):
    monkeypatch.setattr(phase, "_begun", True)


def test_lines_of_both_streams_and_of_a_bar_what_stays(tmp_path, capsys):
    with console_file(tmp_path):
        print("before")
        with tqdm(total=3, desc="work", mininterval=0) as bar:
            for step in range(3):
                bar.set_postfix_str(f"loss {step}")
                bar.update()
                if step == 1:
                    tqdm.write("in between")
        print("a warning", file=sys.stderr)
        print("not yet a line", end="")
    said = (tmp_path / NAME).read_text().splitlines()
    assert said[0] == "before"
    assert said[1] == "in between"
    assert said[2].startswith("work: 100%")
    assert "loss 2" in said[2]
    assert said[3:] == ["a warning", "not yet a line"]
    shown = capsys.readouterr()
    assert "before\nin between\n" in shown.out
    assert "a warning" in shown.err


def test_of_a_bar_below_another_one_the_last_state_stays(tmp_path):
    with console_file(tmp_path):
        with tqdm(total=2, desc="outer", file=sys.stderr, mininterval=0) as outer:
            for _ in range(2):
                with tqdm(total=3, desc="inner", file=sys.stderr, mininterval=0) as inner:
                    for _ in range(3):
                        inner.update()
                outer.update()
        print("done")
    text = (tmp_path / NAME).read_text()
    assert "\x1b" not in text
    lines = text.splitlines()
    assert [line.partition(" |")[0].partition("%")[0] for line in lines if line.startswith("inner")] == [
        "inner: 100"
    ] * 2
    assert lines[-1] == "done"
    assert "" not in lines
    assert len(lines) <= 7, text


def test_it_is_continued(tmp_path):
    for text in ("first", "second"):
        with console_file(tmp_path):
            print(text)
    print("afterwards")
    assert (tmp_path / NAME).read_text() == "first\nsecond\n"


def fail(folder, error):
    """A run that ends in an error."""

    def run():
        with console_file(folder):
            print("so far")
            raise error

    with pytest.raises(type(error)):
        run()


def test_an_exception_leaves_what_was_said(tmp_path):
    streams = sys.stdout, sys.stderr
    fail(tmp_path, ZeroDivisionError())
    assert (sys.stdout, sys.stderr) == streams
    assert (tmp_path / NAME).read_text() == "so far\n"


def test_a_full_disk_is_said_once_and_loses_nothing(tmp_path, monkeypatch, capsys):
    write, full = files.os.write, [True]

    def refuse(handle, content):
        if full[0]:
            raise OSError(28, "No space left on device")
        return write(handle, content)

    with console_file(tmp_path):
        monkeypatch.setattr(files.os, "write", refuse)
        print("one")
        print("two")
        full[0] = False
        print("three")
    monkeypatch.undo()
    said = (tmp_path / NAME).read_text().splitlines()
    assert [line for line in said if line in ("one", "two", "three")] == ["one", "two", "three"]
    shown = capsys.readouterr()
    assert (shown.out + shown.err).count("could not be written") == 1


@pytest.mark.parametrize("error", [ZeroDivisionError("of steps"), OSError("no room"), KeyboardInterrupt()])
def test_why_a_run_ended_early_is_in_its_file_as_it_was_printed(error, tmp_path, capsys):
    fail(tmp_path, error)
    assert program.say(error) != 0
    printed = capsys.readouterr().err
    assert str(error) in printed
    assert ("Traceback" in printed) == isinstance(error, ZeroDivisionError)
    assert (tmp_path / NAME).read_text() == f"so far\n{printed}"


def test_an_error_of_another_run_is_not_in_it(tmp_path):
    """Of a sweep: the second run is well, the third was refused before it had a file."""
    fail(tmp_path / "first", ValueError("of the first"))
    program.say(ValueError("of the first"))
    with console_file(tmp_path / "second"):
        print("all is well")
    program.say(ValueError("of the third"))
    assert (tmp_path / "first" / NAME).read_text().endswith("of the first\n")
    assert (tmp_path / "second" / NAME).read_text() == "all is well\n"


def test_a_start_that_is_refused_leaves_no_file(tmp_path, monkeypatch):
    monkeypatch.setattr(phase, "_begun", False)
    fail(tmp_path, ValueError("wrong"))
    program.say(ValueError("wrong"))
    assert not list(tmp_path.iterdir())


def test_what_was_said_before_work_began_is_there_as_soon_as_it_has(tmp_path, monkeypatch):
    monkeypatch.setattr(phase, "_begun", False)
    with console_file(tmp_path):
        print("run in folder")
        print("warning: odd", file=sys.stderr)
        assert not (tmp_path / NAME).exists()
        phase.begin_work()
        print("\revaluation 0 of 9", end="", file=sys.stderr)  # no line yet
        assert (tmp_path / NAME).read_text() == "run in folder\nwarning: odd\n"


RECIPE = """
import hydra

from vla_algos.run import launch, run_program
from vla_algos.run.phase import begin_work
from vla_algos.run import CLONING
from typing import Literal


@hydra.main(version_base=None, config_path={conf!r}, config_name="sft")
def main(config):
    launch(train, config, {{**CLONING, "recipe": Literal["sft"], "heldout_every": int}})


def train(config, run):
    {begin}
    raise IndexError("list index out of range")


run_program("sft", main)
"""


@pytest.mark.parametrize("begun", [True, False])
def test_a_program_that_fails_has_its_traceback_in_the_folder_if_work_had_begun(begun, tmp_path):
    file = tmp_path / "recipe.py"
    file.write_text(RECIPE.format(conf=str(CONF), begin="begin_work()" if begun else "pass"))
    programs = ForkedPrograms()
    done = programs.run(file, f"hydra.run.dir={tmp_path / 'run'}", cwd=tmp_path)
    programs.close()
    assert done.returncode == (FAILED if begun else WRONG_USE), done.stderr
    said = tmp_path / "run" / NAME
    assert said.exists() == begun
    if begun:
        assert "Traceback (most recent call last)" in done.stderr
        assert done.stdout + done.stderr == said.read_text()
