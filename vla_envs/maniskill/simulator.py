"""One world of ManiSkill behind the :class:`~vla_envs.simulator.Simulator` protocol, on the CPU's physics."""

import gc
import hashlib
import math
import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from vla_envs.folders import check_installed
from vla_envs.maniskill.assets import find_assets
from vla_envs.maniskill.variants import FACTORS, VariantSplit
from vla_envs.rendering.gpus import WORKER, gpu_of_worker, refuse_fork, show
from vla_envs.rendering.vulkan import NO_CUDA, check_driver, check_gpus, choose_driver, has_gpu
from vla_envs.simulator import Episode, Observation, Outcome, SimulatorSpec

if TYPE_CHECKING:
    from vla_envs.maniskill.expert import Expert

INSTALL = "pip install 'vla-torchrl[maniskill]'"
_VERSIONS = {"mani_skill": "3.0.1", "sapien": "3.0.3"}  # whose physics and pixels results belong to
_check_installed = partial(check_installed, "ManiSkill", {name: name for name in _VERSIONS}, _VERSIONS, INSTALL)
_ROUNDS = 4  # of a Feistel network: enough to look random


class ManiSkillSimulator:
    """What all tasks have in common. ManiSkill draws a frame in each step and reset; here only ``observe`` does."""

    def __init__(self, spec: SimulatorSpec):
        self.spec = spec
        _check_installed()
        choose_driver()
        refuse_fork("Vulkan")
        if WORKER in os.environ and not gc.get_freeze_count():
            # Each new scene collects garbage: what has been imported is there for good and need not be looked at.
            import mani_skill.envs  # noqa: F401

            gc.collect()
            gc.freeze()
        self._world = self._build()
        self._world._obs_mode = "none"

    @staticmethod
    def check(spec: SimulatorSpec) -> None:
        _check_installed()
        check_driver()

    @staticmethod
    def check_gpus(spec: SimulatorSpec, gpus: Sequence[int]) -> None:
        if spec.batched and len(gpus) > 1:
            raise ValueError(
                f"gpus={show(gpus)}: backend=cuda simulates all worlds on one GPU; type env.gpus=[{gpus[0]}], or "
                "start a process for each GPU"
            )
        check_gpus(gpus)

    def step(self, action: np.ndarray) -> Outcome:
        _, reward, _, _, info = self._world.step(np.asarray(action, np.float32)[None])
        return Outcome(reward=float(reward), success=bool(info["success"]))

    def close(self) -> None:
        self._world.close()

    def _build(self) -> Any:
        raise NotImplementedError

    def _joints(self) -> np.ndarray:
        return self._world.agent.robot.get_qpos()[0].numpy().astype(np.float32)


class PlateSimulator(ManiSkillSimulator):
    """A world of plate-25. Its states are the robot's eight joint positions: six of the arm (rad), two fingers (m)."""

    _expert: "Expert | None" = None

    @staticmethod
    def check(spec: SimulatorSpec) -> None:
        find_assets(spec.options["assets"])
        ManiSkillSimulator.check(spec)

    def reset(self, episode: Episode) -> None:
        split = self._world.splits[episode.task_id]
        number = episode_id_of(split, episode.trial_id, episode.seed, self.spec.options["only"])
        self._world.reset(options={"split": episode.task_id, "episode_id": number})
        self._expert = None

    def observe(self) -> Observation:
        from vla_envs.maniskill.overlay import resize
        from vla_envs.maniskill.scene import CAMERA

        frames = self._world._get_obs_sensor_data()[CAMERA]["rgb"]
        return Observation(
            images=resize(frames, *self.spec.image_shape)[0].cpu().numpy(),
            states=self._joints(),
            task_description=self._world.get_language_instruction()[0],
        )

    def expert_action(self) -> np.ndarray:
        """Ask the scripted expert, which reads poses, for an action, float32 ``[7]`` within the bounds."""
        if self._expert is None:
            from vla_envs.maniskill.expert import Expert

            self._expert = Expert(self._world, self.spec)
        return self._expert.action()

    def _build(self) -> Any:
        return make_plate_world(self.spec, sim_backend="physx_cpu", render_backend=_render_backend())


def make_plate_world(spec: SimulatorSpec, **backends: Any) -> Any:
    """Build worlds of plate-25, one if ``num_envs`` is not among the arguments of ManiSkill's ``BaseEnv``."""
    from vla_envs.maniskill.scene import PutOnPlate

    options = spec.options
    return PutOnPlate(
        **{name: options[name] for name in ("splits", "assets", "reward_mode", "start", "textures")},
        obs_mode="rgb+segmentation",
        sensor_configs={"shader_pack": options["shader"]},
        **backends,
    )


