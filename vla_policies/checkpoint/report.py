"""What ``python -m vla_policies inspect`` prints of a checkpoint."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

import torch

from vla_policies.checkpoint.weights import Entry

NOT_SAID = "not in the files"


@dataclass
class Report:
    """``facts`` of a checkpoint in the order to print, and what is ``missing`` before it can be loaded."""

    facts: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"{name:<15} {text}" for name, text in self.facts.items()]
        return "\n".join(lines + [f"{'MISSING':<15} {text}" for text in self.missing])


def describe_weights(weights: Mapping[str, Entry]) -> str:
    """Count numbers, dtypes, bytes and files, from headers, which do not tell a buffer from a parameter."""
    count = sum(prod(entry.shape) for entry in weights.values())
    dtypes = Counter(str(entry.dtype).removeprefix("torch.") for entry in weights.values())
    size = sum(prod(entry.shape) * (entry.dtype or torch.int64).itemsize for entry in weights.values())
    files = len({entry.file for entry in weights.values()})
    unit, amount = ("GB", size / 1e9) if size > 1e9 else ("MB", size / 1e6)
    names = ", ".join(name for name, _ in dtypes.most_common())
    return f"{count:,} parameters and buffers, {names}, {amount:.1f} {unit} in {files} file{'s' if files > 1 else ''}"
