"""``SHA256SUMS``: one file of digests per folder, in the format that ``sha256sum -c`` checks."""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from pathlib import Path, PurePosixPath

SUMS = "SHA256SUMS"
_LINE = re.compile(r"([0-9a-f]{64}) [ *](?:\./)?(.+)")
_THREADS = 4  # OpenSSL hashes 2 GB/s with one
_only_names: ContextVar[bool] = ContextVar("_only_names", default=False)


class ChecksumError(ValueError):
    """Files are not what was written."""


def write_checksums(folder: Path, files: Iterable[str]) -> None:
    """Write the digests of files, named relative to their folder; what an earlier call wrote is replaced."""
    names = sorted(files)
    write_lines(folder, dict(zip(names, _digests([folder / name for name in names]), strict=True)))


def write_lines(folder: Path, digests: dict[str, str]) -> None:
    """Write digests that are known already, by the names of their files."""
    (folder / SUMS).write_text("".join(f"{digest}  {name}\n" for name, digest in digests.items()))


def identity(folder: Path) -> str | None:
    """Tell folders apart by what was written into them: the digest of ``SHA256SUMS``; ``None`` without one."""
    try:
        return digest(folder / SUMS)
    except OSError:
        return None


@contextlib.contextmanager
def only_names() -> Iterator[None]:
    """Within, :func:`verify_checksums` looks whether files are there and reads none, which may take minutes."""
    token = _only_names.set(True)
    try:
        yield
    finally:
        _only_names.reset(token)


def verify_checksums(folder: Path, share: tuple[int, int] = (0, 1)) -> None:
    """Compare the files of a folder with its ``SHA256SUMS``. A folder without one, which is not ours, passes.

    Args:
        folder: of the files.
        share: number of this process and of all that read the folder together: each compares a part of the files.

    Raises:
        ChecksumError: files are others than were written, or are gone; names them and says what to type.
    """
    if not (folder / SUMS).exists():
        return
    expected = read_checksums(folder)
    gone = [name for name in expected if not (folder / name).is_file()]
    there = [] if _only_names.get() else [name for name in expected if name not in gone][share[0] :: share[1]]
    found = dict(zip(there, _digests([folder / name for name in there]), strict=True))
    changed = [name for name in there if found[name] != expected[name]]
    if gone or changed:
        problems = [f"has no {', '.join(gone)}"] * bool(gone)
        problems += [f"has another {', '.join(changed)} than was written"] * bool(changed)
        delete = " ".join(f"-e '\\#  {name}$#d'" for name in [*gone, *changed])
        raise ChecksumError(
            f"{folder} {' and '.join(problems)} (by {SUMS}): damaged or exchanged; copy the folder again, or if you "
            f"changed it on purpose type: sed -i {delete} {folder / SUMS}"
        )


def read_checksums(folder: Path) -> dict[str, str]:
    """Read the digests of a folder by the names of its files.

    Raises:
        ChecksumError: the file is damaged.
    """
    try:
        lines = (folder / SUMS).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ChecksumError(f"{folder / SUMS} cannot be read ({error}); copy the folder again") from error
    found = [_LINE.fullmatch(line) for line in lines]
    digests = {match[2]: match[1] for match in found if match}
    inside = all(not PurePosixPath(name).is_absolute() and ".." not in PurePosixPath(name).parts for name in digests)
    if not digests or not inside or len(digests) != len(lines):
        raise ChecksumError(
            f"{folder / SUMS} is damaged, or not one of sha256sum; copy the folder again, or if you are sure of its "
            f"files type: rm {folder / SUMS}"
        )
    return digests


def _digests(files: list[Path]) -> list[str]:
    with ThreadPoolExecutor(_THREADS) as threads:  # hashlib lets others run meanwhile
        return list(threads.map(digest, files))


def digest(file: Path) -> str:
    """Return the SHA-256 of a file."""
    with open(file, "rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
