"""The value head of OpenVLA policies, by the names and the initialisation of RLinf's checkpoints."""

from __future__ import annotations

from torch import Tensor, nn


class ValueHead(nn.Module):
    """MLP ``hidden -> 512 -> 128 -> num_values`` with GELU between, in float32 whatever the language model is in.

    Args:
        hidden_size: width of the language model.
        num_values: 1 per decision, or one per primitive action of the chunk.
    """

    def __init__(self, hidden_size: int, num_values: int = 1):
        super().__init__()
        first, second, last = nn.Linear(hidden_size, 512), nn.Linear(512, 128), nn.Linear(128, num_values, bias=False)
        self.mlp = nn.Sequential(first, nn.GELU(), second, nn.GELU(), last)
        for layer in (first, second):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
            nn.init.zeros_(layer.bias)
        nn.init.normal_(last.weight, std=0.02)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return values float32 ``[N, num_values]`` of hidden states ``[N, hidden]`` at the prompt's last token."""
        return self.mlp(hidden.to(next(self.mlp.parameters()).dtype)).float()
