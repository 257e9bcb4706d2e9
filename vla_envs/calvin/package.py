"""The package calvin_env, which is not on PyPI: where a checkout of it may lie, and an import without side effects.

Its robot, scenes, cameras and task oracle are used as they are; its ``PlayTableSimEnv`` is not: it draws both cameras
at every step, and wants a git checkout, ``gym``, OpenCV and EGL.
"""

import contextlib
import ctypes
import importlib
import os
import sys
from collections.abc import Iterator
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote

from vla_envs.calvin.scenes import BLOCKS, SCENES
from vla_envs.folders import Checkout, check_installed, import_checkout

INSTALL = "make setup  (or: pip install 'vla-torchrl[calvin]')"
_VERSIONS = {"pybullet": "3.2.7"}  # whose physics and renderer results belong to
_MODULES = {"pybullet": "pybullet", "quaternion": "numpy-quaternion", "git": "gitpython", "scipy": "scipy"}
_check_modules = partial(check_installed, "CALVIN", _MODULES, _VERSIONS, INSTALL)
_FILES = (
    *(f"calvin_env/robot/{name}.py" for name in ("robot", "mixed_ik")),
    *("calvin_env/scene/play_table_scene.py", "calvin_env/envs/tasks.py", "calvin_env/utils/utils.py"),
    *(f"calvin_env/camera/{name}_camera.py" for name in ("static", "gripper")),
    *(f"conf/scene/calvin_scene_{scene}.yaml" for scene in SCENES),
    *(f"conf/cameras/cameras/{name}.yaml" for name in ("static", "gripper")),
    *("conf/tasks/new_playtable_tasks.yaml", "conf/robot/panda.yaml", "conf/robot/panda_longer_finger.yaml"),
    *(f"data/calvin_table_{scene}/urdf/calvin_table_{scene}.urdf" for scene in SCENES),
    *(f"data/blocks/block_{color}_{size}.urdf" for color in BLOCKS for size in ("small", "middle", "big")),
    *("data/plane/plane.urdf", "data/franka_panda/panda_longer_finger.urdf"),
)


def _other_places() -> list[Path]:
    files = ""
    with contextlib.suppress(metadata.PackageNotFoundError):
        files = metadata.distribution("calvin_env").read_text("direct_url.json") or ""
    url = files.partition('"file://')[2].partition('"')[0]
    return [*([Path(unquote(url))] if url else []), Path.home() / ".cache" / "calvin_env"]


CHECKOUT = Checkout(
    name="calvin_env",
    repository="mees/calvin_env",
    commit="797142c588c21e76717268b7b430958dbd13bf48",
    fetch="calvin",
    about="30 MB, MIT",
    variable="CALVIN_ENV_PATH",
    pack="calvin/calvin_env",
    files=_FILES,
    parts=_FILES,
    digest="e127e3823796996026a3ed8ab68ab5e38fc6af9e6fef25c15f30e40b8566da53",
    others=_other_places,
)


def check_packages(path: str | None = None) -> None:
    """Check that everything is there, without importing it."""
    _check_modules()
    CHECKOUT.find(path)


def import_pybullet() -> Any:
    """Import PyBullet, which announces its build on the standard error."""
    with silence():
        return importlib.import_module("pybullet")


@cache
def import_calvin(folder: Path) -> SimpleNamespace:
    """Import the modules of calvin_env that are used from the folder of a checkout."""
    import_pybullet()
    os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")  # GitPython is imported, git is not needed
    names = ["robot.robot", "robot.mixed_ik", "scene.play_table_scene"]
    names += ["camera.static_camera", "camera.gripper_camera", "envs.tasks"]
    modules = import_checkout(folder, [f"calvin_env.{name}" for name in names])
    return SimpleNamespace(**{module.__name__.rpartition(".")[2]: module for module in modules})


def import_all() -> None:
    """Import what there is: PyBullet, and the parts of calvin_env if there is a checkout."""
    _check_modules()
    try:
        folder = CHECKOUT.find()
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
    """Write what Python and the C library have buffered, before the outputs lead to another place."""
    for output in (sys.stdout, sys.stderr):
        if output is not None:
            output.flush()
    ctypes.CDLL(None).fflush(None)
