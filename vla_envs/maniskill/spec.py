"""ManiSkill3: the plate-25 tasks with their out-of-distribution variants, and tasks of ManiSkill itself, on SAPIEN.

Plate-25 (Liu et al. 2025, arXiv 2505.19789): a WidowX arm in a simulated Bridge scene puts one of 25 objects on a
plate. Third-person camera with a photograph behind robot and objects, no wrist camera (no ``wrist_images``; of
ManiSkill's own tasks four have one), state = joint positions, actions = changes of the hand's target pose at 5 Hz,
horizon 80. :mod:`vla_envs.maniskill.variants` has the variants as data.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Final, Literal

from annotated_types import Gt, Lt, MinLen

from vla_common.errors import unknown_name
from vla_common.settings import Count, Pixels, Whole, check_settings, checked
from vla_envs.maniskill.assets import describe_assets, list_instructions
from vla_envs.maniskill.variants import FACTORS, TEMPLATES, VARIANTS, VariantSplit, make_split
from vla_envs.protocol import HORIZON, PIXELS, check_once, image_shape, list_deviations
from vla_envs.simulator import SimulatorSpec, Task

MAX_EPISODE_STEPS, CONTROL_FREQUENCY = 80, 5  # of plate-25; Hz
TRIALS = 64  # of each task in an evaluation: RL4VLA's number
IMAGE_SHAPE = (480, 640)  # of plate-25's camera
BUILT_IN_SIZE = 128  # pixels of a side of ManiSkill's own cameras
# Metres and radians of one action. The controller takes more; Bridge data, and what is trained on it, hardly do.
ACTION_BOUND = (0.05, 0.05, 0.05, 0.25, 0.25, 0.25, 1.0)
REWARD_TYPES = {
    "plate-25": {"staged": "dense", "success": "sparse"},  # our names, and ManiSkill's
    "built-in": {"success": "sparse", "dense": "normalized_dense"},
}
CONTROL_MODE: Final = "pd_ee_delta_pose"  # of the Panda
CONTROL_MODES = {CONTROL_MODE: 7, "pd_ee_delta_pos": 4}  # numbers of an action
CAMERA: dict[str, Any] = {  # metres and radians
    "eye": tuple[float, float, float],
    "target": tuple[float, float, float],
    "fov": Annotated[float, Gt(0), Lt(math.pi)],
}
SHADERS = {"benchmark": "default", "fast": "minimal"}  # of plate-25, in ManiSkill's words
ON_CPU = "type backend=processes, or start=rlinf"
BACKENDS = {"processes": "", "cuda": "vla_envs.maniskill.batch:BatchedWorlds"}
OOD_SUITE = "plate25-ood"
_STARTS = {
    "rlinf": "start as in RLinf: things fall as the episode starts (RL4VLA: they have settled)",
    "rl4vla": "start as in RL4VLA: things have settled (RLinf: they fall as the episode starts)",
}
_TEXTURES = {
    "rl4vla": "textures as in RL4VLA: the episode's (RLinf's code: its table's)",
    "rlinf": "textures as in RLinf's code: the table's (RL4VLA: the episode's)",
}
_OTHER = "MultiCarrot: another distractor where it would be the object itself, in one test episode of 8"
# The protocol runs these in training's objects and plates too, among which a second one is new.
_ALSO_IN_TRAIN = ("PutOnPlateInScene25MultiCarrot-v1", "PutOnPlateInScene25MultiPlate-v1")
_Only = Annotated[Mapping[Literal["object", "plate", "extra", "table", "position", "yaw"], Sequence[Whole]], MinLen(1)]


@dataclass(frozen=True)
class BuiltIn:
    """A task of ManiSkill itself, which ships no instructions: ``instruction`` is ours, ``horizon`` ManiSkill's."""

    instruction: str
    horizon: int = 50
    wrist_camera: bool = False
    dense: bool = True
    simulator: str = "BuiltInSimulator"


