"""The four scenes as calvin_env describes them, and what is mended in them.

Initial conditions and the task oracle take the blocks for red, blue and pink, in this order. Upstream lists them in
another one in scenes A (pink, blue, red) and C (blue, red, pink), so that a chain about the red block begins with
another block in its place. And the places of a block in the sliding cabinet are those of scenes A and D; in B and C
the cabinet's floor lies 18 cm further to the right, and the block falls off it. In B the button is at one of the two
places on the table.
"""

from __future__ import annotations

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
FIXES = {  # what is mended, for protocol_deviations
    "A": "blocks in the order red, blue, pink (upstream: pink, blue, red)",
    "B": "places in the cabinet 18 cm further to the right, where its floor is, and one on the table 3 cm further to "
    "the left, off the button",
    "C": "blocks in the order red, blue, pink (upstream: blue, red, pink), places in the cabinet 18 cm further to the "
    "right, where its floor is",
}


def describe_fixes(scenes: str) -> tuple[str, ...]:
    """Say what is mended in some scenes."""
    return tuple(f"scene {scene} mended: {FIXES[scene]}" for scene in scenes if scene in FIXES)


def read_scene(folder: Path, scene: str, fixes: bool) -> Any:
    """Read the description of a scene.

    Args:
        folder: of calvin_env.
        scene: its letter.
        fixes: list the blocks in the order that initial conditions assume.

    Returns:
        A configuration of OmegaConf: the keyword arguments of ``PlayTableScene``.
    """
    from omegaconf import OmegaConf

    configuration = OmegaConf.load(folder / "conf" / "scene" / f"calvin_scene_{scene}.yaml")
    configuration.data_path, configuration.euler_obs = str(folder / "data"), True  # they refer to what is not here
    if fixes:
        blocks = configuration.objects.movable_objects
        configuration.objects.movable_objects = {f"block_{name}": blocks[f"block_{name}"] for name in BLOCKS}
    return {str(name): value for name, value in configuration.items() if not str(name).startswith("_")}


def read_robot(folder: Path, scene: Any) -> dict[str, Any]:
    """Read the description of the robot, a Panda with longer fingers, as it stands in a scene.

    Args:
        folder: of calvin_env.
        scene: of :func:`read_scene`.

    Returns:
        The keyword arguments of ``Robot``.
    """
    from omegaconf import OmegaConf

    robots = folder / "conf" / "robot"
    robot: dict[str, Any] = {}
    for name in ("panda", "panda_longer_finger"):
        settings = OmegaConf.to_container(OmegaConf.load(robots / f"{name}.yaml"))
        assert isinstance(settings, dict)
        robot |= {str(key): value for key, value in settings.items()}
    for place in ("base_position", "base_orientation", "initial_joint_positions"):
        robot[place] = list(scene[f"robot_{place}"])
    return {name: value for name, value in robot.items() if name not in ("_target_", "defaults")}


def read_camera(folder: Path, name: str) -> dict[str, Any]:
    """Read the description of a camera, ``"static"`` or ``"gripper"``: keyword arguments of its class."""
    from omegaconf import OmegaConf

    camera = OmegaConf.to_container(OmegaConf.load(folder / "conf" / "cameras" / "cameras" / f"{name}.yaml"))
    assert isinstance(camera, dict)
    return {str(key): value for key, value in camera.items() if key != "_target_"}


def read_oracle(folder: Path) -> dict[str, list[Any]]:
    """Read the parameters of the 34 tasks for calvin_env's ``Tasks``."""
    from omegaconf import OmegaConf

    table = OmegaConf.to_container(OmegaConf.load(folder / "conf" / "tasks" / "new_playtable_tasks.yaml"))
    assert isinstance(table, dict)
    tasks: dict[str, list[Any]] = table["tasks"]
    return tasks
