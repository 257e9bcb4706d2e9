"""Files that ManiSkill's tasks need beside its package: where they may lie, whether they are all there, who has them.

ManiSkill asks on the terminal whether it may download, and takes a folder for a finished download even if it is empty.
Here they are looked for before ManiSkill is asked.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

OBJECTS_SOURCE = "RLinf/maniskill_assets"  # a data set on the Hugging Face hub
ROBOT, SCENE, OBJECTS = "robots/widowx", "tasks/bridge_v2_real2sim_dataset", "carrot"
_ROBOT_MODEL = "wx250s.urdf"
_SCENE_FILES = ("stages/bridge_table_1_v1.glb",)
_MODELS = {"object": "more_carrot", "plate": "more_plate", "table": "more_table"}
_NUMBERS = {"object": 25, "plate": 17, "table": 21}
_VISUALS = ("textured.obj", "textured.dae", "textured.glb")  # the first that is there
_STAND_INS = "MANIFEST.md"
DOWNLOAD = (
    "python -m mani_skill.utils.download_asset -y widowx250s && python -m mani_skill.utils.download_asset -y "
    f"bridge_v2_real2sim && hf download --repo-type dataset {OBJECTS_SOURCE} --local-dir "
    '"${MS_ASSET_DIR:-$HOME/.maniskill}/data"'
)


def asset_places(assets: str | None = None) -> list[Path]:
    """List folders that may hold ``robots``, ``tasks`` and ``carrot``, in order of looking; an explicit one alone."""
    if assets is not None:
        return [Path(assets).expanduser()]
    places = []
    if root := os.environ.get("VLA_TORCHRL_ASSETS"):
        places.append(Path(root) / "maniskill")
    return [*places, own_folder()]


def own_folder() -> Path:
    """Return ManiSkill's own folder: ``$MS_ASSET_DIR/data``, or ``~/.maniskill/data``."""
    return Path(os.environ.get("MS_ASSET_DIR", Path.home() / ".maniskill")).expanduser() / "data"


def find_assets(assets: str | None = None) -> Path:
    """Find the folder of robot, scene, objects, plates and tables.

    Args:
        assets: an explicit path. Otherwise ``$VLA_TORCHRL_ASSETS/maniskill``, then ManiSkill's own folder.

    Raises:
        FileNotFoundError: there is none, or none is complete; says where was looked and what to type.
    """
    places = asset_places(assets)
    for place in places:
        if not missing_assets(place):
            return place
    looked = "\n".join(f"  {place}: {_problem(place)}" for place in places)
    raise FileNotFoundError(
        f"no plate-25 assets. Looked in:\n{looked}\n  Type: {DOWNLOAD}   (or name their folder: assets=FOLDER)"
    )


def missing_assets(folder: Path) -> list[str]:
    """List what a folder lacks: the names of files, of which an interrupted download has only some."""
    wanted = [f"{ROBOT}/{name}" for name in _robot_files(folder)] + [f"{SCENE}/{name}" for name in _SCENE_FILES]
    missing = [name for name in wanted if not _is_file(folder / name)]
    for kind, name in _MODELS.items():
        models = folder / OBJECTS / name
        try:
            table = json.loads((models / "model_db.json").read_text())
        except (OSError, ValueError):
            missing.append(f"{OBJECTS}/{name}/model_db.json")
            continue
        if len(table) != _NUMBERS[kind]:
            missing.append(f"{_NUMBERS[kind] - len(table)} entries of {OBJECTS}/{name}/model_db.json")
        for model, entry in table.items():
            if kind == "table":
                files = [models / "imgs" / model, models / "textures" / entry["texture"]]
            else:
                files = [models / model / "collision.obj", visual_file(models / model)]
            missing.extend(str(file.relative_to(folder)) for file in files if not _is_file(file))
    unfinished = [path for part in (OBJECTS, ".cache/huggingface") for path in folder.glob(f"{part}/**/*.incomplete")]
    return [*missing, *(f"all of {path.name}" for path in unfinished)]


def _robot_files(folder: Path) -> list[str]:
    """List the robot's description, and the meshes that it names."""
    model = folder / ROBOT / _ROBOT_MODEL
    meshes = re.findall(r'filename="([^"]+\.(?:stl|STL|dae|obj))"', model.read_text()) if model.is_file() else []
    return [_ROBOT_MODEL, *dict.fromkeys(meshes)]


def visual_file(model: Path) -> Path:
    """Find the mesh of a model with its textures; the last name that may be if there is none."""
    return next((model / name for name in _VISUALS if (model / name).is_file()), model / _VISUALS[-1])


def describe_assets(assets: str | None = None) -> tuple[str, ...]:
    """Say what differs from the benchmark in the assets that would be used: pixels of stand-ins."""
    found = _complete(assets)
    if found is None or not (found / _STAND_INS).is_file():
        return ()
    return (f"stand-ins for meshes and textures, as {_STAND_INS} of the assets says",)  # the same on all machines


@cache
def model_table(folder: Path, kind: str) -> tuple[dict[str, Any], ...]:
    """List the entries of ``model_db.json`` in their order, each with its ``folder`` added.

    Args:
        folder: of the assets.
        kind: ``"object"``, ``"plate"`` or ``"table"``.
    """
    models = folder / OBJECTS / _MODELS[kind]
    table = json.loads((models / "model_db.json").read_text())
    return tuple({**entry, "file": name, "folder": models} for name, entry in table.items())


def instruction(folder: Path, template: str, object: int, plate: int) -> str:
    """Fill in a template with the names of an object and a plate."""
    return template.format(
        object=model_table(folder, "object")[object]["name"], plate=model_table(folder, "plate")[plate]["name"]
    )


def list_instructions(
    assets: str | None, templates: Iterable[str], objects: Iterable[int], plates: Iterable[int]
) -> tuple[str, ...]:
    """List the sentences that templates make of the names of objects and plates; none as long as there are no assets.

    Args:
        assets: see :func:`find_assets`.
        templates: with ``{object}`` and ``{plate}``.
        objects: their numbers.
        plates: theirs.
    """
    folder = _complete(assets)
    if folder is None:
        return ()
    return tuple(instruction(folder, *parts) for parts in product(templates, objects, plates))


def _complete(assets: str | None) -> Path | None:
    return next((place for place in asset_places(assets) if not missing_assets(place)), None)


def _is_file(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > 0


def _problem(place: Path) -> str:
    if not place.is_dir():
        return "no such folder"
    missing = missing_assets(place)
    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    return f"incomplete, lacks {missing[0]}{more}; a download that was interrupted has to be started again"
