"""One run at a time in a folder."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import shutil
import subprocess
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from vla_algos.run.files import attempt

_BEAT, _STALE = 30.0, 300.0  # seconds: between two signs of life, and without any until a lock counts as forgotten
_held: set[int] = set()  # handles, which a forked child must not keep open: it would hold the lock when we are gone


class FolderInUse(RuntimeError):
    """Another process writes into the folder; the message names it."""


class FolderLock:
    """Holds ``<folder>/.lock`` until :meth:`release` or the end of the process, however it ends.

    The kernel's lock (``flock``) decides among processes of one machine, and on network file systems that carry it to
    others. Where they do not, what is written in the file does: host, process, SLURM job, and the time of the last
    sign of life, which is the file's. Another machine's lock is forgotten if it was silent for five minutes, if its
    SLURM job is over, or if that job is this one, started again.

    Args:
        folder: of the run.

    Raises:
        FolderInUse: another process has it.
    """

    def __init__(self, folder: Path):
        self._path = folder / ".lock"
        self._handle: int | None = None
        self._released = threading.Event()
        attempt(str(self._path), self._acquire, "the folder is not locked: start nothing else in it")

    def release(self) -> None:
        """Let others have the folder."""
        self._released.set()
        if self._handle is None:
            return
        self._beating.join()
        with contextlib.suppress(OSError):
            if _same_file(self._handle, self._path):
                self._path.unlink()
        _held.discard(self._handle)
        os.close(self._handle)
        self._handle = None

    def _acquire(self) -> None:
        while True:
            handle = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                locked = _lock(handle)
                if locked is not None and not _same_file(handle, self._path):  # its holder has removed it just now
                    os.close(handle)
                    continue
                self._take(handle, locked)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.close(handle)
                raise
            break
        self._handle = handle
        _held.add(handle)
        self._beating = threading.Thread(target=self._beat, args=(handle,), daemon=True)
        self._beating.start()

    def _take(self, handle: int, locked: bool | None) -> None:
        """Write our name into the file unless another one in it may be alive; ``None``: the kernel cannot lock here."""
        holder, silent = _read(handle), time.time() - os.fstat(handle).st_mtime
        if locked is False or (holder and _may_live(holder, silent, locked is None)):
            raise FolderInUse(_describe(self._path.parent, holder, silent if locked else None))
        data = json.dumps(_self()).encode() + b"\n"
        os.ftruncate(handle, 0)
        try:
            os.pwrite(handle, data, 0)
            os.fsync(handle)
        except OSError:  # a full disk
            if locked is None:
                raise
        if locked is None:
            time.sleep(1)  # of several that came at once the last one has it
            if self._path.read_bytes() != data:
                raise FolderInUse(_describe(self._path.parent, _read(handle), None))

    def _beat(self, handle: int) -> None:
        while not self._released.wait(_BEAT):
            with contextlib.suppress(OSError):
                os.utime(handle)


def _lock(handle: int) -> bool | None:
    """Lock a file; ``False``: somebody has it; ``None``: its file system cannot."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _same_file(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False


def _self() -> dict[str, Any]:
    return {
        "host": platform.node(),
        "pid": os.getpid(),
        "job": os.environ.get("SLURM_JOB_ID"),
        "restarts": int(os.environ.get("SLURM_RESTART_COUNT", "0")),
        "boot": _boot(),
        "container": _container(),
        "since": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _boot() -> str | None:
    """Name the running kernel: the same in all containers of a machine, another one after it was started again."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return None


def _container() -> str | None:
    """Name the container, among whose processes a number is one: its namespace."""
    with contextlib.suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return None


def _read(handle: int) -> dict[str, Any]:
    """Read who holds a lock; nothing if it is not ours, or was not written to its end."""
    try:
        found = json.loads(os.pread(handle, 10_000, 0))
    except ValueError:
        return {}
    ours = isinstance(found, dict) and all(isinstance(found.get(name), int) for name in ("pid", "restarts"))
    return found if ours else {}


def _may_live(holder: dict[str, Any], silent: float, unlocked: bool) -> bool:
    """Tell whether who has written its name may still be at work, although the kernel gave us its lock."""
    own = _self()
    job = holder.get("job")
    if job and job == own["job"] and own["restarts"] > holder["restarts"]:
        return False  # SLURM starts a job again when it is over
    if holder.get("boot") == own["boot"]:
        gone = holder.get("container") == own["container"] and not Path(f"/proc/{holder['pid']}").exists()
        return unlocked and silent < _STALE and not gone
    if holder.get("host") == own["host"]:
        return False  # this machine was started again
    return silent < _STALE and not (job and _job_is_over(str(job)))


def _job_is_over(job: str) -> bool:
    if shutil.which("squeue") is None:
        return False
    done = subprocess.run(["squeue", "-h", "-j", job, "-o", "%T"], capture_output=True, text=True)
    if done.returncode:
        return "invalid job id" in done.stderr.lower()
    return not done.stdout.strip()


def _describe(folder: Path, holder: dict[str, Any], silent: float | None) -> str:
    who = "another process"
    if holder:
        job = f" (SLURM job {holder['job']})" if holder.get("job") else ""
        who = f"process {holder['pid']} on {holder.get('host')}{job}, since {holder.get('since')}"
    forgotten = ""
    if silent is not None:
        forgotten = (
            f"; it was heard of {max(0, silent):.0f} s ago: if it is dead, this works in {_STALE - silent:.0f} s, or "
            f"after rm {folder / '.lock'}"
        )
    return f"{folder} is in use: {who}; wait until that has ended, or take another folder: hydra.run.dir=...{forgotten}"


def _forget_in_child() -> None:
    for handle in _held:
        with contextlib.suppress(OSError):
            os.close(handle)
    _held.clear()


os.register_at_fork(after_in_child=_forget_in_child)
