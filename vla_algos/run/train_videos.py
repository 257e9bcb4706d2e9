"""Videos of training: what some environments show while an iteration collects; and all that they execute."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tensordict import TensorDictBase

from vla_algos import distributed
from vla_algos.evaluation import film
from vla_algos.run.run import Run
from vla_algos.run.train_actions import TrainActions
from vla_algos.run.videos import caption, write_video
from vla_common.keys import CRASHED, NEXT, TASK_ID
from vla_common.settings import Count, Whole
from vla_envs import SimulatorSpec
from vla_envs.env import ENV_INDEX
from vla_envs.gym.env import frames_per_second

_Shots = dict[int, list[tuple[np.ndarray, str]]]  # frames and captions by environment


class TrainVideos:
    """Films the first environments of rank 0 in every so many iterations: a video each, from first to last decision.

    It is a collector's ``step_hook`` and copies frames that are there: nothing is rendered or drawn at random.

    Args:
        run: whose videos they are, in a folder for each iteration.
        spec: of the environment.
        environments: how many are filmed; 0 for none.
        every: iterations from one that is filmed to the next.
        keep_actions: keep what all environments execute in all iterations, see
            :class:`~vla_algos.run.train_actions.TrainActions`.
    """

    def __init__(
        self, run: Run, spec: SimulatorSpec, environments: Whole = 0, every: Count = 1, keep_actions: bool = False
    ):
        self._run, self._spec, self.environments, self.every = run, spec, environments, every
        self._actions = TrainActions(run, spec) if keep_actions else None
        self._shots: _Shots | None = None  # while it films
        there = distributed.per_rank(run.config.env["num_envs"], "env.num_envs")
        if environments > there and distributed.is_main():
            whose = "" if distributed.world_size() == 1 else " of rank 0, which films"
            raise ValueError(
                f"train_videos.environments={environments}: there are {there} environments{whose}; type "
                f"train_videos.environments={there} or fewer"
            )

    @property
    def hook(self) -> TrainVideos | None:
        """What a collector calls with each decision; ``None`` where nothing is kept."""
        return self if self._actions or (self.environments and distributed.is_main()) else None

    @contextlib.contextmanager
    def of(self, iteration: int, chunk_size: int) -> Iterator[None]:
        """Film what is collected inside, if it is an iteration to be filmed, and give the videos to the loggers."""
        self._shots = {} if self.environments and iteration % self.every == 0 and distributed.is_main() else None
        with self._actions.of(iteration) if self._actions else contextlib.nullcontext():
            yield
        shots, self._shots = self._shots, None
        if shots is not None:
            folder = self._run.folder / "videos" / "training" / f"iteration_{iteration:04d}"
            speed = frames_per_second(self._spec, chunk_size)
            self._run.log_videos("train", self._write(shots, folder, speed), iteration)

    def __call__(self, outcome: TensorDictBase) -> None:
        """Take the frames of a decision ``[k]`` of all environments, or of those that ``env_index`` names."""
        if self._actions is not None:
            self._actions(outcome)
        if self._shots is None:
            return
        places = outcome.get(ENV_INDEX, None)
        slots = enumerate(range(len(outcome)) if places is None else places.tolist())
        filmed = (outcome[TASK_ID] >= 0) & ~outcome[NEXT, CRASHED].squeeze(-1)  # no idle one, nor one without a frame
        film(self._shots, outcome, {row: slot for row, slot in slots if slot < self.environments and filmed[row]})

    def _write(self, shots: _Shots, folder: Path, fps: float) -> list[Path]:
        paths = []
        for slot, filmed in sorted(shots.items()):
            frames, texts = zip(*filmed, strict=True)
            paths.append(write_video(folder / f"environment_{slot}.mp4", caption(np.stack(frames), texts), fps))
        return paths