BUILT_IN = {
    "PickCube-v1": BuiltIn("pick up the red cube and move it to the green goal"),
    "PushCube-v1": BuiltIn("push the cube to the goal region", simulator="PushCubeSimulator"),
    "PullCube-v1": BuiltIn("pull the cube to the goal region"),
    "StackCube-v1": BuiltIn("stack the red cube on the green cube", wrist_camera=True),
    "PegInsertionSide-v1": BuiltIn("insert the peg into the hole in the side of the box", 100, wrist_camera=True),
    "LiftPegUpright-v1": BuiltIn("lift the peg and stand it upright"),
    "PokeCube-v1": BuiltIn("poke the cube with the peg"),
    "PullCubeTool-v1": BuiltIn("pull the cube closer with the tool", 100),
    "PlaceSphere-v1": BuiltIn("place the sphere in the bin"),
    "RollBall-v1": BuiltIn("roll the ball to the goal region", 80),
    "PlugCharger-v1": BuiltIn("plug the charger into the receptacle", 200, wrist_camera=True, dense=False),
    "StackPyramid-v1": BuiltIn("stack the three cubes as a pyramid", 250, wrist_camera=True, dense=False),
}


@cache
def suites() -> tuple[str, ...]:
    """List the suites: the variants of plate-25, all of them as one evaluation, and ManiSkill's own tasks."""
    return (*VARIANTS, OOD_SUITE, *BUILT_IN)


