"""Faults of processes that train together under torchrun: killed, stopped, cut off, failing, or out of step.

Each fault meets a run of two processes in its middle. All of its processes must be gone soon, with a line that names
who has failed; the same command must then end with the numbers and weights of an undisturbed run.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.storm.tally import Tally

ROOT = Path(__file__).parents[2]
HEARTBEAT = 6.0  # seconds; two minutes otherwise
SOON = HEARTBEAT + 60  # a process that is stopped is killed by torchrun after 30 seconds
LIFE = 240.0
SETTINGS = [
    *["env.num_envs=4", "env.num_workers=2", "env.max_episode_steps=8", "env.image_size=32", "eval.trials=2"],
    *["eval.videos=0", "iterations=9", "update.epochs=1", "optim.lr=1e-3", "checkpoint_every=2", "evaluate_every=4"],
    *["demonstrations.episodes=2", "cloning.steps=3", "policy.chunk_size=3"],
]
RECIPES = {
    "ppo": [*SETTINGS, "collector.decisions=3", "update.critic_warmup_steps=0"],
    "grpo": [
        *SETTINGS,
        "env=metaworld_button",
        *["group_size=2", "collector.groups=2", "collector.max_groups=2", "eval.sampled=false"],
    ],
}
FAULTY = """
import os, runpy, signal, socket, sys
import vla_algos.learner, vla_algos.run.evaluator, vla_algos.run.resume, vla_envs.env
from vla_algos import parallel

rank, where, count = os.environ["STORM"].split(":")
calls = 0

def cut_off():
    for number in map(int, os.listdir("/proc/self/fd")):
        try:
            connection = socket.socket(fileno=os.dup(number))
            if connection.family != socket.AF_UNIX:
                connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

def wrap(owner, name):
    function = getattr(owner, name)
    def wrapped(*arguments, **named):
        global calls
        calls += 1
        if calls == int(count) and rank == os.environ["RANK"]:
            if where == "network":
                cut_off()
            elif where == "another call":
                parallel.barrier()
            elif where.startswith("SIG"):
                os.kill(os.getpid(), getattr(signal, where.split()[0]))
            else:
                raise ArithmeticError("storm")
        return function(*arguments, **named)
    setattr(owner, name, wrapped)

LEARNING = (vla_algos.learner, "clip_gradient")
PLACES = {"learning": LEARNING, "SIGKILL in learning": LEARNING, "SIGSTOP in learning": LEARNING,
          "saving": (vla_algos.run.resume, "save_checkpoint"), "evaluating": (vla_algos.run.evaluator, "evaluate")}
