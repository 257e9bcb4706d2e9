"""Signals at random moments of PPO and GRPO: a run that was killed and started again ends as one left alone.

A moment is drawn as a phase (collecting, learning, saving, ...) and a time within it; three of four signals are
SIGKILL, the others ask politely. After at most four signals a run is left to end; metrics and weights are then compared
with those of an undisturbed run, bit by bit.
"""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

from benchmarks.storm import _lives
from benchmarks.storm._lives import PHASES, Board
from benchmarks.storm.tally import Tally

COUNT = 60
POLITE = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)


def run(count: int, seed: int) -> Tally:
    """Send ``count`` signals to toy runs."""
    _lives.warm()
    draw, tally, board = random.Random(seed), Tally("signals at random moments of PPO and GRPO"), Board()
    with _lives.work_folder() as temporary:
        whole = {}
        for name in _lives.OF:
            folder = Path(temporary) / f"{name}_whole"
            if _lives.wait(_lives.live(name, folder, board)) != 0:
                raise RuntimeError(f"an undisturbed run fails:\n{_lives.last_words(folder)}")
            whole[name] = _lives.outcome(folder)
        number = 0
        while tally.tried < count:
            name = list(_lives.OF)[number % 2]
            folder = Path(temporary) / f"{name}_{number}"
            sent = [_disturb(name, folder, board, draw) for _ in range(min(draw.randint(1, 4), count - tally.tried))]
            wanted = _lives.newest(folder)
            status = _lives.wait(_lives.live(name, folder, board))
            problem = _lives.difference(folder, whole[name]) if status == 0 else f"the last life ended with {status}"
            for what, bad in sent:
                outcome, why = bad or ("survived", "")
                if status is None:
                    outcome, why = "hung", _lives.last_words(folder)
                elif board[Board.RESUMED] < wanted:
                    outcome, why = "lost", f"resumed after {board[Board.RESUMED] - 1}, not {wanted - 1}"
                elif problem:
                    outcome, why = "wrong" if status == 0 else "lost", problem
                tally.note(outcome, what, f"seed {seed}, run {number}: {why}")
            number += 1
    return tally


def _disturb(name: str, folder: Path, board: Board, draw: random.Random) -> tuple[str, tuple[str, str] | None]:
    """Start a life and end it by a signal; says which and when, and what was wrong with how it ended."""
    polite = draw.random() < 0.25
    wanted = draw.choice(POLITE) if polite else signal.SIGKILL
    phase, entries, delay = draw.choice(PHASES), draw.randint(1, 6), draw.uniform(0, 0.03)
    process = _lives.live(name, folder, board)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        reached = board[Board.ENTERED] >= entries and board.phase == phase
        if reached or phase == "starting" or os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            break
    time.sleep(delay * (20 if phase == "starting" else 1))
    when = board.phase
    os.kill(process, wanted)
    status = _lives.wait(process)
    what = f"{name} {wanted.name} {when}"
    if status is None:
        return what, ("hung", "did not end")
    if status not in (0, 128 + wanted):
        return what, ("lost", f"ended with {status}")
    return what, None
