"""The published variants of pi0 and pi0.5 by the names of openpi and RLinf, and how they meet each benchmark.

Horizons, relative actions and prompts are facts of the checkpoints' training configurations (openpi; RLinf's data
configurations); each benchmark's schema has those of its variants. Actions and states are the benchmark's own numbers,
padded by the network to 32.
"""

from __future__ import annotations

from dataclasses import dataclass

from vla_common.registry import benchmarks
from vla_common.schema import get_schema
from vla_policies.processing.adapters import Adapter

FAMILY = "pi0"


@dataclass(frozen=True)
class Pi0Preset:
    """What a variant was trained with.

    Attributes:
        benchmark: where it acts.
        pi05: pi0.5 rather than pi0.
        horizon: actions that are denoised together.
        relative: dimensions whose actions are relative to the state.
        state_in_prompt: pi0.5 only: the prompt lists the state; otherwise pi0.5 does not see it at all.
        value_head: hidden widths of the value head that its published checkpoints have, if they have one.
    """

    benchmark: str
    pi05: bool
    horizon: int
    relative: tuple[int, ...] = ()
    state_in_prompt: bool = False
    value_head: tuple[int, ...] | None = None


def list_presets() -> dict[str, Pi0Preset]:
    """List the presets of the registered benchmarks by name; a benchmark that cannot be imported is left out."""
    found = {}
    for benchmark in benchmarks.load_all():
        for name, preset in benchmark.schema.families.get(FAMILY, {}).get("presets", {}).items():
            found[name] = Pi0Preset(benchmark.name, **preset)
    return found


def get_preset(config_name: str) -> Pi0Preset:
    """Find a preset by name.

    Raises:
        ValueError: there is none of that name; lists those there are.
    """
    presets = list_presets()
    if config_name not in presets:
        raise ValueError(f"no preset {config_name!r}; config_name is one of {', '.join(sorted(presets))}")
    return presets[config_name]


def get_adapter(benchmark: str) -> Adapter:
    """Build the adapter: actions as the simulator takes them, the gripper rounded where the schema says so.

    Raises:
        ValueError: there is no such benchmark; offers the nearest names.
    """
    return Adapter.from_schema(benchmark, gripper=get_schema(benchmark).families.get(FAMILY, {}).get("gripper"))
