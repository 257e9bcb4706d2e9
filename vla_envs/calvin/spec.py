"""CALVIN: 34 tasks of a Panda arm at a desk with drawer, sliding door, switch, button and three blocks, on PyBullet.

Mees et al. 2022, arXiv 2112.03227. Static camera and camera in the hand, as they come; state = hand position, its Euler
angles and the gripper's opening; relative actions; 30 Hz. Chains of five tasks under two protocols:

- ``calvin/lh-mtlc``, the published evaluation: 1000 chains in scene D, 360 steps for each task, no reset in between, a
  chain ends at its first failure. A chunk of actions ends with its task: the next one is decided with the new sentence.
- ``calvin/D``, ``calvin/ABC`` and so on, for training, as RLinf's guide has it: 480 steps for all five tasks, a reward
  of 1 for each, the sentence advances without a reset and in the midst of a chunk, terminated after the fifth.

And the tasks one by one: ``calvin/open_drawer``. A task is paid once, by the action that does it.

Actions out of bounds are executed as they are, as calvin_env and its evaluation do (the published data were clipped to
-1 to 1 when they were recorded). Of the gripper only the sign counts: above 0 opens, everything else closes.
"""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Literal

import numpy as np

from vla_common.errors import unknown_name
from vla_common.settings import Count, Pixels
from vla_common.validation import check_name, is_whole_number
from vla_envs.calvin.chains import LENGTH, PUBLISHED, published_chains, tasks
from vla_envs.calvin.expert import expert_tasks
from vla_envs.calvin.package import describe_package
from vla_envs.calvin.scenes import SCENES, describe_fixes
from vla_envs.simulator import SimulatorSpec, Task

IMAGE_SIZE, WRIST_IMAGE_SIZE = 200, 84
CONTROL_FREQUENCY = 30  # Hz
SUBTASK_STEPS = 360  # for each task of the published evaluation, and for a task alone
CHAIN_STEPS = 480  # for five tasks in training
EVALUATION = "lh-mtlc"
TRIALS_OF_A_TASK = 50
_HOLDING = 0.07  # m, that the gripper is open at most around a block; 0.08 with nothing in it
_PROTOCOLS = {
    EVALUATION: f"LH-MTLC: chains of {LENGTH} tasks, {SUBTASK_STEPS} steps for each, ended by the first failure",
    "chain": f"training chain: {LENGTH} tasks in {{steps}} steps, as RLinf has it; not LH-MTLC; {{chains}} chains",
    "task": "tasks one by one, {steps} steps; no protocol of the benchmark",
}


@cache
def all_sentences() -> dict[str, dict[str, tuple[str, ...]]]:
    """Read the sentences of calvin_agent: by ``"validation"`` (one for each task) and ``"training"``, by task."""
    table = json.loads(resources.files("vla_envs.calvin").joinpath("sentences.json").read_text())
    return {kind: {task: tuple(found) for task, found in tasks.items()} for kind, tasks in table.items()}


@cache
def suites() -> tuple[str, ...]:
    """List the names that :func:`make_spec` takes, besides other sets of scenes and tasks joined by ``+``."""
    return (EVALUATION, *SCENES, "ABC", "ABCD", *tasks())


