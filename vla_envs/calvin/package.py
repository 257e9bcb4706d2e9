"""The package calvin_env, which is not on PyPI: where a checkout of it may lie, and an import without side effects.

Of the package the robot, the scenes, the cameras and the task oracle are used, as they are; its ``PlayTableSimEnv`` is
not: it draws both cameras at every step, wants a git checkout, ``gym``, OpenCV and EGL.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vla_envs.folders import find_folder, list_places

COMMIT = "797142c588c21e76717268b7b430958dbd13bf48"
REPOSITORY = "https://github.com/mees/calvin_env"
VERSIONS = {"pybullet": "3.2.7"}  # whose physics and renderer results belong to
_MODULES = {"pybullet": "pybullet", "quaternion": "numpy-quaternion", "git": "gitpython", "scipy": "scipy"}
INSTALL = "make setup  (or: pip install 'vla-torchrl[calvin]')"
CLONE = (
    f"git clone {REPOSITORY} ~/.cache/calvin_env && git -C ~/.cache/calvin_env checkout {COMMIT[:12]}   "
    "(or a clone elsewhere and export CALVIN_ENV_PATH=FOLDER)"
)
_FILES = (
    *(f"calvin_env/robot/{name}.py" for name in ("robot", "mixed_ik")),
    *("calvin_env/scene/play_table_scene.py", "calvin_env/envs/tasks.py", "calvin_env/utils/utils.py"),
    *(f"calvin_env/camera/{name}_camera.py" for name in ("static", "gripper")),
    *(f"conf/scene/calvin_scene_{scene}.yaml" for scene in "ABCD"),
    *(f"conf/cameras/cameras/{name}.yaml" for name in ("static", "gripper")),
    *("conf/tasks/new_playtable_tasks.yaml", "conf/robot/panda.yaml", "conf/robot/panda_longer_finger.yaml"),
    *(f"data/calvin_table_{scene}/urdf/calvin_table_{scene}.urdf" for scene in "ABCD"),
    *(
        f"data/blocks/block_{color}_{size}.urdf"
        for color in ("red", "blue", "pink")
        for size in ("small", "middle", "big")
    ),
    *("data/plane/plane.urdf", "data/franka_panda/panda_longer_finger.urdf"),
)
_DIGEST = "6eae733562191a4abb597e6aaf1bc967065758385519c3702879a6db173c0dad"  # of these files at COMMIT


def package_places(path: str | None = None) -> list[Path]:
    """List folders that may be a checkout of calvin_env, in order of looking; one that was named is alone."""
    others = [*_installed(), Path.home() / ".cache" / "calvin_env"]
    return list_places(path, "CALVIN_ENV_PATH", ["calvin/calvin_env"], others)


def find_package(path: str | None = None) -> Path:
    """Find the folder with ``calvin_env/``, ``conf/`` and ``data/``.

    Args:
        path: an explicit one. Otherwise ``$CALVIN_ENV_PATH``; where that is not set, the first of these that is
            complete: ``$VLA_TORCHRL_ASSETS/calvin/calvin_env``, an editable installation, ``~/.cache/calvin_env``.

    Raises:
        FileNotFoundError: there is none; says where was looked and what to type.
    """
    return find_folder("no checkout of calvin_env", package_places(path), missing_files, CLONE)


def missing_files(folder: Path) -> list[str]:
    """List what a checkout lacks."""
    return [name for name in _FILES if not (folder / name).is_file()]


@cache
def is_pinned(folder: Path) -> bool:
    """Tell whether a complete checkout is that of :data:`COMMIT`, as far as episodes depend on it."""
    digest = hashlib.sha256()
    for name in _FILES:
        digest.update((folder / name).read_bytes().replace(b"\r\n", b"\n"))
    return digest.hexdigest() == _DIGEST


def describe_package(path: str | None = None) -> tuple[str, ...]:
    """Say what differs from the benchmark in the checkout that would be used: another commit, or edited files."""
    try:
        folder = find_package(path)
    except FileNotFoundError:
        return ()
    return () if is_pinned(folder) else (f"{folder} is not calvin_env at {COMMIT[:12]}",)


def check_packages(path: str | None = None) -> None:
    """Check that everything is there, without importing it.

    Raises:
        ModuleNotFoundError: a package from PyPI is missing.
        RuntimeError: PyBullet is of another version.
        FileNotFoundError: there is no checkout of calvin_env.
    """
    check_modules()
    find_package(path)


def check_modules() -> None:
    """Check that the packages from PyPI are there, without importing them.

    Raises:
        ModuleNotFoundError: one is missing.
        RuntimeError: PyBullet is of another version.
    """
    missing = [name for module, name in _MODULES.items() if find_spec(module) is None]
    if missing:
        raise ModuleNotFoundError(f"CALVIN needs {', '.join(missing)}, not installed; type: {INSTALL}")
    version = metadata.version("pybullet")
    if version != VERSIONS["pybullet"]:
        raise RuntimeError(
            f"CALVIN's episodes belong to PyBullet {VERSIONS['pybullet']}, there is {version}; type: "
            f"pip install pybullet=={VERSIONS['pybullet']}"
        )


def import_pybullet() -> Any:
    """Import PyBullet, which announces its build on the standard error."""
    with silence():
        return importlib.import_module("pybullet")


@dataclass(frozen=True)
class Calvin:
    """The parts of calvin_env that are used.

    Attributes:
        Robot, PlayTableScene, StaticCamera, GripperCamera, Tasks: its classes.
        modules: those that call PyBullet by the name ``p``.
    """

    Robot: Any
    PlayTableScene: Any
    StaticCamera: Any
    GripperCamera: Any
    Tasks: Any
    modules: tuple[Any, ...]

    def use(self, client: Any) -> None:
        """Let everything that is called next work in the world of a client of PyBullet.

        calvin_env forgets in places to say which world it means, and then means the first one of the process.
        """
        for module in self.modules:
            module.p = client


@cache
def import_calvin(folder: Path) -> Calvin:
    """Import the parts of calvin_env that are used.

    Args:
        folder: of :func:`find_package`.

    Raises:
        ImportError: another folder of that name has been imported in this process.
    """
    import_pybullet()
    os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")  # GitPython is imported, git is not needed
    sys.path.insert(0, str(folder))  # first: the current folder may have one of that name
    importlib.invalidate_caches()
    try:
        package = importlib.import_module("calvin_env")
        names = ("robot.robot", "scene.play_table_scene", "camera.static_camera", "camera.gripper_camera", "envs.tasks")
        robot, scene, static, gripper, tasks = (importlib.import_module(f"calvin_env.{name}") for name in names)
        mixed_ik = importlib.import_module("calvin_env.robot.mixed_ik")
    finally:
        sys.path.remove(str(folder))
    found = Path(next(iter(package.__path__))).resolve().parent
    if found != folder:
        raise ImportError(f"calvin_env was imported from {found} already, not from {folder}; start a new process")
    return Calvin(
        Robot=robot.Robot,
        PlayTableScene=scene.PlayTableScene,
        StaticCamera=static.StaticCamera,
        GripperCamera=gripper.GripperCamera,
        Tasks=tasks.Tasks,
        modules=(robot, mixed_ik, static, gripper),
    )


def import_all() -> None:
    """Import what there is: PyBullet, and the parts of calvin_env if there is a checkout.

    Raises:
        ImportError, RuntimeError: see :func:`check_modules` and :func:`import_calvin`.
    """
    check_modules()
    try:
        folder = find_package()
    except FileNotFoundError:
        import_pybullet()
    else:
        import_calvin(folder)


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Keep what PyBullet and its renderers write to the outputs of the process from being seen; exceptions pass."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    _flush()
    kept: dict[int, int] = {}
    for number in (1, 2):
        with contextlib.suppress(OSError):  # it is closed
            kept[number] = os.dup(number)
            os.dup2(nowhere, number)
    os.close(nowhere)
    try:
        yield
    finally:
        _flush()
        for number, output in kept.items():
            os.dup2(output, number)
            os.close(output)


def _flush() -> None:
    """Write what Python and the C library hold back, which would go to wherever the outputs lead by then."""
    for output in (sys.stdout, sys.stderr):
        if output is not None:
            output.flush()
    ctypes.CDLL(None).fflush(None)


def _installed() -> list[Path]:
    """Find an editable installation; what merely lies in the current folder is none."""
    try:
        files = metadata.distribution("calvin_env").read_text("direct_url.json") or ""
    except metadata.PackageNotFoundError:
        return []
    url = files.partition('"file://')[2].partition('"')[0]
    return [Path(url)] if url else []
