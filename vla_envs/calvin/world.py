"""A CALVIN scene in PyBullet, stepped without drawing; several may be in one process."""

import copy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from vla_envs.calvin.chains import Condition
from vla_envs.calvin.package import import_calvin, import_pybullet, silence
from vla_envs.calvin.scenes import BLOCKS, read_arguments, read_robot, read_scene
from vla_envs.calvin.states import FIRST_BLOCK
from vla_envs.probe import run_probe
from vla_envs.stress import camera_motion

PHYSICS_RATE = 240  # Hz
PHYSICS_STEPS = 8  # per action
_GRASP_STEPS, _SETTLE_STEPS = 12, 10  # actions
_STAY_OPEN, _STAY_CLOSED = (np.array([0, 0, 0, 0, 0, 0, grip]) for grip in (1.0, -1.0))


class World:
    """Robot, table and blocks (calvin_env's ``robot`` and ``scene`` of the last reset), cameras and task oracle.

    ``fixes``: see :func:`~vla_envs.calvin.scenes.read_scene`; ``egl``: draw with PyBullet's EGL renderer, on a GPU.
    """

    def __init__(self, folder: Path, *, fixes: bool, egl: bool):
        self._folder, self._fixes = folder, fixes
        self._settings: dict[str, tuple[Any, Any]] = {}  # of scenes that were loaded and the robot in them
        self._camera_settings = [read_arguments(folder, f"cameras/cameras/{name}") for name in ("static", "gripper")]
        self._calvin = import_calvin(folder)
        self._oracle = self._calvin.tasks.Tasks(**read_arguments(folder, "tasks/new_playtable_tasks"))
        with silence():
            self._client: Any = _connect(egl)

    def reset(self, scene: str, robot: np.ndarray, objects: np.ndarray) -> None:
        """Load a scene by its letter and put all in place: ``robot_obs`` ``[15]`` and ``scene_obs`` ``[24]``, float64.

        It is loaded again (44 ms): PyBullet remembers contacts of the last episode, which would change the next.
        """
        client, calvin = self._client, self._calvin
        self._use()
        client.resetSimulation()
        client.setTimeStep(1 / PHYSICS_RATE)
        client.setGravity(0, 0, -9.8)
        if scene not in self._settings:  # reading takes 20 ms
            read = read_scene(self._folder, scene, self._fixes)
            self._settings[scene] = read, read_robot(self._folder, read)
        settings, robot_settings = self._settings[scene]
        parts: dict[str, Any] = {"cid": client._client}
        # Its generator is for places that are not given; all are given below.
        playing, random = calvin.play_table_scene, np.random.RandomState(0)
        self.scene = playing.PlayTableScene(p=client, np_random=random, **parts, **settings)
        self.robot = calvin.robot.Robot(**parts, **copy.deepcopy(robot_settings))
        with silence():
            self.robot.load()
            self.scene.load()
        # Now, because resetSimulation sets it back. Without it contacts come in an order that depends on the past.
        client.setPhysicsEngineParameter(deterministicOverlappingPairs=1)
        parts |= {"robot_id": self.robot.robot_uid, "objects": None}
        static, gripper = copy.deepcopy(self._camera_settings)
        self._cameras = [
            calvin.static_camera.StaticCamera(**static, **parts),
            calvin.gripper_camera.GripperCamera(**gripper, **parts),
        ]
        self.scene.reset(objects)
        self.robot.reset(robot)
        client.stepSimulation()

    def begin(self, scene: str, condition: Condition, robot: np.ndarray, objects: np.ndarray) -> None:
        """Reset as above, close the hand around a block that is held, and let everything come to rest."""
        self.reset(scene, robot, objects)
        places = [condition[f"{color}_block"] for color in BLOCKS]
        held = [number for number, place in enumerate(places) if place == "grasped"]
        for number in held:
            self._grasp(number, objects[FIRST_BLOCK + 6 * number :][:6])
        if {"grasped", "drawer", "stacked_top"} & {*places}:
            for _ in range(_SETTLE_STEPS):
                self.step(_STAY_CLOSED if held else _STAY_OPEN)

    def _grasp(self, block: int, pose: np.ndarray) -> None:
        """Close the gripper around a block that is kept at a pose, m and rad, float64 ``[6]``."""
        for _ in range(_GRASP_STEPS):
            self.robot.apply_action(_STAY_CLOSED)
            for _ in range(PHYSICS_STEPS):
                self.scene.movable_objects[block].reset(pose)
                self._client.stepSimulation()

    def step(self, action: np.ndarray) -> None:
        """Move by an action, float64 ``[7]``: shares of 2 cm and 0.05 rad onto the target pose, gripper 1 or -1."""
        self._use()
        self.robot.apply_action(action)
        for _ in range(PHYSICS_STEPS):
            self._client.stepSimulation()
        self.scene.step()

    def info(self) -> dict[str, Any]:
        """Return what the task oracle compares."""
        self._use()
        return {"robot_info": self.robot.get_observation()[1], "scene_info": self.scene.get_info()}

    def solved(self, task: str, before: dict[str, Any]) -> bool:
        """Ask calvin_env's oracle whether a task was done between :meth:`info` ``before`` and now."""
        return bool(self._oracle.get_task_info_for_set(before, self.info(), {task}))

    def states(self) -> tuple[np.ndarray, np.ndarray]:
        """Return ``robot_obs``, float64 ``[15]``, and ``scene_obs``, float64 ``[24]``."""
        self._use()
        return self.robot.get_observation()[0], self.scene.get_obs()

    def hand(self) -> tuple[np.ndarray, np.ndarray]:
        """Return where the finger tips are, m, and the hand's Euler angles, rad; float64 ``[3]`` each."""
        observation = self.states()[0]
        return observation[:3], observation[3:6]

    def block(self, color: str) -> tuple[np.ndarray, float]:
        """Return the middle of a block, m, float64 ``[3]``, and its rotation about the vertical, rad."""
        number = [block.name for block in self.scene.movable_objects].index(f"block_{color}")
        pose = self.states()[1][FIRST_BLOCK + 6 * number :][:6]
        return pose[:3], pose[5]

    def bounds(self, link: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the lowest and highest corner of the box around a part of the table, m, float64 ``[3]`` each."""
        table = self.scene.fixed_objects[0]
        low, high = self._client.getAABB(table.uid, self.scene.get_info()["fixed_objects"]["table"]["links"][link])
        return np.array(low), np.array(high)

    def render(self, size: int, *, wrist: bool) -> tuple[np.ndarray, np.ndarray | None]:
        """Draw what the static camera sees, uint8 ``[size, size, 3]``, and if asked the hand's, ``[84, 84, 3]``."""
        self._use()
        static, gripper = self._cameras
        static.width = static.height = size
        images = [np.asarray(camera.render()[0], np.uint8) for camera in ([static, gripper] if wrist else [static])]
        return images[0], images[1] if wrist else None

    def move_camera(self, draw: np.ndarray) -> None:
        """Move the static camera until the next reset, as :func:`~vla_envs.stress.camera_motion` says."""
        camera = self._cameras[0]
        distance = float(np.linalg.norm(np.subtract(camera.look_from, camera.look_at)))
        motion = camera_motion(draw, distance, np.radians(camera.fov))
        camera.viewMatrix = (np.linalg.inv(motion) @ np.reshape(camera.viewMatrix, (4, 4)).T).T.ravel().tolist()

    def _use(self) -> None:
        """Let what is called next work in this world: calvin_env does not always name the client of PyBullet."""
        calvin = self._calvin
        for module in (calvin.robot, calvin.mixed_ik, calvin.static_camera, calvin.gripper_camera):  # that call it p
            module.p = self._client

    def close(self) -> None:
        """Free the world."""
        if self._client is not None:
            with silence():
                self._client.disconnect()
            self._client = None


def try_renderer(*, egl: bool) -> tuple[bool, str]:
    """Draw a ball in a process of its own, which ends where it fails: whether it can be seen, or what went wrong."""
    ok, detail = run_probe(f"from vla_envs.calvin import world; world.draw_ball(egl={egl})")
    return ok, "" if ok else detail.rstrip(".")


def draw_ball(*, egl: bool) -> None:
    """Draw a red ball; what :func:`try_renderer` runs."""
    client = _connect(egl)
    client.createMultiBody(
        baseVisualShapeIndex=client.createVisualShape(client.GEOM_SPHERE, radius=0.5, rgbaColor=[1, 0, 0, 1])
    )
    view = client.computeViewMatrix([2, 0, 0], [0, 0, 0], [0, 0, 1])
    image = client.getCameraImage(64, 64, view, client.computeProjectionMatrixFOV(60, 1, 0.1, 10))[2]
    if np.reshape(image, (64, 64, 4))[..., :3].std() < 1:
        raise RuntimeError("the frame is empty")


def _connect(egl: bool) -> Any:
    """Make a client of PyBullet; with EGL its first two frames are drawn, which have other shadows than all others."""
    pybullet = import_pybullet()
    from pybullet_utils.bullet_client import BulletClient

    client: Any = BulletClient(pybullet.DIRECT)
    if egl:
        found = find_spec("eglRenderer")
        library = (found.origin, "_eglRendererPlugin") if found and found.origin else ("eglRendererPlugin",)
        if client.loadPlugin(*library) < 0:
            raise RuntimeError("PyBullet's EGL renderer cannot be loaded; type renderer=tiny")
        for _ in range(2):
            client.getCameraImage(200, 200)
    return client
