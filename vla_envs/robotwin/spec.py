"""The tasks of RoboTwin 2.0, and what is to be known about them without starting the simulator."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import resources
from typing import Any, Literal

import numpy as np

from vla_common.errors import unknown_name
from vla_common.settings import Count, Pixels, checked
from vla_envs.protocol import are_numbers, check_once, image_shape, list_deviations
from vla_envs.robotwin.expert import expert_tasks
from vla_envs.robotwin.package import CHECKOUT, describe_assets, longest_sentences
from vla_envs.robotwin.seeds import EVALUATION, RANGE, seeds_of, solved_seeds
from vla_envs.simulator import SimulatorSpec, Task

ALL = "all"
EPISODES = 100  # of a task in RoboTwin's own evaluation
CROPPED = 224  # pixels of a side
IMAGE_SHAPE = (240, 320)  # of all cameras: the D435 of RoboTwin's task_config/
ARMS = (("aloha-agilex",), ("piper", "piper"))  # one robot with two arms, or two robots
_SEEDS = {"solved": "seeds that demonstrations have solved", "range": "any seeds"}
_SEEN = "sentences of the seen split, as RLinf has it; RoboTwin's own are unseen"
_DISTANCE = 0.6  # m between two arms, the guide's

_TABLE = json.loads(resources.files("vla_envs.robotwin").joinpath("tasks.json").read_text())
TASKS: dict[str, int] = _TABLE["step_limits"]  # of RoboTwin's own evaluation (task_config/_eval_step_limit.yml)
REFUSED: dict[str, str] = _TABLE["refused"]  # and why


@cache
def suites() -> tuple[str, ...]:
    """List the names that :func:`make_spec` takes, besides several tasks joined by ``+``."""
    return (*sorted(TASKS), ALL)


@checked
def make_spec(
    suite: str,
    *,
    task_config: Literal["demo_clean", "demo_randomized"] = "demo_clean",
    embodiment: Sequence[str | float] = ("aloha-agilex",),
    collect_wrist_camera: bool = True,
    center_crop: bool = False,
    image_size: tuple[Pixels, Pixels] | Pixels | None = None,
    step_lim: Count | None = None,
    instruction_type: Literal["seen", "unseen"] = "seen",
    seeds: Literal["solved", "range"] = "solved",
    shader: Literal["default", "rt"] = "default",
    render_quality: Literal["benchmark", "fast"] = "benchmark",
    path: str | None = None,
    assets_path: str | None = None,
) -> SimulatorSpec:
    """Describe a part of RoboTwin without importing it; ``ValueError`` for an unknown task or option value.

    A chunk of actions is one motion (:class:`~vla_envs.simulator.ChunkSimulator`): another chunk size is another
    environment. An action is where the joints shall go, ``[left 6, left gripper, right 6, right gripper]``.

    Args:
        suite: a task such as ``"place_empty_cup"``, several joined by ``+``, or ``"all"`` 46.
        task_config: RoboTwin's file of that name: ``"demo_randomized"`` draws backgrounds, light, clutter and the
            table's height.
        embodiment: ``["aloha-agilex"]``, one robot with two arms, or ``["piper", "piper", 0.6]``, two, 0.6 m apart.
        collect_wrist_camera: draw what the cameras in the hands see, left and right (``wrist_images``).
        center_crop: keep the middle 0.9 of each image's area, at 224 x 224 pixels.
        image_size: ``(height, width)`` that frames are reduced to, by averaging, or the pixels of a side; divisors of
            what they have otherwise. ``None`` for that.
        step_lim: primitive actions of an episode; ``None`` for each task's own in RoboTwin's evaluation.
        instruction_type: which of RoboTwin's sentences an episode has.
        seeds: ``"solved"``, those that RoboTwin's demonstrations have solved, of the 22 tasks that have such lists;
            ``"range"``: any, see :func:`vla_envs.robotwin.seeds.seeds_of`. Evaluations have seeds of their own.
        shader: ``"default"`` rasterises; ``"rt"`` traces rays as for RoboTwin's data, 100 times slower on a CPU.
        render_quality: ``"fast"`` draws shadows of half the resolution, and none of the wall: less than half the time
            on a CPU; 0.2 % of the pixels differ by more than 8 levels.
        path: a checkout of RoboTwin; ``None`` looks for it, see :data:`vla_envs.robotwin.package.CHECKOUT`.
        assets_path: the folder around its ``assets/``; ``None`` looks for it, see
            :func:`vla_envs.robotwin.package.find_assets`.
    """
    arms, names = _checked_arms(embodiment), _tasks_of(suite)
    states, heldout = (min(map(len, parts)) for parts in zip(*(seeds_of(name, seeds) for name in names), strict=True))
    drawn = (CROPPED, CROPPED) if center_crop else IMAGE_SHAPE
    shape = drawn if image_size is None else _reduced(image_size, drawn)
    limits = {name: step_lim or TASKS[name] for name in names}
    demonstrated = set(names) <= set(expert_tasks())
    found = (*describe_assets(assets_path, path), *CHECKOUT.describe(path))  # stand-ins come first
    options = {
        "task_config": task_config,
        "embodiment": arms,
        "center_crop": center_crop,
        "image_size": None if image_size is None else shape,
        "limits": limits,
        "instruction_type": instruction_type,
        "seeds": seeds,
        "shader": shader,
        "render_quality": render_quality,
        "path": path,
        "assets_path": assets_path,
    }
    return SimulatorSpec(
        id=f"robotwin/{suite}",
        entry_point=f"vla_envs.robotwin.simulator:{'Expert' if demonstrated else 'RoboTwin'}Simulator",
        tasks=_described(names, path, instruction_type),
        trials=EPISODES,
        initial_states=states,
        evaluation_trials=range(EVALUATION, EVALUATION + heldout),
        image_shape=shape,
        wrist_image_shape=(2, *shape) if collect_wrist_camera else None,
        center_crop=center_crop,
        state_dim=14,
        action_low=(*(-math.pi,) * 6, 0.0) * 2,
        action_high=(*(math.pi,) * 6, 1.0) * 2,
        gripper_dims=(6, 13),
        neutral_action=hold,
        clips_actions=False,
        max_episode_steps=max(limits.values()),
        control_frequency=None,
        protocol=f"{task_config}, {_describe(arms)}, {_SEEDS[seeds]}, {_numbers(limits.values())} actions",
        protocol_deviations=(*found, *_deviations(options, collect_wrist_camera, drawn, shape)),
        perturbs=("camera", "light") if task_config == "demo_clean" else ("camera",),  # the other has its own lights
        options=options,
    )


def _deviations(
    options: Mapping[str, Any], wrist: bool, drawn: tuple[int, int], shape: tuple[int, int]
) -> Iterable[str]:
    limits = options["limits"]
    others = [name for name, limit in limits.items() if limit != TASKS[name]]
    usual = _numbers(TASKS[name] for name in others or limits)
    fewer = f"at most {limits[others[0]]} actions instead of {usual}" if others else ""
    untried = options["seeds"] == "range" or not limits.keys() <= solved_seeds("eval").keys()
    return list_deviations(
        (options["shader"], "rt", "rasterised, not ray-traced as the published data are"),
        (options["render_quality"], "benchmark", "shadows of half the resolution, and none of the wall"),
        (fewer, "", "{value}"),
        (options["embodiment"][2:] or (_DISTANCE,), (_DISTANCE,), "arms {value} m apart instead of {usual}"),
        (wrist, True, "no cameras in the hands"),
        (shape, drawn, "images reduced to {value} pixels"),
        (options["center_crop"], False, f"images are their middle 0.9 by area, {CROPPED} x {CROPPED}"),
        (options["instruction_type"], "unseen", _SEEN),
        (untried, False, f"untried seeds from {RANGE.start} to {RANGE.stop - 1}"),
    )


def hold(states: np.ndarray) -> np.ndarray:
    """Return the action that moves nothing, ``[14]``: the targets of joints and grippers stay."""
    return states


def _tasks_of(suite: str) -> tuple[str, ...]:
    if suite == ALL:
        return tuple(sorted(TASKS))
    names = tuple(suite.split("+"))
    for name in names:
        if name in REFUSED:
            raise ValueError(
                f"RoboTwin's task {name} cannot be run: {REFUSED[name]}; robotwin/{ALL} are those that can"
            )
        if name not in TASKS:
            raise unknown_name("RoboTwin task", name, suites(), example="robotwin/place_empty_cup")
    check_once("RoboTwin", suite, names)
    return names


def _described(names: Sequence[str], path: str | None, split: str) -> tuple[Task, ...]:
    checkout = None
    with suppress(FileNotFoundError):
        checkout = CHECKOUT.find(path)
    return tuple(
        Task(
            name,
            name.replace("_", " "),
            instructions=longest_sentences(checkout, name, split) if checkout else (),
            sentence_per_episode=True,
        )
        for name in names
    )


def _reduced(image_size: Any, shape: tuple[int, int]) -> tuple[int, int]:
    wanted = image_shape(image_size)
    if any(have % want for have, want in zip(shape, wanted, strict=True)):
        raise ValueError(
            f"image_size={list(wanted)} does not divide frames of {shape[0]} x {shape[1]} pixels; type "
            f"image_size=[{shape[0] // 4},{shape[1] // 4}], or null for all of them"
        )
    return wanted


def _checked_arms(embodiment: Sequence[str | float]) -> tuple[str | float, ...]:
    given = tuple(embodiment)
    if given == ARMS[0]:
        return given
    if given[:-1] == ARMS[1] and are_numbers(given[-1:], 1) and 0 <= float(given[-1]) <= 2:
        return (*ARMS[1], float(given[-1]))
    raise ValueError(
        f"embodiment={list(embodiment)!r}: is [aloha-agilex] (one robot with two arms) or [piper, piper, {_DISTANCE}] "
        f"(two arms and the metres between them, at most 2); type embodiment=[piper,piper,{_DISTANCE}]"
    )


def _describe(arms: Sequence[str | float]) -> str:
    return str(arms[0]) if len(arms) == 1 else f"{arms[0]} and {arms[1]} {arms[2]} m apart"


def _numbers(values: Iterable[int]) -> str:
    least, *_, most = sorted([*values] * 2)
    return str(least) if least == most else f"{least} to {most}"
