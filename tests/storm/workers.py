"""Simulators that raise, die, hang or lie, and signals from outside: what is not guilty is the same to the bit.

A fault counts as

* survived: the episode that it hit is reported as crashed where it was hit, or, if it went away or hurt nothing, ended
  as if nothing had happened; and nothing else happened in its batch that should not have;
* lost: another episode of the batch was reported as crashed, or all of the batch ended by an error;
* hung: its batch left a process;
* wrong: an episode has another outcome, state or pixel than undisturbed, and was not reported.
"""

import contextlib
import os
import random
import signal
import tempfile
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.storm import faulty
from tests.storm.faulty import ANSWERS, CHUNK, DEATHS, HANGS, HORIZON
from tests.storm.tally import Tally
from vla_common import keys
from vla_envs import Episode, EpisodeQueue, WorkerPool, make_env

FAULTS_PER_BATCH, EPISODES_PER_FAULT = 25, 2
STEP_TIMEOUT, START_TIMEOUT = 2.0, 10.0  # a machine that is busy with other things is slow
SIZES = ((6, 2), (8, 1), (4, 4), (12, 2))  # slots and workers
MARK = "VLA_STORM"  # a variable by which what a batch has started is found

Fault = tuple[str, int, str, str]


def run(count: int, seed: int) -> Tally:
    """Disturb ``count`` times."""
    tally, draw = Tally(), random.Random(seed)
    kinds = [inside] * 6 + [outside, orphans]
    number = 0
    while tally.tried < count:
        kind = kinds[number % len(kinds)]
        kind(tally, min(FAULTS_PER_BATCH if kind is inside else 5, count - tally.tried), draw.randrange(2**31))
        number += 1
    return tally


def inside(tally: Tally, count: int, seed: int) -> None:
    """Episodes that fail on command."""
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        trials = draw.sample(range(EPISODES_PER_FAULT * count), count)
        faults = {trial: _draw_fault(draw, f"{folder}/{trial}") for trial in trials}
        names = {trial: f"{what} in {where}" + (" once" if path else "") for trial, (where, _, what, path) in
                 faults.items()}  # fmt: skip
        episodes = _batch(tally, list(names.values()), seed, EPISODES_PER_FAULT * count, faults, draw.choice(SIZES))
    if episodes is None:
        return
    wrong, innocent = _judge(episodes, EPISODES_PER_FAULT * count, faults)
    for trial, name in names.items():
        outcome = "wrong" if trial in wrong else "lost" if innocent else "survived"
        tally.note(outcome, name, f"seed {seed} trial {trial}: {wrong.get(trial, innocent)}")


def outside(tally: Tally, count: int, seed: int) -> None:
    """Workers that are killed or stopped from outside: each signal may cost the one episode that was running."""
    draw, name = random.Random(seed), "a signal from outside"
    episodes = _batch(tally, [name] * count, seed, 60, {}, draw.choice(SIZES), signals=(count, draw.random()))
    if episodes is None:
        return
    wrong, _ = _judge(episodes, 60, {})
    crashed = sum(episode["crashed"] for episode in episodes.values())
    silent = [trial for trial in wrong if trial not in episodes or not episodes[trial]["crashed"]]
    outcome = "wrong" if silent else "lost" if crashed > count else "survived"
    for _ in range(count):
        tally.note(outcome, name, f"seed {seed}: {len(silent)} wrong, {crashed} crashed of {count} signals")


def orphans(tally: Tally, count: int, seed: int) -> None:
    """The process that has the environment is killed while its workers hang in all ways."""
    draw = random.Random(seed)
    for _ in range(count):
        what, when = draw.choice(HANGS), draw.uniform(0.0, 4.0)
        os.environ[MARK] = mark = uuid.uuid4().hex
        if not (child := os.fork()):
            with contextlib.suppress(BaseException):
                torch.set_num_threads(1)
                _run_episodes(8, {trial: ("step", 2, what, "") for trial in range(4)}, (4, 4), timeout=30.0)
            os._exit(0)
        time.sleep(when)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        left = _left(mark)
        tally.note("hung" if left else "survived", f"parent killed, workers {what}", f"after {when:.1f} s: {left}")
    del os.environ[MARK]


def _batch(tally: Tally, names: list[str], seed: int, *arguments: Any, **named: Any) -> dict[int, Any] | None:
    """Run episodes; ``None``, with a note for each fault, if that raises an error or leaves a process."""
    os.environ[MARK] = mark = uuid.uuid4().hex
    problem, episodes = "", None
    try:
        episodes = _run_episodes(*arguments, **named)
    except Exception as error:
        problem = f"lost: {type(error).__name__}: {str(error)[-200:]}"
    if left := _left(mark):
        problem = f"hung: {left}"
    del os.environ[MARK]
    if not problem:
        return episodes
    for name in names:
        tally.note(problem.partition(":")[0], name, f"seed {seed}: {problem}")
    return None


