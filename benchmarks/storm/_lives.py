"""Whole runs of the recipes on a toy benchmark, each life in a process forked from one that has imported everything.

A life costs half a second, so that a run can be killed, and started again by the same command, many times.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import importlib
import json
import mmap
import os
import re
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
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, open_dict
from safetensors.torch import load_file
from tqdm import tqdm

import vla_algos.run.resume as resume
from benchmarks.storm import _line
from vla_algos import Learner, StepCollector
from vla_algos.parallel import process_group
from vla_algos.run import provenance
from vla_algos.run.checkpoints import CheckpointError, latest_checkpoint
from vla_algos.run.launch import members, run_recipe
from vla_algos.run.run import Run

PHASES = ("starting", "collecting", "learning", "saving", "evaluating", "ending")
COMMON = [
    *("sft=none", "iterations=4", "evaluate_every=2", "eval.trials=1", "policy.chunk_size=3", "policy.dim=32"),
    "eval.videos=0",
    *("policy.layers=1", "update.epochs=2", "update.minibatch_size=8", "optim.lr=1e-3", "eval.sampled=false"),
]
OF = {
    "ppo": ["collector.decisions=4", "update.critic_warmup_steps=0"],
    "grpo": ["group_size=4", "collector.groups=2", "collector.max_groups=3"],
}
_TIMES = re.compile(r"^(sync/|time/|decisions_per_s|env_steps_per_s|fps|.*per_second)")
_CELL = struct.Struct("q")


class Board:
    """What a life tells the process that forked it, as it happens: a few numbers in shared memory."""

    PHASE, COUNT, RESUMED, ENTERED, WRITING = range(5)

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 64)

    def __getitem__(self, cell: int) -> int:
        return _CELL.unpack_from(self._memory, cell * _CELL.size)[0]

    def __setitem__(self, cell: int, value: int) -> None:
        _CELL.pack_into(self._memory, cell * _CELL.size, value)

    @property
    def phase(self) -> str:
        """What the life does: saving, whatever else, while a thread writes."""
        return "saving" if self[self.WRITING] else PHASES[self[self.PHASE]]


def work_folder() -> tempfile.TemporaryDirectory[str]:
    """Make a temporary folder in memory, where there is some: what a kill leaves does not depend on the disk."""
    return tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None)


@functools.cache
def warm() -> None:
    """Import and set what all lives share."""
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    _line.register()
    provenance.code()
    # What a life inherits it must not collect: torch's process groups end threads that a forked process has not.
    os.register_at_fork(after_in_child=gc.freeze)


@functools.cache
def compose_recipe(name: str, overrides: tuple[str, ...] = ()) -> DictConfig:
    """Compose what ``python recipes/NAME.py`` would run on the toy benchmark."""
    conf = Path(importlib.import_module(f"recipes.{name}").__file__ or "").parent / "conf"
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(conf), version_base=None):
        config = compose(name, overrides=[*COMMON, *OF[name], *overrides])
    GlobalHydra.instance().clear()
    with open_dict(config):
        config["env"] = {"id": "line/all", "num_envs": 4, "num_workers": 1}
    return config


def live(
    name: str, folder: Path, board: Board, prepare: Callable[[], None] = lambda: None, more: tuple[str, ...] = ()
) -> int:
    """Fork a life; returns its process.

    Args:
        name: of the recipe.
        folder: of the run.
        board: learns phase, and the iteration after which the run was resumed, plus one.
        prepare: is called in the life before anything else.
        more: further overrides.
    """
    board[Board.PHASE] = board[Board.RESUMED] = board[Board.COUNT] = board[Board.ENTERED] = 0
    board[Board.WRITING] = 0
    config = compose_recipe(name, more)
    sys.stdout.flush()
    if process := os.fork():
        return process
    status = 70
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder.with_suffix(".log"), "a") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
        faulthandler.dump_traceback_later(100, file=sys.__stderr__)  # where it hangs
        tqdm.set_lock(threading.RLock())  # all lives would share one, and one that is killed may have it
        prepare()
        _report_to(board)
        recipe: Any = importlib.import_module(f"recipes.{name}")
        run_recipe(recipe.train, recipe.SETTINGS, config, folder)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 71
    except KeyboardInterrupt:  # before or after what can be saved
        status = 130
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def live_together(
    name: str, folder: Path, processes: int, prepare: Callable[[], None] = lambda: None, more: tuple[str, ...] = ()
) -> list[int]:
    """Fork lives that are the processes of one run, as torchrun would start them; returns these.

    Args:
        name: of the recipe.
        folder: of the run.
        processes: how many.
        prepare: is called in each before anything else; ``RANK`` tells them apart.
        more: further overrides.
    """
    warm()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def prepared(rank: int) -> None:
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
        os.environ |= {key: str(number) for key, number in (numbers | {"MASTER_PORT": port}).items()}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": name}
        global run_recipe
        alone = run_recipe

        def in_group(train: Any, types: Any, config: DictConfig, folder: Path) -> None:
            with process_group(members(config)) as has_part:
                if has_part:
                    alone(train, types, config, folder)

        run_recipe = in_group
        prepare()

    return [live(name, folder, Board(), functools.partial(prepared, rank), more) for rank in range(processes)]


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
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        entry = {key: value for key, value in json.loads(line).items() if not _TIMES.match(key)}
        found.setdefault(f"{entry['step']} {'eval/success_once' in entry}", []).append(entry)
    return found, load_file(folder / "policy" / "model.safetensors")


def difference(folder: Path, expected: tuple[dict[str, Any], dict[str, torch.Tensor]]) -> str:
    """Say in what a finished run is not the expected one; nothing if they are the same, bit by bit."""
    try:
        numbers, weights = outcome(folder)
        json.loads((folder / "run.json").read_text())["metrics"]
    except (OSError, ValueError, KeyError) as error:
        return f"no whole result: {error}"
    if numbers != expected[0]:
        return "other metrics"
    if weights.keys() != expected[1].keys() or any(not torch.equal(weights[n], expected[1][n]) for n in weights):
        return "other weights"
    rest = [path.name for path in folder.rglob(".*") if path.name.startswith((".unfinished", ".old_", ".run"))]
    return f"left behind: {rest}" if rest else ""


def newest(folder: Path) -> int:
    """Return after how many iterations the next life has to resume, plus one; 0 if there is no checkpoint."""
    try:
        return int(latest_checkpoint(folder / "checkpoints").name.removeprefix("step_")) + 1
    except (CheckpointError, OSError):
        return 0


def _report_to(board: Board) -> None:
    def during(owner: Any, method: str, phase: str) -> None:
        original = getattr(owner, method)

        def entered(*given: Any, **named: Any) -> Any:
            before = board[Board.PHASE]
            board[Board.PHASE] = PHASES.index(phase)
            board[Board.ENTERED] += 1
            try:
                return original(*given, **named)
            finally:
                board[Board.PHASE] = before

        setattr(owner, method, entered)

    during(StepCollector, "rollout", "collecting")
    during(importlib.import_module("recipes.grpo"), "collect_groups", "collecting")
    during(Learner, "update", "learning")
    during(resume.ResumableRun, "_save", "saving")
    during(Run, "_evaluate", "evaluating")
    during(Run, "_finish", "ending")
    save = resume.save_checkpoint

    def written(*given: Any, **named: Any) -> Any:
        board[Board.WRITING] = 1
        try:
            return save(*given, **named)
        finally:
            board[Board.WRITING] = 0

    resume.save_checkpoint = written
    original = resume.ResumableRun.resume

    def resumed(self: Any) -> int | None:
        done = original(self)
        board[Board.RESUMED] = 0 if done is None else done + 1
        return done

    resume.ResumableRun.resume = resumed  # type: ignore[method-assign]
