"""Scripted experts. That of plate-25 looks for a grasp on the object's collision shape, and carries it to the plate.

It steers the controller's target pose, which the actions add up to, so it comes back from disturbed actions too.
"""

from typing import Any

import numpy as np
from scipy.spatial.transform import Rotation

from vla_envs.simulator import SimulatorSpec

_TABLE = 0.8695  # m, height of the table
_TIP = 0.016  # m, from the controlled link down to the finger tips
_OPENING = 0.047  # m, what fits well between the open fingers
_HALF_FINGER = 0.012  # m, of a finger's breadth
_REACH = 0.045  # m, that an object may stick up between the fingers
_CLEARANCE = 0.03  # m, above object or plate while moving sideways
_NEAR, _ALIGNED = 0.012, 0.12  # m, rad: close enough for the next phase
_CLOSING_STEPS, _DESCENDING_STEPS = 3, 8
_OPEN, _CLOSED = 1.0, -1.0
_ANGLES = np.arange(0, np.pi, np.pi / 16)
_OFFSETS = np.array([0.0, 0.01, -0.01, 0.02, -0.02, 0.035, -0.035])  # m, of the grasp along the object
_SAMPLES = np.array([(i, j, 4 - i - j) for i in range(5) for j in range(5 - i)]) / 4  # weights within a triangle
# Of PushCube-v1.
_PUSH_STEP = 0.1  # m, that an action of 1 asks for (the Panda's pd_ee_delta_pose)
_PUSH_SPEED = 0.7  # of that
_PUSH_START = 0.065  # m, from the cube's middle back to where the fingers come down
_PUSH_LOW, _PUSH_HIGH = 0.015, 0.09  # m, of the fingers above the table: pushing, and moving over the cube