def _draw_fault(draw: random.Random, path: str) -> Fault:
    what = draw.choice([*DEATHS * 5, *HANGS, *["raise", "leave", "ask", "leave children"] * 3, *ANSWERS, *ANSWERS])
    once = path if draw.random() < 0.5 else ""
    if what in ANSWERS:
        outcome = ANSWERS[what][0] in ("reward", "success", "outcome")
        where = "step" if outcome else "observe"
    elif what in HANGS and not once:
        where = draw.choice(["step", "observe"])  # hanging three times in reset takes a while
    else:
        where = draw.choice(["reset", "step", "observe", "close"])
    step = draw.randrange(1, HORIZON) if where == "step" else draw.randrange(HORIZON // CHUNK) * CHUNK
    return where, 0 if where == "reset" else step, what, once


def _judge(episodes: dict[int, Any], count: int, faults: dict[int, Fault]) -> tuple[dict[int, str], str]:
    """Find episodes that are not what they should be, and what happened to innocent ones."""
    wrong, innocent = {}, ""
    for trial, episode in episodes.items():
        expected = faulty.clean_run(trial)
        where, step, what, once = faults.get(trial, ("", 0, "", ""))
        guilty = where not in ("", "close") and what != "leave children"
        started = -(-step // CHUNK) if where == "step" else step // CHUNK  # decisions until it fails
        digests, shown = episode["digests"], len(expected)
        if guilty and (not once or started):  # one that fails once at the start is tried again
            shown = max(started, 0 if where == "reset" or (where == "observe" and not step) else 1)
        crashed = guilty and shown < len(expected)
        if once and crashed and not episode["crashed"]:  # it was repeated because a neighbour died after it
            crashed, shown = False, len(expected)
        if episode["crashed"] != crashed:
            about = f"crashed={episode['crashed']} after {len(digests)} decisions, must be {crashed}"
            if trial in faults:
                wrong[trial] = about
            else:
                innocent = f"trial {trial} {about}"
        elif digests != expected[:shown]:
            wrong[trial] = f"{len(digests)} observations, or their content, differ from {shown}"
    missing = set(range(count)) - set(episodes)
    return wrong | dict.fromkeys(missing, "no result"), innocent


def _run_episodes(
    count: int,
    faults: dict[int, Fault],
    size: tuple[int, int],
    signals: tuple[int, float] | None = None,
    timeout: float = STEP_TIMEOUT,
) -> dict[int, Any]:
    """Run episodes to their ends; returns the digests of each and whether it crashed."""
    slots, workers = size
    queue = EpisodeQueue(Episode(0, trial) for trial in range(count))
    env = make_env(
        faulty.describe(faults), slots, CHUNK, episodes=queue, num_workers=workers, step_timeout=timeout,
        start_timeout=START_TIMEOUT,
    )  # fmt: skip
    done = threading.Event()
    if signals is not None:
        threading.Thread(target=_send_signals, args=(env.pool, *signals, done), daemon=True).start()
    episodes: dict[int, dict[str, Any]] = {}
    td, none = env.reset(), np.zeros(CHUNK, np.float32)
    begin, decisions = list(range(slots)), [0] * slots
    while any(env.current_episodes):
        for slot in begin:
            if (episode := env.current_episodes[slot]) is not None:
                blank = not td[keys.IMAGES][slot].any() and not td[keys.STATES][slot].any()
                first = faulty.digest(td[keys.IMAGES][slot].numpy(), td[keys.STATES][slot].numpy(), none)
                episodes[episode.trial_id] = {"digests": [] if blank else [first], "crashed": False}
                decisions[slot] = 0
        running = list(env.current_episodes)
        chunks = [faulty.actions(e.trial_id, decisions[s]) if e else np.zeros((CHUNK, faulty.ACTIONS), np.float32)
                  for s, e in enumerate(running)]  # fmt: skip
        td[keys.ACTION] = torch.from_numpy(np.stack(chunks))
        outcome, td = env.step_and_maybe_reset(td)
        after = outcome[keys.NEXT]
        for slot, episode in enumerate(running):
            if episode is None:
                continue
            decisions[slot] += 1
            if after[keys.CRASHED][slot]:
                episodes[episode.trial_id]["crashed"] = True
            else:
                seen = [after[key][slot].numpy() for key in (keys.IMAGES, keys.STATES, keys.STEP_REWARDS)]
                episodes[episode.trial_id]["digests"].append(faulty.digest(*seen))
        begin = [slot for slot in range(slots) if after[keys.DONE][slot]]
        if signals is not None:
            time.sleep(0.05)
    done.set()
    env.close()
    return episodes


def _send_signals(pool: WorkerPool, count: int, seed: float, done: threading.Event) -> None:
    """Kill or stop workers at random moments."""
    draw = random.Random(seed)
    for _ in range(count):
        if done.wait(draw.uniform(0.0, 0.5)):
            return
        _signal_one(pool, draw)


def _signal_one(pool: WorkerPool, draw: random.Random) -> None:
    process = draw.choice([process for process in pool._processes if process is not None] or [None])
    if process is not None:
        with contextlib.suppress(ProcessLookupError):  # it has just been replaced
            os.kill(process._popen.pid, draw.choice([signal.SIGKILL, signal.SIGSTOP]))


def _left(mark: str) -> str:
    """End the processes that a batch has left after 5 s; says how many there were."""
    until, left = time.monotonic() + 5.0, _started_by(mark)
    while left and time.monotonic() < until:
        time.sleep(0.05)
        left = _started_by(mark)
    for process in left:
        os.kill(process, signal.SIGKILL)
    return f"left {len(left)} processes" if left else ""


def _started_by(mark: str) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is of another user
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found