@checked
def make_spec(
    suite: str,
    *,
    object_set: Literal["train", "test", "all"] = "train",
    only: _Only | None = None,
    image_size: Pixels | tuple[Pixels, Pixels] | None = None,
    max_episode_steps: Count | None = None,
    reward_type: Literal["staged", "success", "dense"] | None = None,
    start: Literal["rlinf", "rl4vla"] = "rlinf",
    textures: Literal["rl4vla", "rlinf"] = "rl4vla",
    render_quality: Literal["benchmark", "fast"] = "benchmark",
    control_mode: Literal["pd_ee_delta_pose", "pd_ee_delta_pos"] = CONTROL_MODE,
    camera: Mapping[Literal["eye", "target", "fov"], Any] | None = None,
    assets: str | None = None,
    backend: Literal["processes", "cuda"] = "processes",
) -> SimulatorSpec:
    """Describe a ManiSkill suite without importing it; ``ValueError`` for an unknown suite or option value.

    Args:
        suite: a plate-25 variant such as ``"PutOnPlateInScene25Main-v3"``, several joined by ``+``, each if need be
            with its object set as in ``"PutOnPlateInScene25Carrot-v1:test"``; ``"plate25-ood"``, which is Main in
            training, the 13 variants in test, and two of them in training too; or a task of ManiSkill, such as
            ``"PickCube-v1"``.
        object_set: of plate-25 variants that do not name theirs: ``"train"``, ``"test"`` or ``"all"``.
        only: keep to some values of plate-25's factors, by number: ``{"object": [0, 4], "table": [0]}``. Training and
            evaluation draw from the same configurations, so an evaluation is of unseen episodes only where far more are
            left than are run.
        image_size: pixels of a side, or ``(height, width)``; ``None`` for the benchmark's. Plate-25 is always drawn at
            480 x 640, then resized.
        max_episode_steps: horizon in primitive actions; ``None`` for the benchmark's.
        reward_type: of each state; with ``relative_reward`` an environment pays its changes. Plate-25 has ``"staged"``
            (default: 0.1 once held, 0.1 once held for five steps, 1 on the plate) and ``"success"`` (1 on the plate); a
            task of ManiSkill has ``"success"`` (default) and ``"dense"`` (ManiSkill's own, at most 1).
        start: whose code says how things of plate-25 lie as an episode starts. ``"rlinf"``: they fall the last
            centimetres in its first step. ``"rl4vla"``: they have settled before; not with ``backend="cuda"``.
        textures: whose code says which texture an episode of VisionTexture and VisionWhole has. ``"rl4vla"``: one for
            each, as described in the paper. ``"rlinf"``: its table's, which is none for the first table.
        render_quality: of plate-25: ``"benchmark"`` (ManiSkill's shader ``default``), or ``"fast"`` (``minimal``, in
            two thirds of the time and about one level brighter). A task of ManiSkill has ManiSkill's own.
        control_mode: of a task of ManiSkill: ``"pd_ee_delta_pose"`` (moves, turns, gripper) or ``"pd_ee_delta_pos"``
            (moves, gripper).
        camera: of a task of ManiSkill: ``None`` for its own, else ``eye`` and ``target`` (3 numbers each, metres) and
            ``fov`` (vertical, radians).
        assets: folder of plate-25's assets; ``None`` looks for it, see :func:`vla_envs.maniskill.assets.find_assets`.
        backend: ``"processes"`` simulates each world on a CPU core, in worker processes; ``"cuda"`` all of plate-25
            together on a GPU.
    """
    size = None if image_size is None else image_shape(image_size)
    if suite in BUILT_IN:
        of_plate25 = (object_set, start, textures, render_quality, backend)
        usual = ("train", "rlinf", "rl4vla", "benchmark", "processes")
        if only is not None or assets is not None or of_plate25 != usual:
            raise ValueError(
                f"{suite} is a task of ManiSkill itself; object_set, only, start, textures, render_quality, assets and "
                "backend=cuda belong to plate-25"
            )
        return _built_in(suite, control_mode, camera, max_episode_steps, size, reward_type)
    if camera is not None or control_mode != CONTROL_MODE:
        raise ValueError(f"{suite} has the benchmark's camera and control; set both for tasks of ManiSkill only")
    if start == "rl4vla" and backend == "cuda":
        raise ValueError(f"start=rl4vla simulates a world before its episode, which backend=cuda cannot; {ON_CPU}")
    splits = _splits_of(suite, object_set)
    kept: dict[str, tuple[int, ...]] = {factor: tuple(numbers) for factor, numbers in (only or {}).items()}
    for split in splits:
        check_only(split, kept)
    states = min(math.prod(len(kept.get(factor, split.values[factor])) for factor in FACTORS) for split in splits)
    horizon, shape = max_episode_steps or MAX_EPISODE_STEPS, size or IMAGE_SHAPE
    deviations = list_deviations(
        (horizon, MAX_EPISODE_STEPS, HORIZON),
        (shape, IMAGE_SHAPE, PIXELS),
        *((", ".join(map(str, numbers)), "", f"only {factor} {{value}}") for factor, numbers in kept.items()),
        (bool(kept), False, f"at most {states} configurations of a task, which training and evaluation share"),
        # What is chosen where the benchmark's two codes, RL4VLA's and RLinf's, differ from each other or from us.
        (start, None, _STARTS),
        (textures if any(split.variant.extra_factor == "texture" for split in splits) else None, None, _TEXTURES),
        (any(split.variant.extra_factor == "object" and split.object_set == "test" for split in splits), False, _OTHER),
        (render_quality, "benchmark", "ManiSkill's shader minimal instead of default: about one level brighter"),
    )
    return SimulatorSpec(
        id=f"maniskill/{suite}",
        entry_point="vla_envs.maniskill.simulator:PlateSimulator",
        tasks=tuple(_task(split, kept, assets) for split in splits),
        trials=min(TRIALS, states),
        initial_states=states if kept else None,
        image_shape=shape,
        state_dim=8,
        action_low=tuple(-bound for bound in ACTION_BOUND),
        action_high=ACTION_BOUND,
        gripper_dims=(6,),
        neutral_action=(*(0.0,) * 6, 1.0),  # the gripper has a target, and begins open
        clips_actions=False,
        max_episode_steps=horizon,
        control_frequency=CONTROL_FREQUENCY,
        batched=BACKENDS[backend],
        protocol_deviations=(*deviations, *describe_assets(assets)),
        options={
            "splits": tuple((split.variant.id, split.object_set) for split in splits),
            "only": kept,
            "reward_mode": _reward_mode("plate-25", reward_type or "staged"),
            "start": start,
            "textures": textures,
            "shader": SHADERS[render_quality],
            "assets": assets,
        },
    )


def _task(split: VariantSplit, only: Mapping[str, Sequence[int]], assets: str | None) -> Task:
    numbers = {factor: only.get(factor, values) for factor, values in split.values.items()}
    templates = [TEMPLATES[number] for number in numbers["extra"]] if split.variant.extra_factor == "template" else []
    said = list_instructions(assets, templates or TEMPLATES[:1], numbers["object"], numbers["plate"])
    return Task(f"{split.variant.id}:{split.object_set}", TEMPLATES[0], split.variant.group, said)


