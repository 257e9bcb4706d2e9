"""Demonstrations by a benchmark's scripted expert: recorded in parallel, kept in memory or on disk, read back.

On disk a data set is a folder of raw arrays and JSON, ``TensorDict``'s memory-mapped layout: ``<key>.memmap`` is the
array of a key, C order, little endian; ``meta.json`` has the shape and dtype of each; ``dataset.json`` says what was
recorded and how. ``TensorDict.load_memmap(FOLDER)`` reads it, and so does ``numpy.memmap``. Nothing in it is code, and
nothing is unpickled.

A recording knows no policy: no tokens, no resized images. :func:`for_policy` makes the samples that a policy learns
from, whose images stay on disk until a batch asks for them.
"""

from __future__ import annotations

import json
import math
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from vla_common import __version__, keys
from vla_common.settings import BelowOne, Count, Fraction, checked
from vla_common.texts import WIDTH, decode, encode
from vla_envs.demonstrations import check_expert, noise_of_dimensions
from vla_envs.env import VLAEnv
from vla_envs.simulator import Episode, SimulatorSpec
from vla_envs.workers.pool import reason
from vla_policies import VLAPolicy

FORMAT = 1
KIND = "demonstrations of vla-torchrl"
FACTS = "dataset.json"
CAMERAS = (keys.IMAGES, keys.WRIST_IMAGES)
_NO_CODE = (".pkl", ".pickle", ".pt", ".pth")  # files that are unpickled where they are read
_META = "meta.json"  # TensorDict's name for it
_DTYPES = {
    keys.IMAGES: "uint8",
    keys.WRIST_IMAGES: "uint8",
    keys.STATES: "float32",
    keys.TASK_DESCRIPTIONS: "uint8",
    keys.ACTION: "float32",
    keys.STEP_MASK: "bool",
    keys.TASK_ID: "int64",
    keys.TRIAL_ID: "int64",
    keys.EPISODE: "int64",
    keys.STEP: "int64",
    keys.EPISODE_LEN: "int64",
    keys.FINAL_STATES: "float32",
}
Finished = Callable[[Episode, int | None], object]  # an episode, and the actions that the expert needed, if it did it


@dataclass
class ExpertTally:
    """How often the expert solved each task while its actions were disturbed.

    Attributes:
        spec: of the tasks.
        tried, solved, in_time: episodes by ``task_id``; ``in_time`` are those solved within the horizon.
    """

    spec: SimulatorSpec
    tried: Counter[int] = field(default_factory=Counter)
    solved: Counter[int] = field(default_factory=Counter)
    in_time: Counter[int] = field(default_factory=Counter)

    def add(self, episode: Episode, steps: int | None) -> None:
        """Count an episode that took the expert ``steps`` actions, or was not solved."""
        self.tried[episode.task_id] += 1
        if steps is not None:
            self.solved[episode.task_id] += 1
            self.in_time[episode.task_id] += steps <= self.spec.max_episode_steps

    def tasks(self) -> list[dict[str, Any]]:
        """List the tasks with their numbers, as :data:`FACTS` has them."""
        return [
            {
                "name": task.name,
                "instruction": task.instruction,
                "group": task.group,
                "tried": self.tried[number],
                "solved": self.solved[number],
                "within_horizon": self.in_time[number],
            }
            for number, task in enumerate(self.spec.tasks)
        ]


def describe_experts(tasks: Sequence[Mapping[str, Any]], horizon: int) -> str:
    """Say in a line how often experts solved what they tried; below it by group, where there are several.

    Args:
        tasks: of :meth:`ExpertTally.tasks`.
        horizon: primitive actions of an episode.
    """
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


