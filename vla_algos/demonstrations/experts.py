"""A scripted expert solves episodes in an environment's workers: recorded in memory or into a folder, and counted."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from vla_algos.demonstrations.dataset import FORMAT, KIND, append_rows, env_facts, write_facts
from vla_algos.results import NAME, EpisodeResult, as_lines
from vla_algos.samples import CAMERAS
from vla_common import __version__, keys
from vla_common.settings import Count, Fraction, check_fields
from vla_common.texts import WIDTH, encode
from vla_envs.env import VLAEnv
from vla_envs.experts import check_expert, noise_of_dimensions
from vla_envs.replay import Visit
from vla_envs.simulator import Episode, SimulatorSpec
from vla_envs.workers.calls import reason
from vla_policies import VLAPolicy

Finished = Callable[[Episode, int | None], object]  # an episode, and the actions that the expert needed, if it did it


@dataclass(frozen=True, kw_only=True)
class RecordingSettings:
    """How the expert is recorded; a ``ValueError`` for a value out of range.

    Attributes:
        stride: record every so many primitive actions, or decisions where a chunk is one motion.
        noise: standard deviation of the disturbance, as a fraction of half the action's range: one number, for all but
            the gripper, or one for each dimension.
        max_steps: give up after that many actions.
    """

    stride: Count = 4
    noise: Fraction | Sequence[Fraction] = 0.25
    max_steps: Count = 150

    def __post_init__(self) -> None:
        check_fields(self)


def record_demonstrations(
    env: VLAEnv,
    policy: VLAPolicy,
    episodes: Sequence[Episode],
    *,
    before: Sequence[Sequence[np.ndarray]] | None = None,
    on_episode: Finished | None = None,
    **settings: Any,
) -> TensorDict:
    """Let the benchmark's scripted expert solve ``episodes`` in the workers of ``env``, and keep it in memory.

    Workers take them task by task, because another task may be another world to build.

    Args:
        env: its workers record; the episodes in its slots stay where they are.
        policy: tokenises the instructions, shrinks the images if it resizes, and sets the length of the chunks.
        episodes: what to solve; those that the expert fails are left out, and those whose simulator fails again and
            again, with a warning that counts them.
        before: chunks of actions, float32 ``[C, A]``, that are executed first in each, before the expert takes over;
            ``step`` and ``episode_len`` count from there.
        on_episode: called after each with it and with the actions that the expert needed, ``None`` if it failed.
        **settings: of :class:`RecordingSettings`.

    Returns:
        ``[K]``, in the order of ``episodes``: the cameras that the policy looks at, or ``model_images`` of one that
        resizes, ``states``, ``task_descriptions`` as bytes, ``prompt_tokens``, ``action`` ``[K, C, A]``, ``step_mask``
        ``[K, C]``, ``task_id``, ``trial_id``, ``episode``, ``step``, ``episode_len`` ``[K, 1]`` and ``final_states``.

    Raises:
        ValueError: the benchmark has no scripted expert; noise for other actions.
        RuntimeError: the expert solved none, and nothing was done ``before``; otherwise there are no rows.
        SimulatorCrash: the simulator fails whatever it is to do.
    """
    solved: list[dict[str, Any] | None] = [None] * len(episodes)

    def keep(number: int, recording: dict[str, Any] | None) -> None:
        if recording is None:
            return
        cameras = {name: recording.pop(name) for name in CAMERAS if name in recording}
        seen = {name: torch.from_numpy(frames) for name, frames in cameras.items() if name in policy.in_keys}
        images = TensorDict(seen, [len(recording[keys.STATES])])
        recording["frames"] = policy.shrink_images(images.to(policy.device)).cpu()  # before the next are recorded
        solved[number] = recording

    _record(env, episodes, policy.chunk_size, keep, on_episode, RecordingSettings(**settings), before)
    recordings = [(episode, each) for episode, each in zip(episodes, solved, strict=True) if each is not None]
    if not recordings:  # a policy has led nowhere that the expert finds out of
        return TensorDict({}, [0])
    data: TensorDict = torch.cat([recording["frames"] for _, recording in recordings])
    rows = [_rows(number, episode, each) for number, (episode, each) in enumerate(recordings)]
    for name in rows[0]:
        data[name] = torch.from_numpy(np.concatenate([row[name] for row in rows]))
    texts = [each[keys.TASK_DESCRIPTIONS] for _, each in recordings for _ in each[keys.STATES]]
    data[keys.TASK_DESCRIPTIONS] = _encoded(texts)
    data[keys.PROMPT_TOKENS] = policy.prompt_tokens(texts, data[keys.STATES]).cpu()
    return data


def write_demonstrations(
    folder: str | Path,
    env: VLAEnv,
    episodes: Sequence[Episode],
    *,
    chunk_size: Count,
    spread: Count = 1,
    on_episode: Finished | None = None,
    **settings: Any,
) -> None:
    """Record as :func:`record_demonstrations` does, into a new folder of the format of :mod:`.dataset`.

    Frames are written as they come, in the order of ``episodes``: hand them in sorted by task, and no more than a few
    demonstrations are in memory at a time. Until this has returned the data set is not whole. Arguments and errors are
    those of :func:`record_demonstrations`, and ``chunk_size`` is the actions per label: policies with at most as many
    can learn from it. ``spread`` is noted in the folder: how ``episodes`` were chosen. ``episodes.jsonl`` has what was
    executed, but of chunks that are one motion.
    """
    spec, folder, recording_settings = env.simulator_spec, Path(folder), RecordingSettings(**settings)
    folder.mkdir(parents=True)
    waiting: dict[int, dict[str, Any] | None] = {}  # solved, but not yet those before
    texts, results = list[str](), list[EpisodeResult]()
    due, written = 0, 0

    def write(number: int, recording: dict[str, Any] | None) -> None:
        nonlocal due, written
        waiting[number] = recording
        while due in waiting:
            if (ready := waiting.pop(due)) is not None:
                cameras = {name: ready[name] for name in CAMERAS if name in ready}
                append_rows(folder, {**cameras, **_rows(written, episodes[due], ready)})
                if spec.control_frequency is not None:
                    results.append(_result(spec, written, episodes[due], ready))
                texts.extend([ready[keys.TASK_DESCRIPTIONS]] * len(ready[keys.STATES]))
                written += 1
            due += 1

    outcomes = _record(env, episodes, chunk_size, write, on_episode, recording_settings)
    encoded = _encoded(texts).numpy()
    append_rows(folder, {keys.TASK_DESCRIPTIONS: encoded})
    facts = {
        "kind": KIND,
        "format": FORMAT,
        "library": __version__,
        "env": env_facts(spec),
        "recording": {
            "episodes": len(episodes),
            "seeds": sorted({episode.seed for episode in episodes}),
            "chunk_size": chunk_size,
            "spread": spread,
            **asdict(recording_settings),
            "noise_of_dimensions": noise_of_dimensions(recording_settings.noise, spec).tolist(),
        },
        "tasks": count_by_task(spec, outcomes),
        "demonstrations": written,
        "frames": len(texts),
    }
    (folder / NAME).write_text(as_lines(results))
    write_facts(folder, facts, encoded.shape[1])


def _record(
    env: VLAEnv,
    episodes: Sequence[Episode],
    chunk_size: int,
    take: Callable[[int, dict[str, Any] | None], object],
    on_episode: Finished | None,
    settings: RecordingSettings,
    before: Sequence[Sequence[np.ndarray]] | None = None,
) -> list[tuple[Episode, int | None]]:
    """Have workers record episodes task by task; returns the actions that the expert needed, ``None`` if it failed."""
    if not episodes:
        raise ValueError("no episodes are given, and cloning needs some (recipes: demonstrations.episodes)")
    spec = env.simulator_spec
    check_expert(spec.simulator_class(), spec)
    noise_of_dimensions(settings.noise, spec)
    crashed, outcomes = list[tuple[Episode, str]](), list[tuple[Episode, int | None]]()

    def note(result: tuple[int, dict[str, Any] | None]) -> None:
        number, recording = result
        outcomes.append((episodes[number], None if recording is None else recording[keys.EPISODE_LEN]))
        take(number, recording)
        if on_episode is not None:
            on_episode(*outcomes[-1])

    def skip(visit: Visit, error: str) -> None:
        crashed.append((visit.episode, reason(error)))
        note((visit.number, None))

    shared = {"chunk_size": chunk_size, **asdict(settings)}
    chunks = [()] * len(episodes) if before is None else before
    visits = [Visit(*each) for each in zip(range(len(episodes)), episodes, chunks, strict=True)]
    visits.sort(key=lambda visit: visit.episode.task_id)
    env.pool.map("vla_envs.experts:record_visit", visits, on_result=note, on_error=skip, **shared)
    if crashed:
        episode, error = crashed[0]
        warnings.warn(
            f"{len(crashed)} of {len(episodes)} demonstrations crashed and are left out: the first is task "
            f"{spec.tasks[episode.task_id].name} trial {episode.trial_id} seed {episode.seed}: {error}",
            stacklevel=3,
        )
    if before is None and all(steps is None for _, steps in outcomes):
        raise RuntimeError(
            f"the scripted expert solved none of {len(episodes)} episodes of {spec.id} within {settings.max_steps} "
            "steps; raise max_steps, lower noise (recipes: demonstrations.*), or take other tasks"
        )
    return outcomes


def _result(spec: SimulatorSpec, number: int, episode: Episode, recording: Mapping[str, Any]) -> EpisodeResult:
    task, actions, length = spec.tasks[episode.task_id], recording[keys.EXECUTED].tolist(), recording[keys.EPISODE_LEN]
    how = {"group": task.group, "index": number, "actions": actions}
    return EpisodeResult(episode, task.name, True, True, float(recording[keys.REWARD]), length, **how)


def _rows(number: int, episode: Episode, recording: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return what is small of a recording, a row for each frame."""
    count = len(recording[keys.STATES])
    same = {
        keys.TASK_ID: np.int64(episode.task_id),
        keys.TRIAL_ID: np.int64(episode.trial_id),
        keys.EPISODE: np.int64(number),
        keys.EPISODE_LEN: np.array([recording[keys.EPISODE_LEN]], np.int64),
        keys.FINAL_STATES: recording[keys.FINAL_STATES],
    }
    return {
        **{name: recording[name] for name in (keys.STATES, keys.ACTION, keys.STEP_MASK, keys.STEP)},
        **{name: np.repeat(value[None], count, 0) for name, value in same.items()},
    }


