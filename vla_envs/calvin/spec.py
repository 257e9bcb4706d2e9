"""CALVIN: 34 tasks of a Panda arm at a desk with drawer, sliding door, switch, button and three blocks, on PyBullet.

Mees et al. 2022, arXiv 2112.03227. Static camera and camera in the hand, as they come; state = hand position, its Euler
angles and the gripper's opening; relative actions; 30 Hz. Chains of five tasks under two protocols:

- ``calvin/lh-mtlc``, the published evaluation: 1000 chains in scene D, 360 steps for each task, no reset in between, a
  chain ends at its first failure. A chunk of actions ends with its task: the next one is decided with the new sentence.
- ``calvin/D``, ``calvin/ABC`` and so on, for training, as RLinf's guide has it: 480 steps for all five tasks, a reward
  of 1 for each, the sentence advances without a reset and in the midst of a chunk, terminated after the fifth.

And tasks one by one, such as ``calvin/open_drawer``. A task is paid once, by the action that does it. Actions out of
bounds are executed as they are, as calvin_env does. Of the gripper only the sign counts: above 0 opens, else it closes.
"""

import json
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Literal

import numpy as np

from vla_common.errors import unknown_name
from vla_common.settings import Count, Pixels, checked
from vla_envs.calvin.chains import LENGTH, PUBLISHED, tasks
from vla_envs.calvin.expert import expert_tasks
from vla_envs.calvin.package import CHECKOUT
from vla_envs.calvin.scenes import FIXES, SCENES
from vla_envs.protocol import HORIZON, PIXELS, check_once, list_deviations
from vla_envs.simulator import SimulatorSpec, Task

IMAGE_SIZE, WRIST_IMAGE_SIZE = 200, 84
CONTROL_FREQUENCY = 30  # Hz
SUBTASK_STEPS = 360  # for each task of the published evaluation, and for a task alone
CHAIN_STEPS = 480  # for five tasks in training
EVALUATION = "lh-mtlc"
TRIALS_OF_A_TASK = 50
_HORIZONS = {"chain": CHAIN_STEPS, "task": SUBTASK_STEPS, EVALUATION: LENGTH * SUBTASK_STEPS}
_HOLDING = 0.07  # m, that the gripper is open at most around a block; 0.08 with nothing in it
_CONTACTS = "contacts in a fixed order, of each chain by itself; in calvin_env they depend on the chains before"
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


