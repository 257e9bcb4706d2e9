"""LIBERO: 130 tabletop tasks of a Panda arm in five suites, on robosuite and MuJoCo.

Liu et al. 2023, arXiv 2306.03310.
Third-person and wrist camera, both turned by 180 degrees as every published policy sees them, state = hand position,
axis-angle and gripper, sparse reward, the initial states that LIBERO ships. Horizons and settle steps differ between
publications; :data:`PROTOCOLS` has them by name, and :attr:`SimulatorSpec.protocol_deviations` says what differs from
them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Literal

from vla_common.errors import unknown_name
from vla_common.settings import Count, Factor, Pixels, Whole
from vla_common.validation import are_numbers, check_name, check_whole_number, is_whole_number
from vla_envs.libero.package import describe_assets, wrong_versions
from vla_envs.rendering.egl import check_renderer
from vla_envs.simulator import SimulatorSpec, Task

IMAGE_SIZE = 256
TRIALS = 50  # initial states per task
CONTROL_FREQUENCY = 20  # Hz
RENDER_QUALITIES = {  # and what each leaves out
    "benchmark": "",
    "fast": "no shadows, no multisampling, no reflections, no sky box",
}


# Whose draw of cabinets, stoves and racks an episode gets, which no initial state has: a seed of its own per trial, or
# one seed per task and then a reset per trial, as evaluation scripts do. The seed of each; None is the trial's number.
FIXTURE_SEEDS = {"trial": None, "openvla": 0, "openpi": 7}


@dataclass(frozen=True)
class Protocol:
    """Numbers that publications do not agree on.

    Attributes:
        settle_steps: actions that move nothing but the gripper, after the reset, so that objects come to rest.
        horizons: primitive actions by suite, settle steps not counted.
    """

    settle_steps: int
    horizons: dict[str, int]


PROTOCOLS = {
    # The evaluation scripts of OpenVLA and OpenVLA-OFT, used by most papers.
    "openvla": Protocol(10, {"spatial": 220, "object": 280, "goal": 300, "10": 520, "90": 400}),
    # RLinf; its GRPO runs of OpenVLA-OFT take 512 for every suite, its runs of pi0 take 480 for libero_10.
    "rlinf": Protocol(15, {"spatial": 240, "object": 240, "goal": 320, "10": 512, "90": 512}),
    "lerobot": Protocol(10, {"spatial": 280, "object": 280, "goal": 300, "10": 520, "90": 400}),
}


@cache
def suites() -> dict[str, tuple[Task, ...]]:
    """List the suites and the tasks of each, in the order that fixes ``task_id``; ``130`` is all five."""
    table = json.loads(resources.files("vla_envs.libero").joinpath("tasks.json").read_text())
    found = {suite: tuple(Task(name, _instruction(name), suite) for name in names) for suite, names in table.items()}
    return {**found, "130": tuple(task for tasks in found.values() for task in tasks)}


def _instruction(name: str) -> str:
    """Turn ``KITCHEN_SCENE3_turn_on_the_stove`` into ``turn on the stove``, as LIBERO itself reads its file names."""
    words = name.split("_")
    scene = next((place for place, word in enumerate(words) if word.startswith("SCENE")), -1)
    return " ".join(words[scene + 1 :])


def make_spec(
    suite: str,
    *,
    task_ids: Sequence[Whole] | None = None,
    protocol: Literal["openvla", "rlinf", "lerobot"] = "openvla",
    max_episode_steps: Count | None = None,
    settle_steps: Whole | None = None,
    reset_gripper_open: bool = True,
    fixtures: Literal["trial", "openvla", "openpi"] = "trial",
    image_size: Pixels = IMAGE_SIZE,
    render_quality: Literal["benchmark", "fast"] = "benchmark",
    assets: str | None = None,
    download_assets: bool = False,
    cache_gigabytes: Factor = 2.0,
    allow_other_versions: bool = False,
) -> SimulatorSpec:
    """Describe a LIBERO suite without importing LIBERO.

    Args:
        suite: ``"spatial"``, ``"object"``, ``"goal"``, ``"10"``, ``"90"`` or ``"130"``; ``"libero_"`` may stand before.
        task_ids: only these tasks of the suite, by number; they are numbered anew from 0.
        protocol: whose horizons and settle steps, see :data:`PROTOCOLS`.
        max_episode_steps: horizon in primitive actions, settle steps not counted; ``None`` for the protocol's.
        settle_steps: ``None`` for the protocol's.
        reset_gripper_open: open the gripper in the settle steps (-1); ``False`` sends 0, which leaves it half open, as
            RLinf's runs of OpenVLA-OFT do.
        fixtures: poses of cabinets, stoves and racks. ``"trial"``: drawn with the trial's number as the seed.
            ``"openvla"``, ``"openpi"``: those that the trial has in the evaluation script of OpenVLA and OpenVLA-OFT,
            or of openpi.
        image_size: pixels of a side, of both cameras.
        render_quality: ``"benchmark"``, or ``"fast"`` (see :data:`RENDER_QUALITIES`); the pixels differ.
        assets: folder of meshes and textures; ``None`` looks for it, see :func:`vla_envs.libero.package.find_assets`.
        download_assets: fetch it if there is none.
        cache_gigabytes: memory for built worlds that are kept for the next episode of their task, per worker.
        allow_other_versions: run although LIBERO, robosuite or MuJoCo are not the versions that results belong to.

    Raises:
        ValueError: an unknown suite, task or option value.
    """
    check_renderer()
    name = suite.removeprefix("libero_")
    if name not in suites():
        raise unknown_name("LIBERO suite", suite, suites(), example="libero/spatial")
    check_name("LIBERO protocol", protocol, PROTOCOLS, example="openvla")
    check_name("fixtures", fixtures, FIXTURE_SEEDS, example="openvla")
    if not isinstance(reset_gripper_open, bool):
        raise ValueError(f"reset_gripper_open is true or false, got {reset_gripper_open!r}")
    check_name("render_quality", render_quality, RENDER_QUALITIES, example="benchmark")
    if not is_whole_number(image_size) or image_size < 1:
        raise ValueError(f"image_size is a number of pixels, at least 1, got {image_size!r}; try image_size=256")
    tasks = _chosen(name, task_ids)
    published = PROTOCOLS[protocol]
    horizons = {task.group: published.horizons[task.group] for task in tasks}
    horizon = max(horizons.values())
    steps = horizon if max_episode_steps is None else max_episode_steps
    settle = published.settle_steps if settle_steps is None else settle_steps
    check_whole_number("max_episode_steps", steps, 1)
    check_whole_number("settle_steps", settle, 0)
    if not are_numbers([cache_gigabytes], 1) or cache_gigabytes < 0:
        raise ValueError(f"cache_gigabytes must be a number >= 0, got {cache_gigabytes!r}")
    others = wrong_versions()
    deviations = [
        text
        for deviates, text in [
            (
                len(set(horizons.values())) > 1,
                f"one horizon for all suites; {protocol} has "
                + ", ".join(f"{number} for {group}" for group, number in horizons.items()),
            ),
            (steps != horizon, f"horizon {steps} instead of {horizon}"),
            (settle != published.settle_steps, f"{settle} settle steps instead of {published.settle_steps}"),
            (not reset_gripper_open, "gripper command 0 instead of -1, open, in the settle steps"),
            (
                fixtures not in ("trial", protocol),
                f"fixtures as drawn by the evaluation script of {fixtures}",
            ),
            (len(tasks) < len(suites()[name]), f"{len(tasks)} of the suite's {len(suites()[name])} tasks"),
            (render_quality != "benchmark", RENDER_QUALITIES[render_quality]),
            (image_size != IMAGE_SIZE, f"{image_size} x {image_size} pixels instead of {IMAGE_SIZE} x {IMAGE_SIZE}"),
            (allow_other_versions and bool(others), "other versions: " + "; ".join(others)),
        ]
        if deviates
    ]
    return SimulatorSpec(
        id=f"libero/{name}",
        entry_point="vla_envs.libero.simulator:LiberoSimulator",
        tasks=tasks,
        trials=TRIALS,
        initial_states=TRIALS,
        image_shape=(image_size, image_size),
        wrist_image_shape=(1, image_size, image_size),
        state_dim=8,
        action_low=(-1.0,) * 7,
        action_high=(1.0,) * 7,
        gripper_dims=(6,),
        neutral_action=(*(0.0,) * 6, -1.0 if reset_gripper_open else 0.0),  # as in the settle steps
        max_episode_steps=steps,
        control_frequency=CONTROL_FREQUENCY,
        protocol_deviations=(*deviations, *describe_assets(assets)),
        worker_gb=(0.75, 0.22),
        options={
            "settle_steps": settle,
            "reset_gripper_open": reset_gripper_open,
            "fixtures": fixtures,
            "render_quality": render_quality,
            "assets": assets,
            "download_assets": download_assets,
            "cache_gigabytes": cache_gigabytes,
            "allow_other_versions": allow_other_versions,
        },
    )


def _chosen(suite: str, task_ids: Sequence[int] | None) -> tuple[Task, ...]:
    tasks = suites()[suite]
    if task_ids is None:
        return tasks
    numbers = list(task_ids) if isinstance(task_ids, Iterable) else []
    wrong = [n for n in numbers if not is_whole_number(n) or not 0 <= n < len(tasks)]
    if wrong or not numbers or len(set(numbers)) != len(numbers):
        raise ValueError(
            f"task_ids of libero/{suite} are different numbers from 0 to {len(tasks) - 1}, got {task_ids!r}; "
            "try task_ids=[0,3], or leave it out for all"
        )
    return tuple(tasks[number] for number in numbers)
