"""What a run says is in its folder too."""

import sys

import pytest
from tqdm import tqdm

from vla_algos.run import files
from vla_algos.run.console import NAME, console_file


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


def test_it_is_continued(tmp_path):
    for text in ("first", "second"):
        with console_file(tmp_path):
            print(text)
    print("afterwards")
    assert (tmp_path / NAME).read_text() == "first\nsecond\n"


def test_an_exception_leaves_what_was_said(tmp_path):
    streams = sys.stdout, sys.stderr

    def fail():
        with console_file(tmp_path):
            print("so far")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
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