@checked
def make_spec(
    suite: str,
    *,
    scene: str | None = None,
    chains: Literal["drawn", "published"] | None = None,
    sentences: Literal["validation", "training"] | None = None,
    max_episode_steps: Count | None = None,
    image_size: Pixels = IMAGE_SIZE,
    wrist_camera: bool = True,
    scene_fixes: bool = True,
    renderer: Literal["auto", "tiny", "egl"] = "auto",
    path: str | None = None,
) -> SimulatorSpec:
    """Describe a part of CALVIN without importing it; ``ValueError`` for an unknown suite, scene, task or option value.

    Args:
        suite: ``"lh-mtlc"``, scenes to draw chains from such as ``"D"`` and ``"ABC"``, a task such as
            ``"open_drawer"``, or several tasks joined by ``+``.
        scene: of ``"lh-mtlc"`` and of tasks; ``None`` for D. Of a task also several, such as ``"ABC"``: which one an
            episode is in is then drawn from its seed.
        chains: in training ``"drawn"`` ones, another for each episode, or the 1000 ``"published"`` ones of the
            evaluation, as RLinf trains on; the evaluation has these.
        sentences: ``"validation"``, one for each task; ``"training"``: one of about eleven is drawn. ``None``:
            validation, and training for chains in A, B and C, and in all four, as RLinf has it.
        max_episode_steps: horizon of an episode; ``None`` for 480 in training, 360 for a task, and 1800 in the
            evaluation, where fewer cut chains off.
        image_size: pixels of a side of the static camera.
        wrist_camera: draw what the camera in the hand sees.
        scene_fixes: fix the scenes, see :mod:`vla_envs.calvin.scenes`; false for upstream's.
        renderer: PyBullet's own on the CPU (``"tiny"``) or on a GPU (``"egl"``), which ``"auto"`` takes where there is
            one. The pixels differ.
        path: a checkout of calvin_env; ``None`` looks for it, see :data:`vla_envs.calvin.package.CHECKOUT`.
    """
    kind, scenes, names = _parts(suite, scene)
    if kind != "chain" and chains is not None:
        raise ValueError(f"chains={chains} is for training in scenes such as calvin/D; calvin/{suite} has its own")
    number = PUBLISHED if kind == EVALUATION or chains == "published" else None
    usual = "training" if kind == "chain" and {*"ABC"} <= {*scenes} else "validation"
    said = usual if sentences is None else sentences
    steps = _HORIZONS[kind] if max_episode_steps is None else max_episode_steps
    if kind == EVALUATION and steps > _HORIZONS[kind]:
        raise ValueError(
            f"max_episode_steps={steps}: calvin/{EVALUATION} has {SUBTASK_STEPS} steps for each of {LENGTH} tasks; "
            f"type less than {_HORIZONS[kind]} to cut chains off, or leave it out"
        )
    drawer = choose_renderer(renderer)
    demonstrated = kind == "task" and set(names) <= set(expert_tasks())
    deviations = list_deviations(
        (steps, _HORIZONS[kind], HORIZON),
        (scenes if kind == EVALUATION else "D", "D", "scene {value} instead of {usual}"),
        (said, usual, "{value} sentences instead of {usual} ones"),
        ((image_size,) * 2, (IMAGE_SIZE,) * 2, PIXELS),
        (wrist_camera, True, "no camera in the hand"),
        (kind == EVALUATION, False, _CONTACTS),
        (drawer, "egl", "drawn by PyBullet's TinyRenderer, not by EGL as the published data are"),
    )
    mended = [f"scene {letter} mended: {FIXES[letter]}" for letter in scenes if scene_fixes and letter in FIXES]
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
        perturbs=("start", "camera"),
        clips_actions=False,
        max_episode_steps=steps,
        control_frequency=CONTROL_FREQUENCY,
        protocol=_PROTOCOLS[kind].format(steps=steps, chains="the published" if number else "drawn"),
        protocol_deviations=(*deviations, *CHECKOUT.describe(path), *mended),
        options={
            "kind": kind,
            "scenes": scenes,
            "published": number is not None,
            "sentences": said,
            "scene_fixes": scene_fixes,
            "renderer": drawer,
            "path": path,
        },
    )


def _parts(suite: str, asked: str | None) -> tuple[str, str, tuple[str, ...]]:
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
    check_once("CALVIN", suite, names)
    return "task", scene, names


def _are_scenes(letters: object) -> bool:
    return isinstance(letters, str) and 0 < len(letters) == len({*letters} & {*SCENES})


def _task(kind: str, name: str, said: str) -> Task:
    if kind == "task":
        return Task(name, spoken(name, said)[0], instructions=spoken(name, said))
    every = dict.fromkeys(sentence for task in tasks() for sentence in spoken(task, said))
    return Task(name, "the tasks of a chain, one after the other", instructions=tuple(every))


def spoken(task: str, said: str) -> tuple[str, ...]:
    """List the sentences that a task may have, ``"validation"`` or ``"training"`` ones."""
    return all_sentences()[said][task]


def stay(states: np.ndarray) -> np.ndarray:
    """Return the action that moves nothing, float32 ``[7]``; the gripper stays as it is."""
    return np.array([*(0.0,) * 6, 1.0 if states[6] > _HOLDING else -1.0], np.float32)


def choose_renderer(asked: str) -> str:
    """Return ``"egl"`` or ``"tiny"``; ``"auto"`` is the former where there is a GPU."""
    if asked != "auto":
        return asked
    return "egl" if any(Path("/proc/driver/nvidia/gpus").glob("*")) else "tiny"
