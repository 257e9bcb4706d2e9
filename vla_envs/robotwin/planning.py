"""What RoboTwin's checkout imports and does not need here: mplib, of which its TOPP alone is used, and open3d.

mplib 0.2.1 ends the process when it is imported under numpy 2. A chunk of joint positions needs the time-optimal path
parametrisation of it, which is toppra's; it is written here over that package. Motion planning, which RoboTwin's
scripted demonstrations use, is not there.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy as np

PHYSICS_RATE = 250  # Hz
VELOCITY_LIMIT = ACCELERATION_LIMIT = 1.0  # rad/s and rad/s^2 of each joint, mplib's where the arm names none


class NoPlanning(RuntimeError):
    """A scripted demonstration has asked for a motion plan."""


class Planner:
    """Stands for mplib's planners.

    Attributes:
        last_steps: physics steps of the last trajectory; ``None`` where there was none, and the arm stands still.
    """

    def __init__(self, *_: Any, **__: Any):
        self.joint_limits = self.joint_acc_limits = None
        self.last_steps: int | None = None

    def TOPP(  # noqa: N802  mplib calls it so
        self, path: np.ndarray, step: float = 0.1, verbose: bool = False
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, None, float]:
        """Move through joint positions as fast as the limits allow.

        Args:
            path: rad ``[P, J]``, the first where the arm is.
            step: seconds between samples.
            verbose: of mplib; nothing is said.

        Returns:
            Of ``T`` samples the times, positions and velocities ``[T, J]``; no accelerations, which nobody reads; and
            the duration in seconds.

        Raises:
            RuntimeError: there is no such motion. RoboTwin then lets the arm stand.
        """
        from toppra import SplineInterpolator, algorithm, constraint

        self.last_steps = None
        joints = path.shape[1]
        spline = SplineInterpolator(np.linspace(0, 1, len(path)), np.asarray(path, np.float64))
        limits = [
            constraint.JointVelocityConstraint(np.full(joints, VELOCITY_LIMIT)),
            constraint.JointAccelerationConstraint(np.full(joints, ACCELERATION_LIMIT)),
        ]
        moved = algorithm.TOPPRA(limits, spline, parametrizer="ParametrizeConstAccel").compute_trajectory()
        if moved is None:
            raise RuntimeError("there is no time-optimal motion through these joint positions")
        times = np.linspace(0, moved.duration, int(moved.duration / step))
        self.last_steps = len(times)
        return times, moved(times), moved(times, 1), None, moved.duration

    def set_base_pose(self, pose: Any) -> None:
        """Do nothing: only plans depend on where the arm stands."""

    def plan_pose(self, *_: Any, **__: Any) -> Any:
        """Refuse.

        Raises:
            NoPlanning: always.
        """
        raise NoPlanning("RoboTwin's scripted demonstrations need motion planning, which is not there")

    plan_screw = plan_qpos = IK = plan_pose


class _Anything:
    """What is made of mplib besides, and looked at by plans alone."""

    def __init__(self, *_: Any, **__: Any): ...


@contextlib.contextmanager
def stand_ins() -> Iterator[None]:
    """Have modules that are imported meanwhile find these stand-ins; afterwards all others find what is installed."""
    names = ("mplib", "mplib.planner", "mplib.sapien_utils", "mplib.pymp")
    modules = {name: types.ModuleType(name) for name in names}
    top, planner, utilities, pymp = modules.values()
    for name, module in zip(("planner", "sapien_utils", "pymp"), (planner, utilities, pymp), strict=True):
        setattr(top, name, module)
    vars(top).update(__path__=[], Planner=Planner, Pose=_Anything)
    vars(planner).update(Planner=Planner)
    vars(utilities).update(SapienPlanner=Planner, SapienPlanningWorld=_Anything)
    vars(pymp).update(Pose=_Anything)
    if "open3d" not in sys.modules and importlib.util.find_spec("open3d") is None:  # for point clouds on disk
        modules["open3d"] = types.ModuleType("open3d")
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name, was in before.items():
            if was is None:
                del sys.modules[name]
            else:
                sys.modules[name] = was
