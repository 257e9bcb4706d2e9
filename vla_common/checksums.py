"""``SHA256SUMS``: one file of digests per folder, in the format that ``sha256sum -c`` checks."""

import hashlib
import re
import shlex
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

from vla_common.plain import read_small

SUMS = "SHA256SUMS"
_LINE = re.compile(r"([0-9a-f]{64}) [ *](?:\./)?(.+)")
_ODD = re.compile(r"[^\w ./-]")  # what sed or a shell may obey; to sed a dot is any character
_READ = (".json", ".safetensors", ".pt", ".model")  # files that a loader finds by their names or in a listing
_THREADS = 4  # OpenSSL hashes 2 GB/s with one


class ChecksumError(ValueError):
    """Files are not what was written."""


def write_checksums(folder: Path, files: Iterable[str]) -> None:
    """Write the digests of files, named relative to their folder, in the place of earlier ones."""
    write_lines(folder, _digests(folder, sorted(files)))


def add_checksum(folder: Path, name: str) -> None:
    """Add the digest of a file that is written after the others, where they have digests."""
    if (folder / SUMS).exists():
        write_lines(folder, {**read_checksums(folder), name: digest(folder / name)})


def write_lines(folder: Path, digests: dict[str, str]) -> None:
    """Write digests that are known already, by the names of their files."""
    (folder / SUMS).write_text("".join(f"{digest}  {name}\n" for name, digest in digests.items()))


def identity(folder: Path) -> str | None:
    """Return the digest of ``SHA256SUMS``, which tells folders apart by what was written; ``None`` without one."""
    return digest(folder / SUMS) if (folder / SUMS).is_file() else None


def verify_checksums(folder: Path, share: tuple[int, int] = (0, 1), only: str | None = None) -> None:
    """Compare the files of a folder with its ``SHA256SUMS``. A folder without one, which is not ours, passes.

    Of the processes that read a folder together (``share``: number of this one, and of all) each compares a part of the
    files; ``only`` is the name of the one file that is read. A ``ChecksumError`` if files are others than were written,
    are gone, or are too many; it says what to type.
    """
    if not (folder / SUMS).exists():
        return
    listed = read_checksums(folder)
    expected = {name: each for name, each in listed.items() if only in (None, name)}
    gone = [name for name in expected if not (folder / name).is_file()]
    own = [name for name in expected if name not in gone][share[0] :: share[1]]
    changed = [name for name, found in _digests(folder, own).items() if found != expected[name]]
    places = {PurePosixPath(name).parent for name in listed}
    files = {(place / path.name).as_posix() for place in places for path in (folder / place).glob("*")}
    extra = [name for name in sorted(files.difference(listed)) if name.endswith(_READ) and only in (None, name)]
    problems = [f"has no {', '.join(gone)}"] * bool(gone)
    problems += [f"has another {', '.join(changed)} than was written"] * bool(changed)
    problems += [f"has {', '.join(extra)}, not written with the others"] * bool(extra)
    if not problems:
        return
    delete = " ".join(f"-e '\\#  {_ODD.sub('.', name)}$#d'" for name in [*gone, *changed])
    typed = [f"cd {shlex.quote(str(folder))}", *[f"sed -i {delete} {SUMS}"] * bool(delete)]
    typed += [f"sha256sum {shlex.join([*changed, *extra])} >> {SUMS}"] * bool(changed or extra)
    raise ChecksumError(
        f"{folder} {' and '.join(problems)} (by {SUMS}): damaged or exchanged; copy the folder again, or if you "
        f"changed it on purpose type: ({' && '.join(typed)})"
    )


def read_checksums(folder: Path) -> dict[str, str]:
    """Read the digests of a folder by the names of its files; a ``ChecksumError`` if they are damaged."""
    try:
        lines = read_small(folder / SUMS).decode().splitlines()
    except (OSError, ValueError) as error:
        raise ChecksumError(f"{folder / SUMS} cannot be read ({error}); copy the folder again") from error
    found = [_LINE.fullmatch(line) for line in lines]
    digests = {match[2]: match[1] for match in found if match}
    inside = all(not PurePosixPath(name).is_absolute() and ".." not in PurePosixPath(name).parts for name in digests)
    if not digests or not inside or len(digests) != len(lines):
        raise ChecksumError(
            f"{folder / SUMS} is damaged, or not one of sha256sum; copy the folder again, or if you are sure of its "
            f"files type: rm {shlex.quote(str(folder / SUMS))}"
        )
    return digests


def _digests(folder: Path, names: Sequence[str]) -> dict[str, str]:
    with ThreadPoolExecutor(_THREADS) as threads:  # hashlib lets others run meanwhile
        return dict(zip(names, threads.map(digest, [folder / name for name in names]), strict=True))


def digest(file: Path) -> str:
    """Return the SHA-256 of a file."""
    with open(file, "rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
