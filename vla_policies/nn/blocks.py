"""The repeated blocks of a network."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn


def blocks_of(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield names and modules of the blocks: what is in the outermost lists, as far as it has parameters."""
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList):
            for number, block in child.named_children():
                if next(block.parameters(), None) is not None:
                    yield f"{prefix}{name}.{number}", block
        else:
            yield from blocks_of(child, f"{prefix}{name}.")
