"""RoboTwin's code and assets, neither of which is on PyPI: where they may lie, and an import without side effects.

Nothing of the checkout is changed. Its ``VectorEnv`` is not used: that describes one episode forever, ends episodes
late and retries whatever fails without an end.
"""

import contextlib
import glob
import importlib
import io
import os
import re
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from vla_common.plain import read_json
from vla_envs.folders import Checkout, Download, Source, check_installed, find_folder, import_checkout, list_places
from vla_envs.rendering.vulkan import choose_driver
from vla_envs.robotwin.planning import stand_ins

INSTALL = "pip install 'vla-torchrl[robotwin]'  (in a checkout of vla-torchrl: make setup)"
VERSIONS = {"sapien": "3.0.3", "toppra": "0.6.10"}  # whose physics, pixels and motions results belong to
_MODULES = {
    **{name: name for name in ("sapien", "toppra", "transforms3d", "trimesh", "h5py", "scipy", "imageio")},
    **{"cv2": "opencv-python", "yaml": "pyyaml"},
}
check_modules = partial(check_installed, "RoboTwin", _MODULES, VERSIONS, INSTALL)
_PACKS = ("robotwin", "robotwin/data", "robotwin/objects_standin")  # folders around assets/
_STANDIN = "STANDIN.json"  # in a folder that does not have the benchmark's own objects and arms
_PLACE = re.compile(r"\{([A-Za-z])\}")  # in a pattern of sentences
_GIVEN = re.compile(r"""["']\{([A-Z])\}["']: *(?:f?["']([^"'{}/]+)[/"'])?""")  # what a task's code puts in a place
_ARM = "the right arm"
_imported_assets: dict[str, str | None] = {}  # what this process has RoboTwin with: $ASSETS_PATH before that


def _inside(place: Path) -> str:
    return " (it is the folder around assets/ that is to be named)" if (place / "objects").is_dir() else ""


CHECKOUT = Checkout(
    name="RoboTwin",
    repository="RoboTwin-Platform/RoboTwin",
    commit="0008ae6800df9f75fc8de7098bacb01735fd8fd2",  # of the branch RLinf_support
    fetch="robotwin",
    about="code, MIT",
    variable="ROBOTWIN_PATH",
    pack="robotwin/RoboTwin",
    files=(
        *("envs/_base_task.py", "envs/_GLOBAL_CONFIGS.py", "envs/robot/robot.py", "envs/camera/camera.py"),
        *("envs/utils/create_actor.py", "envs/utils/rand_create_cluttered_actor.py"),
        "description/utils/generate_episode_instructions.py",
        *(f"task_config/{name}.yml" for name in ("demo_clean", "demo_randomized")),
        *(f"task_config/{name}.yml" for name in ("_camera_config", "_embodiment_config")),
    ),
    parts=("envs/**/*.py", "description/**/*.json", "description/utils/*.py", "task_config/*.yml"),
    digest="9ec6aa85ba7ae58980da5e0d8c22c1ad7be9ee74de72f834c55aae3f615da4d0",
    others=lambda: [Path.home() / ".cache" / "RoboTwin"],
    hint=_inside,
)


HOW_TO_FETCH = "python -m vla_envs fetch robotwin   (or export ASSETS_PATH=FOLDER, the one around assets/)"


def asset_places(assets_path: str | None = None, path: str | None = None) -> list[Path]:
    """List folders that may have ``assets/``, in order of looking; one that was named is alone."""
    if assets_path is not None:
        return [Path(assets_path).expanduser()]
    named = os.environ.get("ASSETS_PATH", "")
    if typed := _imported_assets.get(named, named):
        return [Path(typed).expanduser()]
    # First where RoboTwin's own script puts them.
    return [*CHECKOUT.places(path), *list_places(None, "", _PACKS)]


def find_assets(assets_path: str | None = None, path: str | None = None) -> Path:
    """Find the folder whose ``assets/`` has objects, arms and textures; :func:`asset_places` are looked through."""
    return find_folder("no assets of RoboTwin", asset_places(assets_path, path), missing_assets, HOW_TO_FETCH, _inside)


def missing_assets(
    folder: Path, tasks: Sequence[str] = (), arms: Sequence[str] = (), checkout: Path | None = None
) -> list[str]:
    """List what the folder around ``assets/`` lacks, also of arms, and of objects of a checkout's tasks."""
    names = ["objects/same.json", "objects/objaverse/list.json", "background_texture/unseen"]
    names += [f"embodiments/{arm}/config.yml" for arm in arms] or ["embodiments"]
    if checkout is not None:
        names += sorted({f"objects/{name}" for task in tasks for name in objects_of(checkout, task)})
    return [f"assets/{name}" for name in names if not (folder / "assets" / name).exists()]


ASSETS = Download(
    name="robotwin",
    title="RoboTwin's assets",
    about="objects, arms and textures",
    packs=(_PACKS[1], *_PACKS),
    sources=(
        Source(
            "TianxingChen/RoboTwin2.0",
            into="assets",
            archives=dict.fromkeys(("background_texture.zip", "embodiments.zip", "objects.zip"), ""),
        ),
    ),
    missing=missing_assets,
    places=asset_places,
    only=("assets", _STANDIN),
)


@cache
def objects_of(checkout: Path, task: str) -> tuple[str, ...]:
    """List the objects that the code of a task names."""
    file = checkout / "envs" / f"{task}.py"
    return tuple(re.findall(r"[\"'](\d{3}_[\w-]+)[\"']", file.read_text())) if file.is_file() else ()


