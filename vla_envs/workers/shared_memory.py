"""Arrays that the environment and its worker processes share, one row per simulator."""

import mmap
import os
from dataclasses import dataclass
from typing import Any

import numpy as np

from vla_envs.simulator import SimulatorSpec


@dataclass
class SharedArrays:
    """Views of one anonymous memory file; ``N`` simulators, chunks of ``C`` actions."""

    images: Any  # uint8 [N, H, W, 3], an array or a tensor on a GPU
    wrist_images: np.ndarray  # uint8 [N, V, H, W, 3], V = 0 without wrist cameras
    states: np.ndarray  # float32 [N, S]
    actions: np.ndarray  # float32 [N, C, A]
    rewards: np.ndarray  # float32 [N, C]
    successes: np.ndarray  # bool [N, C], after each executed action
    executed: np.ndarray  # bool [N, C]
    ended: np.ndarray  # bool [N, C], the benchmark gave up after that action
    subtasks: np.ndarray  # int64 [N], tasks of the chain that are solved after the last executed action
    busy: np.ndarray  # int64 [N], entry w: the slot that worker w is working on, -1 when idle
    progress: np.ndarray  # int64 [N], entry w: how many slots and chunks worker w is through with
    seconds: np.ndarray  # float64 [N], entry w: for how long worker w has worked

    def clear_outcomes(self, slots: Any) -> None:
        """Set to zero, for some slots, what a worker writes of the actions that it executes."""
        for array in (self.rewards, self.successes, self.executed, self.ended, self.subtasks):
            array[slots] = 0

    @classmethod
    def layout(cls, spec: SimulatorSpec, num_envs: int, chunk_size: int) -> dict[str, tuple[tuple[int, ...], type]]:
        """Tell shape and type of each array, in the order in which they lie in the file."""
        n, c = num_envs, chunk_size
        return {
            "images": ((n, *spec.image_shape, 3), np.uint8),
            "wrist_images": ((n, *(spec.wrist_image_shape or (0, 1, 1)), 3), np.uint8),
            "states": ((n, spec.state_dim), np.float32),
            "actions": ((n, c, spec.action_dim), np.float32),
            "rewards": ((n, c), np.float32),
            "successes": ((n, c), np.bool_),
            "executed": ((n, c), np.bool_),
            "ended": ((n, c), np.bool_),
            "subtasks": ((n,), np.int64),
            "busy": ((n,), np.int64),
            "progress": ((n,), np.int64),
            "seconds": ((n,), np.float64),
        }

    @classmethod
    def of_one_process(cls, spec: SimulatorSpec, num_envs: int, chunk_size: int) -> "SharedArrays":
        """Allocate zeroed arrays that are shared with no other process."""
        layout = cls.layout(spec, num_envs, chunk_size)
        return cls(**{name: np.zeros(shape, dtype) for name, (shape, dtype) in layout.items()})

    @classmethod
    def create(cls, spec: SimulatorSpec, num_envs: int, chunk_size: int) -> "tuple[SharedArrays, int]":
        """Allocate zeroed arrays; returns them and the file descriptor to hand to the workers."""
        file = os.memfd_create("vla_envs")
        os.ftruncate(file, sum(_bytes(*entry) for entry in cls.layout(spec, num_envs, chunk_size).values()))
        return cls.attach(file, spec, num_envs, chunk_size), file

    @classmethod
    def attach(cls, file: int, spec: SimulatorSpec, num_envs: int, chunk_size: int) -> "SharedArrays":
        """Map the same arrays in another process."""
        memory = mmap.mmap(file, 0)
        arrays, offset = {}, 0
        for name, (shape, dtype) in cls.layout(spec, num_envs, chunk_size).items():
            arrays[name] = np.ndarray(shape, dtype, buffer=memory, offset=offset)
            offset += _bytes(shape, dtype)
        return cls(**arrays)


def _bytes(shape: tuple[int, ...], dtype: type) -> int:
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return -(-size // 64) * 64  # keep every array aligned
