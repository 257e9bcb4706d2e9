"""What a benchmark needs of a machine: packages in some versions, checkouts of code, folders of assets."""

import hashlib
import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType


def check_installed(benchmark: str, modules: Mapping[str, str], versions: Mapping[str, str], install: str) -> None:
    """Refuse missing packages (pip's name by module) and other ``versions``; nothing is imported."""
    if missing := [name for module, name in modules.items() if find_spec(module) is None]:
        raise ModuleNotFoundError(f"{benchmark} needs {', '.join(missing)}, not installed; type: {install}")
    for name, wanted in versions.items():
        if (version := metadata.version(name)) != wanted:
            raise RuntimeError(
                f"{benchmark}'s episodes belong to {name} {wanted}, there is {version}; type: pip install "
                f"{name}=={wanted}"
            )


def list_places(path: str | None, variable: str, packs: Sequence[str] = (), others: Sequence[Path] = ()) -> list[Path]:
    """List folders to look in: alone the explicit one, or the one that a variable names.

    Otherwise ``packs`` in ``$VLA_TORCHRL_ASSETS``, then ``others``, then ``packs`` in :func:`cache_folder`.
    """
    if path is not None:
        return [Path(path).expanduser()]
    if named := os.environ.get(variable):
        return [Path(named).expanduser()]
    root = os.path.expanduser(os.environ.get("VLA_TORCHRL_ASSETS", ""))
    return [*(Path(root) / pack for pack in packs if root), *others, *(cache_folder() / pack for pack in packs)]


def cache_folder() -> Path:
    """Return the folder of what was fetched (:mod:`vla_envs.fetch`), unless ``$VLA_TORCHRL_ASSETS`` names another."""
    return Path.home() / ".cache" / "vla-torchrl"


def find_folder(
    heading: str,
    places: Sequence[Path],
    missing: Callable[[Path], Sequence[str]],
    remedy: str,
    hint: Callable[[Path], str] = lambda place: "",
) -> Path:
    """Return the first place that lacks nothing; if there is none, say what is wrong with each and what to type."""
    for place in places:
        if not missing(place):
            return place.resolve()

    def problem(place: Path) -> str:
        if not place.is_dir():
            return "no such folder"
        first, *others = missing(place)
        return f"incomplete, lacks {first}" + (f" and {len(others)} more" if others else "") + hint(place)

    looked = "\n".join(f"  {place}: {problem(place)}" for place in places)
    raise FileNotFoundError(f"{heading}. Looked in\n{looked}\n  Type: {remedy}")


def describe_stand_ins(find: Callable[[str | None], Path], assets: str | None = None) -> tuple[str, ...]:
    """Say whether the assets that would be used are stand-ins: then ``MANIFEST.md`` is in their folder."""
    with suppress(FileNotFoundError):
        if (find(assets) / "MANIFEST.md").is_file():
            return ("stand-ins for meshes and textures, as MANIFEST.md of the assets says",)  # on all machines the same
    return ()


@dataclass(frozen=True)
class Source:
    """Where files come from: a repository of GitHub at a commit, or a data set of the Hugging Face hub."""

    name: str  # owner/name
    commit: str = ""  # of the repository; a data set has none
    into: str = ""  # where they go, in the folder that is fetched
    archives: Mapping[str, str] = field(default_factory=dict)  # zip files, of which alone it consists; their SHA-256


@dataclass(frozen=True)
class Download:
    """A folder that ``python -m vla_envs fetch NAME`` brings (:mod:`vla_envs.fetch`)."""

    name: str  # that is typed; those of one name come together
    title: str  # for people
    about: str  # its size and licence, as far as they are known
    packs: tuple[str, ...]  # where it goes in the folder of all assets, then where else a mirror may have it
    sources: tuple[Source, ...]  # what it is put together from
    missing: Callable[[Path], Sequence[str]]  # what a folder lacks, or that its digest is wrong
    places: Callable[[], Sequence[Path]]  # where it is looked for
    only: tuple[str, ...] = ()  # names in it that belong to it; all if empty


@dataclass(frozen=True)
class Packages:
    """Packages that no extra can ask for, because they ask for too much; ``fetch`` installs them without that."""

    name: str  # that is typed
    title: str  # for people
    extra: str  # of ours, that has what they really need
    requirements: tuple[str, ...]
    into: str = ""  # a folder in cache_folder(), for data alone: nothing is imported from there


@dataclass(frozen=True)
class Checkout:
    """Code that is on no package index."""

    name: str
    repository: str  # owner/name on GitHub
    commit: str  # that results belong to
    fetch: str  # what to type behind python -m vla_envs fetch
    about: str  # its size and licence, as far as they are known
    variable: str  # of the environment, that names a folder
    pack: str  # where it is in $VLA_TORCHRL_ASSETS
    files: tuple[str, ...]  # that have to be there
    parts: tuple[str, ...]  # patterns of the files that episodes depend on
    digest: str  # their checksum at the commit
    others: Callable[[], Sequence[Path]] = tuple  # further places
    hint: Callable[[Path], str] = lambda place: ""  # what else is to be said of an incomplete one

    def places(self, path: str | None = None) -> list[Path]:
        """List folders that may be one, in order of looking; one that was named is alone."""
        return list_places(path, self.variable, [self.pack], self.others())

    def missing(self, folder: Path) -> list[str]:
        """List the files that a folder lacks."""
        return [name for name in self.files if not (folder / name).is_file()]

    def find(self, path: str | None = None) -> Path:
        """Find the first complete one of :meth:`places`."""
        remedy = f"python -m vla_envs fetch {self.fetch}   (or a clone elsewhere and export {self.variable}=FOLDER)"
        return find_folder(f"no checkout of {self.name}", self.places(path), self.missing, remedy, self.hint)

    @property
    def download(self) -> Download:
        """What there is to fetch: nothing but the commit."""

        def missing(folder: Path) -> list[str]:
            same = self.missing(folder) or digest_of(folder, self.parts) == self.digest
            return self.missing(folder) if same else [f"the files of commit {self.commit[:12]}, by their digest"]

        source = Source(self.repository, self.commit)
        return Download(self.fetch, self.name, self.about, (self.pack,), (source,), missing, self.places)

    def describe(self, path: str | None = None) -> tuple[str, ...]:
        """Say whether the one that would be used is of another commit, or edited."""
        with suppress(FileNotFoundError):
            folder = self.find(path)
            if _digest_of(folder, self.parts) != self.digest:
                return (f"{folder} is not {self.name} at {self.commit[:12]}",)
        return ()


def digest_of(folder: Path, parts: Sequence[str]) -> str:
    """Return a checksum of the files of some patterns; line ends do not count."""
    digest = hashlib.sha256()
    for part in parts:
        for file in sorted(folder.glob(part)):
            digest.update(file.relative_to(folder).as_posix().encode() + b"\0")
            digest.update(file.read_bytes().replace(b"\r\n", b"\n"))
    return digest.hexdigest()


_digest_of = cache(digest_of)


def import_checkout(folder: Path, names: Sequence[str]) -> list[ModuleType]:
    """Import modules of a checkout; ``ImportError`` if this process has had a package of that name from elsewhere."""
    sys.path.insert(0, str(folder))  # first: the current folder may have one of that name
    importlib.invalidate_caches()
    try:
        modules = [importlib.import_module(name) for name in names]
    finally:
        sys.path.remove(str(folder))
    for module in modules:
        if folder not in Path(str(module.__file__)).resolve().parents:
            package = module.__name__.partition(".")[0]
            raise ImportError(f"{package} was imported from {module.__file__}, not from {folder}; start a new process")
    return modules
