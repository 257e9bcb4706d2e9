"""A scripted expert solves episodes in the workers of an environment, and is recorded: in memory, or into a folder."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from vla_algos.demonstrations.experts import ExpertTally
from vla_algos.demonstrations.folder import FACTS, FORMAT, KIND, Arrays, env_facts
from vla_algos.demonstrations.samples import CAMERAS
from vla_common import __version__, keys
from vla_common.settings import BelowOne, Count, Fraction, checked
from vla_common.texts import WIDTH, encode
from vla_envs.demonstrations import check_expert, noise_of_dimensions
from vla_envs.env import VLAEnv
from vla_envs.simulator import Episode
from vla_envs.workers.pool import reason
from vla_policies import VLAPolicy

Finished = Callable[[Episode, int | None], object]  # an episode, and the actions that the expert needed, if it did it


@checked
def record_demonstrations(
    env: VLAEnv,
    policy: VLAPolicy,
    episodes: Sequence[Episode],
    *,
    stride: Count = 4,
    noise: Fraction | Sequence[Fraction] = 0.25,
    noise_correlation: BelowOne = 0.8,
    max_steps: Count = 150,
    on_episode: Finished | None = None,
) -> TensorDict:
    """Let the benchmark's scripted expert solve ``episodes`` in the workers of ``env``, and keep it in memory.

    Workers take them task by task, because another task may be another world to build.

    Args:
        env: its workers record, beside the episodes that run in its slots.
        policy: tokenises the instructions, shrinks the images if it resizes, and sets the length of the chunks.
        episodes: what to solve; those that the expert fails are left out, and those whose simulator fails again and
            again, with a warning that counts them.
        stride: record every so many primitive actions, or decisions where a chunk is one motion.
        noise: standard deviation of the disturbance, as a fraction of half the action's range: one number, for all but
            the gripper, or one for each dimension.
        noise_correlation: of the disturbance between successive actions, 0 to below 1.
        max_steps: give up after that many actions.
        on_episode: called after each with it and with the actions that the expert needed, ``None`` if it failed.

    Returns:
        ``[K]``, demonstrations in the order of ``episodes``: the cameras that the policy looks at, or ``model_images``
        of one that resizes, ``states``, ``task_descriptions`` as bytes, ``prompt_tokens``, ``action`` ``[K, C, A]``,
        ``step_mask`` ``[K, C]``, ``task_id``, ``trial_id``, ``episode``, ``step``, ``episode_len`` ``[K, 1]`` and
        ``final_states``.

    Raises:
        ValueError: the benchmark has no scripted expert; noise for other actions.
        RuntimeError: the expert solved none.
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

    _record(
        env,
        episodes,
        keep,
        on_episode,
        chunk_size=policy.chunk_size,
        stride=stride,
        noise=noise,
        noise_correlation=noise_correlation,
        max_steps=max_steps,
    )
    recordings = [(episode, each) for episode, each in zip(episodes, solved, strict=True) if each is not None]
    data: TensorDict = torch.cat([recording["frames"] for _, recording in recordings])
    rows = [_rows(number, episode, each) for number, (episode, each) in enumerate(recordings)]
    for name in rows[0]:
        data[name] = torch.from_numpy(np.concatenate([row[name] for row in rows]))
    texts = [each[keys.TASK_DESCRIPTIONS] for _, each in recordings for _ in each[keys.STATES]]
    data[keys.TASK_DESCRIPTIONS] = _encoded(texts)
    data[keys.PROMPT_TOKENS] = policy.prompt_tokens(texts, data[keys.STATES]).cpu()
    return data


