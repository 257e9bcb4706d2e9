"""Files that are whole or not there at all, and folders that one process writes into at a time."""

import contextlib
import math
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

_OF_TRACKERS = ("wandb", "swanlab")  # in folders of their own in a run's; wandb links there to its cache


class FolderInUse(RuntimeError):
    """Another process writes into the folder."""


def lock_folder(folder: Path) -> FileLock:
    """Lock ``<folder>/.lock`` until :meth:`release` of the result, or the end of the process, however it ends.

    A :class:`FolderInUse` if another process has it; an ``OSError`` if it cannot be written, or is a link.
    """
    lock = FileLock(folder / ".lock", is_singleton=False)
    try:
        lock.acquire(blocking=False)
    except Timeout as error:
        raise FolderInUse(
            f"{folder} is in use by another process; wait for its end, or take another folder: hydra.run.dir=..."
        ) from error
    return lock


def finite_or_none(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Replace NaN and infinities, which JSON does not have, by ``None``."""
    return {
        name: None if isinstance(number, float) and not math.isfinite(number) else number
        for name, number in numbers.items()
    }


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file under another name, flush and rename it; nothing where it is equal already.

    An ``OSError`` for no room or no permission; the file is then what it was.
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

    An ``OSError`` for no room or no permission; the folder is then what it was.
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
    """Let ``link`` point to ``target`` in one step; ``OSError`` where something that is no link has its name."""
    if link.exists() and not link.is_symlink():
        raise FileExistsError(f"{link} is there and is not a link")
    if link.is_symlink() and os.readlink(link) == target:
        return
    unfinished = _unfinished(link)
    unfinished.unlink(missing_ok=True)  # of a process that was killed
    unfinished.symlink_to(target)
    unfinished.replace(link)
    flush(link.parent)


def check_links(folder: Path) -> None:
    """Refuse (``ValueError``) a run's folder with a link out of it, where other files would be written or removed."""
    home = folder.resolve()
    for place, folders, files in os.walk(home):
        for path in (Path(place, name) for name in (*folders, *files)):
            if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(home):
                raise ValueError(
                    f"{path} is a link out of the run's folder, to {path.readlink()}: what a run writes stays in it; "
                    "remove the link, or take another folder: hydra.run.dir=..."
                )
        folders[:] = [name for name in folders if name not in _OF_TRACKERS]


def remove(path: Path) -> None:
    """Remove a file, a link or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def remove_if_empty(folder: Path) -> None:
    """Remove an empty folder and, inside of the working folder, those around it that are empty then."""
    with contextlib.suppress(OSError):
        if folder.is_relative_to(Path.cwd()):
            os.removedirs(folder.relative_to(Path.cwd()))
        else:
            folder.rmdir()


def flush(path: Path) -> None:
    """Force a file or the entries of a folder to disk, so that a rename cannot overtake them."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _unfinished(path: Path) -> Path:
    return path.with_name(f".unfinished_{path.name}")
