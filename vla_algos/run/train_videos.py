"""Videos of training: what some environments show while an iteration collects, as the policy sees it."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
from tensordict import TensorDictBase

from vla_algos.run.captions import caption, describe, enlarge
from vla_algos.run.files import attempt
from vla_algos.run.logging import write_video
from vla_common.keys import (
    CRASHED,
    EPISODE_LEN,
    EPISODE_RETURN,
    IMAGES,
    NEXT,
    STEP_MASK,
    SUCCESS,
    TASK_DESCRIPTIONS,
    TASK_ID,
)
from vla_common.settings import Count, Whole
from vla_common.texts import to_strings
from vla_envs.env import ENV_INDEX


class TrainVideos:
    """Films the first environments of this process in every so many iterations.

    It is a collector's ``on_decision`` and copies frames that are there: nothing is rendered, drawn at random or kept
    from one iteration to the next. A video is what one environment shows from the first decision of an iteration to
    its last, so that an episode that spans iterations is filmed as far as it is in this one; episodes of groups, which
    end within an iteration, follow each other.

    Args:
        folder: where videos go, one folder for each iteration.
        environments: how many are filmed; 0 for none.
        every: iterations from one that is filmed to the next.
    """

    def __init__(self, folder: Path, environments: Whole = 0, every: Count = 1):
        self.folder, self.environments, self.every = folder, environments, every
        self._shots: dict[int, list[tuple[np.ndarray, str]]] | None = None  # by environment, while it films

    def films(self, iteration: int) -> bool:
        """Tell whether an iteration is filmed."""
        return bool(self.environments) and iteration % self.every == 0

    def begin(self, iteration: int) -> None:
        """Film from here on, if it is an iteration to be filmed; what an interrupted one has left is forgotten."""
        self._shots = {} if self.films(iteration) else None

    def __call__(self, outcome: TensorDictBase) -> None:
        """Take the frames of a decision ``[k]`` of all environments, or of those that ``env_index`` names."""
        if self._shots is None:
            return
        places = outcome.get(ENV_INDEX, None)
        slots = list(range(len(outcome))) if places is None else places.tolist()
        after, texts = outcome[NEXT], None
        for row, slot in enumerate(slots):
            if slot >= self.environments or outcome[TASK_ID][row] < 0 or after[CRASHED][row]:
                continue  # another, an idle one, or one without a frame
            texts = texts or (to_strings(outcome), to_strings(outcome, (NEXT, TASK_DESCRIPTIONS)))
            shots = self._shots.setdefault(slot, [])
            if after[EPISODE_LEN][row] == after[STEP_MASK][row].sum():  # an episode begins
                shots.append((outcome[IMAGES][row].cpu().numpy().copy(), describe(texts[0][row], 0.0, False)))
            so_far, solved = float(after[EPISODE_RETURN][row]), bool(after[SUCCESS][row])
            shots.append((after[IMAGES][row].cpu().numpy().copy(), describe(texts[1][row], so_far, solved)))

    def write(self, iteration: int, fps: float) -> list[Path]:
        """Write what was filmed since :meth:`begin`; a video that cannot be written is left out, and said.

        Args:
            iteration: names the folder.
            fps: decisions per second.
        """
        filmed, self._shots = self._shots or {}, None
        paths = []
        for slot, shots in sorted(filmed.items()):
            path = self.folder / f"iteration_{iteration:04d}" / f"environment_{slot}.mp4"
            write = partial(_write, path, shots, fps)
            if attempt(f"a video in {self.folder}", write, "the run goes on without it", Exception):
                paths.append(path)
        return paths


def _write(path: Path, shots: list[tuple[np.ndarray, str]], fps: float) -> None:
    frames, texts = zip(*shots, strict=True)
    write_video(path, caption(enlarge(np.stack(frames)), texts), fps)
