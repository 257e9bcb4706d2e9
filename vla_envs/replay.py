"""An episode in which a policy has acted, simulated once more: the same actions lead to the same states, to the bit."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from PIL import Image

from vla_common import keys
from vla_envs.simulator import Episode
from vla_envs.workers.answers import check_observation, check_outcome


@dataclass(frozen=True)
class Visit:
    """What a policy has done in an episode.

    Attributes:
        number: whose it is among others.
        episode: its identity.
        chunks: what was executed, float32 ``[C, A]`` each.
    """

    number: int
    episode: Episode
    chunks: Sequence[np.ndarray] = field(default=(), repr=False)


def replay(simulator: Any, visit: Visit) -> tuple[int, dict[str, Any]]:
    """Return the number of a visit, and what was to be seen before each of its ``L`` actions, and what each did.

    ``images`` and ``wrist_images``: for each camera ``L`` PNG files; ``pixels``: of each camera its mean, mean square,
    least and largest value by colour, float64 ``[4, 3]``, 0 to 1; ``states`` float32 ``[L, S]``; ``task_descriptions``,
    ``L`` texts; ``reward`` float32 and ``success`` bool ``[L]``. For a simulator that executes one action at a time.
    """
    spec, frames = simulator.spec, list[list[np.ndarray]]()
    states, texts, rewards, successes = list[Any](), list[str](), list[float](), list[bool]()
    simulator.reset(visit.episode)
    for action in np.concatenate(visit.chunks):
        seen = simulator.observe()
        states.append(np.array(check_observation(spec, seen)))
        frames.append([seen.images.copy(), *([] if seen.wrist_images is None else seen.wrist_images.copy())])
        texts.append(seen.task_description)
        outcome = check_outcome(spec, simulator.step(action), "step returned")
        rewards.append(outcome.reward)
        successes.append(outcome.success)
    cameras = [list(each) for each in zip(*frames, strict=True)]
    return visit.number, {
        "cameras": [[_png(frame) for frame in camera] for camera in cameras],
        "pixels": [_pixels(camera) for camera in cameras],
        keys.STATES: np.stack(states),
        keys.TASK_DESCRIPTIONS: texts,
        keys.REWARD: np.array(rewards, np.float32),
        keys.SUCCESS: np.array(successes),
    }


def _png(frame: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(frame).save(file, "PNG", compress_level=1)  # nine times as fast as the best, and little larger
    return file.getvalue()


def _pixels(camera: Sequence[np.ndarray]) -> np.ndarray:
    colours = np.stack(camera).reshape(-1, 3) / 255.0
    return np.stack([colours.mean(0), (colours**2).mean(0), colours.min(0), colours.max(0)])
