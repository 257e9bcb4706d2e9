"""SAPIEN's defaults while a scene is built, and a robot's drives in a third of RoboTwin's time, to the same bits."""

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np

_FRICTION, _RESTITUTION = 0.3, 0.1
_CLOSED, _OPEN = np.float64(0), np.float64(1)
_WIDEST_STEP = 0.1  # of a gripper's opening


class PhysicsSteps:
    """Counts the physics steps of a SAPIEN scene, whose ``step`` it takes the place of."""

    def __init__(self, scene: Any):
        self.count = 0
        self._step = scene.physx_system.step  # not the scene's own, which would keep the scene
        scene.step = self.step

    def step(self) -> None:
        """Take one."""
        self.count += 1
        self._step()


class Drives:
    """Takes the place of ``set_arm_joints`` and ``set_gripper`` of RoboTwin's ``robot``.

    RoboTwin clips single numbers with numpy, and weighs both arms' own weight up in each of these calls. The kinds of
    numbers are RoboTwin's (float32 what a joint says of itself, float64 its target), for its bits.
    """

    def __init__(self, robot: Any, steps: PhysicsSteps):
        self._robot, self._steps = robot, steps
        self._arms = {"left": robot.left_arm_joints, "right": robot.right_arm_joints}
        self._grippers = {
            "left": (robot.left_gripper, robot.left_gripper_scale),
            "right": (robot.right_gripper, robot.right_gripper_scale),
        }
        self._bodies = [robot.left_entity]
        if robot.right_entity is not robot.left_entity:
            self._bodies.append(robot.right_entity)
        self._weighed_at = -1  # physics steps, when both arms' weight was weighed up last
        robot.set_arm_joints, robot.set_gripper = self.set_arm_joints, self.set_gripper

    def set_arm_joints(self, target_position: np.ndarray, target_velocity: np.ndarray, arm_tag: str) -> None:
        """Send an arm to joint positions, rad ``[6]``, at velocities, rad/s ``[6]``."""
        self._weigh()
        positions, velocities = target_position.tolist(), target_velocity.tolist()
        for joint, position, velocity in zip(self._arms[arm_tag], positions, velocities, strict=False):
            joint.set_drive_target(position)
            joint.set_drive_velocity_target(velocity)

    def set_gripper(self, gripper_val: Any, arm_tag: str, gripper_eps: Any = _WIDEST_STEP) -> None:
        """Send a gripper to an opening from 0 to 1, at most ``gripper_eps`` from its target of now."""
        self._weigh()
        opening = min(max(np.float64(gripper_val), _CLOSED), _OPEN)
        setattr(self._robot, f"{arm_tag}_gripper_val", opening)
        joints, (least, most) = self._grippers[arm_tag]
        has = (joints[0][0].get_drive_target()[0] - least) / (most - least)
        has = min(max(has, np.float32(0)), np.float32(1))
        if (opening - has > gripper_eps > 0) or (opening - has < gripper_eps < 0):
            opening = has + gripper_eps
        width = least + opening * (most - least)
        for joint, factor, offset in joints:
            target = width * factor + offset
            velocity = min(max(target - joint.drive_target[0], -1.0), 1.0) * 0.05
            joint.set_drive_target(target)
            joint.set_drive_velocity_target(velocity)

    def _weigh(self) -> None:
        """Set the forces that hold both arms up: they depend on their joints alone, which move in physics steps."""
        if self._weighed_at != self._steps.count:
            self._weighed_at = self._steps.count
            for body in self._bodies:
                body.set_qf(body.compute_passive_force(gravity=True, coriolis_and_centrifugal=True))


@contextlib.contextmanager
def sapiens_defaults() -> Iterator[None]:
    """Build with SAPIEN's defaults, as RoboTwin does in a process of its own; put back what was there.

    ManiSkill sets contact offsets, solver iterations and materials for all that is built after it. The format of
    pictures cannot be read, so it stays; ManiSkill sets it before each of its cameras.
    """
    from sapien import physx, render

    configurations = [
        (physx.set_scene_config, physx.get_scene_config(), physx.PhysxSceneConfig()),
        (physx.set_body_config, physx.get_body_config(), physx.PhysxBodyConfig()),
        (physx.set_shape_config, physx.get_shape_config(), physx.PhysxShapeConfig()),
        (physx.set_sdf_config, physx.get_sdf_config(), physx.PhysxSDFConfig()),
    ]
    material = physx.get_default_material()
    samples, shader = render.get_msaa(), render.get_camera_shader_dir()
    for set_configuration, _, default in configurations:
        set_configuration(default)
    physx.set_default_material(_FRICTION, _FRICTION, _RESTITUTION)
    render.set_msaa(1)
    render.set_picture_format("Color", "r32g32b32a32sfloat")
    try:
        yield
    finally:
        for set_configuration, before, _ in configurations:
            set_configuration(before)
        physx.set_default_material(material.static_friction, material.dynamic_friction, material.restitution)
        render.set_msaa(samples)
        render.set_camera_shader_dir(shader)