class Samples:
    """Rows of demonstrations to learn from: some of a TensorDict, which is not copied.

    ``samples[index]``, with a tensor, is the TensorDict of these rows; ``samples[key]`` is an entry for all of them;
    ``len(samples)`` counts them. Images that are mapped from disk are read when a batch asks for them.

    Args:
        data: TensorDict ``[K]``, see :func:`for_policy`.
        rows: int64, which of them; all if ``None``.
    """

    def __init__(self, data: TensorDict, rows: Tensor | None = None):
        self.data, self.rows = data, rows

    def __len__(self) -> int:
        return len(self.data if self.rows is None else self.rows)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, str):
            entry = self.data[index]
            return entry if self.rows is None else entry[self.rows]
        return self.data[index if self.rows is None else self.rows[index]]

    def __contains__(self, key: str) -> bool:
        return key in self.data

    def select(self, *names: str) -> Samples:
        """Return the rows with some of the entries only."""
        return Samples(self.data.select(*names), self.rows)

    def choose(self, chosen: Tensor) -> Samples:
        """Return the rows where ``chosen``, bool ``[len]``, is true."""
        rows = torch.arange(len(self)) if self.rows is None else self.rows
        return Samples(self.data, rows[chosen])

    @property
    def episodes(self) -> int:
        """How many demonstrations the rows are of."""
        return len(self[keys.EPISODE].unique())

    def split(self, heldout: float) -> tuple[Samples, Samples]:
        """Keep whole demonstrations out of learning, for a loss on what was not learnt.

        Which ones, a demonstration's trial decides alone: of each task the same share, and the same trials whatever
        else was recorded or solved. With 1/16 those are trials 15, 31, 47 and so on.

        Args:
            heldout: share of the trials, 0 to below 1.

        Returns:
            What is learnt from, and what is held out; with 0 all of it, and nothing.

        Raises:
            ValueError: nothing is held out although it should, or nothing is left.
        """
        if not heldout:
            return self, self.choose(torch.zeros(len(self), dtype=torch.bool))
        out = is_held_out(self[keys.TRIAL_ID], heldout)
        _check_split(heldout, out)
        return self.choose(~out), self.choose(out)


def check_heldout(heldout: float, trials: int) -> None:
    """Refuse to hold out nothing, or all, of so many trials of each task.

    Raises:
        ValueError: says what to type.
    """
    if heldout:
        _check_split(heldout, is_held_out(torch.arange(trials), heldout))


def _check_split(heldout: float, out: Tensor) -> None:
    if out.any() and not out.all():
        return
    what = "no demonstration is left to learn from" if out.any() else "no demonstration is held out"
    raise ValueError(
        f"heldout={heldout:g}: {what}, of each task trials {_some(heldout)}, ... are; take more demonstrations, or "
        "heldout=0 to learn from all (recipes: demonstrations.episodes, demonstrations.heldout)"
    )


def _some(heldout: float) -> str:
    """Name the first trials that are held out."""
    return ", ".join(map(str, [math.ceil(number / heldout - 1e-9) - 1 for number in (1, 2, 3)]))


def is_held_out(trials: Tensor, share: float) -> Tensor:
    """Tell which trials, int64 ``[K]``, a share of them holds out: evenly spread over the numbers from 0."""
    counted = trials.double() * share + 1e-9
    return (counted + share).floor() > counted.floor()


# ---- recording


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
    """Record as :func:`record_demonstrations` does, into a new folder; see the module for what is in it.

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
    arrays = _Arrays(folder)

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
        "env": _env_facts(spec),
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


class _Arrays:
    """Files that grow by rows, in ``TensorDict``'s memory-mapped layout when they are finished."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._shapes: dict[str, list[int]] = {}

    def append(self, rows: Mapping[str, np.ndarray]) -> None:
        """Write rows ``[k, ...]`` of some entries."""
        for name, array in rows.items():
            self._shapes.setdefault(name, [0, *array.shape[1:]])[0] += len(array)
            with open(self.folder / f"{name}.memmap", "ab") as file:
                file.write(np.ascontiguousarray(array, np.dtype(_DTYPES[name]).newbyteorder("<")).tobytes())

    def finish(self) -> None:
        """Say what is in the files."""
        entries = {
            name: {"device": "cpu", "shape": shape, "dtype": f"torch.{_DTYPES[name]}", "is_nested": False}
            for name, shape in self._shapes.items()
        }
        [frames] = {shape[0] for shape in self._shapes.values()}
        meta = {**entries, "shape": [frames], "device": "cpu", "_type": str(TensorDict)}
        (self.folder / _META).write_text(json.dumps(meta))


def _env_facts(spec: SimulatorSpec) -> dict[str, Any]:
    return {
        "id": spec.id,
        "image_shape": list(spec.image_shape),
        "wrist_image_shape": None if spec.wrist_image_shape is None else list(spec.wrist_image_shape),
        "state_dim": spec.state_dim,
        "action_low": [float(bound) for bound in spec.action_low],
        "action_high": [float(bound) for bound in spec.action_high],
        "gripper_dims": list(spec.gripper_dims),
        "whole_chunks": spec.control_frequency is None,
        "max_episode_steps": spec.max_episode_steps,
        "protocol": spec.protocol,
        "protocol_deviations": list(spec.protocol_deviations),
    }


# ---- reading


