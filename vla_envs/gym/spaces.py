"""The spaces of one environment, and instructions that stay up to date in Gymnasium's ``AsyncVectorEnv``."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils.shared_memory import read_from_shared_memory

from vla_common import keys
from vla_envs.simulator import SimulatorSpec

_CHARACTERS = string.ascii_letters + string.digits + string.punctuation + " ’"


class InstructionSpace(spaces.Text):
    """Text that ``AsyncVectorEnv`` keeps up to date.

    Gymnasium 1.4 decodes a ``Text`` in shared memory once, when the vector environment is made, and returns
    that first (empty) text for ever. This space is read as a view that decodes when it is looked at.
    """


class _SharedTexts(Sequence):
    """The current texts of all environments, in the memory that they share; a copy of it is a plain tuple."""

    def __init__(self, space: spaces.Text, memory: Any, n: int):
        self._arguments = space, memory, n

    def _decode(self) -> tuple[str, ...]:
        texts: Any = read_from_shared_memory.dispatch(spaces.Text)(*self._arguments)
        return texts

    def __getitem__(self, index: Any) -> Any:
        return self._decode()[index]

    def __len__(self) -> int:
        return self._arguments[-1]

    def __deepcopy__(self, _: Any) -> tuple[str, ...]:
        return self._decode()


@read_from_shared_memory.register(InstructionSpace)
def _read_instructions(space: InstructionSpace, shared_memory: Any, n: int = 1) -> _SharedTexts:
    return _SharedTexts(space, shared_memory, n)


def make_observation_space(spec: SimulatorSpec) -> spaces.Dict:
    """Describe what one environment shows, by the names and units of :mod:`vla_keys`."""
    entries: dict[str, spaces.Space[Any]] = {
        keys.IMAGES: spaces.Box(0, 255, (*spec.image_shape, 3), np.uint8),
        keys.STATES: spaces.Box(-np.inf, np.inf, (spec.state_dim,), np.float32),
        keys.TASK_DESCRIPTIONS: InstructionSpace(keys.MAX_INSTRUCTION, charset=_CHARACTERS),
    }
    if spec.wrist_image_shape is not None:
        entries[keys.WRIST_IMAGES] = spaces.Box(0, 255, (*spec.wrist_image_shape, 3), np.uint8)
    return spaces.Dict(entries)


def make_action_space(spec: SimulatorSpec, chunk_size: int | None = None) -> spaces.Box:
    """Describe one primitive action, float32 ``[A]``, or a chunk of them, ``[C, A]``, in the simulator's units."""
    low, high = np.array(spec.action_low, np.float32), np.array(spec.action_high, np.float32)
    if chunk_size is not None:
        low, high = np.tile(low, (chunk_size, 1)), np.tile(high, (chunk_size, 1))
    return spaces.Box(low, high)
