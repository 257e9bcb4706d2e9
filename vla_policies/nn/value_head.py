"""Value heads, by the initialisation of RLinf's."""

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn


def make_value_layers(sizes: Sequence[int], activation: type[nn.Module], bias_last: bool) -> nn.Sequential:
    """Make linear layers from ``sizes[0]`` to ``sizes[-1]`` numbers with an activation between.

    Initialised as RLinf's: weights Kaiming-normal by fan-out, the last one's N(0, 0.02), biases zero.
    """
    layers: list[nn.Module] = []
    for before, after in pairwise(sizes[:-1]):
        layers += [nn.Linear(before, after), activation()]
    last = nn.Linear(sizes[-2], sizes[-1], bias=bias_last)
    layers.append(last)
    for layer in layers:
        if isinstance(layer, nn.Linear):
            if layer is last:
                nn.init.normal_(layer.weight, std=0.02)
            else:
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    return nn.Sequential(*layers)


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
