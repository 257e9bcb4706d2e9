"""Runs that are killed: before every operation on their files, and at any moment.

Then the same command is typed again. The run must be resumed from its newest checkpoint and end with the metrics and
weights of an undisturbed one, bit by bit.
"""

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.storm import lives
from tests.storm.lives import Board
from tests.storm.tally import Tally

MORE = ("iterations=2", "evaluate_every=0")  # of lives that die at an operation
SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
NAMES = ("ppo", "grpo", "rs", "dagger", "dsrl", "sac")
SOON = 60.0  # seconds in which a process ends whose other is gone
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_AUDITED = {"os.rename": 2, "os.remove": 1, "os.mkdir": 1, "os.rmdir": 1, "os.symlink": 2, "os.truncate": 1}  # paths
_FUNCTIONS = ("write", "pwrite", "fsync", "ftruncate")


def at_operations(count: int, seed: int) -> Tally:
    """End ``count`` lives of PPO at operations on files, spread over a whole run; a third of them once more."""
    draw, tally, board = random.Random(seed), Tally(), Board()
    with lives.work_folder() as temporary:
        folder = Path(temporary) / "whole" / "run"
        _finish("ppo", folder, board, MORE, _die_at(folder, board, 0))
        whole, operations = lives.outcome(folder), board[Board.COUNT]
        for number in range(count):
            operation = 1 + (number * operations // count if count < operations else number) % operations
            folder = Path(temporary) / str(number) / "run"
            deaths = [operation] + [draw.randint(1, operations)] * (draw.random() < 1 / 3)
            ends = [lives.wait(lives.live("ppo", folder, board, _die_at(folder, board, at), MORE)) for at in deaths]
            died = all(end in (0, 128 + signal.SIGKILL) for end in ends)
            outcome, why = _resume("ppo", folder, board, whole, MORE, 2) if died else ("lost", f"ended with {ends}")
            tally.note(outcome, f"{len(deaths)} deaths", f"seed {seed}, operations {deaths} of {operations}: {why}")
    return tally


def at_moments(count: int, seed: int) -> Tally:
    """End ``count`` lives of all of ``NAMES`` by a signal at a random moment, up to three of each run."""
    draw, tally, board = random.Random(seed), Tally(), Board()
    with lives.work_folder() as temporary:
        whole, seconds = {}, {}
        for name in NAMES:
            began = time.monotonic()
            _finish(name, Path(temporary) / name, board)
            whole[name], seconds[name] = lives.outcome(Path(temporary) / name), time.monotonic() - began
        while tally.tried < count:
            name = NAMES[tally.tried % len(NAMES)]
            folder, sent, strange = Path(temporary) / f"{name}_{tally.tried}", [], ""
            for _ in range(min(draw.randint(1, 3), count - tally.tried)):
                process, what = lives.live(name, folder, board), draw.choice(SIGNALS)
                moment = draw.uniform(0, seconds[name])
                time.sleep(moment)
                os.kill(process, what)
                status = lives.wait(process)
                sent.append(f"{what.name} of {name} after {moment:.2f} s")
                if status is None or (what == signal.SIGKILL and status not in (0, 128 + what)):
                    strange = f"ended with {status}: {lives.last_words(folder)}"
            outcome, why = ("lost", strange) if strange else _resume(name, folder, board, whole[name])
            for kind in sent:
                tally.note(outcome, kind.partition(" after")[0], f"seed {seed}, {sent}: {why}")
    return tally


def of_two(count: int, seed: int) -> Tally:
    """Kill one of two processes of a run of PPO ``count`` times, at random moments: the other must end, too."""
    draw, tally = random.Random(seed), Tally()
    with lives.work_folder() as temporary:
        folder, began = Path(temporary) / "whole", time.monotonic()
        ends = [lives.wait(each) for each in lives.live_together("ppo", folder, 2)]
        assert ends == [0, 0], lives.last_words(folder)
        whole, seconds = lives.outcome(folder), time.monotonic() - began
        for number in range(count):
            folder, rank, moment = (
                Path(temporary) / str(number),
                draw.randrange(2),
                seconds * draw.uniform(0.5, 1),
            )  # they have met
            processes = lives.live_together("ppo", folder, 2)
            time.sleep(moment)
            os.kill(processes[rank], signal.SIGKILL)
            lives.wait(processes[rank])
            outcome, why = "survived", ""
            if lives.wait(processes[1 - rank], SOON) is None:
                outcome, why = "hung", f"the other has not ended after {SOON:.0f} s"
            elif (ends := [lives.wait(each) for each in lives.live_together("ppo", folder, 2)]) != [0, 0]:
                outcome, why = "lost", f"the same command ends with {ends}: {lives.last_words(folder)}"
            elif why := lives.difference(folder, whole):
                outcome = "wrong"
            tally.note(outcome, f"process {rank}", f"seed {seed}, after {moment:.2f} s: {why}")
    return tally


def _finish(
    name: str, folder: Path, board: Board, more: tuple[str, ...] = (), prepare: Callable[[], None] = lambda: None
) -> None:
    if lives.wait(lives.live(name, folder, board, prepare, more)) != 0:
        raise RuntimeError(f"an undisturbed run fails:\n{lives.last_words(folder)}")


def _resume(
    name: str, folder: Path, board: Board, whole: Any, more: tuple[str, ...] = (), iterations: int = lives.ITERATIONS
) -> tuple[str, str]:
    """Type the command again; returns the outcome, and what is wrong."""
    saved = lives.newest(folder)
    status = lives.wait(lives.live(name, folder, board, more=more))
    if status != 0:
        return "hung" if status is None else "lost", f"the same command ends with {status}: {lives.last_words(folder)}"
    if board[Board.ROLLOUTS] > iterations - saved:
        return "lost", f"{board[Board.ROLLOUTS]} batches were collected after the checkpoint of iteration {saved}"
    problem = lives.difference(folder, whole)
    return "wrong" if problem else "survived", problem


def _die_at(folder: Path, board: Board, number: int) -> Callable[[], None]:
    """Return what counts a life's operations on files in the run's folder, and ends it before one."""
    root = f"{folder}{os.sep}"

    def count() -> None:
        board[Board.COUNT] += 1
        if board[Board.COUNT] == number:
            os.kill(os.getpid(), signal.SIGKILL)

    def in_run(path: Any) -> bool:
        return isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(root)

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            counts = in_run(arguments[0]) and isinstance(arguments[2], int) and arguments[2] & _WRITING
        elif event == "os.remove" and arguments[1] != -1:  # of shutil.rmtree, which has the folder open
            counts = True
        else:
            counts = any(in_run(path) for path in arguments[: _AUDITED.get(event, 0)])
        if counts:
            count()

    def counted(original: Callable[..., Any]) -> Callable[..., Any]:
        def called(handle: Any, *given: Any) -> Any:
            if in_run(os.readlink(f"/proc/self/fd/{handle if isinstance(handle, int) else handle.fileno()}")):
                count()
            return original(handle, *given)

        return called

    def prepare() -> None:
        for function in _FUNCTIONS:
            setattr(os, function, counted(getattr(os, function)))
        sys.addaudithook(audit)

    return prepare