def _built_in(
    suite: str,
    control_mode: str,
    camera: Mapping[Any, Any] | None,
    max_episode_steps: int | None,
    size: tuple[int, int] | None,
    reward_type: str | None,
) -> SimulatorSpec:
    task = BUILT_IN[suite]
    horizon, usual = max_episode_steps or task.horizon, (BUILT_IN_SIZE,) * 2
    shape = size or usual
    camera = None if camera is None else _checked_camera(camera)
    described = ", ".join(f"{name} {value}" for name, value in (camera or {}).items())
    if reward_type == "dense" and not task.dense:
        raise ValueError(f"{suite} has no dense reward in ManiSkill; use reward_type=success")
    return SimulatorSpec(
        id=f"maniskill/{suite}",
        entry_point=f"vla_envs.maniskill.simulator:{task.simulator}",
        tasks=(Task(suite, task.instruction),),
        trials=TRIALS,
        image_shape=shape,
        wrist_image_shape=(1, *shape) if task.wrist_camera else None,
        state_dim=9,
        action_low=(-1.0,) * CONTROL_MODES[control_mode],
        action_high=(1.0,) * CONTROL_MODES[control_mode],
        gripper_dims=(CONTROL_MODES[control_mode] - 1,),
        neutral_action=(*(0.0,) * (CONTROL_MODES[control_mode] - 1), 1.0),
        max_episode_steps=horizon,
        control_frequency=20,
        protocol_deviations=list_deviations(
            (horizon, task.horizon, HORIZON),
            (shape, usual, PIXELS),
            (control_mode, CONTROL_MODE, "control mode {value} instead of {usual}"),
            (described, "", "camera with {value} instead of ManiSkill's"),
        ),
        perturbs=("camera", "light"),
        options={
            "reward_mode": _reward_mode("built-in", reward_type or "success"),
            "control_mode": control_mode,
            "camera": camera,
        },
    )


def _splits_of(suite: str, object_set: str) -> tuple[VariantSplit, ...]:
    if suite == OOD_SUITE:
        if object_set != "train":
            raise ValueError(f"{OOD_SUITE} has an object set for each of its tasks; leave out object_set={object_set}")
        in_test = [make_split(name, "train" if place == 0 else "test") for place, name in enumerate(VARIANTS)]
        return (*in_test, *(make_split(name, "train") for name in _ALSO_IN_TRAIN))
    splits = []
    for part in suite.split("+"):
        name, _, own = part.partition(":")
        if name in (OOD_SUITE, *BUILT_IN):
            raise ValueError(
                f"{suite!r}: only variants of plate-25 are joined by + or take an object set after a colon, {name} is "
                f"none; type maniskill/{name}"
            )
        if name not in VARIANTS:
            raise unknown_name("ManiSkill suite or task", name, suites(), example="maniskill/PickCube-v1")
        splits.append(make_split(name, own or object_set))
    check_once("ManiSkill", suite, splits, "variant")
    return tuple(splits)


def check_only(split: VariantSplit, only: Mapping[str, Sequence[int]]) -> None:
    """Refuse factors and numbers that a variant does not have."""
    for factor, numbers in only.items():
        known = split.values[factor]
        wrong = [number for number in numbers if number not in known]
        if wrong or not numbers or len(set(numbers)) != len(numbers):
            raise ValueError(
                f"only.{factor} takes different numbers from {known.start} to {known.stop - 1} in {split.variant.id} "
                f"with object set {split.object_set!r}, got {list(numbers)}"
            )


def _reward_mode(kind: str, reward_type: str) -> str:
    if reward_type not in REWARD_TYPES[kind]:
        raise unknown_name("reward_type", reward_type, REWARD_TYPES[kind])
    return REWARD_TYPES[kind][reward_type]


def _checked_camera(camera: Mapping[Any, Any]) -> dict[str, Any]:
    check_settings("camera", dict.fromkeys(CAMERA) | dict(camera), CAMERA)
    eye, target = ([float(number) for number in camera[name]] for name in ("eye", "target"))
    if eye == target:
        raise ValueError(f"camera.target={target}: must be another place than camera.eye")
    return {"eye": eye, "target": target, "fov": float(camera["fov"])}
