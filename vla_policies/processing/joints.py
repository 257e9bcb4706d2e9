"""Joints and grippers as a model counts them, where a simulator counts otherwise.

A schema names the transforms of a preset and the dimensions that each is for, those of states and actions alike::

    "joints": {"flip": (1, 2, 8, 9), "aloha_gripper": (6, 13)}

A name is one of :data:`TRANSFORMS`, or ``"package.module:object"`` of somebody else's :class:`JointTransform`. States
are only ever converted to the model's numbers, actions both ways; a transform may count the two in different units.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Protocol, cast

import torch
from torch import Tensor


class JointTransform(Protocol):
    """Conversions of some dimensions, elementwise; they get float64 and return it."""

    def states(self, values: Tensor) -> Tensor:
        """Convert states of the simulator to the model's."""

    def to_simulator(self, values: Tensor) -> Tensor:
        """Convert actions of the model to the simulator's."""

    def to_model(self, values: Tensor) -> Tensor:
        """Invert :meth:`to_simulator`."""


class Flip:
    """Joints that turn the other way."""

    def states(self, values: Tensor) -> Tensor:
        return -values

    def to_simulator(self, values: Tensor) -> Tensor:
        return -values

    def to_model(self, values: Tensor) -> Tensor:
        return -values


class AlohaGripper:
    """ALOHA's gripper, whose opening is from 0 to 1, as the angle of its horn: the way pi0 was trained.

    The fingers are ``p`` metres apart from the joint, 0.01844 closed and 0.05800 open, and hang on an arm of 0.036 m
    and a horn of 0.022 m, whose angle is ``asin((0.022^2 + p^2 - 0.036^2) / (2 0.022 p))``. A state is that angle from
    0.5476 to 1.6296 rad (2405 and 3110 of the encoder's 4096 counts, zero at 2048), scaled to 0..1. An action is the
    angle less 0.5476 rad, and not scaled; ALOHA commands it as the share of -0.6213 to 1.4910 rad, its own limits of
    that joint. Closed and open are -1.0799 and 0.9457 of a state and -1.1689 and 0.9434 of an action.

    Source: openpi, ``policies/aloha_policy.py`` (``_gripper_to_angular``, ``_gripper_from_angular``); RLinf has the
    same. The geometry is Interbotix', the limits are those of ALOHA's ``constants.py`` (Zhao et al. 2023).
    """

    closed, opened = 0.01844, 0.05800  # m
    horn, arm = 0.022, 0.036  # m
    first, last = 0.5476, 1.6296  # rad, of pi0's data
    low, high = -0.6213, 1.4910  # rad, of ALOHA's commands

    def states(self, values: Tensor) -> Tensor:
        distance = values * (self.opened - self.closed) + self.closed
        sine = (self.horn**2 + distance**2 - self.arm**2) / (2 * self.horn * distance)
        return (sine.clamp(-1.0, 1.0).asin() - self.first) / (self.last - self.first)

    def to_simulator(self, values: Tensor) -> Tensor:
        return (values + self.first - self.low) / (self.high - self.low)

    def to_model(self, values: Tensor) -> Tensor:
        return values * (self.high - self.low) + self.low - self.first


TRANSFORMS: dict[str, JointTransform] = {"flip": Flip(), "aloha_gripper": AlohaGripper()}


class JointSpace:
    """All transforms of a preset, in their order.

    Args:
        transforms: dimensions by the name of a transform; none at all leaves every number as it is.

    Raises:
        ValueError: no transform of that name.
    """

    def __init__(self, transforms: Mapping[str, Sequence[int]]):
        self._transforms = [(_find(name), list(dimensions)) for name, dimensions in transforms.items()]

    def states(self, states: Tensor) -> Tensor:
        """Convert states ``[..., S]`` of the simulator to the model's."""
        return self._apply(states, [(transform.states, where) for transform, where in self._transforms])

    def to_simulator(self, actions: Tensor) -> Tensor:
        """Convert actions ``[..., A]`` of the model to the simulator's."""
        return self._apply(actions, [(transform.to_simulator, where) for transform, where in reversed(self._transforms)])

    def to_model(self, actions: Tensor) -> Tensor:
        """Invert :meth:`to_simulator`."""
        return self._apply(actions, [(transform.to_model, where) for transform, where in self._transforms])

    @staticmethod
    def _apply(values: Tensor, steps: Sequence[tuple[Callable[[Tensor], Tensor], list[int]]]) -> Tensor:
        if not steps:
            return values
        converted = values.to(torch.float64, copy=True)  # near an open gripper the angle is steep
        for convert, dimensions in steps:
            converted[..., dimensions] = convert(converted[..., dimensions])
        return converted.to(values.dtype)


def _find(name: str) -> JointTransform:
    module, _, found = name.partition(":")
    if found:
        return cast(JointTransform, getattr(import_module(module), found))
    if name not in TRANSFORMS:
        raise ValueError(
            f"no transform of joints {name!r}; there are {', '.join(TRANSFORMS)}, or 'package.module:object' of your own"
        )
    return TRANSFORMS[name]