def _encoded(texts: Sequence[str]) -> Tensor:
    return encode(texts, max(WIDTH, *(len(text.encode()) for text in texts)))


def count_by_task(spec: SimulatorSpec, outcomes: Sequence[tuple[Episode, int | None]]) -> list[dict[str, Any]]:
    """Count as ``dataset.json`` has it; ``outcomes``: the actions that the expert needed, ``None`` if it failed."""
    found = []
    for number, task in enumerate(spec.tasks):
        needed = [steps for episode, steps in outcomes if episode.task_id == number]
        solved = [steps for steps in needed if steps is not None]
        in_time = sum(steps <= spec.max_episode_steps for steps in solved)
        counts = {"tried": len(needed), "solved": len(solved), "within_horizon": in_time}
        found.append({"name": task.name, "instruction": task.instruction, "group": task.group, **counts})
    return found


def describe_experts(tasks: Sequence[Mapping[str, Any]], horizon: int) -> str:
    """Say in a line how often experts solved ``tasks`` (of :func:`count_by_task`); below it by group."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for task in tasks:
        if task["tried"]:
            groups.setdefault(task["group"] or "all", []).append(task)
    said = f"the expert solved {_shares([*tasks], horizon)}"
    if never := [task["name"] for task in tasks if task["tried"] and not task["solved"]]:
        said += f"; never {', '.join(never)}"
    if len(groups) < 2:
        return said
    width = max(map(len, groups))
    return "\n".join([said, *(f"  {name:<{width}}  {_shares(rows, horizon)}" for name, rows in groups.items())])


def _shares(tasks: Sequence[Mapping[str, Any]], horizon: int) -> str:
    tried, solved, in_time = (sum(task[name] for task in tasks) for name in ("tried", "solved", "within_horizon"))
    share = 100 / max(tried, 1)
    return (
        f"{solved:,} of {tried:,} episodes ({share * solved:.0f} %), {in_time:,} ({share * in_time:.0f} %) within the "
        f"horizon of {horizon}"
    )
