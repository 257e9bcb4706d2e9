"""Parts of several networks: MLPs and value heads, and the repeated blocks, which are found and run."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
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


def make_value_layers(sizes: Sequence[int], activation: type[nn.Module], bias_last: bool) -> nn.Sequential:
    """Make linear layers from ``sizes[0]`` to ``sizes[-1]`` numbers with an activation between.

    Initialised as RLinf's: weights Kaiming-normal by fan-out, the last one's N(0, 0.02), biases zero.
    """
    hidden = [nn.Linear(before, after) for before, after in pairwise(sizes[:-1])]
    last = nn.Linear(sizes[-2], sizes[-1], bias=bias_last)
    for layer in hidden:
        nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
        nn.init.zeros_(layer.bias)
    nn.init.normal_(last.weight, std=0.02)
    if bias_last:
        nn.init.zeros_(last.bias)
    return nn.Sequential(*(part for layer in hidden for part in (layer, activation())), last)


class ValueHead(nn.Module):
    """MLP ``hidden -> 512 -> 128 -> num_values`` with GELU between, in float32 whatever the language model is in.

    That of OpenVLA policies, by the names of RLinf's checkpoints. ``num_values`` is 1, or one per action of the chunk.
    """

    def __init__(self, hidden_size: int, num_values: int = 1):
        super().__init__()
        self.mlp = make_value_layers((hidden_size, 512, 128, num_values), nn.GELU, bias_last=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return values float32 ``[N, num_values]`` of hidden states ``[N, hidden]`` at the prompt's last token."""
        return self.mlp(hidden.to(next(self.mlp.parameters()).dtype)).float()


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
