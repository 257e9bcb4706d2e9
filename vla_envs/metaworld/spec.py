"""Meta-World v3: the 50 Sawyer tasks, MT50, ML45 and the difficulty groups, on MuJoCo.

RLinf's protocol: camera ``corner4`` turned upright, 480 x 480 pixels, no wrist camera (no ``wrist_images``), state =
hand position and gripper opening, 15 settle steps, horizon 100, sparse reward, instructions and task order of
``tasks.json``; :attr:`SimulatorSpec.protocol_deviations` says what deviates. LeRobot has another one: ``PROTOCOLS``.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Ge, Gt, Le

from vla_common.errors import unknown_name
from vla_common.settings import Count, Factor, Pixels, Whole, check_settings, checked
from vla_envs.protocol import HORIZON, PIXELS, SETTLE_STEPS, check_once, image_shape, list_deviations
from vla_envs.rendering.egl import check_renderer
from vla_envs.simulator import SimulatorSpec, Task

IMAGE_SIZE = 480
CONTROL_FREQUENCY = 80  # Hz
DIFFICULTIES = ("easy", "medium", "hard", "very_hard")
RENDER_QUALITIES = {  # and what each leaves out
    "benchmark": "",
    "fast": "no shadows, no multisampling",
    "minimal": "no shadows, no multisampling, no reflections, no sky box",
    "coarse": "no shadows, no multisampling, no reflections, no sky box, coarser shapes and textures",
}
CAMERA: dict[str, Any] = {  # metres and degrees
    "lookat": tuple[float, float, float],
    "distance": Annotated[float, Gt(0), Le(100)],
    "azimuth": Annotated[float, Ge(-360), Le(360)],
    "elevation": Annotated[float, Ge(-90), Le(90)],
}
LEROBOT_SEED = 1000  # of the first episode of lerobot-eval
_LEROBOT = (
    "LeRobot's protocol: camera corner2, moved, instead of corner4, horizon 500 instead of 100, 0 settle steps instead "
    "of 15, its own seeded initial states"
)


@dataclass(frozen=True)
class Protocol:
    """What publications do not agree on. Their sentences are the same (LeRobot's: ``metaworld_config.json``)."""

    camera: str  # of Meta-World's, which hang upside down
    position: tuple[float, float, float] | None  # that it is moved to, metres
    settle_steps: int
    horizon: int  # primitive actions, settle steps not counted


PROTOCOLS = {"rlinf": Protocol("corner4", None, 15, 100), "lerobot": Protocol("corner2", (0.75, 0.075, 0.7), 0, 500)}
_TABLE: dict[str, Any] = json.loads(resources.files("vla_envs.metaworld").joinpath("tasks.json").read_text())


@cache
def suites() -> dict[str, tuple[str, ...]]:
    """List the suites and the tasks of each, in the order that fixes ``task_id``."""
    names = tuple(task["name"] for task in _TABLE["tasks"])
    found = {"MT50": names, **{f"ML45-{part}": tuple(_TABLE["ML45"][part]) for part in ("train", "test")}}
    for difficulty in DIFFICULTIES:
        found[difficulty] = tuple(task["name"] for task in _TABLE["tasks"] if task["difficulty"] == difficulty)
    return found | {name: (name,) for name in names}


def _checked_ranges(
    ranges: Mapping[str, Sequence[Sequence[float]]], tasks: Sequence[str]
) -> dict[str, tuple[tuple[float, ...], ...]]:
    for task, bounds in ranges.items():
        if task not in tasks:
            error = unknown_name("task in reset_ranges", task, tasks)
            raise ValueError(f"{error}; for the benchmark's own initial states type env.reset_ranges=null")
        if len(bounds) != 2 or not 0 < len(bounds[0]) == len(bounds[1]) or np.greater(bounds[0], bounds[1]).any():
            raise ValueError(
                f"reset_ranges.{task} takes [low, high] of the task's random vector, in metres and as many numbers "
                f"each, such as [[-0.1, 0.8, 0.0], [0.1, 0.9, 0.0]], got {bounds!r}"
            )
    return {task: tuple(tuple(map(float, bound)) for bound in bounds) for task, bounds in ranges.items()}


def _tasks_of(suite: str) -> tuple[str, ...]:
    """List the tasks of a suite, of a single task (``-v3`` may be left out) or of several joined by ``+``."""
    names: list[str] = []
    for part in suite.split("+"):
        known = suites()
        match = next((name for name in (part, f"{part}-v3") if name in known), None)
        if match is None:
            raise unknown_name("Meta-World suite or task", part, known, example="metaworld/MT50")
        names.extend(known[match])
    check_once("Meta-World", suite, names)
    return tuple(names)


@checked
def make_spec(
    suite: str,
    *,
    image_size: Pixels | tuple[Pixels, Pixels] = IMAGE_SIZE,
    protocol: Literal["rlinf", "lerobot"] = "rlinf",
    max_episode_steps: Count | None = None,
    render_quality: Literal["benchmark", "fast", "minimal", "coarse"] = "benchmark",
    settle_steps: Whole | None = None,
    camera: Mapping[Literal["lookat", "distance", "azimuth", "elevation"], Any] | None = None,
    reset_ranges: Mapping[str, Sequence[Sequence[float]]] | None = None,
    hide_goals: bool = False,
    reward_type: Literal["sparse", "progress"] = "sparse",
    cache_gigabytes: Factor = 2.0,
) -> SimulatorSpec:
    """Describe a Meta-World suite without importing it; ``ValueError`` for an unknown suite, task or option value.

    Args:
        suite: ``"MT50"``, ``"ML45-train"``, ``"ML45-test"``, a difficulty (``"easy"``, ``"medium"``, ``"hard"``,
            ``"very_hard"``), a task such as ``"reach-v3"``, or several of these joined by ``+``.
        image_size: pixels of a side, or ``(height, width)``.
        protocol: whose camera, horizon, settle steps and draws of initial states, see :data:`PROTOCOLS`. Trials of
            ``"lerobot"`` are its seeds: evaluations run those from 1000 on, training those below.
        max_episode_steps: horizon in primitive actions, settle steps not counted; ``None`` for the protocol's.
        render_quality: ``"benchmark"`` (shadows, 4x multisampling), ``"fast"`` (neither), ``"minimal"`` (no reflections
            and sky box either) or ``"coarse"`` (fewer faces of large meshes and smaller textures as well, for pictures
            of about 100 pixels); the pixels differ.
        settle_steps: zero actions after the reset; ``None`` for the protocol's.
        camera: ``None`` for the protocol's camera, else the free camera's ``lookat`` (3 numbers, metres), ``distance``
            (metres), ``azimuth`` and ``elevation`` (degrees).
        reset_ranges: per task ``[low, high]`` of the random vector from which it draws its initial state, in metres; a
            task that is not named keeps the benchmark's. Equal bounds replay that vector.
        hide_goals: leave out the marker spheres, which may tell tasks of one scene apart.
        reward_type: ``"sparse"``, 1 for each action after which the task is solved; ``"progress"`` adds the change of
            Meta-World's own shaped reward, scaled to at most 1 in sum over an episode.
        cache_gigabytes: memory for built worlds that are kept for the next episode of their task, per worker. The 50
            tasks take 1.5 at ``"coarse"``, 2.8 at ``"minimal"`` and ``"fast"``.
    """
    check_renderer()
    shape, names = image_shape(image_size), _tasks_of(suite)
    published, by_lerobot = PROTOCOLS[protocol], protocol == "lerobot"
    steps = published.horizon if max_episode_steps is None else max_episode_steps
    settle = published.settle_steps if settle_steps is None else settle_steps
    if camera is not None:
        if by_lerobot:
            raise ValueError(
                "camera cannot be set with protocol=lerobot, which has its own: leave it out (null), or take "
                "protocol=rlinf"
            )
        check_settings("camera", dict.fromkeys(CAMERA) | dict(camera), CAMERA)
    ranges = _checked_ranges(reset_ranges or {}, names)
    described = ", ".join(f"{key} {value}" for key, value in (camera or {}).items())
    by_name = {task["name"]: task for task in _TABLE["tasks"]}
    return SimulatorSpec(
        id=f"metaworld/{suite}",
        entry_point="vla_envs.metaworld.simulator:MetaWorldSimulator",
        tasks=tuple(Task(name, by_name[name]["prompt"], by_name[name]["difficulty"]) for name in names),
        trials=20 if suite == "ML45-test" else 10,
        image_shape=shape,
        state_dim=4,
        action_low=(-1.0,) * 4,
        action_high=(1.0,) * 4,
        gripper_dims=(3,),
        neutral_action=(0.0,) * 4,
        perturbs=("start", "camera", "light", "distractors"),
        initial_states=LEROBOT_SEED if by_lerobot else None,
        evaluation_trials=range(LEROBOT_SEED, 1_000_000) if by_lerobot else None,
        max_episode_steps=steps,
        pays_once=reward_type == "progress",
        control_frequency=CONTROL_FREQUENCY,
        protocol_deviations=list_deviations(
            (protocol, "rlinf", _LEROBOT),
            (steps, published.horizon, HORIZON),
            (settle, published.settle_steps, SETTLE_STEPS),
            (described, "", f"free camera {{value}} instead of {published.camera}"),
            (", ".join(ranges), "", "own reset ranges for {value}"),
            (hide_goals, False, "goal markers hidden"),
            (reward_type, "sparse", "training reward with Meta-World's shaped progress"),
            (render_quality, "benchmark", RENDER_QUALITIES),
            (shape, (IMAGE_SIZE, IMAGE_SIZE), PIXELS),
        ),
        options={
            "render_quality": render_quality,
            "protocol": protocol,
            "settle_steps": settle,
            "camera": None if camera is None else dict(camera),
            "reset_ranges": ranges,
            "hide_goals": hide_goals,
            "reward_type": reward_type,
            "cache_gigabytes": cache_gigabytes,
        },
    )
