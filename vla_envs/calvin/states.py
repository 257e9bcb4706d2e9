"""Initial states: where robot, blocks, drawer, slider, switch and lights are in a condition.

Numbers and order of the draws are those of calvin_agent (``get_env_state_for_initial_condition``), of which each
condition has one state. They are those of scene D; :mod:`~vla_envs.calvin.scenes` says where other scenes' places are.
"""

import math
from typing import Any

import numpy as np

from vla_envs.calvin.chains import Condition
from vla_envs.calvin.scenes import BLOCKS, CABINET_SHIFT, TABLE_SHIFT

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


def published_state(condition: Condition, scene: str) -> tuple[np.ndarray, np.ndarray]:
    """Return a condition's state in the published evaluation: ``robot_obs`` ``[15]``, ``scene_obs`` ``[24]``, float64.

    The order of the condition's entries counts. ``scene`` is whose places they are; upstream's are D's everywhere.
    """
    return _state(condition, scene, np.random.RandomState(fnv(str(condition.values()))))


def drawn_state(condition: Condition, scene: str, *seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a state of a condition in which the blocks' rotations, and their order on the table, are drawn."""
    seeds = np.random.SeedSequence(seed).generate_state(4)
    return _state(condition, scene, np.random.RandomState(seeds))


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
