"""Videos of training: what some environments show while an iteration collects; and all that they execute."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
from tensordict import TensorDictBase

from vla_algos import distributed
from vla_algos.evaluation import executed, film
from vla_algos.results import TRAINED, EpisodeResult, as_lines, files_of, part_of
from vla_algos.run.logging import forget
from vla_algos.run.run import Run
from vla_algos.run.videos import caption, write_video
from vla_common import keys
from vla_common.settings import Count, Whole
from vla_envs import Episode, SimulatorSpec
from vla_envs.env import ENV_INDEX
from vla_envs.gym.env import frames_per_second

_AFTER = (keys.SUCCESS, keys.SUCCESS_AT_END, keys.EPISODE_RETURN, keys.EPISODE_LEN, keys.CRASHED, keys.DONE)
_READ = (keys.TASK_ID, keys.TRIAL_ID, *((keys.NEXT, key) for key in _AFTER))
_Shots = dict[int, list[tuple[np.ndarray, str]]]  # frames and captions by environment


class TrainVideos:
    """Films the first environments of rank 0 in every so many iterations: a video each, from first to last decision.

    It is a collector's ``step_hook`` and copies frames that are there: nothing is rendered or drawn at random.

    Args:
        run: whose videos they are, in a folder for each iteration.
        spec: of the environment.
        environments: how many are filmed; 0 for none.
        every: iterations from one that is filmed to the next.
        keep_actions: keep what all environments execute in all iterations: ``training_episodes.jsonl``, of which
            ``vla-recipe rollouts`` makes a data set.

    Raises:
        ValueError: fewer environments are there; or their episodes cannot be simulated once more, action by action.
    """

    def __init__(
        self, run: Run, spec: SimulatorSpec, environments: Whole = 0, every: Count = 1, keep_actions: bool = False
    ):
        self._run, self._spec, self.environments, self.every = run, spec, environments, every
        self._actions = _TrainActions(run, spec) if keep_actions else None
        self._shots: _Shots | None = None  # while it films
        there = distributed.per_rank(run.config.env["num_envs"], "env.num_envs")
        if environments > there and distributed.is_main():
            whose = "" if distributed.world_size() == 1 else " of rank 0, which films"
            raise ValueError(
                f"train_videos.environments={environments}: there are {there} environments{whose}; type "
                f"train_videos.environments={there} or fewer"
            )

    @property
    def hook(self) -> "TrainVideos | None":
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
        places = outcome.get(ENV_INDEX, None)
        slots = range(len(outcome)) if places is None else places.tolist()
        if self._actions is not None:
            self._actions.take(outcome, slots)
        if self._shots is not None:
            # No idle one, nor one without a frame.
            filmed = (outcome[keys.TASK_ID] >= 0) & ~outcome[keys.NEXT, keys.CRASHED].squeeze(-1)
            rows = {row: slot for row, slot in enumerate(slots) if slot < self.environments and filmed[row]}
            film(self._shots, outcome, rows)

    def _write(self, shots: _Shots, folder: Path, fps: float) -> list[Path]:
        paths = []
        for slot, filmed in sorted(shots.items()):
            frames, texts = zip(*filmed, strict=True)
            paths.append(write_video(folder / f"environment_{slot}.mp4", caption(np.stack(frames), texts), fps))
        return paths


class _TrainActions:
    """Keeps what is executed in training in ``training_episodes.jsonl``, each process its own part.

    Lines, see :func:`~vla_algos.results.read_training`, are written when an iteration is collected; those of an
    iteration that is run again after an interruption are removed first.
    """

    def __init__(self, run: Run, spec: SimulatorSpec):
        if spec.batched or spec.control_frequency is None:
            what = "simulates all worlds together" if spec.batched else "executes a chunk as one motion"
            raise ValueError(f"train_videos.keep_actions=true: {spec.id} {what}, which is not repeated; leave it out")
        self._spec, self._seed, self._path = spec, run.config.seed, run.folder / TRAINED
        self._running: dict[int, EpisodeResult] = {}  # by slot, with the actions of this iteration
        self._ended: list[tuple[int, EpisodeResult]] = []
        self._tidy = False

    @contextlib.contextmanager
    def of(self, iteration: int) -> Iterator[None]:
        """Keep what is collected inside."""
        if not self._tidy:
            for part in files_of(self._path) if distributed.is_main() else ():
                forget(part, iteration - 1)
            distributed.barrier()  # nothing is added before
            self._tidy = True
        self._running, self._ended = {}, []
        yield
        parts = [*((True, *each) for each in self._ended), *((False, *each) for each in self._running.items())]
        rank, processes = distributed.rank(), distributed.world_size()
        with open(part_of(self._path, rank), "a") as file:
            for done, slot, result in parts:
                file.write(as_lines([result], step=iteration, slot=slot * processes + rank, done=done))
            file.flush()
            os.fsync(file.fileno())  # before a checkpoint says that the iteration is over

    def take(self, outcome: TensorDictBase, slots: Sequence[int]) -> None:
        """Take a decision ``[k]`` of some environments."""
        actions = iter(executed(outcome))
        rows = zip(*(outcome[key].flatten().tolist() for key in _READ), strict=True)
        for slot, count, row in zip(slots, outcome[keys.NEXT, keys.STEP_MASK].sum(-1).tolist(), rows, strict=True):
            task, trial, once, at_end, total, length, crashed, done = row
            before, new = self._running.pop(slot, None), [*islice(actions, count)]
            if task < 0 or crashed:
                continue
            if before is not None and length > count:  # otherwise it begins
                new = [*(before.actions or []), *new]
            what, episode = self._spec.tasks[task], Episode(task, trial, self._seed)
            how = {"group": what.group, "actions": new}
            result = EpisodeResult(episode, what.name, once, at_end, total, length, **how)
            if done:
                self._ended.append((slot, result))
            else:
                self._running[slot] = result
