"""A scripted expert for four tasks that are solved by pressing. Each chunk is one press.

Joint angles come from SAPIEN's inverse kinematics, and an arm goes straight from angles to angles: enough where nothing
stands in the way. It plans from where the arms are, and so comes back from disturbed actions too.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

_CLOSED = 0.0
_ABOVE, _THROUGH = 0.06, 0.012  # m: a finger tip before it presses, and how far below the surface it wants to get
_BEFORE, _BEHIND = 0.05, 0.03  # m: the same of the switch, along its normal
_DOWN, _LEVEL = (0.9, 0.7, 0.5, 0.3, 1.1, 1.3), (0.3, 0.1, -0.1, 0.5)  # rad that a hand may point down, best first
_PRECISION, _OFF = 1e-4, 1e-2  # m and rad: that inverse kinematics tries to reach, and that it may be off


@dataclass(frozen=True)
class Press:
    """Two points of a closed hand."""

    left: bool  # whether it is the left arm's
    near: np.ndarray  # m, float64 [3], before pressing
    on: np.ndarray  # likewise, when pressing
    pitches: Sequence[float]  # rad below the horizon that the hand may have, best first


def expert_tasks() -> tuple[str, ...]:
    """List the tasks that there is an expert for."""
    return tuple(sorted(_PRESSES))


class Expert:
    """The expert for one episode of a task, one of :func:`expert_tasks`, that a world has set up."""

    def __init__(self, world: Any, name: str):
        self._world = world
        press = _PRESSES[name](world.task)
        self._hand = slice(0, 7) if press.left else slice(7, 14)
        self._poses = _reach(world.task.robot, press)

    def chunk(self, length: int) -> np.ndarray | None:
        """Return what to do from where the arms are, float64 ``[C, 14]``; ``None`` if the place is out of reach."""
        if self._poses is None:
            return None
        points = [self._world.states() for _ in range(3)]
        for point, angles in zip(points[1:], self._poses, strict=True):
            point[self._hand] = [*angles, _CLOSED]
        times = 2 * np.arange(1, length + 1) / length
        return np.stack([np.interp(times, range(3), values) for values in np.transpose(points)], 1)


def _from_above(name: str, contact: int) -> Callable[[Any], Press]:
    def press(task: Any) -> Press:
        actor = getattr(task, name)
        point = np.array(actor.get_contact_point(contact)[:3])
        near, on = (point + np.array([0, 0, height]) for height in (_ABOVE, -_THROUGH))
        return Press(actor.get_pose().p[0] < 0, near, on, _DOWN)

    return press


def _switch(task: Any) -> Press:
    point = np.array(task.switch.get_contact_point(0)[:3])
    inward = task.switch.get_pose().to_transformation_matrix()[:3, 0]
    return Press(inward[0] >= 0, point - _BEFORE * inward, point + _BEHIND * inward, _LEVEL)


_PRESSES: dict[str, Callable[[Any], Press]] = {
    "click_alarmclock": _from_above("alarm", 0),
    "click_bell": _from_above("bell", 0),
    "press_stapler": _from_above("stapler", 2),
    "turn_switch": _switch,
}


def _reach(robot: Any, press: Press) -> tuple[np.ndarray, np.ndarray] | None:
    arm = _Arm(robot, "left" if press.left else "right")
    for pitch in press.pitches:
        near = arm.angles(press.near, pitch)
        if near is not None and (on := arm.angles(press.on, pitch, near)) is not None:
            return near, on
    return None


class _Arm:
    def __init__(self, robot: Any, side: str):
        def of(name: str) -> Any:
            return getattr(robot, f"{side}_{name}")

        self._robot = of("entity")
        joints, active = of("arm_joints"), list(self._robot.get_active_joints())
        self._numbers = [active.index(joint) for joint in joints]
        self._model = self._robot.create_pinocchio_model()
        end = of("ee")
        self._link, self._in_link = end.child_link, end.get_pose_in_child()
        self._hand = of("gripper_bias")  # m, how far the finger tips are before the end
        now = end.global_pose.to_transformation_matrix()[:3, :3]
        forward = (now @ of("global_trans_matrix") @ of("delta_matrix"))[:, 0]
        # The hand keeps its turn about itself.
        self._turn = _pointing(np.arctan2(forward[1], forward[0]), -np.arcsin(forward[2])).T @ now
        self._base = joints[0].global_pose.p
        self._limits = np.concatenate([joint.get_limits() for joint in joints])

    def angles(self, place: np.ndarray, pitch: float, start: np.ndarray | None = None) -> np.ndarray | None:
        """Find angles that hold the finger tips at a place; the hand points away from the shoulder, down by a pitch."""
        import sapien

        yaw = np.arctan2(place[1] - self._base[1], place[0] - self._base[0])
        pointing = _pointing(yaw, pitch)
        end = np.eye(4)
        end[:3, :3], end[:3, 3] = pointing @ self._turn, place - self._hand * pointing[:, 0]
        wanted = self._robot.pose.inv() * sapien.Pose(end) * self._in_link.inv()
        positions = np.array(self._robot.get_qpos(), np.float64)
        if start is not None:
            positions[self._numbers] = start
        mask = np.zeros(len(positions), np.int32)
        mask[self._numbers] = 1
        found, _, _ = self._model.compute_inverse_kinematics(
            self._link.index, wanted, initial_qpos=positions, active_qmask=mask, eps=_PRECISION, max_iterations=300
        )
        angles = np.array(found)[self._numbers]
        angles = (angles + np.pi) % (2 * np.pi) - np.pi
        self._model.compute_forward_kinematics(found)
        error = wanted.inv() * self._model.get_link_pose(self._link.index)
        off = max(np.abs(error.p).max(), 2 * np.arccos(min(1.0, abs(float(error.q[0])))))
        inside = (self._limits[:, 0] <= angles) & (angles <= self._limits[:, 1])
        return angles if off < _OFF and inside.all() else None


def _pointing(yaw: float, pitch: float) -> np.ndarray:
    """Return the axes of a hand, its first one pointing at ``yaw`` and down by ``pitch``, its second one level."""
    forward = np.array([np.cos(pitch) * np.cos(yaw), np.cos(pitch) * np.sin(yaw), -np.sin(pitch)])
    left = np.array([-np.sin(yaw), np.cos(yaw), 0.0])
    return np.stack([forward, left, np.cross(forward, left)], 1)
