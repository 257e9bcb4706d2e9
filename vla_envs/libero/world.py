"""A built LIBERO world, what of it is drawn, and the worlds that wait in this process for their next episode."""

import contextlib
import ctypes
import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vla_envs.libero.arm import Arm
from vla_envs.libero.package import import_libero, task_file
from vla_envs.libero.spec import CONTROL_FREQUENCY
from vla_envs.rendering.mujoco import Look, Renderer, mujoco, shared_renderer
from vla_envs.simulator import SimulatorSpec, Task
from vla_envs.worlds import WorldCache

CAMERAS = ("agentview", "robot0_eye_in_hand")
_COLLISION_SHAPES = 0  # geom group that robosuite does not draw
_PLACEMENT_ATTEMPTS = 20
_TABLE = (-0.25, -0.35), (0.25, 0.35)  # m; the part in view
# What drawing reads of mujoco's data.
_POSES = ("geom_xpos", "geom_xmat", "site_xpos", "site_xmat", "cam_xpos", "cam_xmat", "light_xpos", "light_xdir")
_QUALITY = {"benchmark": "benchmark", "fast": "minimal"}  # of the renderer


class World:
    """robosuite's environment of one task without its cameras and sensors, which cost more than the physics.

    Its observations show the state of four milliseconds before the end of an action, at which robosuite samples its
    sensors and policies were trained: one sensor remains, which copies what is needed to draw that moment later.
    """

    def __init__(self, task: Task, spec: SimulatorSpec, assets: Path):
        libero = import_libero()
        import libero.libero as package
        import libero.libero.envs.bddl_utils as bddl
        import robosuite
        from robosuite.utils.observables import Observable, sensor

        package._assets_path_cache = str(assets)
        self.task = task
        self.key = _key(task, spec, assets)
        file = str(task_file(task.group, task.name))
        self._env = _prepared(libero.TASK_MAPPING[bddl.get_problem_info(file)["problem_name"]])(
            file,
            robots=["Panda"],
            controller_configs=robosuite.load_controller_config(default_controller="OSC_POSE"),
            gripper_types="default",
            initialization_noise=None,
            use_camera_obs=False,
            has_renderer=False,
            has_offscreen_renderer=False,
            control_freq=CONTROL_FREQUENCY,
            horizon=2**31,  # ours is in the spec; past its own, robosuite raises
            ignore_done=True,
            hard_reset=False,
        )
        self._model, self._data = self._env.sim.model._model, self._env.sim.data._data
        self._samplers = tuple(self._env.object_property_initializers)  # of drawers, doors and burners
        self._drawn = mujoco.MjData(self._model)
        self._drawn_sites = np.empty_like(self._model.site_rgba)
        self._states = np.zeros(8, np.float32)
        self._look: Look | None = None  # under stress
        self.renderer: Renderer = shared_renderer(
            f"{assets}|{file}",  # meshes and textures are the assets folder's
            self._model,
            size=spec.image_shape,
            quality=_QUALITY[spec.options["render_quality"]],
            cameras=CAMERAS,
            mirrored=True,  # the benchmark's frames are upside down; published policies see them turned
            hidden_groups=(_COLLISION_SHAPES,),
        )

        @sensor(modality="world")
        def moment(_: dict[str, Any]) -> float:
            self._remember()
            return 0.0

        with contextlib.suppress(OSError, AttributeError):  # another C library than glibc
            ctypes.CDLL("libc.so.6").malloc_trim(0)  # of parsing and compiling: half of what a world would take
        self._moment = Observable("moment", moment, sampling_rate=CONTROL_FREQUENCY)
        self._env._observables = {"moment": self._moment}
        self._arm = Arm(self._env)
        self._physics_steps = int(self._env.control_timestep / self._env.model_timestep)

    renderer_megabytes = 0.0  # counted with the world

    @property
    def megabytes(self) -> float:
        """About what it takes: mujoco's model and data, and 1.7 times the model for what is there to draw it."""
        return (2.7 * mujoco.mj_sizeModel(self._model) + self._data.nbuffer + self._drawn.nbuffer) / 1e6

    def reset(self, initial_state: np.ndarray, seeds: Sequence[int | None], loads: tuple[int, int]) -> None:
        """Reset everything and put the shipped state in place, float64 ``[1 + nq + nv]``, as in a world just built.

        numpy's global generator, which is seeded here, decides about the poses of fixtures: as LIBERO's own environment
        draws them in the last of so many resets (:class:`~vla_envs.libero.spec.Draws`).
        """
        expected = 1 + self._model.nq + self._model.nv
        if len(initial_state) != expected:
            raise RuntimeError(
                f"initial state of {self.task.name} has {len(initial_state)} numbers, the world {expected}: "
                "the assets are of another version of LIBERO"
            )
        self._look = None
        # LIBERO's own environment loads its model when it is made and at each attempt to reset, and each time it adds
        # the same samplers once more: they draw as often, and the last draw counts.
        loaded = itertools.count(*loads)
        for seed in seeds:
            if seed is not None:
                np.random.seed(seed)
            self._place(loaded)
        self._arm.reset()
        self._env.sim.set_state_from_flattened(initial_state)
        self._env.sim.forward()
        self._env._check_success()
        self._env._post_process()
        self._env._update_observables(force=True)

    def _place(self, loads: Iterator[int]) -> None:
        """Draw places until they fit; ``loads`` says how often LIBERO has loaded its model by then."""
        from robosuite.utils.errors import RandomizationError

        for _ in range(_PLACEMENT_ATTEMPTS):
            self._env.object_property_initializers = next(loads) * list(self._samplers)
            # Where objects lie on and in fixtures is drawn relative to the model as it is loaded.
            self._model.body_pos[:], self._model.body_quat[:] = self._env.unplaced
            try:
                self._env.reset()
                return
            except RandomizationError:  # a draw that does not fit; LIBERO's own reset would try forever
                continue
        raise RuntimeError(f"LIBERO found no place for the objects of {self.task.name}")

    def step(self, action: np.ndarray) -> bool:
        """Execute an action of 50 ms, float64 ``[7]``; returns whether the task is solved."""
        for physics_step in range(self._physics_steps):
            self._arm.compute_dynamics()
            if physics_step == 0:
                self._arm.aim(action)
            self._arm.step()
            self._moment.update(self._env.model_timestep, self._env._obs_cache)
        solved = bool(self._env._check_success())
        self._env._post_process()  # shows burners that are on
        return solved

    def draw(self, kind: str, strength: float, random: np.random.Generator) -> None:
        """Have the running episode look otherwise, by one kind of stress."""
        self._look = self._look or Look(_TABLE, self._model, self._data)
        self._look.draw(kind, strength, random)

    def render(self, camera: int) -> np.ndarray:
        """Draw the remembered moment: uint8 ``[H, W, 3]``."""
        sites = self._model.site_rgba.copy()
        self._model.site_rgba[:] = self._drawn_sites
        try:
            return self.renderer.render(self._model, self._drawn, camera, self._look).copy()
        finally:
            self._model.site_rgba[:] = sites

    def states(self) -> np.ndarray:
        """Return, of the remembered moment, float32 ``[8]``: hand position (m), axis-angle (rad), both fingers (m)."""
        return self._states.copy()

    def close(self) -> None:
        """Free the world."""
        self._env.close()

    def _remember(self) -> None:
        for name in _POSES:
            np.copyto(getattr(self._drawn, name), getattr(self._data, name))
        np.copyto(self._drawn_sites, self._model.site_rgba)
        robot, data = self._env.robots[0], self._env.sim.data
        position = data.site_xpos[robot.eef_site_id]
        w, x, y, z = data.get_body_xquat(robot.robot_model.eef_name)
        fingers = data.qpos[robot._ref_gripper_joint_pos_indexes]
        self._states = np.concatenate([position, _axis_angle(x, y, z, w), fingers]).astype(np.float32)