@cache
def longest_sentences(checkout: Path, task: str, split: str) -> tuple[str, ...]:
    """Return the three longest sentences of a task, in characters: what a prompt has to have room for.

    They are RoboTwin's patterns (``"seen"`` or ``"unseen"``) with the longest name of any object that may be in a
    place: which one an episode has, objects and seed decide when it is set up.
    """
    file = checkout / "description" / "task_instruction" / f"{task}.json"
    if not file.is_file():
        return ()
    given: dict[str, set[str]] = {}
    for letter, what in _GIVEN.findall((checkout / "envs" / f"{task}.py").read_text()):
        given.setdefault(letter, set()).add(what)
    mentioned = objects_of(checkout, task)
    longest = {
        letter: max((_longest_name(checkout, text, split) for text in (given[letter] - {""}) or mentioned), key=len)
        for letter in given
    }
    sentences = {_PLACE.sub(lambda place: longest.get(place[1], _ARM), text) for text in read_json(file)[split]}
    return tuple(sorted(sentences, key=lambda text: (-len(text), text))[:3])


@cache
def _longest_name(checkout: Path, what: str, split: str) -> str:
    names = [what]
    for file in sorted((checkout / "description" / "objects_description" / what).glob("*.json")):
        described = read_json(file)
        names += (f"the {name}" for name in described.get(split) or described.get("seen", []))
    return max(names[1:] or names, key=len)


def describe_assets(assets_path: str | None = None, path: str | None = None) -> tuple[str, ...]:
    """Say whether the assets that would be used are stand-ins."""
    with contextlib.suppress(OSError, ValueError):
        if "standin" in read_json(find_assets(assets_path, path) / _STANDIN):
            return ("STAND-IN objects and arms: pictures, dynamics and success rates are of no benchmark",)
    return ()


def check_packages(
    path: str | None = None, assets_path: str | None = None, tasks: Sequence[str] = (), arms: Sequence[str] = ()
) -> None:
    """Check that everything is there, without importing it."""
    check_modules()
    checkout, assets = CHECKOUT.find(path), find_assets(assets_path, path)
    if missing := missing_assets(assets, tasks, arms, checkout):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise FileNotFoundError(f"{assets} lacks {missing[0]}{more}; type: {HOW_TO_FETCH}")


@dataclass(frozen=True)
class RoboTwin:
    """An imported checkout, the folder around ``assets/``, what it raises and what it writes sentences with."""

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


@cache
def import_robotwin(folder: Path, assets: Path) -> RoboTwin:
    """Import the checkout, whose packages are called ``envs`` and ``description``.

    It reads ``$ASSETS_PATH`` whenever it loads something, so that a process has one folder of assets.
    """
    if others := _imported_assets.keys() - {str(assets)}:
        raise ImportError(f"this process has RoboTwin with {others.pop()} already; start a new one for {assets}")
    _imported_assets.setdefault(str(assets), os.environ.get("ASSETS_PATH"))
    os.environ["ASSETS_PATH"] = str(assets)
    names = ["envs._base_task", "envs.utils.create_actor", "description.utils.generate_episode_instructions"]
    with _silence(), stand_ins():
        base, create, sentences = import_checkout(folder, names)
    base.torch = types.SimpleNamespace(manual_seed=lambda seed: None)  # type: ignore[attr-defined]  # its one use
    _patch_transforms3d()
    # Asked 200 times for each object that comes to rest.
    base.cal_quat_dis = _remembered(base.cal_quat_dis, 1024)  # type: ignore[attr-defined]
    return RoboTwin(folder, assets, create.UnStableError, sentences.generate_episode_descriptions)


def import_all() -> None:
    """Import what there is: SAPIEN, and the checkout if it and assets are there."""
    check_modules()
    choose_driver()
    try:
        folder, assets = CHECKOUT.find(), find_assets()
    except FileNotFoundError:
        importlib.import_module("sapien")
    else:
        import_robotwin(folder, assets)


def _sorted_files(pattern: str) -> list[str]:
    return sorted(glob.glob(pattern))


def _patch_transforms3d() -> None:
    """Have ``mat2euler`` take any matrix, and ``mat2quat`` remember, which is a third of the checks for success.

    transforms3d 0.4.2, the newest, asks numpy 2 for what it refuses unless a matrix is float64.
    """
    import transforms3d.euler as euler
    import transforms3d.quaternions as quaternions

    to_euler, to_quaternion = euler.mat2euler, quaternions.mat2quat
    if to_euler.__module__ == __name__:
        return

    def mat2euler(mat: Any, axes: str = "sxyz") -> Any:
        return to_euler(np.asarray(mat, np.float64), axes)

    known = _remembered(to_quaternion, 256)
    euler.mat2euler, quaternions.mat2quat = mat2euler, lambda M: known(M).copy()  # noqa: N803  its own name


def _remembered(function: Callable[..., Any], most: int) -> Callable[..., Any]:
    @lru_cache(maxsize=most)
    def known(*arrays: tuple[tuple[int, ...], str, bytes]) -> Any:
        return function(*(np.frombuffer(numbers, kind).reshape(shape) for shape, kind, numbers in arrays))

    def remembered(*arrays: Any) -> Any:
        return known(*((array.shape, array.dtype.str, array.tobytes()) for array in map(np.asarray, arrays)))

    return remembered


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield
