"""Demonstrations of a LeRobot data set: which of its frames a policy of an environment learns from."""

import copy
import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from vla_algos.lerobot.dataset import PARQUET, VIDEOS, Camera, LeRobotFolder, needs
from vla_algos.lerobot.frames import FrameReader
from vla_algos.samples import Samples
from vla_common import keys
from vla_common.texts import WIDTH, encode
from vla_envs.simulator import SimulatorSpec
from vla_policies import VLAPolicy

_WRIST = re.compile(r"wrist|hand|gripper", re.IGNORECASE)
_SHOWN = 5  # sentences in a message
_OUTSIDE = 0.01  # share of the actions' numbers from which it is worth a line
Tasks = Literal["environment", "all"]


@dataclass(frozen=True)
class LeRobotDemonstrations:
    """A LeRobot data set as demonstrations for an environment; :meth:`open` makes one, and has the arguments."""

    folder: LeRobotFolder
    spec: SimulatorSpec
    camera: Camera
    wrist_cameras: tuple[Camera, ...]
    stride: int = 1
    tasks: Tasks = "environment"

    @classmethod
    def open(
        cls,
        path: str | Path,
        spec: SimulatorSpec,
        *,
        stride: int = 1,
        camera: str | None = None,
        wrist_cameras: Sequence[str] | None = None,
        tasks: Tasks = "environment",
    ) -> "LeRobotDemonstrations":
        """Read what a data set is and refuse what does not fit the environment; no image is read yet.

        FileNotFoundError: there is no data set. ValueError: in one line, what does not fit and what to type.
        ModuleNotFoundError: what reads it is not installed.

        Args:
            path: a local folder with ``meta/info.json``.
            spec: of the environment.
            stride: every so many frames of an episode are learnt from.
            camera: what ``images`` are; ``None`` for the only one that is not on a wrist, by its name.
            wrist_cameras: what ``wrist_images`` are, in order; ``None`` for those whose names say so.
            tasks: learn from frames whose instruction is one of the ``"environment"``, or from ``"all"``.
        """
        folder = LeRobotFolder.read(path)
        needs(folder.path, *PARQUET)
        _check_sizes(folder, spec)
        wrists = _wrists(folder, wrist_cameras)
        found = cls(folder, spec, _third_person(folder, camera, wrists), wrists, stride, tasks)
        shapes = [(found.camera, spec.image_shape)]
        if spec.wrist_image_shape is not None:
            shapes += [(wrist, spec.wrist_image_shape[1:]) for wrist in wrists]
        for each, shape in shapes:
            if (each.height, each.width) != tuple(shape):
                size = each.height if each.height == each.width else f"[{each.height},{each.width}]"
                raise ValueError(
                    f"{folder.path}: {each.name} has {each.height} x {each.width} pixels, {spec.id} has "
                    f"{shape[0]} x {shape[1]} here; type image_size={size} (recipes: env.image_size), or "
                    f"camera=NAME wrist_cameras=[] (recipes: demonstrations.*), others of {', '.join(folder.cameras)}"
                )
        if any(each.video for each, _ in shapes):
            needs(folder.path, *VIDEOS)
        if tasks == "environment" and not any(number >= 0 for number in found.task_ids.values()):
            raise ValueError(
                f"{folder.path}: none of its instructions is one of {spec.id}: it has {_some(folder.tasks.values())}, "
                f"the environment {_some(task.instruction for task in spec.tasks)}; type tasks='all' (recipes: "
                "demonstrations.tasks=all) to learn from all, in the words of the data set"
            )
        return found

    @cached_property
    def task_ids(self) -> dict[int, int]:
        """For each ``task_index`` of the data set the ``task_id`` of the environment, -1 where it has none."""
        ours: dict[str, int] = {}
        for number, task in enumerate(self.spec.tasks):
            for text in (task.instruction, *task.instructions):
                ours.setdefault(_plain(text), number)
        return {index: ours.get(_plain(text), -1) for index, text in self.folder.tasks.items()}

    @property
    def remarks(self) -> tuple[str, ...]:
        """What is said before learning, and kept in ``run.json``: what may be meant otherwise."""
        said, frequency = [], self.spec.control_frequency
        if frequency is not None and abs(self.folder.fps - frequency) > 1e-3 * frequency:
            said.append(
                f"its actions are {self.folder.fps:g} a second and those of {self.spec.id} {frequency:g}: what is "
                "learnt moves at another speed, if actions are not the same whatever their duration"
            )
        here = set(self.task_ids.values())
        if missing := [task.name for number, task in enumerate(self.spec.tasks) if number not in here]:
            said.append(f"it has nothing of {len(missing)} of {len(self.spec.tasks)} tasks: {_some(missing)}")
        left_out = [index for index, task_id in self.task_ids.items() if task_id < 0 and self.tasks == "environment"]
        counts = Counter(self.folder.table.task.tolist() if left_out else ())
        if foreign := {index: counts[index] for index in left_out if counts[index]}:  # frames of each instruction
            said.append(
                f"{sum(foreign.values()):,} of {self.folder.frames:,} frames have instructions that are none of "
                f"{self.spec.id}: {_some(self.folder.tasks[index] for index in foreign)}; type tasks='all' "
                "(recipes: demonstrations.tasks=all) to learn from them too"
            )
        return tuple(said)

    def facts(self) -> dict[str, Any]:
        """Return what ``run.json`` keeps of it."""
        folder = self.folder
        return {
            "folder": str(folder.path),
            "format": "LeRobot v{}.{}".format(*folder.version),
            "episodes": folder.episodes,
            "frames": folder.frames,
            "fps": folder.fps,
            "images": self.camera.name,
            "wrist_images": [camera.name for camera in self.wrist_cameras],
            "stride": self.stride,
            "remarks": list(self.remarks),
        }

    def describe(self) -> str:
        """Say in some lines what it is and what is taken of it."""
        folder = self.folder
        cameras = f"images are {self.camera.name}"
        if self.wrist_cameras:
            cameras += f", wrist_images {' and '.join(camera.name for camera in self.wrist_cameras)}"
        lines = [
            f"{folder.path}: a data set of LeRobot v{folder.version[0]}.{folder.version[1]}, {folder.episodes:,} "
            f"episodes with {folder.frames:,} frames, {folder.fps:g} a second; {cameras}",
            f"  of {self.stride} frames one is learnt from (demonstrations.stride); episodes, spread, noise "
            "and max_steps are settings of a recording and change nothing",
        ]
        return "\n".join([*lines, *(f"  note: {remark}" for remark in self.remarks)])

    def for_policy(self, policy: VLAPolicy) -> Samples:
        """Make what ``policy`` learns from: the entries that recorded demonstrations have, made batch by batch.

        Actions, states and the like, some 130 bytes a frame, are in memory. A ``ValueError`` if the policy looks at
        wrist cameras that there are not, or frames are missing or damaged.
        """
        cameras: dict[str, tuple[Camera, ...]] = {keys.IMAGES: (self.camera,)} if keys.IMAGES in policy.in_keys else {}
        if keys.WRIST_IMAGES in policy.in_keys:
            wanted = self.spec.wrist_image_shape[0] if self.spec.wrist_image_shape else 0
            if len(self.wrist_cameras) != wanted:
                raise ValueError(
                    f"{self.folder.path}: the policy looks at {wanted} wrist cameras, and the data set has "
                    f"{len(self.wrist_cameras)} whose names say so; type wrist_cameras=[NAME] (recipes: "
                    f"demonstrations.wrist_cameras), of {', '.join(self.folder.cameras)}"
                )
            cameras[keys.WRIST_IMAGES] = self.wrist_cameras
        table = self.folder.table
        if unknown := sorted(set(table.task.tolist()) - set(self.task_ids)):
            raise ValueError(f"{self.folder.path}: damaged, frames have task_index {unknown[0]}, which no task has")
        task_id = np.vectorize(self.task_ids.__getitem__, otypes=[np.int64])(table.task)
        wanted = (table.step % self.stride == 0) & ((task_id >= 0) | (self.tasks == "all"))
        if not wanted.any():
            raise ValueError(f"{self.folder.path}: no frame has an instruction of {self.spec.id}")
        rows = _Rows(self, task_id, policy, cameras)  # which has what Samples asks of a TensorDict
        samples = Samples(rows, torch.from_numpy(np.flatnonzero(wanted)))
        _ = samples[:1]  # what cannot be decoded or tokenised is said now
        return samples

    def outside(self) -> str | None:
        """Say how many numbers of the actions are outside of the environment's bounds, if it is worth it."""
        actions, spec = self.folder.table.actions, self.spec
        low, high = np.array(spec.action_low), np.array(spec.action_high)
        beyond = ((actions < low - 1e-4) | (actions > high + 1e-4)).mean(0)
        if beyond.max() < _OUTSIDE:
            return None
        shares = ", ".join(f"{100 * share:.0f} %" for share in beyond)
        return f"actions outside of the bounds of {spec.id}, by dimension: {shares}; they may be in other units"


class _Rows:
    """A row of each frame of a data set, made when it is asked for: what :class:`Samples` needs of a ``TensorDict``."""

    def __init__(
        self,
        source: LeRobotDemonstrations,
        task_id: np.ndarray,
        policy: VLAPolicy,
        cameras: dict[str, tuple[Camera, ...]],
    ):
        table, tasks, reader = source.folder.table, source.folder.tasks, FrameReader(source.folder)
        _, begins, lengths = np.unique(table.episode, return_index=True, return_counts=True)
        length = np.repeat(lengths, lengths)  # of the episode of each frame
        left = length - table.step  # frames from here to the end of the episode
        counts: defaultdict[int, Iterator[int]] = defaultdict(itertools.count)  # episodes of each task, from 0 on
        trials = [next(counts[task]) for task in table.task[begins].tolist()]
        trial = np.repeat(np.array(trials, np.int64), lengths)  # of each frame: a share of them is held out
        width, ahead = max(WIDTH, *(len(text.encode()) for text in tasks.values())), np.arange(policy.chunk_size)

        def images(name: str, frames: np.ndarray) -> Tensor:
            found = [torch.from_numpy(reader.read(camera, frames)) for camera in cameras[name]]
            return found[0] if name == keys.IMAGES else torch.stack(found, 1)

        def texts(frames: np.ndarray) -> list[str]:
            return [tasks[index] for index in table.task[frames].tolist()]

        self._count = len(task_id)
        self._makers: dict[str, Callable[[np.ndarray], np.ndarray | Tensor]] = {
            **{name: partial(images, name) for name in cameras},
            keys.STATES: lambda frames: table.states[frames],
            keys.TASK_DESCRIPTIONS: lambda frames: encode(texts(frames), width),
            keys.ACTION: lambda frames: table.actions[frames[:, None] + np.minimum(ahead, left[frames, None] - 1)],
            keys.STEP_MASK: lambda frames: ahead < left[frames, None],
            keys.TASK_ID: lambda frames: task_id[frames],
            keys.TRIAL_ID: lambda frames: trial[frames],
            keys.EPISODE: lambda frames: table.episode[frames],
            keys.STEP: lambda frames: table.step[frames],
            keys.EPISODE_LEN: lambda frames: length[frames, None],
            keys.FINAL_STATES: lambda frames: table.states[frames + left[frames] - 1],
            keys.PROMPT_TOKENS: lambda frames: policy.prompt_tokens(
                texts(frames), torch.from_numpy(table.states[frames])
            ).cpu(),
        }

    def __len__(self) -> int:
        return self._count

    def __contains__(self, key: str) -> bool:
        return key in self._makers

    def select(self, *names: str) -> "_Rows":
        """Return the rows without the other entries."""
        found = copy.copy(self)
        found._makers = {name: self._makers[name] for name in names}
        return found

    def __getitem__(self, index: Tensor) -> TensorDict:
        frames = index.numpy()
        return TensorDict({name: torch.as_tensor(make(frames)) for name, make in self._makers.items()}, [len(frames)])


def _check_sizes(folder: LeRobotFolder, spec: SimulatorSpec) -> None:
    for name, theirs, ours, what in (
        (folder.action, folder.action_dim, spec.action_dim, "an action"),
        (folder.state, folder.state_dim, spec.state_dim, "a state"),
    ):
        if theirs != ours:
            raise ValueError(
                f"{folder.path}: its {name} has {theirs} numbers, {what} of {spec.id} has {ours}; take a data set of "
                "this robot, or the environment that it is of (recipes: env=NAME)"
            )


def _wrists(folder: LeRobotFolder, names: Sequence[str] | None) -> tuple[Camera, ...]:
    if names is not None:
        return tuple(_named(folder, name, "wrist_cameras") for name in names)
    return tuple(each for name, each in sorted(folder.cameras.items()) if _WRIST.search(name.rpartition(".")[2]))


def _third_person(folder: LeRobotFolder, name: str | None, wrists: Sequence[Camera]) -> Camera:
    if name is not None:
        return _named(folder, name)
    others = [camera for camera in folder.cameras.values() if camera not in wrists]
    if len(others) != 1:
        raise ValueError(
            f"{folder.path}: which of its cameras are images is not clear from their names; type "
            f"camera=NAME (recipes: demonstrations.camera), one of {', '.join(folder.cameras)}"
        )
    return others[0]


def _named(folder: LeRobotFolder, name: str, setting: str = "camera") -> Camera:
    if name not in folder.cameras:
        raise ValueError(
            f"{setting}={name}: {folder.path} has no such camera; type one of {', '.join(folder.cameras)} (recipes: "
            f"demonstrations.{setting})"
        )
    return folder.cameras[name]


def _plain(text: str) -> str:
    """Return an instruction without what two spellings of one differ in: case, spaces and a full stop."""
    return " ".join(text.lower().split()).rstrip(".")


def _some(texts: Any) -> str:
    found = list(texts)
    shown = ", ".join(map(repr, found[:_SHOWN]))
    return shown + (f" and {len(found) - _SHOWN} others" if len(found) > _SHOWN else "")
