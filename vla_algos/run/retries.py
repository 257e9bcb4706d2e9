"""A SLURM job that goes back into the queue: at its time limit, and after a failure if it has got further before.

Of a failure the run itself may not hear: it was killed. The batch script of the job, which outlives it, runs this file
before and after it, see :func:`batch_lines`; only the standard library is imported, by whatever Python there is.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_FILE = "retries.json"
_STOPPED = ".stopped"  # in the folder of a run: a signal has stopped it


def batch_lines(retries: int, folders: Sequence[Path]) -> list[str]:
    """Write the lines of a batch script, before the run, that requeue its job up to ``retries`` times when it fails.

    Args:
        retries: how many times.
        folders: of the runs of the job, one for each task of an array.
    """
    call = [sys.executable, "-I", str(Path(__file__).resolve())]
    named = shlex.join(map(str, folders))
    # At its end: a shell that is told to end at the first failure (set -e) does this too.
    after = f"{shlex.join([*call, 'after'])} $? {retries} {named}"
    return [f"{shlex.join([*call, 'before'])} {named}", f"trap {shlex.quote(after)} EXIT"]


def note_stopped(folder: Path) -> None:
    """Say that a signal has stopped the run; each of its processes does, as the first that ends may end the others."""
    with contextlib.suppress(OSError):
        (folder / _STOPPED).touch()


def requeue() -> str:
    """Put the SLURM job of this process back into the queue; returns what SLURM says if it does not."""
    done = subprocess.run(["scontrol", "requeue", _job()], capture_output=True, text=True)
    return done.stderr.strip() or "scontrol fails" if done.returncode else ""


def before(folder: Path) -> None:
    """Note how far a run is before an attempt."""
    record = _read(folder)
    retried = record["retried"] if record.get("job") == _job() else 0
    (folder / _STOPPED).unlink(missing_ok=True)
    _write(folder, {"job": _job(), "retried": retried, **_progress(folder)})


def after(status: int, retries: int, folder: Path) -> str | None:
    """Requeue the job of an attempt that has ended, if that is of use; returns what there is to say about it.

    Args:
        status: of the attempt.
        retries: how many times the job may be requeued.
        folder: of the run.
    """
    if status == 0 or _state() != "RUNNING":  # cancelled, preempted, or requeued by the run itself
        return None
    failed = f"job {_job()} has failed with status {status}"
    if _STOPPED in os.listdir(folder):
        return f"job {_job()} was stopped by a signal and is not started again"
    record, now = _read(folder), _progress(folder)
    if record.get("job") != _job():
        return f"{failed} and is not started again: nothing says how far it was before"
    if not (set(now["checkpoints"]) - set(record["checkpoints"]) or now["episodes"] > record["episodes"]):
        return f"{failed} and is not started again: it has saved nothing new since it began"
    if record["retried"] >= retries:
        return f"{failed} and is not started again: launcher.retries={retries} are used up"
    _write(folder, {**record, "retried": record["retried"] + 1})
    if problem := requeue():
        return f"{failed} and could not be requeued ({problem}); submit it again, it resumes where it stopped"
    return f"{failed}; it is requeued and resumes, retry {record['retried'] + 1} of {retries}"


def _progress(folder: Path) -> dict[str, Any]:
    """Return the names of the checkpoints of a training run, and the number of episodes of an evaluation."""
    # Folders are listed because another machine may have written into them: NFS looks a listing up anew.
    checkpoints = os.listdir(folder / "checkpoints") if "checkpoints" in os.listdir(folder) else []
    return {
        "checkpoints": sorted(name for name in checkpoints if re.fullmatch(r"step_\d+", name)),
        "episodes": sum(path.read_bytes().count(b"\n") for path in folder.glob("episodes*.jsonl")),
    }


def _job() -> str:
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        return f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    return os.environ["SLURM_JOB_ID"]


def _state() -> str:
    shown = subprocess.run(["scontrol", "show", "job", _job()], capture_output=True, text=True).stdout
    found = re.search(r"JobState=(\w+)", shown)
    return found[1] if found else ""


def _read(folder: Path) -> dict[str, Any]:
    path = folder / _FILE
    return json.loads(path.read_text()) if _FILE in os.listdir(folder) else {}


def _write(folder: Path, record: dict[str, Any]) -> None:
    unfinished = folder / f".unfinished_{_FILE}"
    unfinished.write_text(json.dumps(record) + "\n")
    unfinished.replace(folder / _FILE)


def _main(when: str, *arguments: str) -> None:
    """``before FOLDER ...`` and ``after STATUS RETRIES FOLDER ...``, as :func:`batch_lines` calls it."""
    numbers, folders = arguments[: 2 * (when == "after")], arguments[2 * (when == "after") :]
    folder = Path(folders[int(os.environ.get("SLURM_ARRAY_TASK_ID", "0"))])
    said = None
    try:
        if when == "before":
            before(folder)
        else:
            said = after(int(numbers[0]), int(numbers[1]), folder)
    except (OSError, ValueError, KeyError) as error:  # a full disk must not end the job
        said = f"whether to start job {_job()} again after a failure cannot be noted in {folder}: {error}"
    if said:
        print(said, flush=True)


if __name__ == "__main__":
    _main(*sys.argv[1:])
