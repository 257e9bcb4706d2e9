"""Which episode runs next: random or ordered training episodes in groups, and fixed evaluation episodes."""

from collections import deque
from collections.abc import Iterable
from dataclasses import astuple, dataclass, field
from itertools import product
from typing import Any, Literal

import numpy as np

from vla_common.settings import Count, Seed, Whole, checked
from vla_envs.simulator import Episode, SimulatorSpec

Mode = Literal["random", "balanced", "learnable", "ordered", "fixed"]
_REMEMBERED = 50  # episodes of a task that its success is estimated from
_LEAST = 0.1  # of a task that is always or never solved, relative to one that is solved half of the time
_MOST = 1_000_000  # episodes of an evaluation
_SETTINGS = ("mode", "group_size", "rank", "world_size")
_TRAINING, _SHUFFLE = 0, 1  # streams of random numbers that never meet


class EpisodeSampler:
    """An endless stream of training episodes, resumable and sliced by rank.

    Consecutive episodes form groups of ``group_size`` runs of one identical episode with one ``group_id``. Ranks take
    turns by whole groups: together they run what a single rank would run.

    Args:
        spec: the suite whose tasks are drawn from.
        seed: fixes the stream and is the ``seed`` of its episodes.
        mode: ``"random"`` draws a task and a fresh initial state for each group; ``"balanced"`` draws a suite or
            difficulty first, so that those count the same; ``"learnable"`` draws like it, but a task that is solved
            with probability ``p`` (see :meth:`tell`) in proportion to ``p (1 - p)``, and at least a tenth of the most
            (Rutherford et al. 2024, arXiv 2408.15099); ``"ordered"`` walks through every (task, trial) of the suite in
            a new random order per pass; ``"fixed"`` gives the same episode over and over.
        group_size: runs per group, at least 1.
        rank, world_size: this process's share.
    """

    @checked
    def __init__(
        self,
        spec: SimulatorSpec,
        seed: Seed = 0,
        *,
        mode: Mode = "random",
        group_size: Count = 1,
        rank: Whole = 0,
        world_size: Count = 1,
    ):
        if rank >= world_size:
            raise ValueError(f"rank={rank}: must be below world_size={world_size}")
        _check_spec("EpisodeSampler", spec)
        self.spec = spec
        self.num_tasks = len(spec.tasks)
        self.seed, self.mode, self.group_size = seed, mode, group_size
        self.rank, self.world_size = rank, world_size
        groups = dict.fromkeys(task.group for task in spec.tasks)
        self._parts = [[n for n, task in enumerate(spec.tasks) if task.group == group] for group in groups]
        self._solved, self._tried = [0.0] * self.num_tasks, [0.0] * self.num_tasks  # of the last episodes of each task
        self._drawn = self._task = 0  # episodes given out by this rank, and the task of the last

    def next(self) -> Episode:
        """Return the next episode of this rank."""
        group = self._drawn // self.group_size * self.world_size + self.rank
        self._drawn += 1
        if self.mode == "ordered":
            trials = self.spec.initial_states or self.spec.trials
            pairs = self.num_tasks * trials
            order = np.random.default_rng([self.seed, _SHUFFLE, group // pairs]).permutation(pairs)
            task_id, trial_id = divmod(int(order[group % pairs]), trials)
        else:
            draw = np.random.default_rng([self.seed, _TRAINING, 0 if self.mode == "fixed" else group])
            task_id, trial_id = self._draw_task(draw), int(draw.integers(self.spec.initial_states or 2**31))
            if self.mode == "learnable" and (self._drawn - 1) % self.group_size:
                task_id = self._task  # a group is of one task, whatever was told meanwhile
            self._task = task_id
        return Episode(task_id, trial_id, self.seed, group_id=group)

    def _draw_task(self, draw: np.random.Generator) -> int:
        if self.mode == "learnable":
            until = np.cumsum(self.shares())
            return int(np.searchsorted(until, draw.random() * until[-1], side="right"))
        tasks = self._parts[int(draw.integers(len(self._parts)))] if self.mode == "balanced" else range(self.num_tasks)
        return tasks[int(draw.integers(len(tasks)))]

    def tell(self, task_ids: Iterable[int], solved: Iterable[bool]) -> None:
        """Tell of episodes of all ranks that have ended, by task; ``"learnable"`` draws accordingly from now on."""
        for task, success in zip(task_ids, solved, strict=True):
            self._tried[task] += 1
            self._solved[task] += success
            if self._tried[task] > _REMEMBERED:
                self._solved[task] *= _REMEMBERED / self._tried[task]
                self._tried[task] = _REMEMBERED

    def shares(self) -> np.ndarray:
        """Return how often each task is drawn by ``"learnable"``, float64 ``[tasks]``, of sum 1.

        The success rate of a task without episodes is taken to be one half.
        """
        found = np.zeros(self.num_tasks)
        for part in self._parts:
            success = (np.array(self._solved)[part] + 1) / (np.array(self._tried)[part] + 2)
            found[part] = np.maximum(4 * success * (1 - success), _LEAST) / len(part)
        return found / found.sum()

    def reseeded(self, seed: int) -> "EpisodeSampler":
        """Return a stream with the same settings and another seed."""
        return EpisodeSampler(self.spec, seed, **{name: getattr(self, name) for name in _SETTINGS})

    def state_dict(self) -> dict[str, Any]:
        """Return what :meth:`load_state_dict` needs to resume exactly here."""
        told = {"solved": list(self._solved), "tried": list(self._tried), "task": self._task}
        return {"drawn": self._drawn, **(told if self.mode == "learnable" else {}), **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where ``state`` was taken; ``ValueError`` if that is another stream of episodes."""
        if "drawn" not in state:
            raise ValueError("the saved episodes are of an EpisodeQueue, this is an EpisodeSampler; set_episodes first")
        for name, value in self._identity().items():
            if (saved := state.get(name, value)) != value:
                raise ValueError(
                    "resume with the settings of the saved run, or start a new run: "
                    f"the saved episode sampler had {name}={saved!r}, this one has {value!r}"
                )
        self._drawn = state["drawn"]
        if self.mode == "learnable":
            self._solved, self._tried, self._task = list(state["solved"]), list(state["tried"]), state.get("task", 0)

    def _identity(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in _SETTINGS}
        own["tasks"] = [task.name for task in self.spec.tasks]
        return {"id": self.spec.id, "seed": self.seed, "trials": self.spec.trials, **own}


@dataclass(frozen=True)
class QueuedEpisode(Episode):
    """An episode with its ``queue_index``: the same episode may be waiting several times."""

    queue_index: int = field(default=0, compare=False, kw_only=True)


class EpisodeQueue:
    """A finite list of episodes that is worked off once, and may grow meanwhile: evaluation and grouped rollouts.

    It remembers what was taken until it is :meth:`done`, so that nothing is lost if an environment fails before that.
    """

    def __init__(self, episodes: Iterable[Episode] = ()):
        self._waiting: deque[QueuedEpisode] = deque()
        self._taken: dict[int, QueuedEpisode] = {}  # by queue index
        self._length = 0
        self.extend(episodes)

    def __len__(self) -> int:
        return self._length

    @property
    def waiting(self) -> int:
        """How many episodes are there to be taken."""
        return len(self._waiting)

    def extend(self, episodes: Iterable[Episode]) -> None:
        """Append episodes; their indices continue those of the others."""
        for episode in episodes:
            self._waiting.append(QueuedEpisode(*astuple(episode)[:4], queue_index=self._length))
            self._length += 1

    def next(self) -> QueuedEpisode | None:
        """Return the next episode, or ``None`` when there are no more for now."""
        if not self._waiting:
            return None
        episode = self._waiting.popleft()
        self._taken[episode.queue_index] = episode
        return episode

    def done(self, episode: QueuedEpisode) -> None:
        """Say that an episode has a result."""
        self._taken.pop(episode.queue_index, None)

    def give_back(self, episode: QueuedEpisode) -> None:
        """Return an episode that has to run again; it is the next one."""
        self._taken.pop(episode.queue_index, None)
        self._waiting.appendleft(episode)

    def give_back_all(self) -> None:
        """Return every episode that was taken and has no result; they are the next ones, in their order."""
        for index in sorted(self._taken, reverse=True):
            self.give_back(self._taken[index])

    def clear(self) -> None:
        """Forget the episodes that wait or were taken; indices continue."""
        self._waiting.clear()
        self._taken.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the episodes that wait."""
        return {"waiting": [astuple(episode) for episode in self._waiting], "length": self._length}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Have the episodes of ``state`` waiting, and no others; ``ValueError`` if it is of an ``EpisodeSampler``."""
        if "waiting" not in state:
            raise ValueError("the saved episodes are of an EpisodeSampler, this is an EpisodeQueue; set_episodes first")
        self._waiting = deque(QueuedEpisode(*values[:4], queue_index=values[4]) for values in state["waiting"])
        self._taken.clear()
        self._length = state["length"]


def unpack(values: tuple[int, ...]) -> Episode:
    """Turn the numbers of an episode (``astuple``) back into it."""
    return QueuedEpisode(*values[:4], queue_index=values[4]) if len(values) == 5 else Episode(*values)


@checked
def evaluation_episodes(
    spec: SimulatorSpec, trials: Count | None = None, seed: Seed = 0, repeats: Count = 1
) -> list[Episode]:
    """List every (task, trial), tasks interleaved so that a progress bar is representative from the start.

    Args:
        spec: the suite.
        trials: initial states per task, of ``spec.evaluation_trials`` or else from 0; ``None``: the benchmark's number.
        seed: family of trials. Use another one than training does.
        repeats: runs of each, for a policy that samples.
    """
    _check_spec("evaluation_episodes", spec)
    trials = spec.trials if trials is None else trials
    first = spec.evaluation_trials.start if spec.evaluation_trials else 0
    states = len(spec.evaluation_trials) if spec.evaluation_trials else spec.initial_states
    if states is not None and trials > states:
        raise ValueError(
            f"{spec.id} has {states} initial states per task, got trials={trials}; take fewer, or the benchmark's own "
            "number with null (recipes: eval.trials=null)"
        )
    if (number := trials * len(spec.tasks) * repeats) > _MOST:
        raise ValueError(
            f"trials={trials}: {len(spec.tasks)} tasks and repeats={repeats} make {number} episodes; take fewer, at "
            f"most {_MOST} in all"
        )
    tasks = range(len(spec.tasks))
    pairs = product(range(trials), tasks)
    return [Episode(task, first + trial, seed, trial * len(tasks) + task) for trial, task in pairs] * repeats


def _check_spec(what: str, spec: Any) -> None:
    if not hasattr(spec, "tasks"):
        hint = "pass its .simulator_spec" if hasattr(spec, "simulator_spec") else "pass make_spec(NAME)"
        raise TypeError(f"{what} takes a SimulatorSpec, not {type(spec).__name__}; {hint}")
