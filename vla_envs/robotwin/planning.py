"""What RoboTwin's checkout imports and does not need here: mplib, of which its TOPP alone is used, and open3d.

mplib 0.2.1 ends the process when it is imported under numpy 2. Its time-optimal path parametrisation is toppra's, and
is written here over that package. There is no motion planning, which RoboTwin's scripted demonstrations use.
"""

import contextlib
import importlib.util
import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy as np

VELOCITY_LIMIT = ACCELERATION_LIMIT = 1.0  # rad/s and rad/s^2 of each joint, mplib's where the arm names none
LONGEST = 500  # physics steps of a chunk; longer ones are sampled down to it


class Planner:
    """Stands for mplib's planners."""

    def __init__(self, *_: Any, **__: Any):
        self.joint_limits = self.joint_acc_limits = None
        self.last_steps: int | None = None  # physics steps of the last trajectory; None: the arm stands still
        self.failed = False  # whether there was none although one was asked for

    def TOPP(  # noqa: N802  mplib calls it so
        self, path: np.ndarray, step: float = 0.1, verbose: bool = False
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, None, float]:
        """Move through joint positions, rad ``[P, J]``, as fast as limits allow, sampled every ``step`` seconds.

        Returns the times, positions and velocities ``[T, J]`` of ``T`` samples, at most :data:`LONGEST`; no
        accelerations, which are not read; and the duration in seconds. A ``RuntimeError`` if there is no such motion:
        RoboTwin lets the arm stand.
        """
        self.last_steps, self.failed = None, True
        motion = fastest_motion(np.asarray(path, np.float64))
        times = np.linspace(0, motion.duration, int(motion.duration / step))
        if len(times) > LONGEST:  # all that RoboTwin takes of them (_base_task.py:453)
            times = times[np.linspace(0, len(times) - 1, LONGEST).astype(int)]
        self.last_steps, self.failed = len(times), not len(times)  # of none RoboTwin lets the arm stand, too
        return times, motion(times), motion(times, 1), None, motion.duration

    def set_base_pose(self, pose: Any) -> None:
        """Do nothing: only plans depend on where the arm stands."""

    def plan_pose(self, *_: Any, **__: Any) -> Any:
        """Refuse."""
        raise RuntimeError("RoboTwin's scripted demonstrations need motion planning, which is not there")

    plan_screw = plan_qpos = IK = plan_pose


def fastest_motion(path: np.ndarray) -> Any:
    """Return toppra's fastest motion along a spline through joint positions, rad ``[P, J]``, that obeys the limits."""
    from toppra import SplineInterpolator, algorithm, constraint

    joints, spline = path.shape[1], SplineInterpolator(np.linspace(0, 1, len(path)), path)
    limits = [
        constraint.JointVelocityConstraint(np.full(joints, VELOCITY_LIMIT)),
        constraint.JointAccelerationConstraint(np.full(joints, ACCELERATION_LIMIT)),
    ]
    motion = algorithm.TOPPRA(limits, spline, parametrizer="ParametrizeConstAccel").compute_trajectory()
    if motion is None:
        raise RuntimeError("there is no time-optimal motion through these joint positions")
    return motion


class _Anything:
    """What is made of mplib besides, and looked at by plans alone."""

    def __init__(self, *_: Any, **__: Any): ...


@contextlib.contextmanager
def stand_ins() -> Iterator[None]:
    """Let modules that are imported within find these stand-ins; later ones find what is installed."""
    modules = {name: types.ModuleType(name) for name in ("mplib", "mplib.planner", "mplib.sapien_utils", "mplib.pymp")}
    top, planner, utilities, pymp = modules.values()
    vars(top).update(__path__=[], Planner=Planner, Pose=_Anything, planner=planner, sapien_utils=utilities, pymp=pymp)
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
