"""A CALVIN scene in PyBullet, stepped without drawing; several may be in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from vla_envs.calvin.package import import_calvin, import_pybullet, silence
from vla_envs.calvin.scenes import read_camera, read_oracle, read_robot, read_scene

PHYSICS_RATE = 240  # Hz
PHYSICS_STEPS = 8  # per action


class World:
    """Robot, table and blocks, cameras and task oracle.

    Args:
        folder: of calvin_env.
        fixes: see :func:`~vla_envs.calvin.scenes.read_scene`.
        egl: draw with PyBullet's EGL renderer, on a GPU, instead of its TinyRenderer.

    Attributes:
        robot, scene: those of calvin_env; of the last :meth:`reset`.

    Raises:
        RuntimeError: EGL cannot be used.
    """

    def __init__(self, folder: Path, *, fixes: bool, egl: bool):
        pybullet = import_pybullet()
        from pybullet_utils.bullet_client import BulletClient

        self._folder, self._fixes = folder, fixes
        self._settings: dict[str, Any] = {}  # of scenes that were loaded; reading one takes 15 ms
        self._calvin = import_calvin(folder)
        self._oracle = self._calvin.Tasks(read_oracle(folder))
        with silence():
            self._client: Any = BulletClient(pybullet.DIRECT)
            if egl:
                _load_egl(self._client)

    def reset(self, scene: str, robot: np.ndarray, objects: np.ndarray) -> None:
        """Load a scene and put everything in its place.

        It is loaded anew each time (44 ms): of the last episode PyBullet remembers contacts, from which it starts to
        solve the next ones, and a block that stands where it stood before then moves otherwise.

        Args:
            scene: its letter.
            robot: ``robot_obs`` of calvin_env, float64 ``[15]``.
            objects: ``scene_obs``, float64 ``[24]``.
        """
        client, calvin = self._client, self._calvin
        calvin.use(client)
        client.resetSimulation()
        client.setTimeStep(1 / PHYSICS_RATE)
        client.setGravity(0, 0, -9.8)
        if scene not in self._settings:
            self._settings[scene] = read_scene(self._folder, scene, self._fixes)
        settings = self._settings[scene]
        parts: dict[str, Any] = {"cid": client._client}
        # Its generator is for places that nobody names; all are named below.
        self.scene = calvin.PlayTableScene(p=client, np_random=np.random.RandomState(0), **parts, **settings)
        self.robot = calvin.Robot(**parts, **read_robot(self._folder, settings))
        with silence():
            self.robot.load()
            self.scene.load()
        # Now, because resetSimulation sets it back. Without it contacts come in an order that depends on the past.
        client.setPhysicsEngineParameter(deterministicOverlappingPairs=1)
        parts |= {"robot_id": self.robot.robot_uid, "objects": None}
        self._cameras = [
            calvin.StaticCamera(**read_camera(self._folder, "static"), **parts),
            calvin.GripperCamera(**read_camera(self._folder, "gripper"), **parts),
        ]
        self.scene.reset(objects)
        self.robot.reset(robot)
        client.stepSimulation()

    def grasp(self, block: int, pose: np.ndarray, steps: int) -> None:
        """Close the gripper around a block, which is kept at a pose (m and rad, float64 ``[6]``) for so many actions."""
        self._calvin.use(self._client)
        for _ in range(steps):
            self.robot.apply_action(np.array([0, 0, 0, 0, 0, 0, -1.0]))
            for _ in range(PHYSICS_STEPS):
                self.scene.movable_objects[block].reset(pose)
                self._client.stepSimulation()

    def step(self, action: np.ndarray) -> None:
        """Move by an action, float64 ``[7]``: shares of 2 cm and 0.05 rad onto the target pose, gripper 1 or -1."""
        self._calvin.use(self._client)
        self.robot.apply_action(action)
        for _ in range(PHYSICS_STEPS):
            self._client.stepSimulation()
        self.scene.step()

    def info(self) -> dict[str, Any]:
        """Return what the task oracle compares."""
        self._calvin.use(self._client)
        return {"robot_info": self.robot.get_observation()[1], "scene_info": self.scene.get_info()}

    def solved(self, task: str, before: dict[str, Any]) -> bool:
        """Ask calvin_env's oracle whether a task was done between :meth:`info` ``before`` and now."""
        return bool(self._oracle.get_task_info_for_set(before, self.info(), {task}))

    def states(self) -> tuple[np.ndarray, np.ndarray]:
        """Return ``robot_obs``, float64 ``[15]``, and ``scene_obs``, float64 ``[24]``."""
        self._calvin.use(self._client)
        return self.robot.get_observation()[0], self.scene.get_obs()

    def render(self, size: int, *, wrist: bool) -> tuple[np.ndarray, np.ndarray | None]:
        """Draw what the static camera and the one in the hand see.

        Args:
            size: pixels of a side of the static camera's image.
            wrist: draw the other one too.

        Returns:
            uint8 ``[size, size, 3]``, and ``[84, 84, 3]`` or ``None``.
        """
        self._calvin.use(self._client)
        static, gripper = self._cameras
        static.width = static.height = size
        images = [np.asarray(camera.render()[0], np.uint8) for camera in ([static, gripper] if wrist else [static])]
        return images[0], images[1] if wrist else None

    def close(self) -> None:
        """Free the world."""
        if self._client is not None:
            with silence():
                self._client.disconnect()
            self._client = None


def _load_egl(client: Any) -> None:
    from importlib.util import find_spec

    found = find_spec("eglRenderer")
    library = (found.origin, "_eglRendererPlugin") if found and found.origin else ("eglRendererPlugin",)
    if client.loadPlugin(*library) < 0:
        raise RuntimeError("PyBullet's EGL renderer cannot be used on this machine; type renderer=tiny")
