"""Whole runs of the recipes on a toy benchmark, each life in a process forked from one that has imported everything.

A life is ``python recipes/NAME.py SETTINGS`` and costs about a second: a run can be killed, and started again by the
same command, many times.
"""

import contextlib
import faulthandler
import functools
import gc
import json
import mmap
import os
import re
import runpy
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tqdm import tqdm

from tests.storm import line
from vla_algos import StepCollector, groups
from vla_algos.run.checkpoints import by_preference

RECIPES = Path(__file__).parents[2] / "recipes"
ITERATIONS = 4
COMMON = [
    *(
        "--config-dir",
        str(Path(__file__).parent / "conf"),
        "env=line",
        "demonstrations.episodes=0",
        f"iterations={ITERATIONS}",
    ),
    *("evaluate_every=2", "eval.trials=1", "eval.videos=0", "eval.sampled=false"),
    *("policy.chunk_size=3", "policy.dim=32", "policy.layers=1"),
]
_EPOCHS = ["update.epochs=2", "update.minibatch_size=8", "optim.lr=1e-3"]
OF = {
    "ppo_async": [*_EPOCHS, "collector.decisions=4", "update.critic_warmup_steps=0"],
    "ppo": [*_EPOCHS, "collector.decisions=4", "update.critic_warmup_steps=0"],
    "grpo": [*_EPOCHS, "group_size=4", "collector.groups=2", "collector.max_groups=3"],
    "dagger": ["collector.episodes=8", "update.steps=3"],
    "dsrl": [
        "policy=small_flow",
        "collector.episodes=8",
        "update.warmup=8",
        "replay.batch_size=16",
        "steering.width=16",
    ],
    "sac": [
        "collector.episodes=8",
        "update.warmup=8",
        "update.update_to_data=0.5",
        "replay.batch_size=8",
        "steering.width=16",
    ],
    "rs": ["collector.episodes=8", "optim.lr=1e-3", "self_imitation.batch_size=4", "update.steps=3"],
}
_TIMES = re.compile(r"^(sync/|time/|decisions_per_s|env_steps_per_s|fps|.*per_second)")
_CELL = struct.Struct("q")


class Board:
    """What a life tells the process that forked it, as it happens: numbers in shared memory."""

    COUNT, ROLLOUTS = range(2)  # of operations on files, of batches that were collected

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 64)

    def __getitem__(self, cell: int) -> int:
        return _CELL.unpack_from(self._memory, cell * _CELL.size)[0]

    def __setitem__(self, cell: int, value: int) -> None:
        _CELL.pack_into(self._memory, cell * _CELL.size, value)


def work_folder() -> tempfile.TemporaryDirectory[str]:
    """Make a temporary folder in memory, where there is some: what a kill leaves does not depend on the disk."""
    return tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None)


@functools.cache
def warm() -> None:
    """Import and set what all lives share."""
    import vla_algos.run  # noqa: F401

    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    line.register()
    # What a life inherits it must not collect: torch's process groups end threads that a forked process has not.
    os.register_at_fork(after_in_child=gc.freeze)


def live(
    name: str,
    folder: Path,
    board: Board | None = None,
    prepare: Callable[[], None] = lambda: None,
    more: tuple[str, ...] = (),
) -> int:
    """Fork a life; returns its process.

    Args:
        name: of the recipe.
        folder: of the run; the life's output is in a file of its name with ``.log``.
        board: learns how many batches were collected.
        prepare: is called in the life before anything else.
        more: further settings.
    """
    board = board or Board()
    board[Board.COUNT] = board[Board.ROLLOUTS] = 0

    def counting() -> None:
        prepare()
        _count(StepCollector, "rollout", board)
        _count(groups, "collect_groups", board)

    return typed(name, [*COMMON, *OF[name], *more, f"hydra.run.dir={folder}"], folder.with_suffix(".log"), counting)


