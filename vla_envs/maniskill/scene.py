"""The plate-25 scene as a ManiSkill task: a WidowX arm has to put an object on a plate.

One class for all variants (:mod:`vla_envs.maniskill.variants`), batched as ManiSkill's tasks are.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import sapien
import torch
from mani_skill.envs.sapien_env import BaseEnv
from mani_skill.envs.tasks.digital_twins.bridge_dataset_eval.base_env import WidowX250SBridgeDatasetFlatTable
from mani_skill.utils import sapien_utils
from mani_skill.utils.geometry.rotation_conversions import quaternion_to_matrix
from mani_skill.utils.structs.actor import Actor
from mani_skill.utils.structs.pose import Pose
from mani_skill.utils.structs.types import SimConfig
from sapien.physx import PhysxMaterial
from torch import Tensor

from vla_envs.maniskill.assets import ROBOT, SCENE, find_assets, instruction, model_table, visual_file
from vla_envs.maniskill.overlay import Overlay
from vla_envs.maniskill.spec import CONTROL_FREQUENCY
from vla_envs.maniskill.variants import MOVE_STEP, TEMPLATES, Configuration, VariantSplit, make_split

CAMERA = "3rd_view_camera"
_ROBOT_POSE = sapien.Pose([0.147, 0.028, 0.870], [0, 0, 0, 1])  # turned by 180 degrees about the vertical
_LIFTED_POSE = sapien.Pose([0.147, 0.028, 1.870], [0, 0, 0, 1])  # of the robot, while things settle
_STAGE_POSE = sapien.Pose([2.0634, 2.8313, 0.0])
_PARKED = {"object": 1.0, "plate": 2.0}  # x of what is not on the table, m; out of sight, behind the robot
_XY_SLACK, _Z_SLACK, _MINIMUM_FORCE = 0.01, 0.05, 0.03  # m, m, N
_GRASP_STEPS = 5  # that count as holding on
_SETTLE, _SETTLE_MORE = 0.5, 6  # control steps; the latter for what still moves faster than the two limits
_STILL, _STILL_TURNING = 1e-3, 1e-2  # m/s, rad/s


class PutOnPlate(BaseEnv):
    """Robot, table, objects and plates of one or more variants.

    Observations are ManiSkill's, with the photograph of the episode's table behind robot and objects. ``reset`` takes
    in ``options`` the ``episode_id`` and the ``split`` of each world that is reset, a number or one for each; 0 if left
    out. ``reward_mode="dense"`` is the staged reward, in every state: 0.1 once the object was held, 0.1 once it was
    held for five steps in a row, 1 if it is on the plate and was held. ``"sparse"`` is 1 in every state in which it is
    on the plate.

    Args:
        splits: variants such as ``"PutOnPlateInScene25Main-v3"``, each with its object set; a batch may mix them.
        start, textures: see :class:`~vla_envs.maniskill.variants.VariantSplit`; ``start="rl4vla"`` needs ``num_envs=1``
            on the CPU's physics.
        assets: folder of the assets; looked for if ``None``.
        **arguments: of ManiSkill's ``BaseEnv``.
    """

    def __init__(
        self,
        *arguments: Any,
        splits: Sequence[tuple[str, str]],
        start: str = "rlinf",
        textures: str = "rl4vla",
        assets: str | None = None,
        num_envs: int = 1,
        **others: Any,
    ):
        self.splits: tuple[VariantSplit, ...] = tuple(make_split(*pair, start, textures) for pair in splits)
        self._folder = find_assets(assets)
        self.overlay: Overlay | None = None
        self.configurations = [self.splits[0].decode(0)] * num_envs  # of the running episodes
        self._running: list[VariantSplit] = [self.splits[0]] * num_envs
        super().__init__(*arguments, robot_uids=_robot(self._folder), num_envs=num_envs, **others)

    @property
    def _default_sim_config(self) -> SimConfig:
        return SimConfig(sim_freq=500, control_freq=CONTROL_FREQUENCY, spacing=20)

    # ---- building

    def _load_agent(self, options: dict) -> None:
        super()._load_agent(options, _ROBOT_POSE)

    def _load_scene(self, options: dict) -> None:
        for robot in self.agent.robot._objs:
            sapien_utils.set_articulation_render_material(robot, specular=0.9, roughness=0.3)
        stage = str(self._folder / SCENE / "stages" / "bridge_table_1_v1.glb")
        upright = sapien.Pose(q=[0.707, 0.707, 0, 0])
        builder = self.scene.create_actor_builder()
        builder.add_nonconvex_collision_from_file(stage, pose=upright)
        builder.add_visual_from_file(stage, pose=upright)
        builder.initial_pose = _STAGE_POSE
        builder.build_static(name="arena")
        if self._rebuilds:
            self._choose([0], options)
            now = self.configurations[0]
            objects = {number for number in (now.object, now.other_object) if number is not None}
            plates = {number for number in (now.plate, now.other_plate) if number is not None}
        else:
            objects = {number for split in self.splits for number in split.values["object"]}
            plates = {number for split in self.splits for number in split.plates}
        self._objects = self._load_models("object", objects)
        self._plates = self._load_models("plate", plates)

    def _load_models(self, kind: str, numbers: set[int]) -> dict[int, Actor]:
        material = PhysxMaterial(static_friction=1.0, dynamic_friction=1.0, restitution=0.0)
        actors = {}
        for number in sorted(numbers):
            entry = model_table(self._folder, kind)[number]
            model, scale = entry["folder"] / entry["file"], [entry.get("scales", [1.0])[0]] * 3
            builder = self.scene.create_actor_builder()
            builder.add_multiple_convex_collisions_from_file(
                str(model / "collision.obj"), scale=scale, material=material, density=entry.get("density", 1000)
            )
            builder.add_visual_from_file(str(visual_file(model)), scale=scale)
            builder.initial_pose = sapien.Pose(_parking(kind, number))
            actors[number] = builder.build(name=entry["file"])
        return actors

    def _load_lighting(self, options: dict) -> None:
        self.scene.set_ambient_light([0.3, 0.3, 0.3])
        self.scene.add_directional_light([0, 0, -1], [2.2, 2.2, 2.2])
        self.scene.add_directional_light([-1, -0.5, -1], [0.7, 0.7, 0.7])
        self.scene.add_directional_light([1, 1, -1], [0.7, 0.7, 0.7])

    def _after_reconfigure(self, options: dict) -> None:
        things = [actor._objs[0].per_scene_id for actor in (*self._objects.values(), *self._plates.values())]
        links = [link._objs[0].entity.per_scene_id for link in self.agent.robot.get_links()]
        if self.overlay is None:
            device = torch.device(f"cuda:{self._render_device.cuda_id}" if self._render_device.is_cuda() else "cpu")
            textures = any(split.variant.texture_strength for split in self.splits)
            self.overlay = Overlay(self._folder, device, textures)
        self.overlay.set_foreground([*things, *links])
        self._sizes = {kind: self._model_sizes(kind) for kind in ("object", "plate")}
        n, device = self.num_envs, self.device
        self._half_size = {kind: torch.zeros(n, 3, device=device) for kind in ("object", "plate")}
        self._object_number, self._plate_number = torch.zeros(2, n, dtype=torch.long, device=device)
        self._evaluated_at = torch.full((n,), -1, dtype=torch.int32, device=device)
        self._held_for = torch.zeros(n, dtype=torch.int32, device=device)
        self._moves, self._was_held, self._was_held_long = torch.zeros(3, n, dtype=torch.bool, device=device)

    def _model_sizes(self, kind: str) -> Tensor:
        entries = model_table(self._folder, kind)
        boxes = [np.subtract(entry["bbox"]["max"], entry["bbox"]["min"]) * entry["scales"][0] for entry in entries]
        return torch.tensor(np.stack(boxes), dtype=torch.float32, device=self.device)

    # ---- episodes

    @property
    def _rebuilds(self) -> bool:
        """Whether each episode gets a scene of its own, with no more than it needs.

        PhysX numbers contacts in an order that depends on all that was simulated before, so that an object comes to
        rest some micrometres elsewhere. On CUDA all worlds share one simulation, which is not built again for one.
        """
        return not self._sim_device.is_cuda()

    def reset(self, seed: Any = None, options: dict | None = None) -> tuple[Any, dict]:
        """Start an episode in the given worlds, all if none are given; see the class for ``options``."""
        options = dict(options or {})
        if self._rebuilds:
            return super().reset(seed=seed, options={**options, "reconfigure": True})
        if "env_idx" not in options:
            return super().reset(seed=seed, options=options)
        # ManiSkill works off the worlds in ascending order, and sets the arms' targets of all worlds, also of those
        # that continue, to where the arms are. (Written from ManiSkill's source; never run, for want of a GPU.)
        order = np.argsort(_numpy(options["env_idx"]))
        for name in ("env_idx", "split", "episode_id"):
            if name in options and np.ndim(_numpy(options[name])):
                options[name] = torch.as_tensor(_numpy(options[name])[order], device=self.device)
        arm = self.agent.controller.controllers["arm"]
        before = arm._target_pose.raw_pose.clone()
        result = super().reset(seed=seed, options=options)
        others = torch.ones(self.num_envs, dtype=torch.bool, device=self.device)
        others[options["env_idx"]] = False
        arm._target_pose = Pose.create(torch.where(others[:, None], before, arm._target_pose.raw_pose))
        return result

    def _initialize_episode(self, env_idx: Tensor, options: dict) -> None:
        rows = [int(row) for row in env_idx]
        self._choose(rows, options)
        chosen = [self.configurations[row] for row in rows]
        self._object_number[env_idx] = torch.tensor([now.object for now in chosen], device=self.device)
        self._plate_number[env_idx] = torch.tensor([now.plate for now in chosen], device=self.device)
        self._moves[env_idx] = torch.tensor([now.moves for now in chosen], device=self.device)
        for kind, actors in (("object", self._objects), ("plate", self._plates)):
            for number, actor in actors.items():
                actor.set_pose(self._poses(kind, number, chosen))
        if chosen[0].settles:
            self.agent.robot.set_pose(_LIFTED_POSE)
            self._settle()
        self.agent.robot.set_pose(_ROBOT_POSE)
        joints = np.stack([configuration.joints for configuration in chosen])
        self.agent.reset(init_qpos=torch.tensor(joints, dtype=torch.float32, device=self.device))
        for kind, numbers in (("object", self._object_number), ("plate", self._plate_number)):
            sizes = self._sizes[kind][numbers[env_idx]]
            rotations = torch.tensor([_rotation(kind, configuration) for configuration in chosen], device=self.device)
            if chosen[0].settles:
                rotations = (self._objects if kind == "object" else self._plates)[int(numbers[0])].pose.q
            # Of the upright box around a turned one: |R| s.
            boxes = (quaternion_to_matrix(rotations.float()).abs() @ sizes[..., None])[..., 0]
            self._half_size[kind][env_idx] = boxes / 2
        self._evaluated_at[env_idx] = -1
        self._held_for[env_idx] = 0
        self._was_held[env_idx] = False
        self._was_held_long[env_idx] = False

    def _settle(self) -> None:
        self._simulate(_SETTLE)
        things = [*self._objects.values(), *self._plates.values()]
        speed = sum(float(thing.linear_velocity.norm()) for thing in things)
        if speed > _STILL or sum(float(thing.angular_velocity.norm()) for thing in things) > _STILL_TURNING:
            self._simulate(_SETTLE_MORE)

    def _simulate(self, control_steps: float) -> None:
        for _ in range(int(self.sim_freq * control_steps / self.control_freq)):
            self.scene.step()

    def _choose(self, rows: list[int], options: dict) -> None:
        places, ids = (np.broadcast_to(_numpy(options.get(name, 0)), len(rows)) for name in ("split", "episode_id"))
        for row, place, episode_id in zip(rows, places, ids, strict=True):
            self._running[row] = self.splits[place]
            self.configurations[row] = self._running[row].decode(int(episode_id))

    def _poses(self, kind: str, number: int, chosen: list[Configuration]) -> Pose:
        rows = []
        for configuration in chosen:
            first, third, usual = configuration.object, configuration.other_object, 0
            if kind == "plate":
                first, third, usual = configuration.plate, configuration.other_plate, 1
            if number in (first, third):
                place = usual if number == first else 2
                rows.append((*configuration.places[place], *_rotation(kind, configuration)))
            else:
                rows.append((*_parking(kind, number), 0, 0, 0, 1))
        return Pose.create(torch.tensor(rows, dtype=torch.float32, device=self.device))

    # ---- what has been achieved

    def evaluate(self) -> dict[str, Tensor]:
        """Return success, and what the staged reward is made of, bool ``[N]`` each; may be called repeatedly."""
        fresh = self._evaluated_at != self._elapsed_steps
        self._evaluated_at = self._elapsed_steps.clone()
        self._move(fresh & self._moves & (self._elapsed_steps == MOVE_STEP))
        held = self._is_held() & (self._elapsed_steps > 0)  # on CUDA a reset leaves the contacts of the step before it
        self._held_for = torch.where(fresh, (self._held_for + 1) * held, self._held_for)
        self._was_held = self._was_held | held
        self._was_held_long = self._was_held_long | (self._held_for >= _GRASP_STEPS)
        return {
            "is_src_obj_grasped": self._was_held.clone(),
            "consecutive_grasp": self._was_held_long.clone(),
            "success": self._is_on_plate(),
        }

    def compute_dense_reward(self, obs: Any, action: Tensor, info: dict[str, Tensor]) -> Tensor:
        """Compute the staged reward of a state, float32 ``[N]``; RLinf trains on its changes (``relative_reward``)."""
        held, held_long = info["is_src_obj_grasped"], info["consecutive_grasp"]
        return 0.1 * held + 0.1 * held_long + 1.0 * (info["success"] & held)

    def _move(self, due: Tensor) -> None:
        if not due.any():
            return
        for number, actor in self._objects.items():
            rows = (due & (self._object_number == number)).nonzero().view(-1).tolist()
            if rows:
                poses = actor.pose.raw_pose.clone()
                for row in rows:
                    configuration = self.configurations[row]
                    pose = (*configuration.places[2], *_rotation("object", configuration))
                    poses[row] = torch.tensor(pose, dtype=poses.dtype, device=poses.device)
                actor.set_pose(Pose.create(poses))
        if self.configurations[0].settles:
            self._simulate(_SETTLE)
        if self.gpu_sim_enabled:
            self.scene._gpu_apply_all()
            self.scene._gpu_fetch_all()

    def _is_held(self) -> Tensor:
        held = torch.zeros(self.num_envs, dtype=torch.bool, device=self.device)
        for number in {now.object for now in self.configurations}:
            mine = self._object_number == number
            held = torch.where(mine, self.agent.is_grasping(self._objects[number]), held)
        return held

    def _is_on_plate(self) -> Tensor:
        pressing = self._force_on_plate() > _MINIMUM_FORCE
        if self._rebuilds and not pressing.any():  # one world; on CUDA, asking would hold up all of them
            return pressing
        offset = self.object_positions() - self.plate_positions()
        half_object, half_plate = self._half_size["object"], self._half_size["plate"]
        near = offset[:, :2].norm(dim=1) <= half_plate.amax(1) + _XY_SLACK
        gap = offset[:, 2] - half_plate[:, 2] - half_object[:, 2]
        return near & (offset[:, 2] > 0) & (gap <= _Z_SLACK) & pressing

    def _force_on_plate(self) -> Tensor:
        force = torch.zeros(self.num_envs, device=self.device)
        for number, plate in {(now.object, now.plate) for now in self.configurations}:
            mine = (self._object_number == number) & (self._plate_number == plate)
            between = self.scene.get_pairwise_contact_forces(self._objects[number], self._plates[plate]).norm(dim=1)
            force = torch.where(mine, between, force)
        return force

    def object_positions(self) -> Tensor:
        """Return the position of each world's object, ``[N, 3]``, m."""
        return self._positions(self._objects, self._object_number, {now.object for now in self.configurations})

    def plate_positions(self) -> Tensor:
        """Return the position of each world's plate, ``[N, 3]``, m."""
        return self._positions(self._plates, self._plate_number, {now.plate for now in self.configurations})

    def _positions(self, actors: dict[int, Actor], numbers: Tensor, lying: set[int]) -> Tensor:
        found = torch.zeros(self.num_envs, 3, device=self.device)
        for number in lying:
            found = torch.where((numbers == number)[:, None], actors[number].pose.p, found)
        return found

    # ---- what is seen

    def get_language_instruction(self) -> list[str]:
        """Return the instruction of each world."""
        return [
            instruction(self._folder, TEMPLATES[now.template], now.object, now.plate) for now in self.configurations
        ]

    def _get_obs_sensor_data(self, apply_texture_transforms: bool = True) -> dict:
        seen = super()._get_obs_sensor_data(apply_texture_transforms)
        camera = seen[CAMERA]
        camera["rgb"] = self._with_background(camera["rgb"], camera["segmentation"])
        return seen

    def _with_background(self, frames: Tensor, segmentation: Tensor) -> Tensor:
        assert self.overlay is not None, "the scene has not been loaded"
        pictures = self.overlay.compose(frames, segmentation, [now.table for now in self.configurations])
        for row, (split, now) in enumerate(zip(self._running, self.configurations, strict=True)):
            if now.texture is not None:
                variant, foreground = split.variant, self.overlay.foreground(segmentation[row : row + 1])[0]
                pictures[row] = self.overlay.perturb(
                    pictures[row], foreground, now.texture, variant.texture_strength, variant.texture_everywhere
                )
        return pictures


def _robot(folder: Path) -> type[WidowX250SBridgeDatasetFlatTable]:
    """Return ManiSkill's arm for Bridge scenes, from the folder of our assets."""

    class WidowX(WidowX250SBridgeDatasetFlatTable):
        urdf_path = str(folder / ROBOT / "wx250s.urdf")

        @property
        def _controller_configs(self) -> dict[str, Any]:
            configs = super()._controller_configs
            for parts in configs.values():  # what ManiSkill takes anyway, with a warning at each reset
                parts["gripper"].mimic = {"left_finger": {"joint": "right_finger"}}
            return configs

    return WidowX


def _parking(kind: str, number: int) -> tuple[float, float, float]:
    return _PARKED[kind], 0.3 * number, 1.0


def _rotation(kind: str, configuration: Configuration) -> tuple[float, float, float, float]:
    """Quaternion ``w, x, y, z``: objects are turned about the vertical, plates are not."""
    if kind == "plate":
        return 1.0, 0.0, 0.0, 0.0
    return float(np.cos(configuration.yaw / 2)), 0.0, 0.0, float(np.sin(configuration.yaw / 2))


def _numpy(value: Any) -> np.ndarray:
    return np.asarray(value.cpu() if isinstance(value, Tensor) else value, np.int64)