@dataclass(frozen=True)
class DemonstrationSet:
    """Demonstrations of a folder.

    Attributes:
        folder: where they are.
        facts: what ``dataset.json`` says.
        frames: TensorDict ``[K]``, mapped; what is written into it stays in this process.
    """

    folder: Path
    facts: Mapping[str, Any]
    frames: TensorDict

    def describe(self) -> str:
        """Say in a line what there is."""
        facts, recording = self.facts, self.facts["recording"]
        noise = recording["noise"]
        return (
            f"{facts['demonstrations']:,} demonstrations with {facts['frames']:,} frames of {facts['env']['id']}, "
            f"{' x '.join(map(str, facts['env']['image_shape']))} pixels, chunks of {recording['chunk_size']}, stride "
            f"{recording['stride']}, noise {noise}, seeds {', '.join(map(str, recording['seeds']))}"
        )

    def check(self, spec: SimulatorSpec, chunk_size: int | None = None) -> None:
        """Refuse an environment, or a length of chunks, that the demonstrations are not for.

        Raises:
            ValueError: says what differs and what to type.
        """
        theirs, ours = self.facts["env"], _env_facts(spec)
        anew = "record anew into another folder (recipes: demonstrations.folder=FOLDER)"
        other, size = f"or {anew}", theirs["image_shape"]
        typed = f"type image_size=[{size[0]},{size[1]}] as it was recorded (recipes: env.image_size), {other}"
        for name, what, how in (
            ("image_shape", "images of {} pixels", typed),
            ("wrist_image_shape", "wrist images {}", f"choose the cameras as they were recorded, {other}"),
            ("state_dim", "{} states", f"take the environment that was recorded, {theirs['id']}, {other}"),
            ("action_low", "actions from {}", f"take the environment that was recorded, {theirs['id']}, {other}"),
            ("action_high", "actions up to {}", f"take the environment that was recorded, {theirs['id']}, {other}"),
            ("whole_chunks", "chunks as one motion: {}", f"take the environment that was recorded, {other}"),
        ):
            if theirs[name] != ours[name]:
                raise ValueError(
                    f"{self.folder}: its demonstrations have {what.format(theirs[name])}, {spec.id} has {ours[name]} "
                    f"here; {how}"
                )
        recorded = {task["name"]: task for task in self.facts["tasks"]}
        for task in spec.tasks:
            if task.name not in recorded:
                raise ValueError(f"{self.folder}: {task.name} is not among its tasks ({theirs['id']}); {anew}")
            if recorded[task.name]["instruction"] != task.instruction:
                raise ValueError(
                    f"{self.folder}: {task.name} was recorded as {recorded[task.name]['instruction']!r}, here it is "
                    f"{task.instruction!r}; {anew}"
                )
        if not any(recorded[task.name]["solved"] for task in spec.tasks):  # of many, an expert may fail some
            raise ValueError(f"{self.folder}: the expert solved no task of {spec.id}; {anew}")
        length = self.facts["recording"]["chunk_size"]
        if chunk_size is not None and (length < chunk_size or (theirs["whole_chunks"] and length != chunk_size)):
            most = "chunks of" if theirs["whole_chunks"] else "chunks of at most"
            raise ValueError(
                f"{self.folder}: its demonstrations are for {most} {length}, the policy has {chunk_size}; make the "
                f"policy with chunk_size={length} (recipes: policy.chunk_size), {other}"
            )