class BuiltInSimulator(ManiSkillSimulator):
    """A world of one of ManiSkill's own tasks, with a Panda arm. Its states are nine joint positions."""

    def reset(self, episode: Episode) -> None:
        """ManiSkill draws the initial state from a seed, which is that of the trial's family and its number."""
        mixed = np.random.SeedSequence([episode.seed, episode.trial_id]).generate_state(1)[0]
        # A new scene: what was simulated in one before would be felt in the last digits.
        self._world.reset(seed=int(mixed >> 1), options={"reconfigure": True})
        goal: Any = getattr(self._world, "goal_site", None)
        if goal in self._world._hidden_objects:  # a policy that is given no coordinates has to see where to go
            self._world._hidden_objects.remove(goal)
            goal.show_visual()

    def perturb(self, kind: str, strength: float, random: np.random.Generator) -> None:
        from vla_envs.rendering import sapien_look

        camera, scene = self._world._sensors["base_camera"].camera._render_cameras[0], self._world.scene.sub_scenes[0]
        sapien_look.perturb(kind, camera, scene, np.zeros(3), strength, random)

    def observe(self) -> Observation:
        seen = self._world._get_obs_sensor_data()
        return Observation(
            images=seen["base_camera"]["rgb"][0].cpu().numpy(),
            states=self._joints(),
            task_description=self.spec.tasks[0].instruction,
            wrist_images=seen["hand_camera"]["rgb"].cpu().numpy() if self.spec.wrist_image_shape else None,
        )

    def _build(self) -> Any:
        import mani_skill.envs  # noqa: F401  registers the tasks
        from mani_skill.utils.registration import make
        from mani_skill.utils.sapien_utils import look_at

        height, width = self.spec.image_shape
        sensors: dict[str, Any] = {"height": height, "width": width}
        if camera := self.spec.options["camera"]:
            sensors["base_camera"] = {"pose": look_at(camera["eye"], camera["target"]).sp, "fov": camera["fov"]}
        return make(
            self.spec.tasks[0].name,
            obs_mode="rgb",
            control_mode=self.spec.options["control_mode"],
            reward_mode=self.spec.options["reward_mode"],
            sensor_configs=sensors,
            sim_backend="physx_cpu",
            render_backend=_render_backend(),
        )


class PushCubeSimulator(BuiltInSimulator):
    """PushCube-v1, for which there is a scripted expert here."""

    def expert_action(self) -> np.ndarray:
        """Ask the scripted expert, which reads poses, for an action, float32 ``[A]`` within the bounds."""
        from vla_envs.maniskill.expert import push_cube_action

        move, turn, gripper = np.split(push_cube_action(self._world), [3, 6])
        return np.concatenate([move, turn, gripper] if len(self.spec.action_low) == 7 else [move, gripper])


def episode_id_of(split: VariantSplit, trial_id: int, seed: int, only: Mapping[str, Sequence[int]]) -> int:
    """Return the benchmark's number of a trial, among those whose factors have the values in ``only``.

    The trials of a family, ``seed``, walk through all configurations in an order that looks random: each comes once,
    then the walk starts again. So the first trials are a fair sample.
    """
    kept = {factor: only.get(factor, split.values[factor]) for factor in FACTORS}
    sizes = [len(values) for values in kept.values()]
    places = map(int, np.unravel_index(shuffled(trial_id, math.prod(sizes), seed), sizes))
    chosen = {factor: kept[factor][place] for factor, place in zip(FACTORS, places, strict=True)}
    return split.episode_id({factor: split.values[factor].index(value) for factor, value in chosen.items()})


def shuffled(place: int, size: int, seed: int) -> int:
    """Return the number at a place of a random order of ``0 .. size - 1``, by a Feistel network."""
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask, number = (1 << half) - 1, place % size
    while True:
        left, right = number >> half, number & mask
        for turn in range(_ROUNDS):
            digest = hashlib.blake2b(f"{seed},{turn},{right}".encode(), digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(digest, "little") & mask)
        number = left << half | right
        if number < size:
            return number


def _render_backend() -> str:
    if not has_gpu():
        return "cpu"
    import torch

    shown = torch.cuda.device_count()
    if not shown:
        raise RuntimeError(NO_CUDA)
    return f"cuda:{gpu_of_worker(shown)}"