def typed(name: str, settings: list[str], log: Path, prepare: Callable[[], None]) -> int:
    """Fork what is typed as ``python recipes/NAME.py SETTINGS``; returns its process.

    Args:
        name: of the recipe.
        settings: as they are typed.
        log: for what it prints.
        prepare: is called in it before anything else.
    """
    warm()
    sys.stdout.flush()
    if process := os.fork():
        return process
    status: Any = 70
    try:
        _write_to(log)
        faulthandler.dump_traceback_later(100, file=sys.__stderr__)  # where it hangs
        tqdm.set_lock(threading.RLock())  # all lives would share one, and one that is killed may have it
        prepare()
        sys.argv = [str(RECIPES / f"{name}.py"), *settings]
        runpy.run_path(sys.argv[0], run_name="__main__")
        status = 0
    except SystemExit as end:
        status = end.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status if isinstance(status, int) else 71)


def _write_to(log: Path) -> None:
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115


def _count(owner: Any, name: str, board: Board) -> None:
    function = getattr(owner, name)

    @functools.wraps(function)  # a recipe reads its settings from the signature
    def counted(*given: Any, **named: Any) -> Any:
        board[Board.ROLLOUTS] += 1
        return function(*given, **named)

    setattr(owner, name, counted)


def die_at_rollout(number: int) -> Callable[[], None]:
    """Return what kills a life of PPO when it begins to collect its batch of that number, all before being saved."""

    def prepare() -> None:
        rollout, calls = StepCollector.rollout, []

        def dies(*given: Any) -> Any:
            calls.append(1)
            if len(calls) == number:
                time.sleep(1)  # a thread may still write
                os.kill(os.getpid(), signal.SIGKILL)
            return rollout(*given)

        StepCollector.rollout = dies

    return prepare


def live_together(
    name: str, folder: Path, processes: int, prepare: Callable[[], None] = lambda: None, more: tuple[str, ...] = ()
) -> list[int]:
    """Fork lives that are the processes of one run, as torchrun would start them; returns these.

    Args:
        name: of the recipe.
        folder: of the run.
        processes: how many.
        prepare: is called in each before anything else; ``RANK`` tells them apart.
        more: further settings.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def prepared(rank: int) -> None:
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
        os.environ |= {key: str(number) for key, number in (numbers | {"MASTER_PORT": port}).items()}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": name}
        prepare()

    return [live(name, folder, None, functools.partial(prepared, rank), more) for rank in range(processes)]


def dies_in_extend(kind: type, call: int) -> Callable[[], None]:
    """Return what to prepare for a life that is killed when ``kind.extend`` has done its ``call``-th call."""

    def prepare() -> None:
        extend, calls = kind.extend, []

        def dies(*given: Any) -> Any:
            found = extend(*given)
            calls.append(1)
            if len(calls) == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return found

        kind.extend = dies

    return prepare


def last_words(folder: Path) -> str:
    """Return the end of what a run's lives have printed."""
    return folder.with_suffix(".log").read_text()[-4000:]


def wait(process: int, seconds: float = 120.0) -> int | None:
    """Wait for a life; its status as a shell shows it, ``None`` (and it is killed) if it does not end in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(process, os.WNOHANG)
        if done:
            return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
        time.sleep(0.002)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return None


def outcome(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return all that a finished run measured but times, and its final weights."""
    found: dict[str, Any] = {}
    for text in (folder / "metrics.jsonl").read_text().splitlines():
        entry = {key: value for key, value in json.loads(text).items() if not _TIMES.match(key)}
        found.setdefault(f"{entry['step']} {'eval/success_once' in entry}", []).append(entry)
    return found, load_file(folder / "policy" / "model.safetensors")


def difference(folder: Path, expected: tuple[dict[str, Any], dict[str, torch.Tensor]]) -> str:
    """Say in what a finished run is not the expected one; nothing if they are the same, bit by bit."""
    try:
        numbers, weights = outcome(folder)
    except (OSError, ValueError, KeyError) as error:
        return f"no whole result: {error}"
    if numbers != expected[0]:
        return "other metrics"
    if weights.keys() != expected[1].keys() or any(not torch.equal(weights[n], expected[1][n]) for n in weights):
        return "other weights"
    rest = [path.name for path in folder.rglob(".*") if path.name.startswith((".unfinished", ".old_", ".run"))]
    return f"left behind: {rest}" if rest else ""


def newest(folder: Path) -> int:
    """Return after how many iterations the checkpoint was saved that a resume begins at; 0 if there is none."""
    found = by_preference(folder / "checkpoints")
    return int(found[0].name.removeprefix("step_")) if found else 0
