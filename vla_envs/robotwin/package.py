"""RoboTwin's code and assets, neither of which is on PyPI: where they may lie, and an import without side effects.

Nothing of the checkout is changed. Its tasks are used; its ``VectorEnv`` is not: that describes one episode for ever,
ends episodes late and retries whatever fails without an end.
"""

from __future__ import annotations

import contextlib
import copy
import glob
import hashlib
import importlib
import io
import json
import os
import re
import shlex
import sys
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from vla_envs.folders import find_folder, list_places
from vla_envs.robotwin.planning import stand_ins

COMMIT = "0008ae6800df9f75fc8de7098bacb01735fd8fd2"
BRANCH = "RLinf_support"
REPOSITORY = "https://github.com/RoboTwin-Platform/RoboTwin.git"
ASSETS_REPOSITORY = "TianxingChen/RoboTwin2.0"  # a data set on the Hugging Face hub
VERSIONS = {"sapien": "3.0.3", "toppra": "0.6.10"}  # whose physics, pixels and motions results belong to
_MODULES = {
    "sapien": "sapien",
    "toppra": "toppra",
    "transforms3d": "transforms3d",
    "trimesh": "trimesh",
    "cv2": "opencv-python",
    "h5py": "h5py",
    "scipy": "scipy",
    "imageio": "imageio",
    "yaml": "pyyaml",
}
INSTALL = "pip install 'vla-torchrl[robotwin]'  (in a checkout of vla-torchrl: make setup)"
CLONE = (
    f"git clone -b {BRANCH} {REPOSITORY} ~/.cache/RoboTwin && git -C ~/.cache/RoboTwin checkout {COMMIT[:12]}   "
    "(or a clone elsewhere and export ROBOTWIN_PATH=FOLDER)"
)
_FILES = (
    *("envs/_base_task.py", "envs/_GLOBAL_CONFIGS.py", "envs/robot/robot.py", "envs/camera/camera.py"),
    *("envs/utils/create_actor.py", "envs/utils/rand_create_cluttered_actor.py"),
    "description/utils/generate_episode_instructions.py",
    *(f"task_config/{name}.yml" for name in ("demo_clean", "demo_randomized", "_camera_config", "_embodiment_config")),
)
_PARTS = ("envs/**/*.py", "description/**/*.json", "description/utils/*.py", "task_config/*.yml")
_DIGEST = "9ec6aa85ba7ae58980da5e0d8c22c1ad7be9ee74de72f834c55aae3f615da4d0"  # of these at COMMIT
_STANDIN = "STANDIN.json"  # in a folder that does not have the benchmark's own objects and arms


def package_places(path: str | None = None) -> list[Path]:
    """List folders that may be a checkout of RoboTwin, in order of looking; one that was named is alone."""
    return list_places(path, "ROBOTWIN_PATH", ["robotwin/RoboTwin"], [Path.home() / ".cache" / "RoboTwin"])


def find_package(path: str | None = None) -> Path:
    """Find the folder with ``envs/``, ``description/`` and ``task_config/``.

    Args:
        path: an explicit one. Otherwise ``$ROBOTWIN_PATH``; where that is not set, the first of these that is complete:
            ``$VLA_TORCHRL_ASSETS/robotwin/RoboTwin``, ``~/.cache/RoboTwin``.

    Raises:
        FileNotFoundError: there is none; says where was looked and what to type.
    """
    return find_folder("no checkout of RoboTwin", package_places(path), missing_files, CLONE, _inside)


def asset_places(assets_path: str | None = None, path: str | None = None) -> list[Path]:
    """List folders that may have ``assets/``, in order of looking; one that was named is alone."""
    if assets_path is not None:
        return [Path(assets_path).expanduser()]
    if (named := os.environ.get("ASSETS_PATH")) and named != _Own.assets_path:
        return [Path(named).expanduser()]
    places = package_places(path)  # where RoboTwin's own script puts them
    if root := os.environ.get("VLA_TORCHRL_ASSETS"):
        places += [Path(root) / "robotwin", Path(root) / "robotwin" / "objects_standin"]
    return places


