"""The demonstrations of a run: recorded now, or read from a folder, which may be a LeRobot data set."""

import contextlib
import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import torch
from tqdm import tqdm

from vla_algos import distributed
from vla_algos.demonstrations import experts
from vla_algos.demonstrations.dataset import DemonstrationSet, for_policy, load_demonstrations
from vla_algos.files import FolderInUse, lock_folder, write_folder_atomically
from vla_algos.imitation import check_imitation, check_state_noise
from vla_algos.lerobot.dataset import is_lerobot
from vla_algos.lerobot.demonstrations import LeRobotDemonstrations, Tasks
from vla_algos.samples import Samples, check_heldout
from vla_algos.state_prediction import check_vision_features
from vla_common import keys
from vla_common.settings import BelowOne, Count, Whole
from vla_envs import Episode, SimulatorSpec, VLAEnv
from vla_envs.experts import check_expert, noise_of_dimensions
from vla_policies import VLAPolicy

_SEED_OFFSET = 1_000_000  # from a run's seed to that of the demonstrations' initial states
_STATISTICS_ROWS = 20_000  # evenly spread, that percentiles are of
Found = DemonstrationSet | LeRobotDemonstrations


@dataclass(frozen=True, kw_only=True)
class DemonstrationSettings(experts.RecordingSettings):
    """The section ``demonstrations``.

    Attributes:
        episodes: how many the expert tries, of all tasks equally many, or one more of the first ones.
        spread: of so many times as many initial states those are taken whose first images are farthest apart: one in
            the middle, and each time the farthest from those taken (Gonzalez, 1985). 1: the first ones.
        folder: where demonstrations are kept: those that are there are read, otherwise they are recorded into it. Of
            what was recorded, the folder's own settings count, and a line says so where they differ from these.
            ``None`` keeps them in memory. A data set of LeRobot is read; of the settings above ``stride`` counts then.
        heldout: share of the trials of each task that are not learnt from, see :meth:`Samples.split`.
        statistics: what a policy of a checkpoint normalises actions and states by: its own statistics, or those of the
            demonstrations that are learnt from, which it is saved with. Policies that are made new always take these
            for their states, and the environment's bounds for their actions.
        camera, wrist_cameras, tasks: of a LeRobot data set, see :meth:`LeRobotDemonstrations.open`.
    """

    episodes: Whole
    spread: Count = 1
    folder: str | None = None
    heldout: BelowOne = 0.0
    statistics: Literal["checkpoint", "demonstrations"] = "checkpoint"
    camera: str | None = None
    wrist_cameras: Sequence[str] | None = None
    tasks: Tasks = "environment"

    @property
    def recording(self) -> dict[str, Any]:
        """Those of :class:`RecordingSettings`."""
        return {each.name: getattr(self, each.name) for each in fields(experts.RecordingSettings)}

    @property
    def lerobot(self) -> dict[str, Any]:
        """Those of a LeRobot data set alone."""
        return {name: getattr(self, name) for name in ("camera", "wrist_cameras", "tasks")}


