"""The physics steps of LIBERO's arm: everything that is equal is computed once, and the bits are robosuite's.

robosuite computes the dynamics three times per physics step. Most of it (kinematics, masses, contacts) follows from
positions and velocities alone and is computed once here. MuJoCo's solver of contact forces runs three times as before,
because it begins where it ended last, and its last digits show that.
"""

from typing import Any

import numpy as np

from vla_envs.rendering.mujoco import mujoco


class Arm:
    """The arm and gripper of a robosuite environment with one robot: operational space control (Khatib 1987).

    Goals and matrices are robosuite's, numbers are added in its order, and arrays lie in memory as its arrays do,
    because BLAS adds up in another order otherwise. ``env`` keeps its simulation through all resets.
    """

    def __init__(self, env: Any):
        from robosuite.utils import control_utils

        self._formulas = control_utils
        self._model, self._data = env.sim.model._model, env.sim.data._data
        self._robot = robot = env.robots[0]
        self._joints = _slice(robot._ref_joint_pos_indexes)
        self._axes = _slice(robot._ref_joint_vel_indexes)
        self._motors = _slice(robot._ref_joint_actuator_indexes)
        self._fingers = _slice(robot._ref_joint_gripper_actuator_indexes)
        self._weakest, self._strongest = robot.torque_limits
        low, high = self._model.actuator_ctrlrange[self._fingers].T
        self._finger_middle, self._finger_reach = 0.5 * (high + low), 0.5 * (high - low)
        # What MuJoCo computes: views of its memory, and what it is asked to write into.
        self._site = robot.eef_site_id
        self._position, self._rotation = self._data.site_xpos[self._site], self._data.site_xmat[self._site]
        self._rotation = self._rotation.reshape(3, 3)
        self._jacobian_of_position, self._jacobian_of_rotation = np.zeros((2, 3, self._model.nv))
        self._all_masses = np.zeros((self._model.nv, self._model.nv))
        count = len(robot._ref_joint_vel_indexes)
        self._masses = np.zeros((count, count), order="F")
        self._moves, self._turns = np.zeros((3, count), order="F"), np.zeros((3, count), order="F")
        self._moves_and_turns = np.zeros((6, count), order="F")
        self._velocity, self._error, self._wrench = np.zeros(6), np.zeros(6), np.zeros(6)
        self.reset()

    def reset(self) -> None:
        """Begin an episode after robosuite's reset.

        Until the first physics step is over robosuite goes by what it read in its reset, where the arm stood before the
        initial state was restored. The last command of the gripper is forgotten.
        """
        self._controller = controller = self._robot.controller  # of this episode
        self._gains, self._damping = controller.kp, controller.kd
        self._posture = controller.initial_joint
        self._hand, self._hand_rotation = controller.ee_pos, controller.ee_ori_mat
        self._velocity[:3], self._velocity[3:] = controller.ee_pos_vel, controller.ee_ori_vel
        self._angles, self._speeds = controller.joint_pos, controller.joint_vel
        self._moves[:], self._turns[:], self._moves_and_turns[:] = controller.J_pos, controller.J_ori, controller.J_full
        self._masses[:] = controller.mass_matrix
        self._grip = np.zeros(len(self._finger_middle))
        self._has_read = True

    def aim(self, action: np.ndarray) -> None:
        """Begin an action, float64 ``[7]``, after the dynamics of the first of its physics steps have been computed."""
        self._read()
        self._controller.ee_pos, self._controller.ee_ori_mat = self._hand, self._hand_rotation
        self._controller.new_update = False  # it has all it needs
        self._controller.set_goal(action[:6])
        self._grip_change = np.array([-1.0, 1.0]) * self._robot.gripper.speed * np.sign(action[6:])

    def compute_dynamics(self) -> None:
        """Compute what a physics step needs before forces are chosen, and the contacts as robosuite solves them."""
        mujoco.mj_step1(self._model, self._data)
        mujoco.mj_fwdActuation(self._model, self._data)  # of the forces of the last step
        mujoco.mj_fwdAcceleration(self._model, self._data)
        mujoco.mj_fwdConstraint(self._model, self._data)
        if not self._has_read:  # as often as robosuite's controller looks
            mujoco.mj_fwdConstraint(self._model, self._data)

    def step(self) -> None:
        """Choose forces and complete the physics step."""
        self._read()
        self._has_read = False
        data, wrench = self._data, self._wrench
        np.subtract(self._controller.goal_pos, self._hand, out=self._error[:3])
        self._error[3:] = self._formulas.orientation_error(self._controller.goal_ori, self._hand_rotation)
        np.multiply(self._error, self._gains, out=wrench)
        wrench -= self._velocity * self._damping
        _, inertia, turning_inertia, nullspace = self._formulas.opspace_matrices(
            self._masses, self._moves_and_turns, self._moves, self._turns
        )
        wrench[:3], wrench[3:] = np.dot(inertia, wrench[:3]), np.dot(turning_inertia, wrench[3:])
        torques = np.dot(self._moves_and_turns.T, wrench)
        torques += data.qfrc_bias[self._axes]  # gravity
        torques += self._formulas.nullspace_torques(self._masses, nullspace, self._posture, self._angles, self._speeds)
        data.ctrl[self._motors] = _clip(torques, self._weakest, self._strongest)
        self._grip = _clip(self._grip + self._grip_change, -1.0, 1.0)
        data.ctrl[self._fingers] = self._finger_middle + self._finger_reach * self._grip
        mujoco.mj_step2(self._model, data)

    def _read(self) -> None:
        if self._has_read:
            return
        self._has_read = True
        data, axes = self._data, self._axes
        mujoco.mj_jacSite(self._model, data, self._jacobian_of_position, self._jacobian_of_rotation, self._site)
        mujoco.mj_fullM(self._model, self._all_masses, data.qM)
        self._masses[:] = self._all_masses[axes, axes]
        self._hand, self._hand_rotation = self._position, self._rotation
        np.dot(self._jacobian_of_position, data.qvel, out=self._velocity[:3])
        np.dot(self._jacobian_of_rotation, data.qvel, out=self._velocity[3:])
        self._angles, self._speeds = data.qpos[self._joints], data.qvel[axes]
        self._moves[:], self._turns[:] = self._jacobian_of_position[:, axes], self._jacobian_of_rotation[:, axes]
        self._moves_and_turns[:3], self._moves_and_turns[3:] = self._moves, self._turns


def _slice(numbers: Any) -> slice:
    """Make a slice of the indices of a robot's joints, which follow one another: of an array it is a view."""
    first, last = int(numbers[0]), int(numbers[-1])
    if list(numbers) != list(range(first, last + 1)):
        raise RuntimeError(f"robosuite numbers the joints of a robot {list(numbers)}: another version than LIBERO's")
    return slice(first, last + 1)


def _clip(values: np.ndarray, low: Any, high: Any) -> np.ndarray:
    return np.minimum(np.maximum(values, low), high)  # numpy's clip takes three times as long for so few
