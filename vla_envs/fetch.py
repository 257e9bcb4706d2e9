"""``python -m vla_envs fetch NAME``: what a benchmark needs beside its packages, into one folder.

What is under way lies in ``PLACE.*.partial``, which the same command continues. It becomes ``PLACE`` when nothing of it
lacks and every digest is right: a commit is the digest of its files, the hub has one of each file, and some are written
down here. Nothing is asked on the terminal.
"""

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
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from filelock import FileLock, Timeout
from packaging.requirements import Requirement
from tqdm import tqdm

from vla_common.errors import unknown_name
from vla_common.program import one_line
from vla_common.registry import benchmarks
from vla_envs.doctor import DISTRIBUTION
from vla_envs.folders import Download, Packages, Source, cache_folder
from vla_envs.registry import get_benchmark

_AGAIN = "type the same command to continue"


def fetch(name: str, source: str | None = None) -> int:
    """Bring all that benchmarks declare under a name, and return 0.

    Args:
        name: of a :class:`~vla_envs.folders.Download` or :class:`~vla_envs.folders.Packages`.
        source: a folder that has it, or is laid out as ``$VLA_TORCHRL_ASSETS``; the address of a mirror of both GitHub
            and the hub; or of one repository, ``.git`` at its end. ``None`` for GitHub and ``$HF_ENDPOINT``.

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
        _install(item, source) if isinstance(item, Packages) else get(item, source)
    print("What else is missing: python -m vla_envs")
    return 0


def get(download: Download, source: str | None = None) -> None:
    """Bring one folder unless it is there; ``source`` and errors as of :func:`fetch`."""
    places, title = download.places(), download.title
    if there := next((place for place in places if not download.missing(place)), None):
        print(f"{title}: there already, {there} (delete that to fetch it again)")
        return
    named = os.path.expanduser(os.environ.get("VLA_TORCHRL_ASSETS", ""))
    writable = named and (os.access(named, os.W_OK) or not Path(named).exists())
    target = (Path(named) if named and writable else cache_folder()) / download.packs[0]
    if target not in places:
        raise ValueError(f"{title} is looked for in {places[0]} alone: unset the variable that names it")
    if target.exists() and any(target.iterdir()):
        raise OSError(f"{target} is there and lacks {download.missing(target)[0]}: move it away, then {_AGAIN}")
    origin = source or ", ".join(part.name for part in download.sources)
    print(f"{title} ({download.about})\n  from {origin} into {target}", flush=True)
    partial = target.with_name(f"{target.name}.{hashlib.sha256(origin.encode()).hexdigest()[:8]}.partial")
    try:
        partial.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{target}.lock", timeout=0):
            _fill(partial, download, source)
            if missing := download.missing(partial):
                shutil.rmtree(partial)
                raise OSError(f"{title} from {origin} is refused, it lacks {missing[0]}; type another --from")
            partial.replace(target)
            print(f"  {download.title} is complete")
            for other in target.parent.glob(f"{target.name}.*.partial"):  # begun from elsewhere
                shutil.rmtree(other)
    except Timeout as error:
        raise OSError(f"{target} is being fetched by another process: wait for that, then {_AGAIN}") from error
    except OSError as error:
        if error.filename is None:  # ours
            raise
        why = f"{error.filename}: {error.strerror}; if that cannot be written"
        raise OSError(f"{why}, type: export VLA_TORCHRL_ASSETS=FOLDER, then {_AGAIN}") from error


def _fill(partial: Path, download: Download, source: str | None) -> None:
    if source and "://" not in source:
        return _take(Path(source).expanduser(), partial, download)
    url = (source or "").rstrip("/")
    repository = url if url.endswith(".git") else ""
    for part in download.sources:
        if part.commit:
            _clone(repository or f"{url or 'https://github.com'}/{part.name}", part.commit, partial / part.into)
        else:
            _download(part, partial / part.into, url if url and not repository else None)
    archives = [partial / part.into / name for part in download.sources for name in part.archives]
    for archive in archives:
        _unpack(archive)
    for archive in archives:  # only now: until here they are not fetched again
        archive.unlink()
    return None


def _take(folder: Path, partial: Path, download: Download) -> None:
    """Copy from the first place in a folder that lacks nothing, or fetch from one that is a repository."""
    if not folder.is_dir():
        raise OSError(f"no folder {folder}; type another --from")
    places = [*(folder / pack for pack in download.packs), folder]
    for place in places:
        if not download.missing(place):
            return _copy(place, partial, download.only)
    for place in places:
        if download.sources[0].commit and ((place / ".git").exists() or (place / "HEAD").is_file()):
            return _clone(str(place.resolve()), download.sources[0].commit, partial)
    place = next((place for place in places if place.is_dir()), folder)
    raise OSError(f"{download.title} is not in {place}, it lacks {download.missing(place)[0]}; type another --from")


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
            elif not copy.is_file() or copy.stat().st_mtime_ns != path.stat().st_mtime_ns:
                shutil.copyfile(path, copy)
                shutil.copystat(path, copy)  # last: its time says that the copy is whole


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
        raise OSError(f"{url}: {one_line(done.stderr)}; {_AGAIN}, or: --from FOLDER|URL")


def _download(part: Source, folder: Path, endpoint: str | None) -> None:
    from huggingface_hub import HfApi

    hub = HfApi(endpoint=endpoint)
    try:
        names = list(part.archives)
        for name in names:  # large: the hub's client begins a file from its start in each process
            _resume(f"{hub.endpoint}/datasets/{part.name}/resolve/main/{name}", folder / name)
        if not names:
            for broken in folder.rglob(".cache/**/*.incomplete"):  # which that client leaves
                broken.unlink()
            hub.snapshot_download(part.name, repo_type="dataset", local_dir=folder)
        checked = hub.verify_repo_checksums(part.name, repo_type="dataset", local_dir=folder)
        if lacking := set(checked.missing_paths) & set(names or checked.missing_paths):
            raise OSError(f"{min(lacking)} has not come")
    except Exception as error:  # of whatever the hub's client stands on
        why = one_line(str(error))
        raise OSError(f"{part.name} from {hub.endpoint}: {why}; {_AGAIN}, or: --from FOLDER") from error
    wrong = {mismatch["path"] for mismatch in checked.mismatches}
    for name, digest in part.archives.items():
        with (folder / name).open("rb") as file:
            wrong |= {name} if digest not in ("", hashlib.file_digest(file, "sha256").hexdigest()) else set()
    for name in wrong:
        (folder / name).unlink()  # comes again
    if wrong:
        raise OSError(f"{part.name} from {hub.endpoint}: {', '.join(wrong)} is refused, its digest is wrong; {_AGAIN}")


def _resume(url: str, path: Path) -> None:
    begun = path.with_name(f"{path.name}.begun")
    if path.exists():
        return
    begun.parent.mkdir(parents=True, exist_ok=True)
    begun.touch()
    request = Request(url, headers={"Range": f"bytes={begun.stat().st_size}-"})
    try:
        with urlopen(request, timeout=60) as answer, begun.open("ab" if answer.status == 206 else "wb") as file:
            end = file.tell() + int(answer.headers["Content-Length"])
            with tqdm.wrapattr(answer, "read", total=end, initial=file.tell(), desc=path.name) as reading:
                shutil.copyfileobj(reading, file)
        if begun.stat().st_size != end:
            raise OSError(f"{path.name} broke off")
    except HTTPError as error:
        if error.code != 416:  # it had come to its end
            raise
    begun.rename(path)


def _unpack(archive: Path) -> None:
    """Unpack a zip file where it lies, into the folder of its name, which in it may have another."""
    with zipfile.ZipFile(archive) as file:
        tops = {name.partition("/")[0] for name in file.namelist()}
        file.extractall(archive.parent)
    target = archive.with_suffix("")
    if len(tops) == 1 and target.name not in tops:
        shutil.rmtree(target, ignore_errors=True)
        (archive.parent / tops.pop()).rename(target)


def _install(packages: Packages, source: str | None) -> None:
    wanted, into = ["--no-deps", *packages.requirements], sys.prefix
    if packages.into:
        into = str(cache_folder() / packages.into)
        wanted += ["--upgrade", "--target", into]
    if find_spec("pip") is None:
        raise OSError(f"no pip in {sys.executable}; type: uv pip install pip, then {_AGAIN}")
    ours = map(Requirement, metadata.requires(DISTRIBUTION) or [])
    needed = [f"{r.name}{r.specifier}" for r in ours if r.marker and r.marker.evaluate({"extra": packages.extra})]
    command = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-input"]
    if source:
        command += ["--index-url", source] if "://" in source else ["--no-index", "--find-links", source]
    print(f"{packages.title}: {', '.join((*needed, *packages.requirements))}\n  into {into}", flush=True)
    for words in filter(None, (needed, wanted)):
        if subprocess.run([*command, *words], stdin=subprocess.DEVNULL).returncode:
            raise OSError(f"pip could not install {packages.title}, it says why above; {_AGAIN}")
