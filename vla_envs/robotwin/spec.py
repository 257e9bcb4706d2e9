"""The tasks of RoboTwin 2.0, and what is to be known about them without starting the simulator."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np

from vla_common.errors import unknown_name
from vla_common.settings import Count, Pixels
from vla_common.validation import check_name, check_whole_number, image_shape
from vla_envs.robotwin.expert import expert_tasks
from vla_envs.robotwin.package import describe_package, find_package
from vla_envs.robotwin.seeds import EVALUATION, KINDS, RANGE, seeds_of, solved_seeds
from vla_envs.robotwin.sentences import longest_sentences
from vla_envs.simulator import SimulatorSpec, Task

ALL = "all"
EPISODES = 100  # of a task in RoboTwin's own evaluation
CROPPED = 224  # pixels of a side
TASK_CONFIGS = ("demo_clean", "demo_randomized")
CAMERAS = {"D435": (240, 320), "L515": (180, 320), "Large_D435": (480, 640), "Large_L515": (360, 640)}
SHADERS = ("default", "rt")
QUALITIES = ("benchmark", "fast")
INSTRUCTION_TYPES = ("seen", "unseen")
ARMS = (("aloha-agilex",), ("piper", "piper"))  # one robot with two arms, or two robots
_SEEDS = {"solved": "seeds that demonstrations have solved", "range": "any seeds"}
_DISTANCE = 0.6  # m between two arms, the guide's
_Camera = Literal["D435", "L515", "Large_D435", "Large_L515"]
_CAMERA: _Camera = "D435"  # of RoboTwin's task_config/

# Each with its step limit in RoboTwin's own evaluation (task_config/_eval_step_limit.yml).
TASKS = {
    **dict.fromkeys(("adjust_bottle", "beat_block_hammer", "click_alarmclock", "click_bell", "grab_roller"), 400),
    **dict.fromkeys(("lift_pot", "move_can_pot", "move_pillbottle_pad", "move_playingcard_away"), 400),
    **dict.fromkeys(("move_stapler_pad", "pick_diverse_bottles", "pick_dual_bottles", "place_a2b_left"), 400),
    **dict.fromkeys(("place_a2b_right", "place_container_plate", "place_mouse_pad", "place_object_stand"), 400),
    **dict.fromkeys(("place_phone_stand", "press_stapler", "rotate_qrcode", "stamp_seal", "turn_switch"), 400),
    **dict.fromkeys(("place_bread_skillet", "place_burger_fries", "place_empty_cup", "place_shoe", "scan_object"), 500),
    **dict.fromkeys(("dump_bin_bigbin", "handover_mic", "place_dual_shoes"), 600),
    **dict.fromkeys(("place_bread_basket", "place_can_basket", "place_object_basket", "shake_bottle"), 700),
    "shake_bottle_horizontally": 700,
    **dict.fromkeys(("handover_block", "place_cans_plasticbox", "stack_blocks_two"), 800),
    **dict.fromkeys(("hanging_mug", "stack_bowls_two"), 900),
    **dict.fromkeys(("blocks_ranking_rgb", "blocks_ranking_size", "stack_blocks_three", "stack_bowls_three"), 1200),
    "open_microwave": 1500,
    "put_bottles_dustbin": 1700,
}
_SET_BY_DEMONSTRATION = "its success check needs what only a scripted demonstration sets"
REFUSED = {
    "place_fan": "its reset fails",
    **dict.fromkeys(("open_laptop", "place_object_scale", "put_object_cabinet"), _SET_BY_DEMONSTRATION),
}


@cache
def suites() -> tuple[str, ...]:
    """List the names that :func:`make_spec` takes, besides several tasks joined by ``+``."""
    return (*sorted(TASKS), ALL)


def make_spec(
    suite: str,
    *,
    task_config: Literal["demo_clean", "demo_randomized"] = "demo_clean",
    embodiment: Sequence[str | float] = ("aloha-agilex",),
    head_camera_type: _Camera = _CAMERA,
    wrist_camera_type: _Camera = _CAMERA,
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
    """Describe a part of RoboTwin without importing it.

    A chunk of actions is one motion (:class:`~vla_envs.simulator.ChunkSimulator`): another chunk size is another
    environment. An action is where the joints shall go, ``[left 6, left gripper, right 6, right gripper]``.

    Args:
        suite: a task such as ``"place_empty_cup"``, several joined by ``+``, or ``"all"`` 46.
        task_config: RoboTwin's file of that name: ``"demo_randomized"`` draws backgrounds, light, clutter and the
            table's height.
        embodiment: ``["aloha-agilex"]``, one robot with two arms, or ``["piper", "piper", 0.6]``, two and the metres
            between them.
        head_camera_type: camera of RoboTwin's ``_camera_config.yml``.
        wrist_camera_type: likewise, of both.
        collect_wrist_camera: draw what the cameras in the hands see, left and right.
        center_crop: keep the middle 0.9 of each image's area, at 224 x 224 pixels.
        image_size: ``(height, width)`` that frames are reduced to, by averaging, or the pixels of a side; divisors of
            what they have otherwise. ``None`` for the camera's.
        step_lim: primitive actions of an episode; ``None`` for each task's own in RoboTwin's evaluation.
        instruction_type: which of RoboTwin's sentences an episode has.
        seeds: ``"solved"``, those that RoboTwin's demonstrations have solved, of the 22 tasks that have such lists;
            ``"range"``: any, see :func:`vla_envs.robotwin.seeds.seeds_of`. Evaluations have seeds of their own
            (:func:`vla_envs.robotwin.seeds.candidates_of`).
        shader: ``"default"`` rasterises; ``"rt"`` traces rays as RoboTwin's data were drawn, in 100 times the time on a
            CPU.
        render_quality: ``"fast"`` draws shadows of half the resolution, and none of the wall: less than half the time
            on a CPU; 0.2 % of the pixels differ by more than 8 levels.
        path: a checkout of RoboTwin; ``None`` looks for it, see :func:`vla_envs.robotwin.package.find_package`.
        assets_path: the folder around its ``assets/``; ``None`` looks for it, see
            :func:`vla_envs.robotwin.package.find_assets`.

    Raises:
        ValueError: an unknown task or option value.
    """
    check_name("task_config", task_config, TASK_CONFIGS)
    check_name("head_camera_type", head_camera_type, CAMERAS)
    check_name("wrist_camera_type", wrist_camera_type, CAMERAS)
    check_name("instruction_type", instruction_type, INSTRUCTION_TYPES)
    check_name("seeds", seeds, KINDS)
    check_name("shader", shader, SHADERS)
    check_name("render_quality", render_quality, QUALITIES)
    if step_lim is not None:
        check_whole_number("step_lim", step_lim, 1)
    if wrist_camera_type != _CAMERA and not collect_wrist_camera:
        raise ValueError(
            f"wrist_camera_type={wrist_camera_type}: nothing is drawn in the hands (collect_wrist_camera=false); leave "
            "it out"
        )
    arms = _checked_arms(embodiment)
    names = _tasks_of(suite)
    limits = {name: step_lim or TASKS[name] for name in names}
    states, heldout = (min(map(len, parts)) for parts in zip(*(seeds_of(name, seeds) for name in names), strict=True))
    unlisted = seeds == "range" or not set(names) <= set(solved_seeds("eval"))
    demonstrated = set(names) <= set(expert_tasks())
    other = [name for name in names if limits[name] != TASKS[name]]
    shape, wrist = CAMERAS[head_camera_type], CAMERAS[wrist_camera_type]
    if center_crop:
        shape = wrist = (CROPPED, CROPPED)
    reduced = False
    if image_size is not None:
        drawn = [shape, wrist] if collect_wrist_camera else [shape]
        shape = wrist = _reduced(image_size, drawn)
        reduced = any(each != shape for each in drawn)
    deviations = [
        *describe_package(path, assets_path),
        *(
            text
            for deviates, text in [
                (shader == "default", "rasterised, not ray-traced as the published data are"),
                (render_quality == "fast", "shadows of half the resolution, and none of the wall"),
                (other, f"at most {step_lim} actions instead of {_numbers(TASKS[name] for name in names)}"),
                (arms[2:] not in ((), (_DISTANCE,)), f"arms {arms[-1]} m apart instead of {_DISTANCE}"),
                (head_camera_type != _CAMERA, f"head camera {head_camera_type} instead of {_CAMERA}"),
                (wrist_camera_type != _CAMERA, f"cameras {wrist_camera_type} in the hands instead of {_CAMERA}"),
                (not collect_wrist_camera, "no cameras in the hands"),
                (reduced, f"images reduced to {' x '.join(map(str, shape))} pixels"),
                (center_crop, f"images are their middle 0.9 by area, {CROPPED} x {CROPPED}"),
                (instruction_type == "seen", "sentences of the seen split, as RLinf has it; RoboTwin's own are unseen"),
                (unlisted, f"seeds from {RANGE.start} to {RANGE.stop - 1} that nobody has tried"),
            ]
            if deviates
        ),
    ]
    checkout: Path | None = None
    with suppress(FileNotFoundError):
        checkout = find_package(path)

    def said(task: str) -> tuple[str, ...]:
        return longest_sentences(checkout, task, instruction_type) if checkout else ()

    joint = math.pi
    return SimulatorSpec(
        id=f"robotwin/{suite}",
        entry_point=f"vla_envs.robotwin.simulator:{'Expert' if demonstrated else 'RoboTwin'}Simulator",
        # What is said differs between episodes: objects and arms have several names each.
        tasks=tuple(Task(name, name.replace("_", " "), instructions=said(name), worded_anew=True) for name in names),
        trials=EPISODES,
        initial_states=states,
        evaluation_trials=range(EVALUATION, EVALUATION + heldout),
        image_shape=shape,
        wrist_image_shape=(2, *wrist) if collect_wrist_camera else None,
        center_crop=center_crop,
        state_dim=14,
        action_low=(*(-joint,) * 6, 0.0) * 2,
        action_high=(*(joint,) * 6, 1.0) * 2,
        gripper_dims=(6, 13),
        neutral_action=hold,
        clips_actions=False,
        max_episode_steps=max(limits.values()),
        control_frequency=None,
        protocol=f"{task_config}, {_describe(arms)}, {_SEEDS[seeds]}, {_numbers(limits.values())} actions",
        protocol_deviations=tuple(deviations),
        worker_gb=(0.5, 0.1) if render_quality == "fast" else (0.7, 0.23),
        options={
            "task_config": task_config,
            "embodiment": arms,
            "head_camera_type": head_camera_type,
            "wrist_camera_type": wrist_camera_type,
            "center_crop": center_crop,
            "image_size": None if image_size is None else shape,
            "limits": limits,
            "instruction_type": instruction_type,
            "seeds": seeds,
            "shader": shader,
            "render_quality": render_quality,
            "path": path,
            "assets_path": assets_path,
        },
    )


def hold(states: np.ndarray) -> np.ndarray:
    """Return the action that moves nothing, ``[14]``: joints and grippers are told to be where they are told to be."""
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
    if len(set(names)) != len(names):
        raise ValueError(f"RoboTwin suite {suite!r} names a task twice; name each task once")
    return names


def _reduced(image_size: Any, shapes: Collection[tuple[int, int]]) -> tuple[int, int]:
    """Return what frames of these shapes are reduced to, where that is an average of whole pixels."""
    wanted = image_shape(image_size)
    for shape in shapes:
        if any(have % want for have, want in zip(shape, wanted, strict=True)):
            height, width = (_quarter(sides) for sides in zip(*shapes, strict=True))
            raise ValueError(
                f"image_size={list(wanted)} does not divide frames of {shape[0]} x {shape[1]} pixels; type "
                f"image_size=[{height},{width}], or null for all of them"
            )
    return wanted


def _quarter(sides: Sequence[int]) -> int:
    """Return the largest number up to a quarter of each side that divides all of them."""
    return max(number for number in range(1, min(sides) // 4 + 1) if not math.gcd(*sides) % number)


def _checked_arms(embodiment: Sequence[str | float]) -> tuple[str | float, ...]:
    given = (embodiment,) if isinstance(embodiment, str) else tuple(embodiment)
    names = given[:2] if len(given) == 3 else given
    distance = given[2] if len(given) == 3 else 0.0
    number = isinstance(distance, (int, float)) and not isinstance(distance, bool) and 0 <= distance <= 2
    if names not in ARMS or len(given) != (3 if len(names) == 2 else 1) or not number:
        raise ValueError(
            f"embodiment={list(given)!r}: is [aloha-agilex] (one robot with two arms) or [piper, piper, {_DISTANCE}] "
            f"(two arms and the metres between them, at most 2); type embodiment=[piper,piper,{_DISTANCE}]"
        )
    return names if len(names) == 1 else (*names, float(distance))


def _describe(arms: Sequence[str | float]) -> str:
    return str(arms[0]) if len(arms) == 1 else f"{arms[0]} and {arms[1]} {arms[2]} m apart"


def _numbers(values: Iterable[int]) -> str:
    least, *_, most = sorted([*values] * 2)
    return str(least) if least == most else f"{least} to {most}"
