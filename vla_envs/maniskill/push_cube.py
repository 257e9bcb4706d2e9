"""A scripted expert for ManiSkill's PushCube-v1: behind the cube in the air, down, and through it towards the goal."""

from __future__ import annotations

from typing import Any

import numpy as np

_STEP = 0.1  # m, that an action of 1 asks for (the Panda's pd_ee_delta_pose)
_SPEED = 0.7  # of that
_START = 0.065  # m, from the cube's middle back to where the fingers come down
_LOW, _HIGH = 0.015, 0.09  # m, of the fingers above the table: pushing, and moving over the cube
_CLOSED = -1.0


def push_cube_action(world: Any) -> np.ndarray:
    """Tell what to do in the present state of PushCube-v1, float32 ``[7]``.

    It remembers nothing, so it comes back from disturbed actions, and it changes smoothly with the state, which is
    what can be cloned from few demonstrations.
    """
    fingers, cube, goal = (pose.p[0].numpy() for pose in (world.agent.tcp.pose, world.obj.pose, world.goal_region.pose))
    way = (goal - cube)[:2] / np.linalg.norm((goal - cube)[:2])
    along = (fingers - cube)[:2] @ way
    beside = (fingers - cube)[:2] - along * way
    # 0 to 1: how much the fingers are behind the cube as seen from the goal, and how much they may push.
    behind = _ramp(0.03 - np.linalg.norm(beside), 0.015) * _ramp(-0.01 - along, 0.01)
    pushing = behind * _ramp(0.06 - fingers[2], 0.03)
    to_start = cube[:2] - _START * way - fingers[:2]
    sideways = pushing * (_STEP * way - 2 * beside) + (1 - pushing) * to_start
    height = behind * _LOW + (1 - behind) * _HIGH
    move = np.array([*sideways, height - fingers[2]]) / _STEP
    times_too_fast: Any = np.linalg.norm(move) / _SPEED
    move = move / max(1.0, times_too_fast)
    return np.array([*move, 0.0, 0.0, 0.0, _CLOSED], np.float32)


def _ramp(value: float | np.floating[Any], width: float) -> float:
    return float(np.clip(value / width, 0, 1))