class Expert:
    """The expert for one episode of a ``world`` that has just been reset; ``spec`` has the bounds of an action."""

    def __init__(self, world: Any, spec: SimulatorSpec):
        self._world = world
        self._low, self._high = np.array(spec.action_low), np.array(spec.action_high)
        self._object = world._objects[int(world._object_number[0])]
        self._shape = _surface(self._object)
        self._phase = "approach"
        self._waited = 0
        self._grasp = np.zeros(3)  # finger tips, m
        self._axis = np.array([0.0, -1.0])  # from finger to finger

    def action(self) -> np.ndarray:
        """Return what to do in the present state, float32 ``[7]``."""
        target, gripper = getattr(self, f"_{self._phase}")()
        return self._towards(target, gripper)

    def _approach(self) -> tuple[np.ndarray, float]:
        """Above the object, fingers open and turned to its narrow side; it may still be falling or rolling."""
        points = self._points()
        self._grasp, self._axis = self._best_grasp(points)
        above = np.array([*self._grasp[:2], max(points[:, 2].max(), _TABLE + 0.02) + _CLEARANCE])
        tips, axis = self._tips()
        aligned = abs(axis @ self._axis) > np.cos(_ALIGNED)
        if aligned and np.linalg.norm((tips - above)[:2]) < _NEAR:
            self._phase, self._waited = "descend", 0
        return above, _OPEN

    def _descend(self) -> tuple[np.ndarray, float]:
        tips, _ = self._tips()
        self._waited += 1
        if np.linalg.norm(tips - self._grasp) < _NEAR or self._waited > _DESCENDING_STEPS:  # as low as it gets
            self._phase, self._waited = "close", 0
        elif np.linalg.norm(self._world.object_positions()[0].numpy()[:2] - self._grasp[:2]) > 0.08:  # it has moved
            self._phase = "approach"
        return self._grasp, _OPEN

    def _close(self) -> tuple[np.ndarray, float]:
        self._waited += 1
        if self._waited > _CLOSING_STEPS:
            self._phase = "carry"
        return self._grasp, _CLOSED

    def _carry(self) -> tuple[np.ndarray, float]:
        if not bool(self._world.agent.is_grasping(self._object, min_force=0.05)[0]):
            self._phase = "approach"
            return self._approach()
        tips, _ = self._tips()
        points, plate = self._points(), self._world.plate_positions()[0].numpy()
        bottom, way = points[:, 2].min(), plate[:2] - (points[:, :2].min(0) + points[:, :2].max(0)) / 2
        over = np.linalg.norm(way) < 0.02
        height = plate[2] + (0.0 if over else _CLEARANCE)
        lifted = bottom > plate[2] + 0.6 * _CLEARANCE or over
        step = np.array([*(way if lifted else (0, 0)), height - bottom])
        return tips + step, _CLOSED

    def _towards(self, tips: np.ndarray, gripper: float) -> np.ndarray:
        """Compute the action that brings the controller's target to finger tips at a place, pointing down."""
        robot = self._world.agent.robot.pose.sp
        base = Rotation.from_quat(robot.q, scalar_first=True)
        target = self._world.agent.controller.controllers["arm"]._target_pose
        position, rotation = target.p[0].numpy(), Rotation.from_quat(target.q[0].numpy(), scalar_first=True)
        wanted = base.inv().apply(tips + np.array([0, 0, _TIP]) - robot.p)
        sign = 1.0 if self._tips()[1] @ self._axis > 0 else -1.0  # either finger may be on either side
        down, across = np.array([0.0, 0.0, -1.0]), np.array([*(sign * self._axis), 0.0])
        upright = base.inv() * Rotation.from_matrix(np.column_stack([down, across, np.cross(down, across)]))
        turn = (upright * rotation.inv()).as_rotvec()
        angles = Rotation.from_rotvec(turn * min(1.0, self._high[3] / max(np.linalg.norm(turn), 1e-9))).as_euler("XYZ")
        return np.clip([*(wanted - position), *angles, gripper], self._low, self._high).astype(np.float32)

    # ---- what the expert sees

    def _tips(self) -> tuple[np.ndarray, np.ndarray]:
        """Middle of the finger tips, m, and the direction between the fingers in the plane of the table."""
        pose = self._world.agent.robot.links_map["ee_gripper_link"].pose.sp
        matrix = pose.to_transformation_matrix()
        axis = matrix[:2, 1] / np.linalg.norm(matrix[:2, 1])
        return pose.p + _TIP * matrix[:3, 0], axis

    def _points(self) -> np.ndarray:
        matrix = self._object.pose.sp.to_transformation_matrix()
        return self._shape @ matrix[:3, :3].T + matrix[:3, 3]

    def _best_grasp(self, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Choose a place for the finger tips and an axis to close along: fitting, near the middle, little turning."""
        middle, top = points.mean(0), points[:, 2].max()
        tip = max(_TABLE + 0.004, min(middle[2] - 0.012, top - 0.015), top - _REACH)
        band = points[(points[:, 2] > tip) & (points[:, 2] < tip + 0.03)]
        _, now = self._tips()
        best = (np.inf, middle, self._axis)
        for angle in _ANGLES:
            axis = np.array([np.cos(angle), np.sin(angle)])
            along = np.array([-axis[1], axis[0]])
            across, lengthwise = (band[:, :2] - middle[:2]) @ axis, (band[:, :2] - middle[:2]) @ along
            for offset in _OFFSETS:
                inside = across[abs(lengthwise - offset) < _HALF_FINGER]
                if len(inside) < 2:
                    continue
                width = inside.max() - inside.min()
                turning = np.arccos(min(1.0, abs(now @ axis)))
                cost = 10 * max(0.0, width - _OPENING) + 0.3 * width + abs(offset) + 0.01 * turning
                if cost < best[0]:
                    place = middle[:2] + axis * (inside.max() + inside.min()) / 2 + along * offset
                    best = (cost, np.array([*place, tip]), axis)
        return best[1], best[2]


def _surface(actor: Any) -> np.ndarray:
    """Sample points on an actor's collision shapes in its own frame, ``[n, 3]``, m."""
    from sapien.physx import PhysxRigidDynamicComponent

    body = actor._objs[0].find_component_by_type(PhysxRigidDynamicComponent)
    found = []
    for shape in body.collision_shapes:
        corners = (shape.vertices * shape.scale)[shape.triangles]  # [m, 3, 3]
        matrix = shape.local_pose.to_transformation_matrix()
        points = np.einsum("sk,mkd->msd", _SAMPLES, corners).reshape(-1, 3)
        found.append(points @ matrix[:3, :3].T + matrix[:3, 3])
    return np.concatenate(found)


def push_cube_action(world: Any) -> np.ndarray:
    """Return what to do in the present state of PushCube-v1, float32 ``[7]``.

    It remembers nothing and changes smoothly with the state, which can be cloned from few demonstrations.
    """
    fingers, cube, goal = (pose.p[0].numpy() for pose in (world.agent.tcp.pose, world.obj.pose, world.goal_region.pose))
    way = (goal - cube)[:2] / np.linalg.norm((goal - cube)[:2])
    along = (fingers - cube)[:2] @ way
    beside = (fingers - cube)[:2] - along * way
    # 0 to 1: how much the fingers are behind the cube as seen from the goal, and how much they may push.
    behind = _ramp(0.03 - np.linalg.norm(beside), 0.015) * _ramp(-0.01 - along, 0.01)
    pushing = behind * _ramp(0.06 - fingers[2], 0.03)
    to_start = cube[:2] - _PUSH_START * way - fingers[:2]
    sideways = pushing * (_PUSH_STEP * way - 2 * beside) + (1 - pushing) * to_start
    height = behind * _PUSH_LOW + (1 - behind) * _PUSH_HIGH
    move = np.array([*sideways, height - fingers[2]]) / _PUSH_STEP
    times_too_fast: Any = np.linalg.norm(move) / _PUSH_SPEED
    move = move / max(1.0, times_too_fast)
    return np.array([*move, 0.0, 0.0, 0.0, _CLOSED], np.float32)


def _ramp(value: float | np.floating[Any], width: float) -> float:
    return float(np.clip(value / width, 0, 1))