def _key(task: Task, spec: SimulatorSpec, assets: Path) -> tuple:
    return task, assets, spec.image_shape, spec.options["render_quality"]


world_cache = WorldCache(World, _key)


def _prepared(domain: type) -> type:
    """Derive from an environment of robosuite one that resets like its first time, without what is not read.

    It remembers the poses of bodies before its first reset, and what MuJoCo's solver makes of the moment when all
    objects are still where they were built: LIBERO, which builds its world at each reset, begins its next solution
    there, and its last digits show it.
    """

    def initialize(self: Any, xml_string: str | None = None) -> None:
        domain._initialize_sim(self, xml_string)  # type: ignore[attr-defined]
        model = self.sim.model._model
        self.unplaced = model.body_pos.copy(), model.body_quat.copy()
        self.solution = None
        self.sim.forward()  # as the cameras would, which LIBERO has

    def reset(self: Any) -> None:
        model, data = self.sim.model._model, self.sim.data._data
        flags = model.opt.disableflags
        if self.solution is not None:
            model.opt.disableflags |= int(mujoco.mjtDisableBit.mjDSBL_CONSTRAINT)
        try:
            domain._reset_internal(self)  # type: ignore[attr-defined]
        finally:
            model.opt.disableflags = flags
        if self.solution is None:
            self.solution = data.qacc_warmstart.copy()
        data.qacc_warmstart[:] = self.solution

    # LIBERO compares the name.
    return type(domain.__name__, (domain,), {"_initialize_sim": initialize, "_reset_internal": reset})


def _axis_angle(x: float, y: float, z: float, w: float) -> np.ndarray:
    """Return axis times angle (rad) of a unit quaternion; the angle is that of ``w`` as it stands, 0 to 2 pi.

    robosuite's ``quat2axisangle`` multiplies in another order, which changes the last digit of seeded episodes.
    """
    w = min(max(w, -1.0), 1.0)
    length = math.sqrt(1.0 - w * w)
    if math.isclose(length, 0.0):
        return np.zeros(3)
    return np.array([x, y, z]) * (2.0 * math.acos(w) / length)
