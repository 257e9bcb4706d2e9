"""Tasks one by one: initial states in which a task is possible, also where it takes a block that is held or stacked.

The benchmark has none: its tasks come in chains. Everything that is not part of the task is drawn as in
:mod:`vla_envs.calvin.states`.
"""

from functools import cache

import numpy as np

from vla_envs.calvin.chains import Condition, conditions, outcomes
from vla_envs.calvin.scenes import BLOCKS, DRAWER_PLACE
from vla_envs.calvin.states import FIRST_BLOCK, drawn_state
from vla_envs.calvin.world import World

_HEIGHT = 0.04  # of every block, m
_GRASP_STEPS, _SETTLE_STEPS = 12, 10  # actions
_STAY_OPEN, _STAY_CLOSED = (np.array([0, 0, 0, 0, 0, 0, grip]) for grip in (1.0, -1.0))


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
    """Draw a condition in which a task is possible, and robot and scene as ``World.reset`` takes them.

    The numbers of ``seed`` fix it.
    """
    possible = starts(task)
    condition = possible[np.random.default_rng(seed).integers(len(possible))]
    robot, scene = drawn_state(condition, letter if fixes else "D", *seed)
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


def begin(world: World, letter: str, condition: Condition, robot: np.ndarray, scene: np.ndarray) -> None:
    """Put a world into an initial state, the hand around a block that is held, and let everything come to rest."""
    world.reset(letter, robot, scene)
    held = [number for number, color in enumerate(BLOCKS) if condition[f"{color}_block"] == "grasped"]
    for number in held:
        world.grasp(number, scene[FIRST_BLOCK + 6 * number :][:6], _GRASP_STEPS)
    if {"grasped", "drawer", "stacked_top"} & {condition[f"{color}_block"] for color in BLOCKS}:
        for _ in range(_SETTLE_STEPS):
            world.step(_STAY_CLOSED if held else _STAY_OPEN)
