"""Files that are whole or not there at all, and bookkeeping that never ends a run."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tqdm import tqdm

_failing: set[str] = set()  # what could not be written when it was last tried


def attempt(what: str, work: Callable[[], object], otherwise: str, errors: type[Exception] = OSError) -> bool:
    """Do what a run can do without; a failure is said once, and again only after a success.

    Args:
        what: is done, such as the path that is written; failures are told apart by it.
        work: does it.
        otherwise: what a failure means for the run.
        errors: that may happen.

    Returns:
        Whether it was done.
    """
    try:
        work()
    except errors as error:
        if what not in _failing:
            tqdm.write(f"{what} could not be written ({error}); {otherwise}")
        _failing.add(what)
        return False
    if what in _failing:
        _failing.discard(what)
        tqdm.write(f"{what} is written again")
    return True


def finite_or_none(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Replace NaN and infinities, which JSON does not have, by ``None``."""
    return {
        name: None if isinstance(number, float) and not math.isfinite(number) else number
        for name, number in numbers.items()
    }


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file under another name beside it, flush and rename it; nothing where it is equal already.

    Raises:
        OSError: no room, no permission; the file is what it was.
    """
    data = content.encode() if isinstance(content, str) else content
    unfinished = _unfinished(path)
    unfinished.unlink(missing_ok=True)  # of a process that was killed
    if path.is_file() and path.read_bytes() == data:
        return
    try:
        with open(unfinished, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise
    flush(path.parent)


def write_folder_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let ``write(folder)`` fill a folder under another name and rename it; one that was there before is replaced.

    Raises:
        OSError: no room, no permission; the folder is what it was.
    """
    unfinished, old = _unfinished(path), path.with_name(f".old_{path.name}")
    for rest in (unfinished, old):  # of a process that was killed
        remove(rest)
    try:
        write(unfinished)
        for part in [*unfinished.rglob("*"), unfinished]:
            flush(part)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    if path.exists():
        path.rename(old)
    unfinished.rename(path)
    flush(path.parent)
    remove(old)


def link_atomically(link: Path, target: str) -> None:
    """Let ``link`` point to ``target``, in one step where it pointed elsewhere.

    Raises:
        OSError: a file or folder that is no link has its name; or no permission.
    """
    if link.exists() and not link.is_symlink():
        raise FileExistsError(f"{link} is there and is not a link")
    if link.is_symlink() and os.readlink(link) == target:
        return
    unfinished = _unfinished(link)
    unfinished.unlink(missing_ok=True)  # of a process that was killed
    unfinished.symlink_to(target)
    unfinished.replace(link)
    flush(link.parent)


def remove(path: Path) -> None:
    """Remove a file, a link or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def flush(path: Path) -> None:
    """Force a file or the entries of a folder to disk, so that a rename cannot overtake them."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class Appended:
    """A file that grows by whole records, also on a disk that is full for a while: what it refuses waits in memory.

    Args:
        path: missing folders are made.
    """

    def __init__(self, path: Path):
        self.path = path
        self._waiting = b""

    def append(self, record: bytes) -> None:
        """Write a record, after those that wait; a failure is said once, and tried again with the next."""
        self._waiting += record
        attempt(str(self.path), self._write, "the run goes on, and writes it later if there is room by then")

    def sync(self) -> None:
        """Flush the file to disk."""
        if self._waiting:
            self.append(b"")
        with contextlib.suppress(OSError):
            flush(self.path)

    def close(self) -> None:
        """Try a last time to write what waits, and say if it is lost."""
        self.sync()
        if self._waiting:
            tqdm.write(f"{self.path} lacks its last {len(self._waiting)} bytes, for which there was no room")

    def _write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            whole = os.fstat(handle).st_size
            try:
                left = self._waiting
                while left:
                    left = left[os.write(handle, left) :]
            except BaseException:  # no half a record
                os.ftruncate(handle, whole)
                raise
        finally:
            os.close(handle)
        self._waiting = b""


def _unfinished(path: Path) -> Path:
    return path.with_name(f".unfinished_{path.name}")
