"""An episode in which a policy has acted, simulated once more: the same actions lead to the same states, to the bit."""

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
    """What a policy has done in an episode."""

    number: int  # its place among others
    episode: Episode
    chunks: Sequence[np.ndarray] = field(default=(), repr=False)  # that were executed, float32 [C, A] each


def thumbnail(simulator: Any, episode: Episode) -> np.ndarray:
    """Return the image that an episode begins with, uint8 ``[16, 16, 3]``."""
    simulator.reset(episode)
    return np.array(Image.fromarray(simulator.observe().images).resize((16, 16), Image.Resampling.BOX))


def replay(simulator: Any, visit: Visit) -> tuple[int, dict[str, Any]]:
    """Return the number of a visit, and what was to be seen before each of its ``L`` actions, and what each did.

    ``cameras``: of each, the wrists' last, ``L`` PNG files; ``pixels`` float64 ``[L, cameras, 4, 3]``: mean, mean
    square, least and largest value of each image by colour, 0 to 1; ``states`` float32 ``[L, S]``;
    ``task_descriptions``, ``L`` texts; ``reward`` float32 and ``success`` bool ``[L]``. For a simulator that executes
    one action at a time.
    """
    spec, rows = simulator.spec, list[tuple[Any, ...]]()
    simulator.reset(visit.episode)
    for action in np.concatenate(visit.chunks):
        seen = simulator.observe()
        states = np.array(check_observation(spec, seen))
        frames = [seen.images, *([] if seen.wrist_images is None else seen.wrist_images)]
        files, pixels = [_png(frame) for frame in frames], np.stack([_pixels(frame) for frame in frames])
        outcome = check_outcome(spec, simulator.step(action), "step returned")
        rows.append((files, pixels, states, seen.task_description, outcome.reward, outcome.success))
    seen_files, seen_pixels, seen_states, texts, rewards, successes = zip(*rows, strict=True)
    return visit.number, {
        "cameras": [*zip(*seen_files, strict=True)],
        "pixels": np.stack(seen_pixels),
        keys.STATES: np.stack(seen_states),
        keys.TASK_DESCRIPTIONS: list(texts),
        keys.REWARD: np.array(rewards, np.float32),
        keys.SUCCESS: np.array(successes),
    }


def _png(frame: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(frame).save(file, "PNG", compress_level=1)  # much faster than the smallest
    return file.getvalue()


def _pixels(frame: np.ndarray) -> np.ndarray:
    colours = frame.reshape(-1, 3) / 255.0
    return np.stack([colours.mean(0), (colours**2).mean(0), colours.min(0), colours.max(0)])
