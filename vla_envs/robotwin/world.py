"""A task of RoboTwin in a SAPIEN scene; several worlds may be in one process."""

import contextlib
import copy
import io
import math
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from vla_common.plain import read_yaml
from vla_envs.rendering.vulkan import choose_driver, has_gpu, show_own_gpu
from vla_envs.robotwin.package import RoboTwin, import_robotwin
from vla_envs.robotwin.physics import Drives, PhysicsSteps, sapiens_defaults
from vla_envs.robotwin.spec import CROPPED

FAST_SHADOWS = 1024  # pixels of a side of a shadow map where drawing is to be fast; SAPIEN's are 2048
STANDING = 50  # physics steps of a chunk for which there is no motion
_CAMERA = "D435"  # of RoboTwin's _camera_config.yml
_KEPT_AREA = 0.9  # of an image that is cropped
_RESETS_PER_CLEANING = 8  # of SAPIEN's caches of meshes and textures
_system: list[Any] = []  # SAPIEN compiles its shaders again (6.5 s) where no scene and no render system is left


class UnstableEpisode(RuntimeError):
    """Objects of a seed do not come to rest."""


class World:
    """One scene, made for each episode.

    RoboTwin seeds numpy's global generator and draws from it, also while it moves. Each world has that generator for
    itself, so that neither another world nor other code in the process matters, nor notices.
    """

    def __init__(self, folder: Path, assets: Path, options: Mapping[str, Any], *, wrist: bool):
        choose_driver()
        if has_gpu():
            import torch

            show_own_gpu(torch.cuda.device_count())  # RoboTwin's scenes cannot be told which
        self._robotwin = import_robotwin(folder, assets)
        self._options, self._wrist = options, wrist
        self._settings = _read_settings(folder, assets, options, wrist)
        self._random: Any = None  # numpy's state, of this world
        self._resets = 0
        self.task: Any = None  # RoboTwin's, of the last reset
        self.instruction = ""  # of its episode
        self.untouchable: list[str] = []  # lines about what has lost shapes for contacts, which PhysX cannot cook
        self.stood = False  # whether an arm stood still in the last chunk, for want of a motion

    def reset(self, name: str, seed: int) -> None:
        """Set a task up."""
        self.untouchable, self.stood = [], False
        self.close(clear_cache=self._resets % _RESETS_PER_CLEANING == 0)
        self._resets += 1
        import sapien

        if not _system:
            _system.append(sapien.render.RenderSystem(*([] if has_gpu() else [sapien.Device("cpu")])))
        said = io.StringIO()
        try:
            # A new one each time: without curobo RoboTwin cannot set one up twice, and nothing of it stays behind.
            self.task = _task_class(self._robotwin, name, self._options["shader"], self._options["render_quality"])()
            with (
                self._own_random(),
                sapiens_defaults(),
                contextlib.redirect_stdout(said),
                _lost_shapes(self.untouchable),
            ):
                self.task.setup_demo(now_ep_num=seed, seed=seed, task_name=name, **copy.deepcopy(self._settings))
                kept = np.random.get_state()
                self.instruction = self._describe(name, seed)
                np.random.set_state(kept)
        except self._robotwin.UnStableError as error:
            self.close()
            raise UnstableEpisode(str(error)) from error
        except (Exception, SystemExit) as error:  # it calls exit() where a file is missing
            self.close()
            detail = f"{type(error).__name__}: {error}"
            if isinstance(error, SystemExit):
                detail = (said.getvalue().strip().splitlines() or ["exit()"])[-1]
            raise RuntimeError(
                f"RoboTwin cannot set up {name} with seed {seed}, of {self._robotwin.folder} with the assets of "
                f"{self._robotwin.assets}: {' '.join(detail.split())}"
            ) from error
        # Ours are counted outside, where an episode ends with the limit and not at the first chunk after it.
        self.task.step_lim = math.inf
        if self._options["render_quality"] == "fast":
            _hide_shadow(self.task.wall.actor)

    def _describe(self, name: str, seed: int) -> str:
        task, before = self.task, dict(vars(self.task))
        task.plan_success = False  # otherwise three tasks act out their demonstrations here
        try:
            info = {key: str(value) for key, value in task.get_info().items()}  # one task has an arm for a text
        finally:
            vars(task).clear()
            vars(task).update(before)
        (found,) = self._robotwin.describe(name, [info], 1, seed)
        return found[self._options["instruction_type"]][0]

    def execute(self, chunk: np.ndarray) -> int | None:
        """Move through a chunk of joint positions ``[C, 14]``, until an action, which is returned, solves the task.

        Both arms' motions take as long as the longer one; the actions share that time evenly, as for the grippers.
        """
        task = self.task
        planners = [arm.planner for arm in (task.robot.left_mplib_planner, task.robot.right_mplib_planner)]
        for planner in planners:
            planner.last_steps, planner.failed = None, False
        task.checks, task.moving = 0, True
        try:
            with self._own_random():
                _, solved, _, _ = task.gen_sparse_reward_data(np.asarray(chunk, np.float64))
        finally:
            task.moving = False
        self.stood = any(planner.failed for planner in planners)
        if not solved[0]:
            return None
        steps = max(planner.last_steps or STANDING for planner in planners)
        return min((task.checks - 1) * len(chunk) // steps, len(chunk) - 1)

    def states(self) -> np.ndarray:
        """Return where the joints are to be, rad, and the grippers' openings, float64 ``[14]``; not where they are."""
        robot = self.task.robot
        return np.array(robot.get_left_arm_jointState() + robot.get_right_arm_jointState(), np.float64)

    def render(self) -> tuple[np.ndarray, np.ndarray | None]:
        """Draw what the head camera sees, uint8 ``[H, W, 3]``, and both in the hands, ``[2, H, W, 3]``, if asked."""
        task = self.task
        with self._own_random():
            kept, ambient = np.random.get_state(), np.array(task.scene.ambient_light)
            task._update_render()  # which draws other lights in some episodes
            images = [self._image(picture) for picture in self._pictures()]
            np.random.set_state(kept)  # looking changes nothing
            if task.crazy_random_light:
                task.scene.set_ambient_light(ambient)
        return images[0], np.stack(images[1:]) if self._wrist else None

    @property
    def head_camera(self) -> Any:
        """SAPIEN's, of the episode."""
        cameras = self.task.cameras
        return cameras.static_camera_list[cameras.static_camera_name.index("head_camera")]

    def _pictures(self) -> Iterator[np.ndarray]:
        """Draw each view, float32 ``[H, W, 4]``.

        A camera that draws keeps 240 MB of shadow maps. So one of them draws all views, from the poses of the others:
        the same pixels in a third of the memory, and of the time of an episode's first frames.
        """
        cameras, drawing = self.task.cameras, self.head_camera
        yield _draw(drawing)
        if not self._wrist:
            return
        own = drawing.entity.pose
        for pose in [camera.entity.pose for camera in (cameras.left_camera, cameras.right_camera)]:
            drawing.entity.set_pose(pose)
            self.task.scene.update_render()
            yield _draw(drawing)
        drawing.entity.set_pose(own)

    def _image(self, color: np.ndarray) -> np.ndarray:
        image = (color[..., :3] * 255).clip(0, 255).astype(np.uint8)
        image = crop(image) if self._options["center_crop"] else np.ascontiguousarray(image)
        return reduce(image, self._options["image_size"]) if self._options["image_size"] else image

    def close(self, clear_cache: bool = True) -> None:
        """Free the scene."""
        task, self.task = self.task, None
        if task is not None:
            task.close_env(clear_cache=clear_cache)

    @contextlib.contextmanager
    def _own_random(self) -> Iterator[None]:
        outside = np.random.get_state()
        if self._random is not None:
            np.random.set_state(self._random)
        try:
            yield
        finally:
            self._random = np.random.get_state()
            np.random.set_state(outside)


def crop(image: np.ndarray) -> np.ndarray:
    """Keep the middle :data:`_KEPT_AREA` of an image, uint8 ``[H, W, 3]``, scaled as TensorFlow does."""
    side = math.sqrt(_KEPT_AREA)
    rows, columns = (np.linspace((1 - side) / 2, (1 + side) / 2, CROPPED) * (length - 1) for length in image.shape[:2])
    above, left = np.floor(rows).astype(int), np.floor(columns).astype(int)
    below, right = np.minimum(above + 1, image.shape[0] - 1), np.minimum(left + 1, image.shape[1] - 1)
    down, across = (rows - above)[:, None, None], (columns - left)[None, :, None]
    upper = image[above][:, left] * (1 - across) + image[above][:, right] * across
    lower = image[below][:, left] * (1 - across) + image[below][:, right] * across
    image = upper * (1 - down) + lower * down
    return (image * (255.5 / 255)).astype(np.uint8)  # TensorFlow's way from numbers up to 1 to bytes


def reduce(image: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Average blocks of pixels, uint8 ``[H, W, 3]``, so that ``shape`` are left."""
    height, width = shape
    blocks = image.reshape(height, image.shape[0] // height, width, image.shape[1] // width, 3)
    return (blocks.mean((1, 3)) + 0.5).astype(np.uint8)


def _draw(camera: Any) -> np.ndarray:
    camera.take_picture()
    return camera.get_picture("Color")


def _with_small_shadows(scene: Any, light: Any) -> Any:
    """Replace a light by one that casts coarser shadows: SAPIEN sizes a shadow map when it is made."""
    pose, directed = light.entity.pose, hasattr(light, "shadow_half_size")
    light.entity.remove_from_scene()
    add, place = (scene.add_directional_light, [0, 0, -1]) if directed else (scene.add_point_light, [0, 0, 0])
    smaller = add(place, light.color, shadow=True, shadow_map_size=FAST_SHADOWS)
    smaller.entity.set_pose(pose)
    return smaller


@contextlib.contextmanager
def _lost_shapes(lost: list[str]) -> Iterator[None]:
    """Note what is built without shapes for contacts that it should have, which SAPIEN leaves out silently."""
    from sapien.wrapper.actor_builder import ActorBuilder

    build = ActorBuilder.build_physx_component

    def build_physx_component(builder: Any, *arguments: Any, **options: Any) -> Any:
        body = build(builder, *arguments, **options)
        there, wanted = len(body.collision_shapes), len(builder.collision_records)
        if there < wanted:  # a file may give several
            files = ", ".join(sorted({record.filename for record in builder.collision_records if record.filename}))
            what = f"{builder.name} has {there} of {wanted} shapes for contacts: PhysX cannot cook {files}"
            if not there and builder.physx_body_type != "link":
                raise RuntimeError(what)
            lost.append(what)
        return body

    ActorBuilder.build_physx_component = build_physx_component
    try:
        yield
    finally:
        ActorBuilder.build_physx_component = build


def _hide_shadow(entity: Any) -> None:
    """Have the wall behind the table throw no shadow, which costs a quarter of a picture."""
    import sapien

    for component in entity.components:
        if isinstance(component, sapien.render.RenderBodyComponent):
            for shape in component._internal_node.children:
                shape.cast_shadow = False


def _read_settings(folder: Path, assets: Path, options: Mapping[str, Any], wrist: bool) -> dict[str, Any]:
    """Read what RoboTwin's ``VectorEnv`` makes of a file in ``task_config/``."""
    configs = folder / "task_config"
    settings = read_yaml(configs / f"{options['task_config']}.yml")
    places, cameras = read_yaml(configs / "_embodiment_config.yml"), read_yaml(configs / "_camera_config.yml")
    arms = [name for name in options["embodiment"] if isinstance(name, str)]
    folders = [str(assets / places[name]["file_path"]) for name in arms]
    left, right = folders[0], folders[-1]
    head = cameras[_CAMERA]
    settings.update(
        planner_backend="mplib",
        embodiment=list(options["embodiment"]),
        left_robot_file=left,
        right_robot_file=right,
        dual_arm_embodied=len(arms) == 1,
        left_embodiment_config=read_yaml(Path(left, "config.yml")),
        right_embodiment_config=read_yaml(Path(right, "config.yml")),
        head_camera_h=head["h"],
        head_camera_w=head["w"],
        eval_mode=True,  # textures that no training data has
        eval_video_log=False,
        render_freq=0,
        save_data=False,
    )
    if len(arms) == 2:
        settings["embodiment_dis"] = options["embodiment"][2]
    settings["camera"] = {
        **settings["camera"],
        "head_camera_type": _CAMERA,
        "wrist_camera_type": _CAMERA,
        "collect_head_camera": True,
        "collect_wrist_camera": wrist,
    }
    return settings


@cache
def _task_class(robotwin: RoboTwin, name: str, shader: str, render_quality: str) -> Any:
    """Derive from RoboTwin's task one that counts, draws as the options say, and changes no defaults."""
    base = robotwin.task(name)

    class Task(base):  # type: ignore[misc, valid-type]
        checks = 0
        moving = False

        def setup_scene(self, **options: Any) -> None:
            """Do as told, and draw with the shader that was asked for: RoboTwin's own asks for the ray tracer."""
            import sapien

            super().setup_scene(**options)
            sapien.render.set_camera_shader_dir(shader)
            if render_quality == "fast":
                for lights in (self.point_light_lst, self.direction_light_lst):
                    lights[:] = [_with_small_shadows(self.scene, light) for light in lights]

        def load_robot(self, **options: Any) -> None:
            """Load it; from here on it is steered in less time: a reset moves the grippers in 900 of its 3400 steps."""
            super().load_robot(**options)
            Drives(self.robot, PhysicsSteps(self.scene))

        def get_cluttered_table(self, cluttered_numbers: int = 10, *_: Any, **__: Any) -> None:
            """Give fresh limits: RoboTwin adds the table's shift to its defaults, for every task of the process."""
            super().get_cluttered_table(cluttered_numbers, [-0.59, 0.59], [-0.34, 0.34], [0.741])

        def check_success(self, *arguments: Any, **options: Any) -> Any:
            self.checks += 1
            return super().check_success(*arguments, **options)

        def _update_render(self) -> None:
            """Leave out what is not seen, unless it draws random numbers."""
            if not self.moving or self.crazy_random_light:
                super()._update_render()

    Task.__name__ = Task.__qualname__ = name
    return Task
