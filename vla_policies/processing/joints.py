"""Joints and grippers as a model counts them, where a simulator counts otherwise.

A schema names the transforms of a preset and their dimensions, of states and actions alike::

    "joints": {"flip": (1, 2, 8, 9), "aloha_gripper": (6, 13)}

A name is one of :data:`TRANSFORMS`, or ``"package.module:object"`` of another package's :class:`JointTransform`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module

import torch
from torch import Tensor

Convert = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class JointTransform:
    """Elementwise float64 conversions of some dimensions of states (to the model's numbers) and actions (both ways)."""

    states: Convert
    to_simulator: Convert
    to_model: Convert


# ALOHA's gripper, whose opening is from 0 to 1, as the angle of its horn: the way pi0 was trained.
#
# The fingers' carriage is p metres from the joint, 0.01844 closed and 0.05800 open, and hangs on an arm of 0.036 m and
# a horn of 0.022 m, at the angle asin((0.022^2 + p^2 - 0.036^2) / (2 0.022 p)). A state is that angle from 0.5476 to
# 1.6296 rad (2405 and 3110 of the encoder's 4096 counts, zero at 2048), scaled to 0..1. An action is the angle less
# 0.5476 rad and not scaled; ALOHA's command is the share of -0.6213 to 1.4910 rad, its own limits of that joint.
# Closed and open are -1.0799 and 0.9457 of a state, and -1.1689 and 0.9434 of an action.
#
# Source: openpi, src/openpi/policies/aloha_policy.py (_gripper_to_angular, _gripper_from_angular); RLinf has the same.
# The geometry is Interbotix', the limits are those in ALOHA's constants.py (Zhao et al. 2023, arXiv 2304.13705).
_CLOSED, _OPENED = 0.01844, 0.05800  # m
_HORN, _ARM = 0.022, 0.036  # m
_FIRST, _LAST = 0.5476, 1.6296  # rad, of pi0's data
_LOW, _HIGH = -0.6213, 1.4910  # rad, of ALOHA's commands


def _opening_to_angle(values: Tensor) -> Tensor:
    place = values * (_OPENED - _CLOSED) + _CLOSED
    sine = (_HORN**2 + place**2 - _ARM**2) / (2 * _HORN * place)
    return (sine.clamp(-1.0, 1.0).asin() - _FIRST) / (_LAST - _FIRST)


def _angle_to_command(values: Tensor) -> Tensor:
    return (values + _FIRST - _LOW) / (_HIGH - _LOW)


def _command_to_angle(values: Tensor) -> Tensor:
    return values * (_HIGH - _LOW) + _LOW - _FIRST


TRANSFORMS = {
    "flip": JointTransform(torch.neg, torch.neg, torch.neg),  # joints that turn the other way
    "aloha_gripper": JointTransform(_opening_to_angle, _angle_to_command, _command_to_angle),
}


@dataclass(frozen=True)
class JointSpace:
    """All transforms of a preset, in their order, each with its dimensions; none leaves every number as it is."""

    transforms: tuple[tuple[JointTransform, tuple[int, ...]], ...] = ()

    @classmethod
    def from_names(cls, names: Mapping[str, Sequence[int]], size: int) -> "JointSpace":
        """Find the transforms of a schema, dimensions by name; states and actions both have ``size`` of them.

        ValueError: no transform of that name, or no such dimension.
        """
        for name, dimensions in names.items():
            if not all(0 <= dimension < size for dimension in dimensions):
                raise ValueError(f"joints: {name!r} is for dimensions {list(dimensions)}, there are 0 to {size - 1}")
        return cls(tuple((_find(name), tuple(dimensions)) for name, dimensions in names.items()))

    def states(self, states: Tensor) -> Tensor:
        """Convert states ``[..., S]`` of the simulator to the model's."""
        return _apply(states, [(transform.states, where) for transform, where in self.transforms])

    def to_simulator(self, actions: Tensor) -> Tensor:
        """Convert actions ``[..., A]`` of the model to the simulator's."""
        return _apply(actions, [(transform.to_simulator, where) for transform, where in reversed(self.transforms)])

    def to_model(self, actions: Tensor) -> Tensor:
        """Invert :meth:`to_simulator`."""
        return _apply(actions, [(transform.to_model, where) for transform, where in self.transforms])


def _apply(values: Tensor, steps: Sequence[tuple[Convert, tuple[int, ...]]]) -> Tensor:
    if not steps:
        return values
    converted = values.to(torch.float64, copy=True)  # near an open gripper the angle is steep
    for convert, dimensions in steps:
        converted[..., list(dimensions)] = convert(converted[..., list(dimensions)])
    return converted.to(values.dtype)


def _find(name: str) -> JointTransform:
    module, _, attribute = name.partition(":")
    reason = "is no JointTransform"
    try:
        found = getattr(import_module(module), attribute) if attribute else TRANSFORMS.get(name)
    except (ImportError, AttributeError) as error:
        found, reason = None, f"is not there ({error})"
    if not isinstance(found, JointTransform):
        raise ValueError(
            f"joints: {name!r} {reason}; write one of {', '.join(TRANSFORMS)}, or 'package.module:object' of your own"
        )
    return found