def find_assets(assets_path: str | None = None, path: str | None = None) -> Path:
    """Find the folder whose ``assets/`` has objects, arms and textures.

    Args:
        assets_path: an explicit one. Otherwise ``$ASSETS_PATH``; where that is not set, the first of these that is
            complete: the checkout, ``$VLA_TORCHRL_ASSETS/robotwin``, ``$VLA_TORCHRL_ASSETS/robotwin/objects_standin``.
        path: a checkout, see :func:`find_package`.

    Raises:
        FileNotFoundError: there is none; says where was looked and what to type.
    """
    return find_folder(
        "no assets of RoboTwin", asset_places(assets_path, path), missing_assets, how_to_download(path), _inside
    )


def how_to_download(path: str | None = None) -> str:
    """Say how to get the assets, into the checkout that would be used."""
    folder = "~/.cache/RoboTwin"
    with contextlib.suppress(FileNotFoundError):
        folder = shlex.quote(str(find_package(path)))
    return (
        f"cd {folder} && bash script/_download_assets.sh   (or unpack background_texture.zip, embodiments.zip and "
        f"objects.zip of the data set {ASSETS_REPOSITORY} into FOLDER/assets and export ASSETS_PATH=FOLDER)"
    )


def _inside(place: Path) -> str:
    return " (it is the folder around assets/ that is to be named)" if (place / "objects").is_dir() else ""


def missing_files(folder: Path) -> list[str]:
    """List what a checkout lacks."""
    return [name for name in _FILES if not (folder / name).is_file()]


def missing_assets(
    folder: Path, tasks: Sequence[str] = (), arms: Sequence[str] = (), checkout: Path | None = None
) -> list[str]:
    """List what a folder of assets lacks.

    Args:
        folder: the one with ``assets/``.
        tasks: whose objects have to be there.
        arms: that have to be there, such as ``"piper"``.
        checkout: has the tasks.
    """
    names = ["objects/same.json", "objects/objaverse/list.json", "background_texture/unseen"]
    names += [f"embodiments/{arm}/config.yml" for arm in arms] or ["embodiments"]
    if checkout is not None:
        objects = {name for task in tasks for name in objects_of(checkout, task)}
        names += [f"objects/{name}" for name in sorted(objects)]
    return [f"assets/{name}" for name in names if not (folder / "assets" / name).exists()]


@cache
def objects_of(checkout: Path, task: str) -> tuple[str, ...]:
    """List the objects that the code of a task names."""
    file = checkout / "envs" / f"{task}.py"
    return tuple(re.findall(r"[\"'](\d{3}_[\w-]+)[\"']", file.read_text())) if file.is_file() else ()


@cache
def is_pinned(folder: Path) -> bool:
    """Tell whether a complete checkout is that of :data:`COMMIT`, as far as episodes depend on it."""
    return digest_of(folder) == _DIGEST


def digest_of(folder: Path) -> str:
    """Return a checksum of what episodes depend on in a checkout."""
    digest = hashlib.sha256()
    for pattern in _PARTS:
        for file in sorted(folder.glob(pattern)):
            digest.update(file.relative_to(folder).as_posix().encode() + b"\0")
            digest.update(file.read_bytes().replace(b"\r\n", b"\n"))
    return digest.hexdigest()


def describe_package(path: str | None = None, assets_path: str | None = None) -> tuple[str, ...]:
    """Say what differs from the benchmark in assets and checkout that would be used; stand-ins come first."""
    return (*describe_assets(assets_path, path), *describe_code(path))


def describe_assets(assets_path: str | None = None, path: str | None = None) -> tuple[str, ...]:
    """Say whether the assets that would be used are stand-ins."""
    with contextlib.suppress(FileNotFoundError):
        if is_standin(find_assets(assets_path, path)):
            return ("STAND-IN objects and arms: pictures, dynamics and success rates are of no benchmark",)
    return ()


