"""The four scenes as calvin_env describes them, and what is fixed in them.

Conditions and task oracle take the blocks for red, blue and pink, in this order; upstream has another order in scenes A
and C, so that a chain about the red block begins with another one in its place. The places in the sliding cabinet are
those of A and D; in B and C its floor lies 18 cm further to the right. In B the button is at a place for blocks.
"""

from pathlib import Path
from typing import Any

SCENES = ("A", "B", "C", "D")
BLOCKS = ("red", "blue", "pink")
# Where the cabinet's floor is, relative to scene D, metres: the origin of plank_link in the URDF, times the scale 0.8.
CABINET_SHIFT = {"A": 0.0, "B": 0.18, "C": 0.18, "D": 0.0}
# Of the right one of the two places on the table, metres: in B the button is there, on which a block would lie, and
# calvin_env's oracle then never sees it pushed (it must touch at the end what it touched in the beginning).
TABLE_SHIFT = {"A": 0.0, "B": -0.03, "C": 0.0, "D": 0.0}
DRAWER_PLACE = {  # of a block that lies in the open drawer, m
    scene: (x, -0.23, 0.362) for scene, x in {"A": 0.10, "B": 0.18, "C": 0.10, "D": 0.18}.items()
}
FIXES = {  # what is fixed, for protocol_deviations
    "A": "blocks in the order red, blue, pink (upstream: pink, blue, red)",
    "B": "places in the cabinet 18 cm further to the right, where its floor is, and one on the table 3 cm further to "
    "the left, off the button",
    "C": "blocks in the order red, blue, pink (upstream: blue, red, pink), places in the cabinet 18 cm further to the "
    "right, where its floor is",
}


def read_scene(folder: Path, scene: str, fixes: bool) -> Any:
    """Read the keyword arguments of ``PlayTableScene``; ``fixes``: with the blocks in the conditions' order."""
    from omegaconf import OmegaConf

    configuration = OmegaConf.load(folder / "conf" / "scene" / f"calvin_scene_{scene}.yaml")
    configuration.data_path, configuration.euler_obs = str(folder / "data"), True  # they refer to what is not here
    if fixes:
        blocks = configuration.objects.movable_objects
        configuration.objects.movable_objects = {f"block_{name}": blocks[f"block_{name}"] for name in BLOCKS}
    return {str(name): value for name, value in configuration.items() if not str(name).startswith("_")}


def read_robot(folder: Path, scene: Any) -> dict[str, Any]:
    """Read the keyword arguments of ``Robot``, a Panda with longer fingers, as it stands in a scene."""
    robot = read_arguments(folder, "robot/panda") | read_arguments(folder, "robot/panda_longer_finger")
    return robot | {
        place: list(scene[f"robot_{place}"])
        for place in ("base_position", "base_orientation", "initial_joint_positions")
    }


def read_arguments(folder: Path, name: str) -> dict[str, Any]:
    """Read a file of ``conf/``, such as ``"cameras/cameras/static"``: keyword arguments of what it describes."""
    from omegaconf import OmegaConf

    settings = OmegaConf.to_container(OmegaConf.load(folder / "conf" / f"{name}.yaml"))
    assert isinstance(settings, dict)
    return {str(key): value for key, value in settings.items() if key not in ("_target_", "defaults")}