class Demonstrations:
    """The demonstrations that a policy clones before reinforcement learning, or in ``recipes/sft.py``.

    Args:
        config: the settings of the run.
        spec: of its environment.
        always: learn from them whatever the policy is; otherwise a policy of a checkpoint begins as it is.

    Attributes:
        wanted: whether there is something to learn from.
        facts: for the run's record, of a LeRobot data set.

    Raises:
        ValueError: settings that do not fit each other or the environment, or the evaluation would repeat episodes.
    """

    def __init__(self, config: SimpleNamespace, spec: SimulatorSpec, always: bool = False):
        folder, cloning = config.demonstrations.get("folder"), config.cloning
        settings = {**config.demonstrations, "folder": folder and str(Path(folder).expanduser())}
        if settings["episodes"] and "steps" not in cloning:
            raise ValueError("cloning.steps is missing; type cloning.steps=400, or demonstrations.episodes=0")
        self.settings, self.spec, self.facts = DemonstrationSettings(**settings), spec, dict[str, Any]()
        self._lerobot: LeRobotDemonstrations | None = None
        self._env, self._auxiliary = dict(config.env), cloning.get("auxiliary", 0.0)
        self._seed, self._evaluation_seed = config.seed + _SEED_OFFSET, config.eval["seed"]
        _refuse_repeated(self._evaluation_seed, (config.seed, self._seed), "that this run trains on")
        noise_of_dimensions(self.settings.noise, spec)
        check_state_noise(cloning.get("state_noise", 0.0), spec.state_dim)
        self.wanted = bool(self.settings.episodes) and (always or not config.policy.get("checkpoint"))
        if not self.wanted:
            if self.settings.episodes and distributed.is_main():
                print("policy.checkpoint is given: nothing is cloned, demonstrations.* and cloning.* have no effect")
            return
        found = self._find()
        if found is None:
            if self.settings.heldout and self.settings.spread > 1:
                raise ValueError(
                    "demonstrations.spread takes some of the trials that heldout counts; type demonstrations.spread=1 "
                    "or demonstrations.heldout=0"
                )
            check_heldout(self.settings.heldout, self.settings.episodes // len(spec.tasks))
            wanted = self.settings.spread * -(-self.settings.episodes // len(spec.tasks))
            if spec.evaluation_trials and wanted > (spec.initial_states or wanted):  # what follows them is evaluated
                raise ValueError(
                    f"demonstrations.spread={self.settings.spread} takes {wanted} initial states of a task, and "
                    f"training has {spec.initial_states}; type demonstrations.spread=1, or fewer episodes"
                )
            with contextlib.suppress(ImportError):  # what starts it says what to install
                check_expert(spec.simulator_class(), spec)
        elif isinstance(found, LeRobotDemonstrations):
            self._lerobot, self.facts["demonstrations"] = found, found.facts()

    def check_policy(self, policy: VLAPolicy) -> None:
        """Refuse a policy that cannot clone, or not as asked: ``cloning.auxiliary``, a folder of other chunks."""
        if self.wanted:
            check_imitation(policy)
            check_vision_features(policy, self._auxiliary)
            if isinstance(found := self._find(), DemonstrationSet):
                found.check(self.spec, policy.chunk_size)
                Samples(found.frames).split(self.settings.heldout)

    def check_executed(self, chunk_size: int) -> None:
        """Refuse demonstrations that do not show what came of each chunk, or in which something failed."""
        if not self.wanted:
            return
        found, noise, stride = self._find(), self.settings.noise, self.settings.stride
        if isinstance(found, DemonstrationSet):
            noise, stride = found.facts["recording"]["noise"], found.facts["recording"]["stride"]
        other = "" if found is None else " and another demonstrations.folder"
        if isinstance(found, LeRobotDemonstrations):
            if found.folder.unsolved:
                raise ValueError(
                    f"{found.folder.path}: {found.folder.unsolved} of its {found.folder.episodes} episodes were not "
                    "solved, and each counts as solved here; write them with vla-recipe rollouts --only-success"
                )
        elif torch.as_tensor(noise).any():
            raise ValueError(
                f"demonstrations.noise={noise}: what a disturbed expert wanted is not what was executed; type "
                f"demonstrations.noise=0{other}"
            )
        if (1 if self.spec.control_frequency is None else chunk_size) % stride:
            raise ValueError(
                f"demonstrations.stride={stride}: not every chunk of {chunk_size} begins with a row; type "
                f"demonstrations.stride=1{other}"
            )

    def record(self, env: VLAEnv, policy: VLAPolicy, by: int = 0) -> tuple[Samples, Samples]:
        """Record them one task after the other, or read them from their folder; of several processes one records.

        It is the process of rank ``by``, in the workers of ``env``; instructions and chunks are those of ``policy``.
        Returns what ``policy`` learns from, and what is held out; the same in all processes. ValueError: the folder has
        something else in it, or nothing is held out although it should be. FolderInUse: another process records there.
        """
        records = distributed.rank() == by
        if self.settings.folder is None:
            recorded: Any = self._record(env, policy) if records else None
            return distributed.broadcast_object(recorded, by)
        found = self._find_or_write(env, policy) if records else None
        distributed.barrier()  # now they are there
        return read(self.settings, self.spec, policy, found or self._find())

    def _find(self) -> Found | None:
        return self._lerobot or find_demonstrations(self.settings, self.spec, self._evaluation_seed)

    def _episodes(self, env: VLAEnv) -> list[Episode]:
        chosen, count = list[Episode](), len(self.spec.tasks)
        for task in range(count):
            wanted = len(range(task, self.settings.episodes, count))
            some = [Episode(task, trial, self._seed) for trial in range(self.settings.spread * wanted)]
            chosen += _farthest_apart(env, some, wanted)
        return chosen

    def _record(self, env: VLAEnv, policy: VLAPolicy) -> tuple[Samples, Samples]:
        episodes = self._episodes(env)
        with _progress(self.spec, len(episodes)) as note:
            data = experts.record_demonstrations(env, policy, episodes, **self.settings.recording, on_episode=note)
        return Samples(data).split(self.settings.heldout)

    def _find_or_write(self, env: VLAEnv, policy: VLAPolicy) -> Found | None:
        """Return what the folder has, and say what that is; record into it if it is not there."""
        found, settings = self._find(), {"spread": self.settings.spread, **self.settings.recording}

        def write(folder: Path) -> None:
            episodes = self._episodes(env)
            with _progress(self.spec, len(episodes)) as note:
                experts.write_demonstrations(
                    folder, env, episodes, chunk_size=policy.chunk_size, **settings, on_episode=note
                )
            (folder / "config.yaml").write_text(json.dumps({"env": self._env}) + "\n")  # for vla-recipe rollouts

        if isinstance(found, LeRobotDemonstrations):
            tqdm.write("\n".join(filter(None, [found.describe(), found.outside()])))
        elif found is not None:
            tqdm.write(_describe(found, self.spec, {"episodes": self.settings.episodes, **settings}))
        else:
            _record_into(Path(str(self.settings.folder)), write)
        return found


def _farthest_apart(env: VLAEnv, episodes: Sequence[Episode], count: int) -> list[Episode]:
    """Choose ``count`` of the episodes, in order; not one whose simulator fails as it begins, if there are others."""
    if count == len(episodes):
        return [*episodes]
    found = zip(episodes, env.pool.map("vla_envs.replay:thumbnail", episodes, on_error=print), strict=True)
    began = [(episode, image.astype(np.int64).ravel()) for episode, image in found if image is not None]
    pixels = np.stack([image for _, image in began])
    apart = np.array([np.square(pixels - image).sum(1) for image in pixels])
    taken = [int(apart.sum(1).argmin())]
    while len(taken) < min(count, len(began)):
        nearest = apart[taken].min(0)
        nearest[taken] = -1
        taken.append(int(nearest.argmax()))
    return [began[number][0] for number in sorted(taken)]


def find_demonstrations(settings: DemonstrationSettings, spec: SimulatorSpec, evaluation_seed: int) -> Found | None:
    """Open the demonstrations of a folder, recorded ones or a LeRobot data set; ``None`` if it is not there yet.

    A ``ValueError`` if they do not fit the environment or the settings, the evaluation would repeat them, or something
    else is there; a ``ModuleNotFoundError`` if what reads them is not installed.
    """
    folder = settings.folder
    if folder is not None and is_lerobot(folder):
        dataset = LeRobotDemonstrations.open(folder, spec, stride=settings.stride, **settings.lerobot)
        _refuse_repeated(evaluation_seed, dataset.folder.seeds, f"of the demonstrations in {folder}")
        return dataset
    for name, value in settings.lerobot.items():
        if value != getattr(DemonstrationSettings, name):
            raise ValueError(
                f"demonstrations.{name}={value} is for a data set of LeRobot, and demonstrations.folder="
                f"{folder} is none (no meta/info.json); leave it out"
            )
    if folder is None and settings.statistics == "demonstrations":
        raise ValueError("demonstrations.statistics=demonstrations needs a folder; type demonstrations.folder=FOLDER")
    if folder is None or not Path(folder).exists():
        return None
    found = load_demonstrations(folder)
    found.check(spec)
    _refuse_repeated(evaluation_seed, found.facts["recording"]["seeds"], f"of the demonstrations in {folder}")
    return found


def _refuse_repeated(seed: int, seeds: Sequence[int], what: str) -> None:
    if seed in seeds:
        other = 9_000_000 + (seed == 9_000_000)
        raise ValueError(f"eval.seed={seed} is the family of initial states {what}; take another: eval.seed={other}")


def read(
    settings: DemonstrationSettings, spec: SimulatorSpec, policy: VLAPolicy, found: Found | None
) -> tuple[Samples, Samples]:
    """Read what was found: what ``policy`` learns from, and what is held out; ``ValueError`` if it does not fit."""
    if found is None:
        raise ValueError(f"demonstrations.folder={settings.folder} is not on this machine; take one that all share")

    def samples() -> tuple[Samples, Samples]:
        made = for_policy(found, policy, spec) if isinstance(found, DemonstrationSet) else found.for_policy(policy)
        return made.split(settings.heldout)

    if settings.statistics == "demonstrations":
        _take_statistics(policy, samples()[0], str(settings.folder))  # before prompts with normalised states in them
    return samples()


def _take_statistics(policy: VLAPolicy, samples: Samples, folder: str) -> None:
    """Have ``policy`` normalise by what is in ``samples``; the name of their folder is that of the statistics."""
    last = len(samples) - 1
    rows = torch.linspace(0, last, min(len(samples), _STATISTICS_ROWS)).long().clamp(max=last)  # float32 rounds up
    some = samples.select(keys.ACTION, keys.STATES, keys.STEP_MASK)[rows]
    name = re.sub(r"[^A-Za-z0-9_-]", "_", Path(folder).resolve().name)
    policy.take_statistics(name, some[keys.ACTION], some[keys.STATES], some[keys.STEP_MASK])


def _describe(found: DemonstrationSet, spec: SimulatorSpec, settings: Mapping[str, Any]) -> str:
    """Say what is read, and what of it is not as this run would have recorded it."""
    recording = found.facts["recording"]
    lines = [f"{found.folder}: {found.describe()}"]
    differing = [name for name, ours in settings.items() if recording.get(name, ours) != ours]
    if other := [f"{name} {recording[name]}, not {settings[name]}" for name in differing]:
        lines.append(f"  recorded with other settings than demonstrations. has now: {'; '.join(other)}")
    theirs, here = found.facts["env"]["protocol_deviations"], list(spec.protocol_deviations)
    if theirs != here:
        lines.append(f"  recorded with {'; '.join(theirs) or 'the benchmark as it is'}")
        lines.append(f"  this run has  {'; '.join(here) or 'the benchmark as it is'}")
    lines.append(experts.describe_experts(found.facts["tasks"], found.facts["env"]["max_episode_steps"]))
    return "\n".join(lines)


@contextlib.contextmanager
def _progress(spec: SimulatorSpec, episodes: int) -> Iterator[experts.Finished]:
    """Show a progress bar of what is called after each episode, and say at the end what the expert has solved."""
    outcomes: list[tuple[Episode, int | None]] = []
    with tqdm(total=episodes, desc="demonstrations", unit="episode", disable=not distributed.is_main()) as bar:

        def note(episode: Episode, steps: int | None) -> None:
            outcomes.append((episode, steps))
            bar.set_postfix(solved=sum(steps is not None for _, steps in outcomes), refresh=False)
            bar.update()

        yield note
    tqdm.write(experts.describe_experts(experts.count_by_task(spec, outcomes), spec.max_episode_steps))


def _record_into(folder: Path, write: Callable[[Path], object]) -> None:
    """Fill a folder that is whole or not there at all, by one process at a time."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    locked = folder.with_name(f".recording_{folder.name}")
    locked.mkdir(exist_ok=True)
    try:
        lock = lock_folder(locked)
    except FolderInUse as error:
        raise FolderInUse(
            f"demonstrations.folder={folder}: another process records into it; type the same again when that has "
            f"ended ({str(error).partition(';')[0]})"
        ) from None
    try:
        if not folder.exists():  # not done meanwhile
            write_folder_atomically(folder, write)
    finally:
        lock.release()
        shutil.rmtree(locked, ignore_errors=True)
