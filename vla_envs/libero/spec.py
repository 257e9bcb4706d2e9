"""LIBERO: 130 tabletop tasks of a Panda arm in five suites, on robosuite and MuJoCo (arXiv 2306.03310).

Third-person and wrist camera, both turned by 180 degrees as every published policy sees them, state = hand position,
axis-angle and gripper, sparse reward, the initial states that LIBERO ships. Horizons and settle steps differ between
publications: :data:`PROTOCOLS`.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Literal

from vla_common.errors import unknown_name
from vla_common.settings import Count, Factor, Pixels, Whole, checked
from vla_envs.libero.package import describe_assets
from vla_envs.protocol import HORIZON, PIXELS, SETTLE_STEPS, list_deviations
from vla_envs.rendering.egl import check_renderer
from vla_envs.simulator import SimulatorSpec, Task

IMAGE_SIZE = 256
TRIALS = 50  # initial states per task
CONTROL_FREQUENCY = 20  # Hz
RENDER_QUALITIES = {  # and what each leaves out
    "benchmark": "",
    "fast": "no shadows, no multisampling, no reflections, no sky box",
}


@dataclass(frozen=True)
class Draws:
    """Whose draw of cabinets, stoves and racks an episode gets, which no initial state has."""

    seeds: Callable[[int], Sequence[int | None]]  # before each reset up to a trial's; None: the draws continue
    loads: tuple[int, int] = (2, 1)  # how often LIBERO has loaded its model by the first reset, and more by each other


FIXTURES = {
    "trial": Draws(lambda trial: [trial], (1, 0)),  # as no published script does: no trial depends on another
    "openvla": Draws(lambda trial: [0, *[None] * trial]),
    "openpi": Draws(lambda trial: [7, *[None] * trial]),
    "simplevla": Draws(lambda trial: [0]),
    "lerobot": Draws(lambda trial: range(1000, 1001 + trial), (3, 1)),  # lerobot-eval's seeds; it resets once before
}


@dataclass(frozen=True)
class Protocol:
    """Numbers that publications do not agree on."""

    settle_steps: int  # actions after the reset that move nothing but the gripper, so that objects come to rest
    horizons: dict[str, int]  # primitive actions by suite, settle steps not counted
    fixtures: str = "trial"


_HORIZONS = {"spatial": 220, "object": 280, "goal": 300, "10": 520, "90": 400}
PROTOCOLS = {
    # The evaluation scripts of OpenVLA and OpenVLA-OFT, used by most papers, and of openpi.
    "openvla": Protocol(10, _HORIZONS),
    "openpi": Protocol(10, _HORIZONS, fixtures="openpi"),
    # SimpleVLA-RL (verl/workers/rollout/rob_rollout.py), in training and evaluation.
    "simplevla": Protocol(10, dict.fromkeys(_HORIZONS, 512), fixtures="simplevla"),
    # RLinf; its GRPO runs of OpenVLA-OFT take 512 for every suite, its runs of pi0 take 480 for libero_10.
    "rlinf": Protocol(15, {"spatial": 240, "object": 240, "goal": 320, "10": 512, "90": 512}),
    "lerobot": Protocol(10, {"spatial": 280, "object": 280, "goal": 300, "10": 520, "90": 400}, fixtures="lerobot"),
}
_ORDER = ("spatial", "object", "goal", "90", "10")  # of LIBERO's list of suites, which RLinf makes its libero_130 of


@cache
def suites() -> dict[str, tuple[Task, ...]]:
    """List the suites and the tasks of each, in the order that fixes ``task_id``; ``130`` is LIBERO's five.

    ``spatial_swap``, ``spatial_lan`` and ``spatial_task`` are LIBERO-PRO's of ``spatial``: objects change places, other
    words, another goal (arXiv 2510.03827). Their instructions are those of their BDDL files, as its runner gives them.
    """
    table = json.loads(resources.files("vla_envs.libero").joinpath("tasks.json").read_text())
    found = {
        suite: tuple(map(Task, table[_base(suite)], map(_instruction, words), [suite] * len(words)))
        for suite, words in table.items()
    }
    return {**found, "130": tuple(task for suite in _ORDER for task in found[suite])}


def _base(suite: str) -> str:
    return suite.partition("_")[0]


def _instruction(name: str) -> str:
    """Turn ``KITCHEN_SCENE3_turn_on_the_stove`` into ``turn on the stove``, as LIBERO itself reads its file names."""
    words = name.split("_")
    scene = next((place for place, word in enumerate(words) if word.startswith("SCENE")), -1)
    return " ".join(words[scene + 1 :])


@checked
def make_spec(
    suite: str,
    *,
    task_ids: Sequence[Whole] | None = None,
    protocol: Literal["openvla", "openpi", "simplevla", "rlinf", "lerobot"] = "openvla",
    max_episode_steps: Count | None = None,
    settle_steps: Whole | None = None,
    reset_gripper_open: bool = True,
    fixtures: Literal["trial", "openvla", "openpi", "simplevla", "lerobot"] | None = None,
    image_size: Pixels = IMAGE_SIZE,
    render_quality: Literal["benchmark", "fast"] = "benchmark",
    assets: str | None = None,
    cache_gigabytes: Factor = 2.0,
) -> SimulatorSpec:
    """Describe a LIBERO suite without importing LIBERO; ``ValueError`` for an unknown suite, task or option value.

    Args:
        suite: ``"spatial"``, ``"object"``, ``"goal"``, ``"10"``, ``"90"`` or ``"130"``; the first four with ``_swap``,
            ``_lan`` or ``_task`` behind are LIBERO-PRO's. ``libero_`` may stand before.
        task_ids: only these tasks of the suite, by number; they are numbered from 0 again.
        protocol: whose horizons, settle steps and fixtures, see :data:`PROTOCOLS`.
        max_episode_steps: horizon in primitive actions, settle steps not counted; ``None`` for the protocol's.
        settle_steps: ``None`` for the protocol's.
        reset_gripper_open: open the gripper in the settle steps (-1); ``False`` sends 0, which leaves it half open, as
            RLinf's runs of OpenVLA-OFT do.
        fixtures: poses of cabinets, stoves and racks. ``"trial"``: drawn with the trial's number as the seed; or those
            of the trial in the evaluation script of OpenVLA and OpenVLA-OFT (``"openvla"``), ``"openpi"``,
            ``"simplevla"`` or ``"lerobot"``; ``None`` for the protocol's, ``"trial"`` of the openvla and rlinf ones.
        image_size: pixels of a side, of both cameras.
        render_quality: ``"benchmark"``, or ``"fast"`` (see :data:`RENDER_QUALITIES`); the pixels differ.
        assets: folder of meshes and textures; ``None`` looks for it, see :func:`vla_envs.libero.package.find_assets`.
        cache_gigabytes: memory for built worlds that are kept for the next episode of their task, per worker.
    """
    check_renderer()
    name = suite.removeprefix("libero_")
    if name not in suites():
        raise unknown_name("LIBERO suite", suite, suites(), example="libero/spatial")
    tasks = _chosen(name, task_ids)
    published = PROTOCOLS[protocol]
    horizons = {task.group: published.horizons[_base(task.group)] for task in tasks}
    horizon = max(horizons.values())
    steps = horizon if max_episode_steps is None else max_episode_steps
    settle = published.settle_steps if settle_steps is None else settle_steps
    drawn = fixtures or published.fixtures
    draws = "with the trial's number as the seed" if drawn == "trial" else f"by the evaluation script of {drawn}"
    several = ", ".join(f"{number} for {group}" for group, number in horizons.items())
    deviations = list_deviations(
        (len(set(horizons.values())), 1, f"one horizon for all suites; {protocol} has {several}"),
        (steps, horizon, HORIZON),
        (settle, published.settle_steps, SETTLE_STEPS),
        (reset_gripper_open, True, "gripper command 0 instead of -1, open, in the settle steps"),
        (drawn not in (published.fixtures, protocol), False, f"fixtures as drawn {draws}"),
        (len(tasks), len(suites()[name]), "{value} of the suite's {usual} tasks"),
        (render_quality, "benchmark", RENDER_QUALITIES),
        ((image_size,) * 2, (IMAGE_SIZE,) * 2, PIXELS),
    )
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
        perturbs=("start", "camera", "light", "distractors"),
        max_episode_steps=steps,
        control_frequency=CONTROL_FREQUENCY,
        protocol=f"{protocol}: {steps} actions, {settle} settle steps, fixtures as drawn {draws}",
        protocol_deviations=(*deviations, *describe_assets(assets)),
        options={
            "settle_steps": settle,
            "reset_gripper_open": reset_gripper_open,
            "fixtures": drawn,
            "render_quality": render_quality,
            "assets": assets,
            "cache_gigabytes": cache_gigabytes,
        },
    )


def _chosen(suite: str, task_ids: Sequence[int] | None) -> tuple[Task, ...]:
    tasks = suites()[suite]
    if task_ids is None:
        return tasks
    if not task_ids or len(set(task_ids)) != len(task_ids) or not max(task_ids) < len(tasks):
        raise ValueError(
            f"task_ids of libero/{suite} are different numbers from 0 to {len(tasks) - 1}, got {task_ids!r}; "
            "try task_ids=[0,3], or leave it out for all"
        )
    return tuple(tasks[number] for number in task_ids)