def describe_code(path: str | None = None) -> tuple[str, ...]:
    """Say whether the checkout that would be used is another commit, or edited."""
    with contextlib.suppress(FileNotFoundError):
        folder = find_package(path)
        if not is_pinned(folder):
            return (f"{folder} is not RoboTwin at {COMMIT[:12]}",)
    return ()


def is_standin(assets: Path) -> bool:
    """Tell whether a folder of assets says of itself that it is not the benchmark's."""
    with contextlib.suppress(OSError, ValueError):
        return "standin" in json.loads((assets / _STANDIN).read_text())
    return False


def check_packages(
    path: str | None = None, assets_path: str | None = None, tasks: Sequence[str] = (), arms: Sequence[str] = ()
) -> None:
    """Check that everything is there, without importing it.

    Raises:
        ModuleNotFoundError: a package from PyPI is missing.
        RuntimeError: one that decides results is of another version.
        FileNotFoundError: there is no checkout, or no assets, or not all that these tasks and arms need.
    """
    check_modules()
    checkout, assets = find_package(path), find_assets(assets_path, path)
    if missing := missing_assets(assets, tasks, arms, checkout):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise FileNotFoundError(f"{assets} lacks {missing[0]}{more}; type: {how_to_download(path)}")


def check_modules() -> None:
    """Check that the packages from PyPI are there, without importing them.

    Raises:
        ModuleNotFoundError: one is missing.
        RuntimeError: one that decides results is of another version.
    """
    missing = [name for module, name in _MODULES.items() if find_spec(module) is None]
    if missing:
        raise ModuleNotFoundError(f"RoboTwin needs {', '.join(missing)}, not installed; type: {INSTALL}")
    for name, wanted in VERSIONS.items():
        if (version := metadata.version(name)) != wanted:
            raise RuntimeError(
                f"RoboTwin's episodes belong to {name} {wanted}, there is {version}; type: pip install {name}=={wanted}"
            )


@dataclass(frozen=True)
class RoboTwin:
    """An imported checkout.

    Attributes:
        folder: of the checkout.
        assets: the folder around ``assets/``.
        UnStableError: what a task raises whose objects do not come to rest.
        describe: writes the sentences of an episode.
    """

    folder: Path
    assets: Path
    UnStableError: type[Exception]
    describe: Any

    def task(self, name: str) -> Any:
        """Import the class of a task."""
        with _silence(), stand_ins():
            module = importlib.import_module(f"envs.{name}")
        if getattr(module, "glob", None) is glob:
            # The order of a folder is the file system's. The same seed has to mean the same object everywhere.
            module.glob = types.SimpleNamespace(glob=_sorted_files)  # type: ignore[attr-defined]
        return getattr(module, name)


class _Own:
    """What this process has imported."""

    assets_path: str | None = None


@cache
def import_robotwin(folder: Path, assets: Path) -> RoboTwin:
    """Import the checkout.

    Its packages are called ``envs`` and ``description``. It reads ``$ASSETS_PATH`` while it is imported and whenever it
    loads something, so that a process has one folder of assets.

    Args:
        folder: of :func:`find_package`.
        assets: of :func:`find_assets`.

    Raises:
        ImportError: other packages of these names, or other assets, are in use in this process.
    """
    if _Own.assets_path not in (None, str(assets)):
        raise ImportError(f"this process has RoboTwin with {_Own.assets_path} already; start a new one for {assets}")
    os.environ["ASSETS_PATH"] = _Own.assets_path = str(assets)
    sys.path.insert(0, str(folder))  # first: the current folder may have an envs, too
    importlib.invalidate_caches()
    try:
        with _silence(), stand_ins():
            base, create, camera = (
                importlib.import_module(f"envs.{name}")
                for name in ("_base_task", "utils.create_actor", "camera.camera")
            )
            sentences = importlib.import_module("description.utils.generate_episode_instructions")
    finally:
        sys.path.remove(str(folder))
    for module in (base, sentences):
        if folder not in Path(str(module.__file__)).resolve().parents:
            raise ImportError(
                f"{module.__name__.partition('.')[0]} was imported from {module.__file__}, not from {folder}; start a "
                "new process"
            )
    base.torch = types.SimpleNamespace(manual_seed=lambda seed: None)  # type: ignore[attr-defined]  # its one use
    _mend_transforms3d()
    base.cal_quat_dis = _remember_distances(base.cal_quat_dis)  # type: ignore[attr-defined]
    for module in (base, camera):
        module.yaml = _RememberedFiles  # type: ignore[attr-defined]
    return RoboTwin(folder, assets, create.UnStableError, sentences.generate_episode_descriptions)


