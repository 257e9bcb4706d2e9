"""SAPIEN's defaults, which a process has once: another simulator's are set aside while RoboTwin builds its scene."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

_FRICTION, _RESTITUTION = 0.3, 0.1
_PICTURE = "r32g32b32a32sfloat"


@contextlib.contextmanager
def sapiens_defaults() -> Iterator[None]:
    """Build with what SAPIEN brings, as RoboTwin does in a process of its own; put back what was there.

    ManiSkill sets contact offsets, solver iterations and materials for all that is built after it. SAPIEN does not tell
    the format of pictures, so that one stays; ManiSkill sets it before each of its cameras.
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
    render.set_picture_format("Color", _PICTURE)
    try:
        yield
    finally:
        for set_configuration, before, _ in configurations:
            set_configuration(before)
        physx.set_default_material(material.static_friction, material.dynamic_friction, material.restitution)
        render.set_msaa(samples)
        render.set_camera_shader_dir(shader)
