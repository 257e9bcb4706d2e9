"""Stress of a camera and of the light in a scene of SAPIEN, until the scene is built again."""

from typing import Any

import numpy as np
import sapien

from vla_envs.stress import camera_motion, light_change


def perturb(
    kind: str, camera: Any, scene: Any, middle: np.ndarray, strength: float, random: np.random.Generator
) -> None:
    """Draw the stress ``camera`` or ``light``, around ``middle``, m, float64 ``[3]``, which is on the table."""
    if kind == "camera":
        before = camera.get_model_matrix()  # its axes are the usual ones
        distance = float(np.linalg.norm(middle - before[:3, 3]))
        after = before @ camera_motion(strength * random.uniform(-1, 1, 6), distance, camera.fovy)
        camera.entity.set_pose(sapien.Pose(after @ np.linalg.inv(before)) * camera.entity.pose)
        return
    brightness, turn = light_change(strength, random)
    around = sapien.Pose(p=middle) * sapien.Pose(np.block([[turn, np.zeros((3, 1))], [0, 0, 0, 1]]))
    around = around * sapien.Pose(p=-middle)
    scene.set_ambient_light(scene.ambient_light * brightness)
    for light in scene.render_system.lights:
        light.color = light.color * brightness
        light.entity.set_pose(around * light.entity.pose)
