"""Demonstrations of a benchmark's scripted expert or of a data set, and cloning them before reinforcement learning."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from tqdm import tqdm

from vla_algos.demonstrations import (
    DemonstrationSet,
    ExpertTally,
    Samples,
    describe_experts,
    for_policy,
    load_demonstrations,
    record_demonstrations,
    write_demonstrations,
)
from vla_algos.imitation import BehaviourCloning
from vla_algos.lerobot.demonstrations import LeRobotDemonstrations, Tasks
from vla_algos.lerobot.folder import is_lerobot
from vla_algos.run.files import write_folder_atomically
from vla_algos.run.lock import FolderInUse, FolderLock
from vla_algos.run.logging import progress_bar
from vla_common import keys
from vla_common.settings import BelowOne, Count, Fraction, Whole
from vla_envs import Episode, SimulatorSpec, VLAEnv
from vla_policies import VLAPolicy

_FAMILY = 1_000_000  # added to a run's seed for the initial states of demonstrations
_STATISTICS_ROWS = 20_000  # evenly spread, that percentiles are of
_OF_DATA_SETS = {"camera": None, "wrist_cameras": None, "tasks": "environment"}  # what they are without being typed


def demonstration_seed(seed: int, evaluation_seed: int) -> int:
    """Choose the seed of the demonstrations' initial states: neither the training episodes' nor the evaluation's.

    Raises:
        ValueError: the evaluation would repeat episodes that were trained on.
    """
    demonstrations = seed + _FAMILY
    if evaluation_seed in (seed, demonstrations):
        raise ValueError(
            f"eval.seed={evaluation_seed} is the family of initial states that this run trains on; "
            "take another one, such as eval.seed=9000000"
        )
    return demonstrations


def find_demonstrations(
    settings: Mapping[str, Any], spec: SimulatorSpec, evaluation_seed: int
) -> DemonstrationSet | LeRobotDemonstrations | None:
    """Open the demonstrations of a folder, recorded ones or a LeRobot data set; ``None`` if it is not there yet.

    Args:
        settings: of :func:`record`.
        spec: of the environment.
        evaluation_seed: see :func:`record`.

    Raises:
        ValueError: they do not fit the environment, the evaluation would repeat them, something else is there, or
            settings that mean nothing for them.
        ModuleNotFoundError: what reads them is not installed.
    """
    folder = settings.get("folder")
    if folder is not None and is_lerobot(folder):
        chosen = {name: settings.get(name, default) for name, default in _OF_DATA_SETS.items()}
        return LeRobotDemonstrations.open(folder, spec, stride=settings.get("stride", 4), **chosen)
    for name, default in _OF_DATA_SETS.items():
        if settings.get(name, default) != default:
            raise ValueError(
                f"demonstrations.{name}={settings[name]} is for a data set of LeRobot, and demonstrations.folder="
                f"{folder} is none (no meta/info.json); leave it out"
            )
    if folder is None and settings.get("statistics") == "demonstrations":
        raise ValueError(
            "demonstrations.statistics=demonstrations needs demonstrations that are kept; type "
            "demonstrations.folder=FOLDER"
        )
    if folder is None or not Path(folder).exists():
        return None
    found = load_demonstrations(folder)
    found.check(spec)
    if evaluation_seed in found.facts["recording"]["seeds"]:
        raise ValueError(
            f"eval.seed={evaluation_seed} is the family of initial states of the demonstrations in {folder}; take "
            "another one, such as eval.seed=9000000"
        )
    return found


def record(
    env: VLAEnv,
    policy: VLAPolicy,
    seed: int,
    evaluation_seed: int,
    *,
    episodes: Whole,
    stride: Count = 4,
    noise: Fraction | Sequence[Fraction] = 0.25,
    noise_correlation: BelowOne = 0.8,
    max_steps: Count = 150,
    folder: str | None = None,
    heldout: BelowOne = 0.0,
    statistics: Literal["checkpoint", "demonstrations"] = "checkpoint",
    camera: str | None = None,
    wrist_cameras: Sequence[str] | None = None,
    tasks: Tasks = "environment",
) -> tuple[Samples, Samples]:
    """Record demonstrations of ``env``'s tasks, one task after the other, or read those of a folder.

    With a progress bar, and afterwards a line on what the expert has solved.

    Args:
        env: its workers record.
        policy: whose instructions and chunks they are for.
        seed: family of the demonstrations' initial states.
        evaluation_seed: family of the evaluation's, which must be another one.
        episodes: how many the expert tries, of all tasks equally many, or one more of the first ones.
        stride: record every so many primitive actions.
        noise: standard deviation of the disturbance, as a fraction of half the action's range: one number, for all but
            the gripper, or one for each dimension.
        noise_correlation: of the disturbance between successive actions, 0 to below 1.
        max_steps: give up after that many actions.
        folder: where demonstrations are kept: those that are there are read, otherwise they are recorded into it. Of
            what was recorded, the folder's own settings count, and a line says so where they differ from these.
            ``None`` keeps them in memory. A data set of LeRobot is read; of the settings above ``stride`` counts then.
        heldout: share of the trials of each task that are not learnt from.
        statistics: what a policy of a checkpoint normalises actions and states by: its own statistics, or those of the
            demonstrations that are learnt from, which it is saved with. Policies that are made new always take these
            for their states, and the environment's bounds for their actions.
        camera: of a LeRobot data set, what ``images`` are; ``None`` for the only one that is on no wrist, by its name.
        wrist_cameras: of a LeRobot data set, what ``wrist_images`` are; ``None`` for those whose names say so.
        tasks: of a LeRobot data set, whether only what has an instruction of the environment is learnt from, or all.

    Returns:
        What is learnt from, and what is held out: see :meth:`Samples.split`.

    Raises:
        ValueError: the folder has something else in it; nothing is held out although it should be.
        FolderInUse: another process records into the folder.
    """
    spec = env.simulator_spec
    settings: dict[str, Any] = {
        "stride": stride,
        "noise": noise,
        "noise_correlation": noise_correlation,
        "max_steps": max_steps,
    }
    chosen: dict[str, Any] = {"camera": camera, "wrist_cameras": wrist_cameras, "tasks": tasks}
    kept: dict[str, Any] = {"folder": folder, "stride": stride, "heldout": heldout, "statistics": statistics, **chosen}
    count = len(spec.tasks)
    wanted = sorted((Episode(n % count, n // count, seed) for n in range(episodes)), key=lambda e: e.task_id)

    def recorded(work: Callable[..., Any]) -> Any:
        tally = ExpertTally(spec)
        with progress_bar("demonstrations", len(wanted), "episode") as bar:

            def note(episode: Episode, steps: int | None) -> None:
                tally.add(episode, steps)
                bar.set_postfix(solved=sum(tally.solved.values()), refresh=False)
                bar.update()

            found = work(on_episode=note)
        tqdm.write(describe_experts(tally.tasks(), spec.max_episode_steps))
        return found

    found = find_demonstrations(kept, spec, evaluation_seed)
    if folder is None:
        samples = Samples(recorded(lambda **on: record_demonstrations(env, policy, wanted, **settings, **on)))
        return samples.split(heldout)
    if found is None:
        _record_into(
            Path(folder),
            lambda path: recorded(
                lambda **on: write_demonstrations(path, env, wanted, chunk_size=policy.chunk_size, **settings, **on)
            ),
        )
    elif isinstance(found, LeRobotDemonstrations):
        tqdm.write("\n".join(filter(None, [found.describe(), found.outside()])))
    else:
        tqdm.write(_describe(found, spec, {"episodes": episodes, **settings}))
    return read(spec, policy, evaluation_seed, kept, found)


def read(
    spec: SimulatorSpec,
    policy: VLAPolicy,
    evaluation_seed: int,
    settings: Mapping[str, Any],
    found: DemonstrationSet | LeRobotDemonstrations | None = None,
) -> tuple[Samples, Samples]:
    """Read demonstrations that are there, as :func:`record` does with such ``settings``.

    Raises:
        ValueError: they are not there or do not fit.
    """
    found = found or find_demonstrations(settings, spec, evaluation_seed)
    if found is None:
        raise ValueError(
            f"demonstrations.folder={settings['folder']}: this process does not see it; take a folder that all "
            "machines share"
        )

    share = settings.get("heldout", 0.0)
    if settings.get("statistics") == "demonstrations":
        learnt, _ = _samples(found, policy, spec).split(share)
        _take_statistics(policy, learnt, settings["folder"])  # before prompts that have normalised states in them
    return _samples(found, policy, spec).split(share)


def _samples(found: DemonstrationSet | LeRobotDemonstrations, policy: VLAPolicy, spec: SimulatorSpec) -> Samples:
    if isinstance(found, LeRobotDemonstrations):
        return found.for_policy(policy)
    return for_policy(found, policy, spec)


def _take_statistics(policy: VLAPolicy, samples: Samples, folder: str) -> None:
    """Have ``policy`` normalise by what is in ``samples``; the name of their folder is that of the statistics."""
    rows = torch.linspace(0, len(samples) - 1, min(len(samples), _STATISTICS_ROWS)).long()
    some = samples.select(keys.ACTION, keys.STATES, keys.STEP_MASK)[rows]
    name = re.sub(r"[^A-Za-z0-9_-]", "_", Path(folder).resolve().name)
    policy.take_statistics(name, some[keys.ACTION], some[keys.STATES], some[keys.STEP_MASK])


def _describe(found: DemonstrationSet, spec: SimulatorSpec, settings: Mapping[str, Any]) -> str:
    """Say what is read, and what of it is not as this run would have recorded it."""
    recording = found.facts["recording"]
    lines = [f"{found.folder}: {found.describe()}"]
    other = [f"{name} {recording[name]}, not {ours}" for name, ours in settings.items() if recording.get(name) != ours]
    if other:
        lines.append(f"  recorded with other settings than demonstrations. has now: {'; '.join(other)}")
    theirs, here = found.facts["env"]["protocol_deviations"], list(spec.protocol_deviations)
    if theirs != here:
        lines.append(f"  recorded with {'; '.join(theirs) or 'the benchmark as it is'}")
        lines.append(f"  this run has  {'; '.join(here) or 'the benchmark as it is'}")
    lines.append(describe_experts(found.facts["tasks"], found.facts["env"]["max_episode_steps"]))
    return "\n".join(lines)


def _record_into(folder: Path, write: Callable[[Path], object]) -> None:
    """Fill a folder that is whole or not there at all, by one process at a time."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = folder.with_name(f".recording_{folder.name}")
    beside.mkdir(exist_ok=True)
    try:
        lock = FolderLock(beside)
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
        shutil.rmtree(beside, ignore_errors=True)