if where:
    wrap(*PLACES.get(where, (vla_envs.env.VLAEnv, "_step")))
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@dataclass
class Life:
    """A run under torchrun, from start to end.

    Attributes:
        folder: of the run.
        torchrun: its process.
        log: what all of its processes say.
        token: by which they are found, whoever their parent is.
    """

    recipe: str
    folder: Path
    fault: str = "none::0"
    token: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __post_init__(self) -> None:
        self.folder.mkdir(exist_ok=True, parents=True)
        self.log = self.folder.with_suffix(f".{self.token[:4]}.log")
        script = self.folder.with_suffix(".py")
        script.write_text(FAULTY)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        command += [str(script), str(ROOT / "recipes" / f"{self.recipe}.py")]
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        told = {"STORM": self.fault, "STORM_TOKEN": self.token, "VLA_HEARTBEAT_TIMEOUT": str(HEARTBEAT)}
        told |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        with open(self.log, "w") as log:
            self.torchrun = subprocess.Popen(
                [*command, *RECIPES[self.recipe], f"hydra.run.dir={self.folder}"],
                stdout=log,
                stderr=log,
                env=os.environ | told,
                start_new_session=True,
            )

    @property
    def text(self) -> str:
        return self.log.read_text()

    def processes(self) -> dict[int, int]:
        """The processes that live, each with its parent."""
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if f"STORM_TOKEN={self.token}".encode() in (path / "environ").read_bytes():
                    found[int(path.name)] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
        return found

    def rank(self, number: int) -> int:
        """The process of that rank."""
        for pid, parent in self.processes().items():
            if (
                parent == self.torchrun.pid
                and f"\0RANK={number}\0".encode() in Path(f"/proc/{pid}/environ").read_bytes()
            ):
                return pid
        raise ProcessLookupError(f"no process of rank {number}")

    def wait_for(self, condition: Callable[[], bool], seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                return False
            self.torchrun.poll()
            time.sleep(0.05)
        return True

    def gone(self) -> bool:
        return not self.processes()

    def reached(self, step: int) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return self.torchrun.poll() is not None or f'"step": {step},' in (self.folder / "metrics.jsonl").read_text()
        return self.torchrun.poll() is not None

    def end(self) -> None:
        """End what is left."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.torchrun.wait()


def kill(life: Life, rank: int) -> None:
    os.kill(life.rank(rank), signal.SIGKILL)


def kill_torchrun(life: Life, _: int) -> None:
    life.torchrun.kill()


def stop(life: Life, rank: int) -> None:
    os.kill(life.rank(rank), signal.SIGSTOP)


def stop_for_long(life: Life, rank: int) -> None:
    """It continues when the others have given it up; it must not write any more."""
    stopped, other = life.rank(rank), life.rank(1 - rank)
    os.kill(stopped, signal.SIGSTOP)
    life.wait_for(lambda: not Path(f"/proc/{other}/fd").exists() or _zombie(other), SOON)
    before = _files(life.folder)
    with contextlib.suppress(ProcessLookupError):
        os.kill(stopped, signal.SIGCONT)
    life.wait_for(life.gone, 10)
    if _files(life.folder) != before:
        raise AssertionError("a process that was given up has written")


def stop_shortly(life: Life, rank: int) -> None:
    stopped = life.rank(rank)
    os.kill(stopped, signal.SIGSTOP)
    time.sleep(HEARTBEAT / 4)
    os.kill(stopped, signal.SIGCONT)


def terminate_one(life: Life, rank: int) -> None:
    os.kill(life.rank(rank), signal.SIGTERM)


def terminate_all(life: Life, _: int) -> None:
    life.torchrun.terminate()


@dataclass(frozen=True)
class Fault:
    """A kind of fault.

    Attributes:
        says: what the processes say, by a regular expression with ``{rank}``; nothing if they cannot say anything.
        outside: does it to a run; otherwise the process does it to itself, ``where`` and after up to ``calls`` calls.
        rank: whom; any unless given.
        soon: seconds in which all must be gone.
    """

    says: str | None
    outside: Callable[[Life, int], None] | None = None
    where: str = ""
    calls: int = 1
    rank: int | None = None
    soon: float = SOON


FAILED = r"process {rank} of 2 \(.*\) has failed: ArithmeticError: storm"
ENDED = r"process {rank} of 2 \(.*\) has ended without a word"
SILENT = r"process {rank} of 2 \(.*\) has given no sign of life for 6 s"
STOPPED = "stopped by SIGTERM"
FAULTS = {
    "kill -9 of torchrun": Fault(None, kill_torchrun, soon=5),
    "SIGSTOP of process 0": Fault(SILENT, stop, rank=0),
    "exception in collecting": Fault(FAILED, where="collecting", calls=30),
    "kill -9 of process 0": Fault(ENDED, kill, rank=0),
    "SIGSTOP, SIGCONT when given up": Fault(SILENT, stop_for_long, rank=0),
    "network lost": Fault(r"process [01] of 2 \(.*\) has ended without a word", where="network", calls=30),
    "SIGSTOP, SIGCONT soon": Fault(None, stop_shortly),
    "another call": Fault("do not make the same calls in the same order", where="another call", calls=20),
    "kill -9 of process 1": Fault(ENDED, kill, rank=1),
    "SIGSTOP of process 1": Fault(SILENT, stop, rank=1),
    "exception in learning": Fault(FAILED, where="learning", calls=8),
    "kill -9 in learning": Fault(ENDED, where="SIGKILL in learning", calls=8),
    "SIGSTOP in learning": Fault(SILENT, where="SIGSTOP in learning", calls=8),
    "exception in saving": Fault(FAILED, where="saving", calls=4, rank=0),
    "exception in evaluating": Fault(FAILED, where="evaluating", calls=3),
    "SIGTERM to one": Fault(STOPPED, terminate_one),
    "SIGTERM to all": Fault(STOPPED, terminate_all),
}
COUNT = len(FAULTS)


def run(count: int, seed: int) -> Tally:
    """Try ``count`` faults."""
    chance = random.Random(seed)
    tally = Tally("processes under torchrun")
    with tempfile.TemporaryDirectory() as temporary:
        undisturbed: dict[str, tuple] = {}
        for number in range(count):
            kind, fault = list(FAULTS.items())[number % len(FAULTS)]
            recipe = list(RECIPES)[number // 2 % 2]
            if recipe not in undisturbed:
                folder = Path(temporary) / recipe
                _finish(Life(recipe, folder))
                undisturbed[recipe] = _result(folder)
            rank = chance.randrange(2) if fault.rank is None else fault.rank
            outcome, what = _try(fault, rank, recipe, Path(temporary) / f"{number}", chance, undisturbed[recipe])
            tally.note(outcome, kind, f"process {rank} of {recipe}: {what}" if what else "")
    return tally


def _try(fault: Fault, rank: int, recipe: str, folder: Path, chance: random.Random, expected: tuple) -> tuple[str, str]:
    """Meet a run with a fault, then resume it; returns the outcome and what was wrong."""
    inside = f"{rank}:{fault.where}:{chance.randint(1, fault.calls)}" if fault.where else "none::0"
    life = Life(recipe, folder, inside)
    try:
        if fault.outside is not None:
            step = chance.randint(1, 7)
            life.wait_for(lambda: life.reached(step), LIFE)
            time.sleep(chance.random() / 3)
            fault.outside(life, rank)
        elif not life.wait_for(lambda: _has_failed(life), LIFE):
            return "wrong", "nothing failed"
        survives = fault.outside is stop_shortly
        if not life.wait_for(life.gone, LIFE if survives else fault.soon):
            return "hung", f"{len(life.processes())} processes live after {fault.soon:.0f} s"
        if survives != (life.torchrun.wait() == 0):
            return "wrong", f"status {life.torchrun.returncode}"
        if fault.says and not re.search(fault.says.format(rank=rank), life.text):
            return "wrong", f"nobody says {fault.says.format(rank=rank)!r}: {life.text[-1500:]}"
    except (ProcessLookupError, AssertionError) as error:
        return "wrong", str(error)
    finally:
        life.end()
    try:
        _finish(Life(recipe, folder))
    except RuntimeError as error:
        return "lost", str(error)
    return ("survived", "") if _result(folder) == expected else ("wrong", "another result")


def _has_failed(life: Life) -> bool:
    """Whether a process has done to itself what it should, which its traceback or that of the other tells."""
    return life.torchrun.poll() is not None or "Error" in life.text or "error:" in life.text


def _finish(life: Life) -> None:
    try:
        status = life.torchrun.wait(LIFE)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"a run without a fault hangs: {life.text[-1500:]}") from error
    finally:
        life.end()
    if status:
        raise RuntimeError(f"a run without a fault ends with status {status}: {life.text[-1500:]}")


def _result(folder: Path) -> tuple:
    """All numbers of a run that are not times, and its weights."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    times = re.compile(r"time/|decisions_per_s|env_steps_per_s|fps|.*per_second")
    numbers = [{key: repr(value) for key, value in line.items() if not times.match(key)} for line in lines]
    return numbers, (folder / "policy" / "model.safetensors").read_bytes()


def _files(folder: Path) -> dict[Path, tuple[int, int]]:
    stats = {path: path.lstat() for path in folder.rglob("*")}
    return {path: (stat.st_mtime_ns, stat.st_size) for path, stat in stats.items()}


def _zombie(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return True