@checked
def write_demonstrations(
    folder: str | Path,
    env: VLAEnv,
    episodes: Sequence[Episode],
    *,
    chunk_size: Count,
    stride: Count = 4,
    noise: Fraction | Sequence[Fraction] = 0.25,
    noise_correlation: BelowOne = 0.8,
    max_steps: Count = 150,
    on_episode: Finished | None = None,
) -> None:
    """Record as :func:`record_demonstrations` does, into a new folder of the format of :mod:`.folder`.

    Frames are written as they come, in the order of ``episodes``: hand them in sorted by task, and no more than a few
    demonstrations are in memory at a time. Whoever must not see half a data set gives the folder its name when this
    has returned.

    Args:
        folder: is made.
        env: its workers record.
        episodes: what to solve.
        chunk_size: actions per label; policies with at most as many can learn from it.
        stride: see :func:`record_demonstrations`, and so are the others.
        noise: of the disturbance.
        noise_correlation: of the disturbance.
        max_steps: give up after that many actions.
        on_episode: called after each.

    Raises:
        OSError: the folder cannot be written.
        Exception: what :func:`record_demonstrations` raises.
    """
    spec, folder = env.simulator_spec, Path(folder)
    folder.mkdir(parents=True)
    waiting: dict[int, dict[str, Any] | None] = {}  # solved, but not yet those before
    tally, texts, written = ExpertTally(spec), list[str](), 0
    numbers = iter(range(len(episodes)))
    due = next(numbers, 0)
    arrays = Arrays(folder)

    def write(number: int, recording: dict[str, Any] | None) -> None:
        nonlocal due, written
        waiting[number] = recording
        while due in waiting:
            ready = waiting.pop(due)
            if ready is not None:
                cameras = {name: ready[name] for name in CAMERAS if name in ready}
                arrays.append({**cameras, **_rows(written, episodes[due], ready)})
                texts.extend([ready[keys.TASK_DESCRIPTIONS]] * len(ready[keys.STATES]))
                written += 1
            due = next(numbers, len(episodes))

    def count(episode: Episode, steps: int | None) -> None:
        tally.add(episode, steps)
        if on_episode is not None:
            on_episode(episode, steps)

    settings = {"chunk_size": chunk_size, "stride": stride, "noise": noise}
    settings |= {"noise_correlation": noise_correlation, "max_steps": max_steps}
    _record(env, episodes, write, count, **settings)
    arrays.append({keys.TASK_DESCRIPTIONS: _encoded(texts).numpy()})
    arrays.finish()
    facts = {
        "kind": KIND,
        "format": FORMAT,
        "library": __version__,
        "env": env_facts(spec),
        "recording": {
            "episodes": len(episodes),
            "seeds": sorted({episode.seed for episode in episodes}),
            **settings,
            "noise_of_dimensions": noise_of_dimensions(noise, spec).tolist(),
        },
        "tasks": tally.tasks(),
        "demonstrations": written,
        "frames": len(texts),
    }
    (folder / FACTS).write_text(json.dumps(facts, indent=1) + "\n")


def _record(
    env: VLAEnv,
    episodes: Sequence[Episode],
    take: Callable[[int, dict[str, Any] | None], object],
    on_episode: Finished | None,
    **settings: Any,
) -> None:
    """Have workers record episodes task by task, and hand each to ``take``, by its number, as it is done."""
    if not episodes:
        raise ValueError(
            "no episodes are given, and behaviour cloning needs at least 1 demonstration; give some (recipes: "
            "demonstrations.episodes)"
        )
    spec = env.simulator_spec
    check_expert(spec.simulator_class(), spec)
    noise_of_dimensions(settings["noise"], spec)
    crashed: list[tuple[Episode, str]] = []
    solved = 0

    def note(result: tuple[int, dict[str, Any] | None]) -> None:
        nonlocal solved
        number, recording = result
        steps = None if recording is None else recording[keys.EPISODE_LEN]
        solved += recording is not None
        take(number, None if recording is None else dict(recording))
        if recording is not None:
            recording.clear()  # the pool keeps all results to the end
        if on_episode is not None:
            on_episode(episodes[number], steps)

    def skip(item: tuple[int, Episode], error: str) -> None:
        number, episode = item
        crashed.append((episode, reason(error)))
        take(number, None)
        if on_episode is not None:
            on_episode(episode, None)

    items = sorted(enumerate(episodes), key=lambda item: item[1].task_id)
    env.pool.map("vla_envs.demonstrations:record_numbered", items, on_result=note, on_error=skip, **settings)
    if crashed:
        episode, error = crashed[0]
        warnings.warn(
            f"{len(crashed)} of {len(episodes)} demonstrations crashed and are left out: the first is task "
            f"{spec.tasks[episode.task_id].name} trial {episode.trial_id} seed {episode.seed}: {error}",
            stacklevel=3,
        )
    if not solved:
        raise RuntimeError(
            f"the scripted expert solved none of {len(episodes)} episodes of {spec.id} within "
            f"{settings['max_steps']} steps; raise max_steps, lower the noise, or take other tasks"
        )


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
    own = (keys.STATES, keys.ACTION, keys.STEP_MASK, keys.STEP)
    return {
        **{name: recording[name] for name in own},
        **{name: np.repeat(value[None], count, 0) for name, value in same.items()},
    }


def _encoded(texts: Sequence[str]) -> Tensor:
    return encode(texts, max(WIDTH, *(len(text.encode()) for text in texts)))
