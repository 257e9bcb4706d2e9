"""The published variants of pi0 and pi0.5 by the names of openpi and RLinf, and how they meet each benchmark.

Horizons, relative actions and prompts are facts of the checkpoints' training configurations (openpi; RLinf's data
configurations). Actions and states are the benchmark's own numbers, padded by the network to 32.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from vla_policies.processing.adapters import ADAPTERS, Adapter

_ARM = tuple(range(6))


@dataclass(frozen=True)
class Pi0Preset:
    """What a family of checkpoints was trained with.

    Attributes:
        benchmark: see :data:`PI0_ADAPTERS`.
        pi05: pi0.5 rather than pi0.
        horizon: actions that are denoised together.
        relative: dimensions whose actions are relative to the state.
        state_in_prompt: pi0.5 only: the prompt lists the state; otherwise pi0.5 does not see it at all.
    """

    benchmark: str
    pi05: bool
    horizon: int
    relative: tuple[int, ...] = ()
    state_in_prompt: bool = False


_BOTH_ARMS = (*_ARM, *(7 + joint for joint in _ARM))
PRESETS = {
    "pi0_libero": Pi0Preset("libero", False, 50, relative=_ARM),
    "pi05_libero": Pi0Preset("libero", True, 10),
    "pi0_maniskill": Pi0Preset("maniskill", False, 50),
    "pi05_maniskill": Pi0Preset("maniskill", True, 10),
    "pi0_metaworld": Pi0Preset("metaworld", False, 5),
    "pi05_metaworld": Pi0Preset("metaworld", True, 5),
    "pi0_calvin": Pi0Preset("calvin", False, 5),
    "pi05_calvin": Pi0Preset("calvin", True, 5),
    "pi0_aloha_robotwin": Pi0Preset("robotwin", False, 50, relative=_BOTH_ARMS),
    "pi05_aloha_robotwin": Pi0Preset("robotwin", True, 50, relative=_BOTH_ARMS, state_in_prompt=True),
}


def _direct(adapter: Adapter) -> Adapter:
    """Actions as the simulator takes them; only the gripper of CALVIN and of plate-25's arm is rounded to 1 or -1."""
    gripper = adapter.gripper if adapter.benchmark in ("calvin", "maniskill") else None
    size = adapter.action_dim
    return replace(adapter, model_action_dim=size, dimensions=tuple(range(size)), gripper=gripper)


PI0_ADAPTERS = {name: _direct(adapter) for name, adapter in ADAPTERS.items()}


def get_preset(config_name: str) -> Pi0Preset:
    """A preset by name.

    Raises:
        ValueError: there is none of that name; lists those there are.
    """
    if config_name not in PRESETS:
        raise ValueError(f"no preset {config_name!r}; config_name is one of {', '.join(PRESETS)}")
    return PRESETS[config_name]
