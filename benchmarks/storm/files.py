"""Death before and after single operations on files: whenever it comes, the same command starts and ends as it should.

Each life of a toy PPO run is ended by SIGKILL at one of its operations on files of the run (open, rename, remove,
mkdir, rmdir, symlink, truncate, write, fsync, and in the middle of a file of tensors); a third of them a second time,
in the life that resumes. Then the run is left to end.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.storm import _lives
from benchmarks.storm._lives import Board
from benchmarks.storm.tally import Tally
from vla_algos.run import checkpoints

COUNT = 120
RECIPE = "ppo"
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
AUDITED = {"os.rename": 2, "os.remove": 1, "os.mkdir": 1, "os.rmdir": 1, "os.symlink": 2, "os.truncate": 1}  # paths
FUNCTIONS = ("write", "pwrite", "fsync", "ftruncate")


def run(count: int, seed: int) -> Tally:
    """End ``count`` lives at operations on files, spread over a whole run."""
    _lives.warm()
    draw, tally, board = random.Random(seed), Tally("death at single operations on files"), Board()
    more = ("iterations=2", "evaluate_every=0")
    with _lives.work_folder() as temporary:
        folder = Path(temporary) / "whole" / "run"
        folder.parent.mkdir()
        if _lives.wait(_lives.live(RECIPE, folder, board, _die_at(folder, board, 0), more)) != 0:
            raise RuntimeError(f"an undisturbed run fails:\n{_lives.last_words(folder)}")
        whole, operations = _lives.outcome(folder), board[Board.COUNT]
        for number in range(count):
            operation = 1 + (number * operations // count if count < operations else number) % operations
            folder = Path(temporary) / str(number) / "run"
            folder.parent.mkdir()
            deaths = [operation] + [draw.randint(1, operations)] * (draw.random() < 1 / 3)
            failed = None
            for death in deaths:
                status = _lives.wait(_lives.live(RECIPE, folder, board, _die_at(folder, board, death), more))
                if status not in (0, 128 + signal.SIGKILL):
                    failed = f"a life ended with {status} by itself: {_lives.last_words(folder)}"
                    break
            wanted = _lives.newest(folder)
            status = _lives.wait(_lives.live(RECIPE, folder, board, more=more))
            problem = _lives.difference(folder, whole) if status == 0 else f"the same command ends with {status}"
            result = "survived"
            if status is None:
                result, problem = "hung", _lives.last_words(folder)
            elif board[Board.RESUMED] < wanted:
                result, problem = "lost", f"resumed after {board[Board.RESUMED] - 1}, not {wanted - 1}"
            elif failed:
                result, problem = "lost", failed
            elif problem:
                result = "wrong" if status == 0 else "lost"
            where = f"seed {seed}, operations {deaths} of {operations}: {problem}"
            tally.note(result, "once" if len(deaths) == 1 else "twice", where)
    return tally


def _die_at(folder: Path, board: Board, number: int) -> Callable[[], None]:
    """Return what counts a life's operations on files in the run's folder or beside it, and ends it at one."""
    root = f"{folder.parent}{os.sep}"

    def count() -> None:
        board[Board.COUNT] += 1
        if board[Board.COUNT] == number:
            os.kill(os.getpid(), signal.SIGKILL)

    def ours(path: Any) -> bool:
        return isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(root)

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            counts = ours(arguments[0]) and isinstance(arguments[2], int) and arguments[2] & WRITING
        elif event == "os.remove" and arguments[1] != -1:  # of shutil.rmtree, which has the folder open
            counts = True
        else:
            counts = any(ours(path) for path in arguments[: AUDITED.get(event, 0)])
        if counts:
            count()

    def counted(original: Callable[..., Any]) -> Callable[..., Any]:
        def called(handle: Any, *given: Any) -> Any:
            mine = ours(os.readlink(f"/proc/self/fd/{handle if isinstance(handle, int) else handle.fileno()}"))
            if mine:
                count()
            return original(handle, *given)

        return called

    def prepare() -> None:
        for function in FUNCTIONS:
            setattr(os, function, counted(getattr(os, function)))
        write = checkpoints.write_safetensors

        def halfway(file: Path, tensors: dict[str, Any], metadata: Any, on_write: Callable[[Any], object]) -> None:
            pieces = itertools.count()

            def on_piece(data: Any) -> None:
                if next(pieces) == len(tensors) // 2:
                    count()
                on_write(data)

            write(file, tensors, metadata, on_piece)

        checkpoints.write_safetensors = halfway
        sys.addaudithook(audit)

    return prepare