def import_all() -> None:
    """Import what there is: SAPIEN, and the checkout if it and assets are there.

    Raises:
        ImportError, RuntimeError: see :func:`check_modules` and :func:`import_robotwin`.
    """
    from vla_envs.rendering.vulkan import choose_driver

    check_modules()
    choose_driver()
    try:
        folder, assets = find_package(), find_assets()
    except FileNotFoundError:
        importlib.import_module("sapien")
    else:
        import_robotwin(folder, assets)


def _sorted_files(pattern: str) -> list[str]:
    return sorted(glob.glob(pattern))


def _mend_transforms3d() -> None:
    """Have ``mat2euler`` take any matrix, and ``mat2quat`` know those that it has been asked for before.

    transforms3d 0.4.2, the newest, asks numpy 2 for what it refuses unless a matrix is float64. Success is checked at
    each physics step, mostly of objects that lie still, and the eigenvectors of their rotations are a third of that.
    """
    import transforms3d.euler as euler
    import transforms3d.quaternions as quaternions

    to_euler, to_quaternion = euler.mat2euler, quaternions.mat2quat
    if to_euler.__module__ == __name__:
        return

    def mat2euler(mat: Any, axes: str = "sxyz") -> Any:
        return to_euler(np.asarray(mat, np.float64), axes)

    @lru_cache(maxsize=256)
    def known(shape: tuple[int, ...], kind: str, numbers: bytes) -> Any:
        return to_quaternion(np.frombuffer(numbers, kind).reshape(shape))

    def mat2quat(M: Any) -> Any:  # noqa: N803  transforms3d calls it so
        matrix = np.asarray(M)
        return known(matrix.shape, matrix.dtype.str, matrix.tobytes()).copy()

    euler.mat2euler, quaternions.mat2quat = mat2euler, mat2quat


def _remember_distances(distance: Any) -> Any:
    """Have ``cal_quat_dis`` know what it was asked before: 200 times for each object that comes to rest."""

    @lru_cache(maxsize=1024)
    def known(first: tuple[bytes, str], second: tuple[bytes, str]) -> Any:
        return distance(*(np.frombuffer(numbers, kind) for numbers, kind in (first, second)))

    def cal_quat_dis(quat1: Any, quat2: Any) -> Any:
        first, second = np.asarray(quat1), np.asarray(quat2)
        return known((first.tobytes(), first.dtype.str), (second.tobytes(), second.dtype.str))

    return cal_quat_dis


class _RememberedFiles:
    """Stands for yaml in a module of RoboTwin's that reads the same file in each reset."""

    FullLoader = yaml.FullLoader

    @staticmethod
    def load(text: str, Loader: Any) -> Any:  # noqa: N803  yaml calls it so
        """Read as yaml does, and at the second time as a copy of what was read at the first."""
        return copy.deepcopy(_read(text, Loader))

    @staticmethod
    def safe_load(file: Any) -> Any:
        """Read an open file likewise."""
        return copy.deepcopy(_read(file.read(), yaml.SafeLoader))


@lru_cache(maxsize=16)
def _read(text: str, loader: Any) -> Any:
    return yaml.load(text, Loader=loader)


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Swallow what RoboTwin prints about packages that it can do without."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield
