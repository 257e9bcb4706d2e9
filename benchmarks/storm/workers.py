"""Simulators that raise, die, hang or lie, and signals from outside: what is not guilty is the same to the bit.

Each batch of faults runs in a forked process with a deadline, which now and then is killed itself. A fault counts as

* survived: the episode that it hit is reported as crashed where it was hit, or, if it went away or hurt nobody, ended
  as if nothing had happened; and nothing else happened in its batch that should not have;
* lost: another episode of the batch was reported as crashed, or all of the batch ended by an error;
* hung: its batch did not end in time, or left a process;
* silently wrong: an episode has another outcome, state or pixel than undisturbed, and was not reported.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.storm import _faulty
from benchmarks.storm._faulty import ANSWERS, CHUNK, DEATHS, HANGS, HORIZON
from benchmarks.storm.tally import Tally
from vla_common import keys
from vla_envs import Episode, EpisodeQueue, WorkerPool, make_env

COUNT = 1000
FAULTS_PER_BATCH, EPISODES_PER_FAULT = 25, 2
STEP_TIMEOUT, START_TIMEOUT = 2.0, 10.0  # a machine that is busy with other things is slow
DEADLINE = 240.0  # of a batch, in seconds
SIZES = ((6, 2), (8, 1), (4, 4), (12, 2))  # slots and workers
MARK = "VLA_STORM"  # a variable by which what a batch has started is found

Fault = tuple[str, int, str, str]


def run(count: int, seed: int) -> Tally:
    """Disturb ``count`` times."""
    tally, draw = Tally("simulators and their workers"), random.Random(seed)
    kinds = [inside] * 6 + [outside, large, orphans]
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
        result, left = _in_batch(lambda: _run_episodes(EPISODES_PER_FAULT * count, faults, draw.choice(SIZES)))
        names = {trial: f"{what} in {where}" + (" once" if path else "") for trial, (where, _, what, path) in
                 faults.items()}  # fmt: skip
    if result is None or left or "error" in result:
        return _note_failed(tally, names.values(), result, f"seed {seed}: {left}")
    wrong, innocent = _judge(result, faults)
    for trial, name in names.items():
        about = f"seed {seed} trial {trial}"
        if trial in wrong:
            tally.note("wrong", name, f"{about}: {wrong[trial]}")
        elif innocent:
            tally.note("lost", name, f"{about}: {innocent}")
            innocent = ""  # once per batch
        else:
            tally.note("survived", name)
    return None


def outside(tally: Tally, count: int, seed: int) -> None:
    """Workers that are killed or stopped by somebody else: each signal may cost the one episode that was running."""
    draw = random.Random(seed)
    size = draw.choice(SIZES)
    result, left = _in_batch(lambda: _run_episodes(60, {}, size, signals=(count, draw.random())))
    names = ["a signal from outside"] * count
    if result is None or left or "error" in result:
        return _note_failed(tally, names, result, f"seed {seed}: {left}")
    wrong, _ = _judge(result, {})
    crashed = sum(episode["crashed"] for episode in result["episodes"].values())
    silently = [trial for trial in wrong if not result["episodes"][trial]["crashed"]]
    for number, name in enumerate(names):
        outcome = "wrong" if number < len(silently) else "lost" if number < crashed - count else "survived"
        tally.note(outcome, name, f"seed {seed}: {len(silently)} wrong, {crashed} crashed of {count} signals")
    return None


def large(tally: Tally, count: int, seed: int) -> None:
    """Workers that are stopped or killed while they send a large answer."""
    result, left = _in_batch(lambda: _map_large(count, random.Random(seed)))
    names = ["stopped or killed in a large answer"] * count
    if result is None or left or "error" in result:
        return _note_failed(tally, names, result, f"seed {seed}: {left}")
    return _note_all(tally, names, "survived" if result["equal"] else "wrong", f"seed {seed}")


def orphans(tally: Tally, count: int, seed: int) -> None:
    """The process that has the environment is killed while its workers hang in all ways."""
    draw = random.Random(seed)
    for _ in range(count):
        what = draw.choice(HANGS)
        faults: dict[int, Fault] = {trial: ("step", 2, what, "") for trial in range(4)}
        when = draw.uniform(0.0, 4.0)
        _, left = _in_batch(lambda faults=faults: _run_episodes(8, faults, (4, 4), timeout=30.0), kill_after=when)
        tally.note("hung" if left else "survived", f"parent killed, workers {what}", f"after {when:.1f} s: {left}")


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


def _judge(result: dict[str, Any], faults: dict[int, Fault]) -> tuple[dict[int, str], str]:
    """Find episodes that are not what they should be, and what happened to innocent ones."""
    wrong, innocent = {}, ""
    for trial, episode in result["episodes"].items():
        expected = _faulty.clean_run(trial)
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
    missing = set(range(result["count"])) - set(result["episodes"])
    return wrong | dict.fromkeys(missing, "no result"), innocent


def _run_episodes(
    count: int,
    faults: dict[int, Fault],
    size: tuple[int, int],
    signals: tuple[int, float] | None = None,
    timeout: float = STEP_TIMEOUT,
) -> dict[str, Any]:
    """Run episodes to their ends; returns the digests of each and whether it crashed."""
    slots, workers = size
    queue = EpisodeQueue(Episode(0, trial) for trial in range(count))
    env = make_env(
        _faulty.describe(faults), slots, CHUNK, episodes=queue, num_workers=workers, step_timeout=timeout,
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
                first = _faulty.digest(td[keys.IMAGES][slot].numpy(), td[keys.STATES][slot].numpy(), none)
                episodes[episode.trial_id] = {"digests": [] if blank else [first], "crashed": False}
                decisions[slot] = 0
        running = list(env.current_episodes)
        chunks = [_faulty.actions(e.trial_id, decisions[s]) if e else np.zeros((CHUNK, _faulty.ACTIONS), np.float32)
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
                episodes[episode.trial_id]["digests"].append(_faulty.digest(*seen))
        begin = [slot for slot in range(slots) if after[keys.DONE][slot]]
        if signals is not None:
            time.sleep(0.05)
    done.set()
    env.close()
    return {"episodes": episodes, "count": count}


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


def _map_large(count: int, draw: random.Random) -> dict[str, Any]:
    size = 10_000_000
    pool = WorkerPool(_faulty.describe({}), 2, 2, CHUNK, step_timeout=STEP_TIMEOUT, start_timeout=START_TIMEOUT)
    done, items = threading.Event(), list(range(count))
    threading.Thread(target=_send_signals, args=(pool, 2, draw.random(), done), daemon=True).start()
    answers = pool.map("benchmarks.storm._faulty:large_answer", items, timeout=STEP_TIMEOUT, size=size)
    done.set()
    pool.close()
    return {"equal": answers == [np.random.default_rng(item).bytes(size) for item in items]}


def _note_all(tally: Tally, names: Any, outcome: str, what: str) -> None:
    for name in names:
        tally.note(outcome, name, what)


def _note_failed(tally: Tally, names: Any, result: dict[str, Any] | None, what: str) -> None:
    """Count a batch that did not end or left a process, or that raised an error, which takes all of it with it."""
    error = (result or {}).get("error", "")
    _note_all(tally, names, "lost" if error else "hung", f"{what} {error}")


def _in_batch(function: Any, kill_after: float | None = None) -> tuple[dict[str, Any] | None, str]:
    """Call a function in a forked process; returns its result, if there was one in time, and the processes it left."""
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(reading)
            os.environ[MARK] = mark
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # simulators that ask print questions
            logging.disable(logging.CRITICAL)
            torch.set_num_threads(1)
            result = function()
            episodes = result.get("episodes", {})
            with os.fdopen(writing, "w") as file:
                json.dump({**result, "episodes": list(episodes.items())}, file)
        except BaseException as error:
            with os.fdopen(writing, "w") as file:
                json.dump({"error": f"{type(error).__name__}: {str(error)[-200:]}", "episodes": []}, file)
        finally:
            os._exit(0)
    os.close(writing)
    os.set_blocking(reading, False)
    ends = time.monotonic() + (DEADLINE if kill_after is None else kill_after)
    text = b""
    while time.monotonic() < ends:
        try:
            piece = os.read(reading, 1 << 20)
        except BlockingIOError:
            time.sleep(0.02)
            continue
        text += piece
        if not piece:
            break
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(reading)
    left = _started_by(mark)
    until = time.monotonic() + 5.0
    while left and time.monotonic() < until:
        time.sleep(0.05)
        left = _started_by(mark)
    for process in left:
        os.kill(process, signal.SIGKILL)
    names = f"left {len(left)} processes" if left else ""
    if not text:
        return None, names
    result = json.loads(text)
    return {**result, "episodes": dict(result["episodes"])}, names


def _started_by(mark: str) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue  # gone, or somebody else's
    return found