def load_demonstrations(folder: str | Path) -> DemonstrationSet:
    """Map a folder of :func:`write_demonstrations`; nothing is read before it is needed, and nothing unpickled.

    Raises:
        ValueError: it is no such folder, of another format, damaged, or has files that could hold code.
    """
    folder = Path(folder)
    another = "take another folder (recipes: demonstrations.folder=FOLDER)"
    if not (folder / FACTS).is_file():
        raise ValueError(f"{folder}: no demonstrations are here, {FACTS} is missing; {another}")
    for path in folder.rglob("*"):
        if path.suffix in _NO_CODE:
            raise ValueError(f"{folder}: {path.name} may hold code, which is never loaded; remove it, or {another}")
    try:
        facts, meta = (json.loads((folder / name).read_text()) for name in (FACTS, _META))
        kind, number = facts.get("kind"), facts.get("format")
    except (OSError, ValueError, AttributeError) as error:
        raise _damaged(folder, str(error)) from None
    if kind != KIND or number != FORMAT:
        raise ValueError(
            f"{folder}: {FACTS} is of kind {kind!r} and format {number!r}, this version reads {KIND!r} of format "
            f"{FORMAT}; {another}, to record anew"
        )
    try:
        shapes = _expected(facts)
        entries = {name: (entry["dtype"], entry["shape"]) for name, entry in meta.items() if isinstance(entry, Mapping)}
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(folder, f"{FACTS} or {_META} lacks {error}") from None
    wanted = {name: (f"torch.{_DTYPES[name]}", shape) for name, shape in shapes.items()}
    text = entries.get(keys.TASK_DESCRIPTIONS, ("", [0, 0]))[1]
    wanted[keys.TASK_DESCRIPTIONS] = ("torch.uint8", [facts["frames"], *text[1:]])
    if entries != wanted:
        wrong = next(name for name in [*wanted, *entries] if entries.get(name) != wanted.get(name))
        raise _damaged(folder, f"{_META} says {wrong} is {entries.get(wrong)}, {FACTS} {wanted.get(wrong)}")
    frames = {}
    for name, (_, shape) in wanted.items():
        path, kind = folder / f"{name}.memmap", np.dtype(_DTYPES[name]).newbyteorder("<")
        size, right = path.stat().st_size if path.is_file() else 0, math.prod(shape) * kind.itemsize
        if size != right:
            raise _damaged(folder, f"{path.name} has {size:,} bytes, not {right:,}")
        # Copy on write: nothing that is done to a sample gets into the file.
        frames[name] = torch.from_numpy(np.memmap(path, kind, "c", shape=tuple(shape)))
    return DemonstrationSet(folder, facts, TensorDict(frames, [facts["frames"]]))


def _expected(facts: Mapping[str, Any]) -> dict[str, list[int]]:
    env, recording, count = facts["env"], facts["recording"], facts["frames"]
    chunk, dims = recording["chunk_size"], len(env["action_low"])
    if not all(type(number) is int and number > 0 for number in (count, chunk, dims, env["state_dim"])):
        raise ValueError("a number of rows")
    for task in facts["tasks"]:
        _ = task["name"], task["instruction"], task["group"], task["tried"], task["solved"], task["within_horizon"]
    _ = facts["demonstrations"], recording["seeds"], recording["stride"], recording["noise"], env["protocol_deviations"]
    _ = env["id"], env["action_high"], env["whole_chunks"], env["max_episode_steps"], recording["episodes"]
    wrist = env["wrist_image_shape"]
    return {
        keys.IMAGES: [count, *env["image_shape"], 3],
        **({} if wrist is None else {keys.WRIST_IMAGES: [count, *wrist, 3]}),
        keys.STATES: [count, env["state_dim"]],
        keys.ACTION: [count, chunk, dims],
        keys.STEP_MASK: [count, chunk],
        keys.TASK_ID: [count],
        keys.TRIAL_ID: [count],
        keys.EPISODE: [count],
        keys.STEP: [count],
        keys.EPISODE_LEN: [count, 1],
        keys.FINAL_STATES: [count, env["state_dim"]],
    }


def _damaged(folder: Path, what: str) -> ValueError:
    return ValueError(f"{folder}: damaged, {what}; copy it again, or remove it to record anew")


def for_policy(demonstrations: DemonstrationSet, policy: VLAPolicy, spec: SimulatorSpec) -> Samples:
    """Make what ``policy`` learns from, of the tasks of ``spec``: the entries of :func:`record_demonstrations`.

    The cameras that the policy looks at stay mapped, as they were recorded: a policy that resizes does so for each
    batch. Chunks are cut to the policy's. The rest is in memory.

    Raises:
        ValueError: the demonstrations do not fit, see :meth:`DemonstrationSet.check`.
    """
    demonstrations.check(spec, policy.chunk_size)
    frames, length = demonstrations.frames, policy.chunk_size
    data = {name: entry for name, entry in frames.items() if name not in CAMERAS or name in policy.in_keys}
    for name, entry in data.items():
        if name not in CAMERAS:
            data[name] = (entry[:, :length] if name in (keys.ACTION, keys.STEP_MASK) else entry).clone()
    data[keys.PROMPT_TOKENS] = policy.prompt_tokens(decode(data[keys.TASK_DESCRIPTIONS]), data[keys.STATES]).cpu()
    ours = {task.name: number for number, task in enumerate(spec.tasks)}
    numbers = torch.tensor([ours.get(task["name"], -1) for task in demonstrations.facts["tasks"]])
    data[keys.TASK_ID] = numbers[data[keys.TASK_ID]]
    samples = Samples(TensorDict(data, frames.batch_size))
    wanted = data[keys.TASK_ID] >= 0
    return samples if wanted.all() else samples.choose(wanted)
