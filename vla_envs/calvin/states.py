"""Initial states: where robot, blocks, drawer, slider, switch and lights are in a condition, of chains and of tasks.

Numbers and order of the draws are those of calvin_agent (``get_env_state_for_initial_condition``), of which each
condition has one state. They are those of scene D; :mod:`~vla_envs.calvin.scenes` says where other scenes' places are.
The benchmark has no tasks one by one: for these there are conditions, too, in which a block is held or stacked.
"""

import math
from functools import cache
from typing import Any

import numpy as np

from vla_envs.calvin.chains import Condition, conditions, outcomes
from vla_envs.calvin.scenes import BLOCKS, CABINET_SHIFT, DRAWER_PLACE, TABLE_SHIFT

_ROBOT = (  # hand x, y, z (m), its Euler angles (rad), opening (m), seven joints (rad), last command of the gripper
    *(0.02586889, -0.2313129, 0.5712808, 3.09045411, -0.02908596, 1.50013585, 0.07999963),
    *(-1.21779124, 1.03987629, 2.11978254, -2.34205014, -0.87015899, 1.64119093, 0.55344928, 1.0),
)
_CABINET = {
    "slider_left": (-0.240851662, 0.0924044687, 0.460990009),
    "slider_right": (0.070341633, 0.0924044687, 0.460990009),
}
_TABLE = ((0.0500000896, -0.120000177, 0.459990009), (0.229995412, -0.119995140, 0.459990010))
_ROTATIONS = (math.pi / 2 - math.pi / 8, math.pi / 2 + math.pi / 8)  # of a block about the vertical
# Entries of scene_obs; blocks have 6 numbers each.
SLIDER, DRAWER, BUTTON, SWITCH, LIGHTBULB, LED, FIRST_BLOCK = range(7)
_SLIDER_LEFT, _DRAWER_OPEN, _SWITCH_ON = 0.28, 0.22, 0.088  # m, m, m
_HEIGHT = 0.04  # of every block, m


def published_state(condition: Condition, scene: str) -> tuple[np.ndarray, np.ndarray]:
    """Return a condition's state in the published evaluation: ``robot_obs`` ``[15]``, ``scene_obs`` ``[24]``, float64.

    The order of the condition's entries counts. ``scene`` is whose places they are; upstream's are D's everywhere.
    """
    return _state(condition, scene, np.random.RandomState(fnv(str(condition.values()))))


def fnv(text: str) -> int:
    """Hash a text as pyhash's ``fnv1_32`` does: FNV-1 of 32 bits that begins at 0, over UTF-16."""
    number = 0
    for byte in text.encode("utf-16-le"):
        number = (number * 0x01000193) % 2**32 ^ byte
    return number


def _state(condition: Condition, letter: str, random: Any) -> tuple[np.ndarray, np.ndarray]:
    table = [np.array(place) for place in _TABLE]
    table[1][0] += TABLE_SHIFT[letter]
    random.shuffle(table)
    scene = np.zeros(24)
    scene[SLIDER] = _SLIDER_LEFT * (condition["slider"] == "left")
    scene[DRAWER] = _DRAWER_OPEN * (condition["drawer"] == "open")
    scene[SWITCH] = _SWITCH_ON * condition["lightbulb"]
    scene[LIGHTBULB], scene[LED] = condition["lightbulb"], condition["led"]
    for number, color in enumerate(BLOCKS):
        block = scene[FIRST_BLOCK + 6 * number :][:6]
        place = condition[f"{color}_block"]
        if place in _CABINET:
            block[:3] = _CABINET[place]
            block[0] += CABINET_SHIFT[letter]
        elif color == "blue":
            block[:3] = table[int(condition["red_block"] in ("table", "stacked_bottom"))]
        else:
            block[:3] = table[0 if color == "red" else 1]
        block[5] = random.uniform(*_ROTATIONS)
    return np.array(_ROBOT), scene


@cache
def starts(task: str) -> tuple[Condition, ...]:
    """List the conditions in which a task is possible, in one way: some of the 192, or else special ones."""
    changed = ({**condition, **change} for condition in conditions() for change in _special(condition))
    for candidates in (conditions(), changed):
        if found := tuple(condition for condition in candidates if len(outcomes(condition, task)) == 1):
            return found
    raise AssertionError(task)


def _special(condition: Condition) -> list[dict[str, object]]:
    changes: list[dict[str, object]] = []
    for color in BLOCKS:
        block = f"{color}_block"
        changes.append({block: "grasped", "grasped": 1})
        changes.append({block: "drawer", "drawer": "open"})
        changes += [
            {block: "stacked_top", f"{other}_block": "stacked_bottom"}
            for other in BLOCKS
            if other != color and condition[f"{other}_block"] == "table"
        ]
    return changes


def start_of(task: str, letter: str, fixes: bool, *seed: int) -> tuple[Condition, np.ndarray, np.ndarray]:
    """Draw, fixed by ``seed``, a condition in which a task is possible, and robot and scene for ``World.reset``."""
    possible = starts(task)
    condition = possible[np.random.default_rng(seed).integers(len(possible))]
    seeds = np.random.SeedSequence(seed).generate_state(4)
    robot, scene = _state(condition, letter if fixes else "D", np.random.RandomState(seeds))
    blocks = {color: scene[FIRST_BLOCK + 6 * number :][:6] for number, color in enumerate(BLOCKS)}
    for color, block in blocks.items():
        where = condition[f"{color}_block"]
        if where == "drawer":
            block[:] = [*DRAWER_PLACE[letter], 0, 0, robot[5]]
        elif where == "grasped":
            block[:] = [*robot[:3], 0, 0, robot[5]]
        elif where == "stacked_top":
            below = next(other for other in BLOCKS if condition[f"{other}_block"] == "stacked_bottom")
            block[:] = blocks[below] + [0, 0, _HEIGHT + 0.001, 0, 0, 0]
    return condition, robot, scene
