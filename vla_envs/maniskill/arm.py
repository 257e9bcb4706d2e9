"""The targets of an arm at each step of one world on the CPU, in a third of ManiSkill's time and to the same bits.

ManiSkill computes in torch, on batches of one; most of a step of its own tasks is that. Here single numbers are float32
of numpy, in ManiSkill's order; what torch does not round correctly (sines, roots, sums of products) is asked of torch.
"""

from typing import Any

import numpy as np
import sapien
import torch
from mani_skill.agents.controllers.pd_ee_pose import PDEEPoseController
from mani_skill.utils.geometry.rotation_conversions import euler_angles_to_matrix, matrix_to_quaternion
from mani_skill.utils.structs.pose import Pose
from torch import Tensor

_FRAME = "root_translation:root_aligned_body_rotation"
_FLOOR = np.float32(0.1)  # matrix_to_quaternion's, of what it divides by
_Quaternion = tuple[Any, ...]  # 4 numbers of numpy's float32, real part first
_Point = tuple[Any, ...]  # 3


def replace_methods(agent: Any) -> None:
    """Put our methods in the place of those of an agent that was just loaded: one world's, on the CPU's physics."""
    Grasp(agent)
    for controller in agent.controller.controllers.values():
        config = controller.config
        if type(controller) is PDEEPoseController and config.use_delta and config.frame == _FRAME:
            Arm(controller)


class Arm:
    """Takes the place of the ``set_action`` of a controller whose actions change the hand's pose in the root's frame.

    ManiSkill works out where the hand is up to twice, of which a CPU's inverse kinematics needs at most one.
    """

    def __init__(self, controller: PDEEPoseController):
        self._controller = controller
        kinematics, config = controller.kinematics, controller.config
        self._model, self._link = kinematics.pmodel, kinematics.end_link_idx
        self._qmask = kinematics.qmask
        self._modelled = kinematics.pmodel_active_joint_indices.numpy()
        self._controlled = kinematics.pmodel_controlled_joint_indices.numpy()
        self._robot = controller.articulation._objs[0]
        self._root, self._hand = controller.root_link._objs[0], controller.ee_link._objs[0]
        self._joints = [joint._objs[0] for joint in controller.joints]
        self._from_target, self._interpolates = config.use_target, config.interpolate
        controller.set_action = self.set_action

    def set_action(self, action: Tensor) -> None:
        """Move the hand's target by metres and radians ``[1, 6]``, and send the joints there."""
        controller = self._controller
        change = controller._preprocess_action(action)
        controller._step, controller._start_qpos = 0, controller.qpos
        if self._from_target:
            before = controller._target_pose.raw_pose[0].numpy()
            position, rotation = tuple(before[:3]), tuple(before[3:])
        else:
            position, rotation = self._where()
        turned = _times(_quaternion(change[:, 3:6]), rotation)
        moved = tuple(old + new for old, new in zip(position, change[0, :3].numpy(), strict=True))
        target = np.array([*moved, *_upper(turned)], np.float32)
        controller._target_pose = Pose(raw_pose=torch.from_numpy(target)[None])
        joints = self._robot.qpos
        found, solved, _ = self._model.compute_inverse_kinematics(
            self._link,
            sapien.Pose(target[:3], target[3:]),
            initial_qpos=joints[self._modelled],
            active_qmask=self._qmask,
            max_iterations=100,
        )
        goal = found[self._controlled].astype(np.float32) if solved else controller._start_qpos[0].numpy()
        controller._target_qpos = torch.from_numpy(goal)[None]
        if self._interpolates:
            controller._step_size = (controller._target_qpos - controller._start_qpos) / controller._sim_steps
            return
        for number, joint in enumerate(self._joints):
            joint.drive_target = goal[number : number + 1]

    def _where(self) -> tuple[_Point, _Quaternion]:
        root, hand = self._root.entity_pose, self._hand.entity_pose
        w, x, y, z = root.q
        inverse = w, -x, -y, -z
        offset = _turn(inverse, tuple(-root.p))
        position = tuple(own + turned for own, turned in zip(offset, _turn(inverse, tuple(hand.p)), strict=True))
        return position, _upper(_times(inverse, tuple(hand.q)))


class Grasp:
    """Takes the place of the ``is_grasping`` of an agent with two fingers: one that touches nothing holds nothing."""

    def __init__(self, agent: Any):
        self._ask = agent.is_grasping
        self._scene = agent.scene
        self._fingers = [getattr(agent, f"finger{number}_link")._bodies[0].entity for number in (1, 2)]
        agent.is_grasping = self.is_grasping

    def is_grasping(self, object: Any, *limits: Any, **others: Any) -> Tensor:
        """Tell whether both fingers press on an object, bool ``[1]``."""
        held = object._bodies[0].entity
        pairs = [[body.entity for body in contact.bodies] for contact in self._scene.px.get_contacts()]
        touching = [pair[0] if pair[1] == held else pair[1] for pair in pairs if held in pair]
        if all(finger in touching for finger in self._fingers):
            return self._ask(object, *limits, **others)
        return torch.zeros(1, dtype=torch.bool)


def _times(a: _Quaternion, b: _Quaternion) -> _Quaternion:
    (aw, ax, ay, az), (bw, bx, by, bz) = a, b
    return (
        aw * bw - ax * bx - ay * by - az * bz,
        aw * bx + ax * bw + ay * bz - az * by,
        aw * by - ax * bz + ay * bw + az * bx,
        aw * bz + ax * by - ay * bx + az * bw,
    )


def _upper(a: _Quaternion) -> _Quaternion:
    """Return the equal rotation whose real part is not negative."""
    return tuple(-number for number in a) if a[0] < 0 else a


def _turn(a: _Quaternion, point: _Point) -> _Point:
    w, x, y, z = a
    return _times(_times(a, (np.float32(0), *point)), (w, -x, -y, -z))[1:]


def _quaternion(angles: Tensor) -> _Quaternion:
    matrix = euler_angles_to_matrix(angles, "XYZ")
    (m00, m01, m02), (m10, m11, m12), (m20, m21, m22) = matrix[0].numpy()
    one, two = np.float32(1), np.float32(2)
    squares = one + m00 + m11 + m22, one + m00 - m11 - m22, one - m00 + m11 - m22, one - m00 - m11 + m22
    if not squares[0] > max(squares[1:]):  # a turn by more than a right angle and a third
        return tuple(matrix_to_quaternion(matrix)[0].numpy())
    positive = torch.from_numpy(np.array([square for square in squares if square > 0], np.float32))
    root = torch.sqrt(positive)[0].numpy()[()]
    below = two * np.maximum(root, _FLOOR)
    return _upper((root * root / below, (m21 - m12) / below, (m02 - m20) / below, (m10 - m01) / below))
