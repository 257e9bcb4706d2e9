"""The published variants of pi0 and pi0.5 by the names of openpi and RLinf, and how they meet each benchmark.

Horizons, relative actions, joints and prompts are facts of the checkpoints' training configurations (openpi; RLinf's
data configurations); each benchmark's schema has those of its variants. Actions and states are the benchmark's own
numbers, or as ``joints`` convert them, padded by the network to 32.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from vla_common.registry import benchmarks
from vla_common.schema import get_schema
from vla_policies.checkpoint.settings import SettingError
from vla_policies.processing.adapters import Adapter

FAMILY = "pi0"


@dataclass(frozen=True)
class Pi0Preset:
    """What a variant was trained with."""

    benchmark: str  # where it acts
    pi05: bool  # pi0.5 rather than pi0
    horizon: int  # actions that are denoised together
    relative: tuple[int, ...] = ()  # dimensions whose actions are relative to the state, in the model's joints
    joints: Mapping[str, Sequence[int]] = field(default_factory=dict)  # pi's own, by transforms of processing.joints
    adapt_to_pi: bool = False  # it was trained on these joints, and not on the benchmark's own numbers
    state_in_prompt: bool = False  # pi0.5 only: the prompt lists the state; otherwise pi0.5 does not see it at all
    value_head: tuple[int, ...] | None = None  # hidden widths of the published checkpoints' value head, if any


def list_presets() -> dict[str, Pi0Preset]:
    """List the presets of the registered benchmarks by name; a benchmark that cannot be imported is left out."""
    found = {}
    for benchmark in benchmarks.load_all():
        for name, preset in benchmark.schema.families.get(FAMILY, {}).get("presets", {}).items():
            found[name] = Pi0Preset(benchmark.name, **preset)
    return found


def get_preset(config_name: str) -> Pi0Preset:
    """Find a preset by name; ValueError lists those there are."""
    presets = list_presets()
    if config_name not in presets:
        raise ValueError(f"no preset {config_name!r}; config_name is one of {', '.join(sorted(presets))}")
    return presets[config_name]


def get_adapter(config_name: str, adapt_to_pi: bool | None = None) -> Adapter:
    """Build the adapter of a preset: actions as the simulator takes them, the gripper rounded where the schema says so.

    ``adapt_to_pi`` as in :class:`~vla_policies.pi0.policy.Pi0Config`; SettingError if the preset does not know how.
    """
    preset = get_preset(config_name)
    if adapt_to_pi and not preset.joints:
        known = [name for name, other in sorted(list_presets().items()) if other.joints]
        raise SettingError(
            f"adapt_to_pi=True: {config_name} has no joints to adapt; leave adapt_to_pi out, of {', '.join(known)}"
        )
    adapted = preset.adapt_to_pi if adapt_to_pi is None else adapt_to_pi
    gripper = get_schema(preset.benchmark).families.get(FAMILY, {}).get("gripper")
    return Adapter.from_schema(preset.benchmark, gripper=gripper, joints=preset.joints if adapted else None)
