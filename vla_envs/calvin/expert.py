"""A scripted expert for 17 of the 34 tasks, in all scenes: it knows where things are and moves from point to point.

It steers the target pose, which the actions add up to, so that it comes back from disturbed actions too.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from vla_envs.calvin.chains import tasks
from vla_envs.calvin.scenes import BLOCKS
from vla_envs.calvin.world import World

_OPEN, _CLOSED = 1.0, -1.0
_DOWN, _ACROSS = np.pi, np.pi / 2  # Euler angles x and z of a hand that points down, its fingers opening along x, rad
_STEP, _TURN = 0.02, 0.05  # m and rad of an action of 1
_NEAR, _ALIGNED = 0.012, 0.1  # m, rad: close enough for the next point
_PATIENCE, _STILL = 12, 0.001  # actions, m: after so many a hand that moves no further has got as far as it can
_TABLE = 0.44  # m, its height
_FREE, _FRONT = 0.53, -0.08  # m: the hand is free above and before
_CLEAR = 0.58  # m, above whatever stands on the table
_TILT_UNDER, _TILT_OVER = 1.0, 0.7  # rad, of the hand at the switch: upright, it would hit the cabinet
_LOW = 0.462  # m, of the finger tips beside or around a block that is on the table


@dataclass(frozen=True)
class Point:
    """Where the finger tips shall be."""

    place: np.ndarray  # m, float64 [3]
    gripper: float  # 1 or -1
    yaw: float = _ACROSS  # of the hand, rad
    tilt: float = 0.0  # of the finger tips towards the cabinet, rad
    actions: int = 1  # stay at least so many
    near: float = _NEAR  # when it counts as reached, m


def expert_tasks() -> tuple[str, ...]:
    """List the tasks that there is an expert for."""
    return tuple(task for task in tasks() if task in _MOTIONS)


class Expert:
    """The expert for one task, from the present state on."""

    def __init__(self, world: World, task: str):
        self._world = world
        motion, *parameters = _MOTIONS[task]
        self._points: Iterator[Point] = chain(_retreat(world), motion(world, *parameters))
        self._point = next(self._points)
        self._actions = 0  # for this point
        self._last = world.hand()[0]

    def action(self) -> np.ndarray:
        """Return what to do in the present state, float32 ``[7]``."""
        place, angles = self._world.hand()
        turn = _difference(self._point.yaw, angles[2])
        reached = np.linalg.norm(place - self._point.place) < self._point.near and abs(turn) < _ALIGNED
        stuck = self._actions > _PATIENCE and np.linalg.norm(place - self._last) < _STILL
        if self._actions >= self._point.actions and (reached or stuck):
            self._point, self._actions = next(self._points, self._point), 0
        self._last = place
        self._actions += 1
        place, angles = self._world.robot.target_pos, self._world.robot.target_orn  # which the actions add up to
        turns = _difference(np.array([_DOWN, -self._point.tilt, self._point.yaw]), angles)
        action = [*((self._point.place - place) / _STEP), *(turns / _TURN), self._point.gripper]
        return np.clip(action, -1, 1).astype(np.float32)


def _retreat(world: World) -> Iterator[Point]:
    place, _ = world.hand()
    if place[2] < _FREE or place[1] > _FRONT:
        yield Point(np.array([place[0], min(place[1], _FRONT), max(place[2], _FREE)]), _CLOSED, near=0.03)


def _open_drawer(world: World, opens: bool) -> Iterator[Point]:
    low, high = world.bounds("drawer_link")
    x, front, z = (low[0] + high[0]) / 2, low[1], high[2] - 0.025
    y = front + 0.045 if opens else front - 0.045
    yield Point(np.array([x, y, _CLEAR - 0.08]), _CLOSED)
    yield Point(np.array([x, y, z]), _CLOSED)
    for moved in (0.1, 0.2, 0.3):
        yield Point(np.array([x, y - moved if opens else y + moved, z]), _CLOSED)


def _move_slider(world: World, left: bool) -> Iterator[Point]:
    low, high = world.bounds("slide_link")
    bar, side = (low[0] + high[0]) / 2, 1.0 if left else -1.0
    begin, end = bar + 0.06 * side, bar - 0.30 * side
    yield Point(np.array([begin, -0.1, 0.56]), _CLOSED)
    yield Point(np.array([begin, -0.01, 0.53]), _CLOSED)
    yield Point(np.array([end, -0.01, 0.53]), _CLOSED)


def _flip_switch(world: World, on: bool) -> Iterator[Point]:
    low, high = world.bounds("switch_link")
    x, y = (low[0] + high[0]) / 2, low[1] + 0.015
    begin, end = (low[2] - 0.01, low[2] + 0.14) if on else (high[2] + 0.02, high[2] - 0.12)
    tilt = _TILT_UNDER if on else _TILT_OVER
    yield Point(np.array([x, y - 0.1, begin]), _CLOSED, tilt=tilt)
    yield Point(np.array([x, y, begin]), _CLOSED, tilt=tilt)
    yield Point(np.array([x, y, end]), _CLOSED, tilt=tilt)


def _press_button(world: World) -> Iterator[Point]:
    low, high = world.bounds("button_link")
    x, y = (low[:2] + high[:2]) / 2
    yield Point(np.array([x, y, high[2] + 0.06]), _CLOSED)
    yield Point(np.array([x, y, high[2] - 0.04]), _CLOSED)


def _push_block(world: World, color: str, left: bool) -> Iterator[Point]:
    place, _ = world.block(color)
    side = 1.0 if left else -1.0
    begin, end = place[0] + 0.075 * side, place[0] - 0.16 * side
    yield Point(np.array([begin, place[1], _CLEAR]), _CLOSED, near=0.03)
    yield Point(np.array([begin, place[1], _LOW]), _CLOSED)
    yield Point(np.array([end, place[1], _LOW]), _CLOSED)


def _lift_block(world: World, color: str) -> Iterator[Point]:
    place, yaw = world.block(color)
    yield Point(np.array([*place[:2], _CLEAR]), _OPEN, yaw)
    yield Point(np.array([*place[:2], place[2]]), _OPEN, yaw)
    yield Point(np.array([*place[:2], place[2]]), _CLOSED, yaw, actions=8)
    yield Point(np.array([*place[:2], _CLEAR + 0.05]), _CLOSED, yaw)


def _difference(wanted: Any, now: Any) -> Any:
    """Return by which angle to turn, -pi to pi rad; or by which angles."""
    return (wanted - now + np.pi) % (2 * np.pi) - np.pi


_MOTIONS: dict[str, tuple[Any, ...]] = {
    "open_drawer": (_open_drawer, True),
    "close_drawer": (_open_drawer, False),
    "move_slider_left": (_move_slider, True),
    "move_slider_right": (_move_slider, False),
    "turn_on_lightbulb": (_flip_switch, True),
    "turn_off_lightbulb": (_flip_switch, False),
    "turn_on_led": (_press_button,),
    "turn_off_led": (_press_button,),
    **{
        f"push_{color}_block_{side}": (_push_block, color, side == "left")
        for color in BLOCKS
        for side in ("left", "right")
    },
    **{f"lift_{color}_block_table": (_lift_block, color) for color in BLOCKS},
}