def clone(
    policy: VLAPolicy,
    demonstrations: Samples,
    settings: dict[str, Any],
    before_step: Callable[[], None],
    heldout: Samples | None = None,
    log: Callable[[Mapping[str, float], int], object] = lambda metrics, step: None,
) -> None:
    """Clone demonstrations into ``policy``, in all processes at once: ``recipes/sft.py`` within another recipe.

    Args:
        policy: trained in place.
        demonstrations: of :func:`record`.
        settings: of :class:`~vla_algos.imitation.BehaviourCloning`.
        before_step: called before each step; may raise to abandon it.
        heldout: of :func:`record`; the loss on them is said at the end.
        log: told of the numbers of each step, by their names in ``recipes/sft.py``.
    """
    learner = BehaviourCloning(policy, demonstrations, **settings)
    with progress_bar("behaviour cloning", settings["steps"], "step") as bar:
        for step in range(1, settings["steps"] + 1):
            before_step()
            loss = learner.step()
            log({"train/loss": loss}, step)
            bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
            bar.update()
        if heldout:
            measured = learner.evaluate(heldout)
            log({f"heldout/{name}": value for name, value in measured.items()}, settings["steps"])
            error = f", error {measured['error']:.3f} of half the range" if "error" in measured else ""
            bar.write(f"{heldout.episodes} demonstrations held out: loss {measured['loss']:.3f}{error}")
