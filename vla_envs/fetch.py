"""``python -m vla_envs fetch NAME``: what a benchmark needs beside its packages, into one folder.

What is under way lies in ``PLACE.partial``, where the same command goes on. It becomes ``PLACE`` when nothing of it
lacks and every digest is right: a commit is the digest of its files, the hub has one of each file, and some are written
down here. Nothing is asked on the terminal.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from contextlib import suppress
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from filelock import FileLock, Timeout
from packaging.requirements import Requirement

from vla_common.errors import unknown_name
from vla_common.program import one_line
from vla_common.registry import benchmarks
from vla_envs.doctor import DISTRIBUTION
from vla_envs.folders import Download, Packages, Source, cache_folder
from vla_envs.registry import get_benchmark

_GO_ON = "type the same command to go on"


def fetch(name: str, source: str | None = None) -> int:
    """Bring all that benchmarks declare under a name; returns the exit status.

    Args:
        name: of a :class:`~vla_envs.folders.Download` or :class:`~vla_envs.folders.Packages`.
        source: a folder that has it, or that is laid out as ``$VLA_TORCHRL_ASSETS``; a mirror of GitHub and of the hub,
            ``https://HOST/...``; or one repository, whose address ends in ``.git``. ``None`` for GitHub and the hub,
            or the mirror of it that ``$HF_ENDPOINT`` names.

    Raises:
        ValueError: an unknown name, with the nearest ones.
        OSError: it could not be brought, or is not what it should be.
    """
    known: dict[str, list[Download | Packages]] = {}
    for benchmark in benchmarks.names():
        with suppress(Exception):  # whatever a package from outside raises; the doctor says so
            for item in get_benchmark(benchmark).downloads:
                known.setdefault(item.name, []).append(item)
    if name not in known:
        raise unknown_name("download", name, known)
    for item in known[name]:
        if isinstance(item, Packages):
            _install(item, source)
        else:
            get(item, source)
    return 0


def get(download: Download, source: str | None = None) -> Path:
    """Bring one folder, unless it is there, and return where it is; ``source`` and errors as of :func:`fetch`."""
    places = download.places()
    for place in places:
        if not download.missing(place):
            print(f"{download.title}: there already, {place}")
            return place
    target = _root() / download.packs[0]
    if target not in places:
        raise ValueError(f"{download.title} is looked for in {places[0]} alone: unset the variable that names it")
    if target.exists() and any(target.iterdir()):
        raise FileExistsError(f"{target} is there and lacks {download.missing(target)[0]}: move it away, then {_GO_ON}")
    origin = source or ", ".join(part.name for part in download.sources)
    print(f"{download.title} ({download.about})\n  from {origin} into {target}", flush=True)
    partial = target.with_name(f"{target.name}.partial")
    try:
        partial.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{partial}.lock", timeout=0):
            _fill(partial, download, source)
            if missing := download.missing(partial):
                shutil.rmtree(partial)
                raise OSError(f"{download.title} from {origin} is refused, it lacks {missing[0]}; try another --from")
            partial.replace(target)
    except Timeout as error:
        raise OSError(f"{partial} is being filled by another process: wait for that, then {_GO_ON}") from error
    except OSError as error:
        if error.filename is None:  # ours
            raise
        problem = f"cannot write {error.filename}: {error.strerror}"
        raise OSError(f"{problem}; type: export VLA_TORCHRL_ASSETS=FOLDER, then {_GO_ON}") from error
    print(f"  complete: {target}\n  What else lacks says: python -m vla_envs")
    return target


def _root() -> Path:
    named = os.environ.get("VLA_TORCHRL_ASSETS")
    return Path(named) if named and (os.access(named, os.W_OK) or not Path(named).exists()) else cache_folder()


def _fill(partial: Path, download: Download, source: str | None) -> None:
    begun = partial / ".from"  # what another source has brought is not mixed with this one's
    if not begun.is_file() or begun.read_text() != str(source):
        shutil.rmtree(partial)
        partial.mkdir()
        begun.write_text(str(source))
    url = source.rstrip("/") if source and "://" in source else None
    if source and url is None:
        _take(Path(source).expanduser(), partial, download)
    else:
        repository = url if url and url.endswith(".git") else None
        for part in download.sources:
            if part.commit:
                _clone(repository or f"{url or 'https://github.com'}/{part.name}", part.commit, partial / part.into)
            else:
                _download(part, partial / part.into, None if repository else url)
        archives = [partial / part.into / name for part in download.sources for name in part.archives]
        for archive in archives:
            _unpack(archive)
        for archive in archives:  # only now: until here they are not fetched again
            archive.unlink()
    begun.unlink()


def _take(folder: Path, partial: Path, download: Download) -> None:
    """Copy from the first place in a folder that lacks nothing, or fetch from one that is a repository."""
    places = [*(folder / pack for pack in download.packs), folder]
    for place in places:
        if not download.missing(place):
            return _copy(place, partial, download.only)
    commit = download.sources[0].commit
    for place in places:
        if commit and ((place / ".git").exists() or (place / "HEAD").is_file()):
            return _clone(str(place.resolve()), commit, partial)
    place = next((place for place in places if place.is_dir()), folder)
    lacks = f"it lacks {download.missing(place)[0]}" if place.is_dir() else "there is no such folder"
    raise OSError(f"{download.title} cannot be had from {place}, {lacks}; type another --from FOLDER, or none")


def _copy(folder: Path, partial: Path, only: tuple[str, ...]) -> None:
    root = folder.resolve()
    for directory, folders, files in os.walk(root):
        if Path(directory) == root:
            folders[:] = [name for name in folders if name != ".git" and (not only or name in only)]
            files = [name for name in files if not only or name in only]
        for name in (*folders, *files):
            path = Path(directory, name)
            if path.is_symlink() and (path.is_dir() or not path.resolve().is_relative_to(root)):
                raise OSError(f"{path} is a link to {path.resolve()}, only links to files of {root} are taken")
            copy = partial / path.relative_to(root)
            if path.is_dir():
                copy.mkdir(exist_ok=True)
                continue
            there = path.stat()
            if not copy.is_file() or (copy.stat().st_size, copy.stat().st_mtime_ns) != (
                there.st_size,
                there.st_mtime_ns,
            ):
                shutil.copyfile(path, copy)
                os.utime(copy, ns=(there.st_atime_ns, there.st_mtime_ns))  # last: it says that the copy is whole


def _clone(url: str, commit: str, folder: Path) -> None:
    if shutil.which("git") is None:
        raise OSError("git is not installed; type: sudo apt-get install -y git  (or bring the files: --from FOLDER)")

    def git(*words: str) -> subprocess.CompletedProcess[str]:
        command = ["git", "--git-dir", str(folder / ".git"), "--work-tree", str(folder), *words]
        environment = {**os.environ, "GIT_TERMINAL_PROMPT": "0", "GIT_SSH_COMMAND": "ssh -o BatchMode=yes"}
        return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=environment)

    if git("rev-parse", "HEAD").stdout.strip() == commit:  # is written last
        return
    shutil.rmtree(folder / ".git", ignore_errors=True)  # what was interrupted may be locked
    folder.mkdir(parents=True, exist_ok=True)
    git("init", "--quiet")
    done = git("fetch", "--quiet", "--depth=1", "--", url, commit)
    if done.returncode:  # a server that only knows branches
        done = git("fetch", "--quiet", "--", url, "+refs/*:refs/mirror/*")
    if done.returncode == 0:
        done = git("checkout", "--quiet", "--force", "--detach", commit)
    if done.returncode:
        raise OSError(f"{url}: {one_line(done.stderr)}; {_GO_ON}, or: --from FOLDER|URL")


def _download(part: Source, folder: Path, endpoint: str | None) -> None:
    from huggingface_hub import HfApi

    hub = HfApi(endpoint=endpoint)
    try:
        hub.snapshot_download(
            part.name, repo_type="dataset", local_dir=folder, allow_patterns=list(part.archives) or None
        )
        checked = hub.verify_repo_checksums(part.name, repo_type="dataset", local_dir=folder)
    except Exception as error:  # of whatever the hub's client stands on
        raise OSError(
            f"{part.name} from {hub.endpoint}: {one_line(str(error))}; {_GO_ON}, or: --from FOLDER"
        ) from error
    wrong = [mismatch["path"] for mismatch in checked.mismatches]
    wrong += [name for name, digest in part.archives.items() if digest and _digest(folder / name) != digest]
    for name in wrong:  # comes again
        (folder / name).unlink(missing_ok=True)
    if wrong:
        raise OSError(f"{part.name} from {hub.endpoint}: {wrong[0]} is refused, it has another SHA-256; {_GO_ON}")


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _unpack(archive: Path) -> None:
    """Unpack a zip file beside it, into the folder of its name, which in it may have another."""
    with zipfile.ZipFile(archive) as file:
        tops = {name.partition("/")[0] for name in file.namelist()}
        file.extractall(archive.parent)
    target = archive.with_suffix("")
    if len(tops) == 1 and target.name not in tops:
        shutil.rmtree(target, ignore_errors=True)
        (archive.parent / tops.pop()).rename(target)


def _install(packages: Packages, source: str | None) -> None:
    wanted = [Requirement(text) for text in metadata.requires(DISTRIBUTION) or []]
    needed = [
        f"{requirement.name}{requirement.specifier}"
        for requirement in wanted
        if requirement.marker and requirement.marker.evaluate({"extra": packages.extra})
    ]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]
    if source:
        pip += ["--index-url", source] if "://" in source else ["--no-index", "--find-links", source]
    if find_spec("pip") is None:
        raise OSError(f"no pip in {sys.executable}; type: uv pip install --no-deps {' '.join(packages.requirements)}")
    print(f"{packages.title}: {', '.join((*needed, *packages.requirements))}\n  into {sys.prefix}", flush=True)
    for words in (needed, ["--no-deps", *packages.requirements]):
        if subprocess.run([*pip, *words], stdin=subprocess.DEVNULL).returncode:
            raise OSError(f"pip could not install {packages.title}, it says why above; {_GO_ON}")