def make_spec(
    suite: str,
    *,
    scene: str | None = None,
    chains: Literal["drawn", "published"] | None = None,
    chains_file: str | None = None,
    sentences: Literal["validation", "training"] | None = None,
    max_episode_steps: Count | None = None,
    image_size: Pixels = IMAGE_SIZE,
    wrist_camera: bool = True,
    scene_fixes: bool = True,
    renderer: Literal["auto", "tiny", "egl"] = "auto",
    path: str | None = None,
) -> SimulatorSpec:
    """Describe a part of CALVIN without importing it.

    Args:
        suite: ``"lh-mtlc"``, scenes to draw chains from such as ``"D"`` and ``"ABC"``, a task such as
            ``"open_drawer"``, or several tasks joined by ``+``.
        scene: of ``"lh-mtlc"`` and of tasks; ``None`` for D. Of a task also several, such as ``"ABC"``: which one an
            episode is in is then drawn from its seed.
        chains: in training ``"drawn"`` ones, anew for each episode, or the 1000 ``"published"`` ones of the evaluation,
            as RLinf trains on; the evaluation has these.
        chains_file: a file with other chains in place of the published ones.
        sentences: ``"validation"``, one for each task; ``"training"``: one of about eleven is drawn. ``None``:
            validation, and training for chains in A, B and C, and in all four, as RLinf has it.
        max_episode_steps: horizon of an episode in training or of a task; ``None`` for 480 and 360.
        image_size: pixels of a side of the static camera.
        wrist_camera: draw what the camera in the hand sees.
        scene_fixes: mend the scenes, see :mod:`vla_envs.calvin.scenes`; false for upstream's.
        renderer: PyBullet's own on the CPU (``"tiny"``) or on a GPU (``"egl"``); ``"auto"`` for the latter where there
            is a GPU. The pixels differ.
        path: a checkout of calvin_env; ``None`` looks for it, see :func:`vla_envs.calvin.package.find_package`.

    Raises:
        ValueError: an unknown suite, scene or task, or an option that the suite does not have.
    """
    check_name("renderer", renderer, ("auto", "tiny", "egl"), example="auto")
    if chains is not None:
        check_name("chains", chains, ("drawn", "published"), example="drawn")
    if sentences is not None:
        check_name("sentences", sentences, ("validation", "training"), example="validation")
    if not is_whole_number(image_size) or image_size < 16:
        raise ValueError(f"image_size is a number of pixels, at least 16, got {image_size!r}; try image_size=200")
    kind, scenes, names = _parts(suite, scene)
    if kind != "chain" and chains is not None:
        raise ValueError(f"chains={chains} is for training in scenes such as calvin/D; calvin/{suite} has its own")
    if kind == EVALUATION and max_episode_steps is not None:
        raise ValueError(f"calvin/{EVALUATION} has {SUBTASK_STEPS} steps for each task; leave max_episode_steps out")
    published = kind == EVALUATION or chains == "published"
    if chains_file is not None and not published:
        raise ValueError("chains_file replaces the published chains; type chains=published too, or calvin/lh-mtlc")
    usual = "training" if kind == "chain" and {*"ABC"} <= {*scenes} else "validation"
    said = usual if sentences is None else sentences
    horizon = {"chain": CHAIN_STEPS, "task": SUBTASK_STEPS, EVALUATION: LENGTH * SUBTASK_STEPS}[kind]
    steps = horizon if max_episode_steps is None else max_episode_steps
    number = len(published_chains(chains_file)) if published else None
    drawer = choose_renderer(renderer)
    demonstrated = kind == "task" and set(names) <= set(expert_tasks())
    deviations = [
        text
        for deviates, text in [
            (steps != horizon, f"horizon {steps} instead of {horizon}"),
            (kind == EVALUATION and scenes != "D", f"scene {scenes} instead of D"),
            (said != usual, f"{said} sentences instead of {usual} ones"),
            (chains_file is not None, f"{number} chains of {chains_file}"),
            (image_size != IMAGE_SIZE, f"{image_size} x {image_size} pixels instead of {IMAGE_SIZE} x {IMAGE_SIZE}"),
            (not wrist_camera, "no camera in the hand"),
            (drawer == "tiny", "drawn by PyBullet's TinyRenderer, not by EGL as the published data are"),
        ]
        if deviates
    ]
    deviations += describe_package(path)
    if scene_fixes:
        deviations += describe_fixes(scenes)
    return SimulatorSpec(
        id=f"calvin/{suite}",
        entry_point=f"vla_envs.calvin.simulator:{'Expert' if demonstrated else 'Calvin'}Simulator",
        tasks=tuple(_task(kind, name, said) for name in names),
        trials=number or (TRIALS_OF_A_TASK if kind == "task" else PUBLISHED // len(scenes)),
        initial_states=number,
        chain_length=1 if kind == "task" else LENGTH,
        pays_once=True,
        image_shape=(image_size, image_size),
        wrist_image_shape=(1, WRIST_IMAGE_SIZE, WRIST_IMAGE_SIZE) if wrist_camera else None,
        state_dim=7,
        action_low=(-1.0,) * 7,
        action_high=(1.0,) * 7,
        gripper_dims=(6,),
        neutral_action=stay,
        clips_actions=False,
        max_episode_steps=steps,
        control_frequency=CONTROL_FREQUENCY,
        protocol=_PROTOCOLS[kind].format(steps=steps, chains="the published" if published else "drawn"),
        protocol_deviations=tuple(deviations),
        worker_gb=(0.25, 0.09),
        options={
            "kind": kind,
            "scenes": scenes,
            "published": published,
            "chains_file": chains_file,
            "sentences": said,
            "scene_fixes": scene_fixes,
            "renderer": drawer,
            "path": path,
        },
    )


def _parts(suite: str, asked: str | None) -> tuple[str, str, tuple[str, ...]]:
    """Return the kind of a suite, its scenes, and the names of its tasks."""
    scene = "D" if asked is None else asked
    if not _are_scenes(scene):
        raise ValueError(f"scene={scene}: is not of {', '.join(SCENES)}, or some of them; type scene=D or scene=ABC")
    if suite == EVALUATION:
        if len(scene) > 1:
            raise ValueError(f"scene={scene}: calvin/{EVALUATION} runs in one scene; type scene={scene[-1]}")
        return EVALUATION, scene, (f"chains in {scene}",)
    if _are_scenes(suite):
        if asked not in (None, suite):
            raise ValueError(f"scene={asked}: calvin/{suite} says by its name where it is; type calvin/{asked}")
        return "chain", suite, tuple(f"chains in {letter}" for letter in suite)
    names = tuple(suite.split("+"))
    for name in names:
        if name and len(names) > 1 and set(name) <= set(SCENES):
            raise ValueError(f"calvin/{suite} joins scenes and tasks; type calvin/ABC for scenes, scene=A for tasks")
        if name not in tasks():
            raise unknown_name("CALVIN suite or task", name, suites(), example="calvin/D")
    if len(set(names)) != len(names):
        raise ValueError(f"CALVIN suite {suite!r} names a task twice; name each task once")
    return "task", scene, names


def _are_scenes(letters: object) -> bool:
    """Tell whether a text names scenes, each once."""
    return isinstance(letters, str) and 0 < len(letters) == len({*letters} & {*SCENES})


def _task(kind: str, name: str, said: str) -> Task:
    by_task = {task: spoken(task, said) for task in tasks()}
    if kind == "task":
        return Task(name, by_task[name][0], instructions=by_task[name])
    every = tuple(dict.fromkeys(sentence for found in by_task.values() for sentence in found))
    return Task(name, "the tasks of a chain, one after the other", instructions=every)


def spoken(task: str, said: str) -> tuple[str, ...]:
    """List the sentences that a task may have, ``"validation"`` or ``"training"`` ones."""
    return all_sentences()[said][task]


def stay(states: np.ndarray) -> np.ndarray:
    """Return the action that moves nothing, float32 ``[7]``: some tasks begin with a block in the hand, others open."""
    return np.array([*(0.0,) * 6, 1.0 if states[6] > _HOLDING else -1.0], np.float32)


def choose_renderer(asked: str) -> str:
    """Return ``"egl"`` or ``"tiny"`` for what was asked, of which ``"auto"`` is the former where there is a GPU."""
    if asked != "auto":
        return asked
    return "egl" if any(Path("/proc/driver/nvidia/gpus").glob("*")) else "tiny"
