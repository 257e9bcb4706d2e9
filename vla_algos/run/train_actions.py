"""What was executed in training, which ``vla-recipe rollouts`` makes a data set of."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from itertools import islice

from tensordict import TensorDictBase

from vla_algos import distributed
from vla_algos.evaluation import executed
from vla_algos.results import TRAINED, EpisodeResult, as_lines, files_of, part_of
from vla_algos.run.logging import forget
from vla_algos.run.run import Run
from vla_common import keys
from vla_envs import Episode, SimulatorSpec
from vla_envs.env import ENV_INDEX

_AFTER = (keys.SUCCESS, keys.SUCCESS_AT_END, keys.EPISODE_RETURN, keys.EPISODE_LEN, keys.CRASHED, keys.DONE)
_READ = (keys.TASK_ID, keys.TRIAL_ID, *((keys.NEXT, key) for key in _AFTER))


class TrainActions:
    """Keeps what is executed in training in ``training_episodes.jsonl``, each process its own part.

    Lines, see :func:`~vla_algos.results.read_training`, are written when an iteration is collected; those of an
    iteration that is run again after an interruption are removed first.

    Args:
        run: in whose folder they are.
        spec: of the environment.

    Raises:
        ValueError: its episodes cannot be simulated once more, action by action.
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

    def __call__(self, outcome: TensorDictBase) -> None:
        """Take a decision ``[k]`` of all environments, or of those that ``env_index`` names."""
        places, actions = outcome.get(ENV_INDEX, None), iter(executed(outcome))
        slots = range(len(outcome)) if places is None else places.tolist()
        rows = zip(*(outcome[key].flatten().tolist() for key in _READ), strict=True)
        counts = outcome[keys.NEXT, keys.STEP_MASK].sum(-1).tolist()
        for slot, count, row in zip(slots, counts, rows, strict=True):
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
