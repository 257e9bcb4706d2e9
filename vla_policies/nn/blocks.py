"""The repeated blocks of a network: finding and running them, and a part of many."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class Mlp(nn.Module):
    """Two layers with GELU between them; ``approximate`` as of :func:`torch.nn.functional.gelu`."""

    def __init__(self, dim: int, hidden_dim: int, approximate: str = "none"):
        super().__init__()
        self.approximate = approximate
        self.fc1 = nn.Linear(dim, hidden_dim)
        self.fc2 = nn.Linear(hidden_dim, dim)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(hidden), approximate=self.approximate))


def blocks_of(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield names and modules of the blocks: what is in the outermost lists, as far as it has parameters."""
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList):
            for number, block in child.named_children():
                if next(block.parameters(), None) is not None:
                    yield f"{prefix}{name}.{number}", block
        else:
            yield from blocks_of(child, f"{prefix}{name}.")


def count_layers(names: Iterable[str], prefix: str) -> int:
    """Count the layers ``prefix<number>.`` among the names of a checkpoint's tensors."""
    return len({name[len(prefix) :].partition(".")[0] for name in names if name.startswith(prefix)})


def run_block(block: nn.Module, *inputs: Any, recompute: bool, **named: Any) -> Any:
    """Run a block; ``recompute`` its activations in the backward pass instead of keeping them."""
    if recompute and torch.is_grad_enabled():
        return checkpoint(block, *inputs, use_reentrant=False, **named)
    return block(*inputs, **named)
