"""The two modules that OpenVLA-OFT adds to OpenVLA, by the names in their checkpoint files (without ``module.``).

Kim et al. 2025, "Fine-Tuning Vision-Language-Action Models", arXiv 2502.19645.
"""

from torch import Tensor, nn
from torch.nn import functional as F


class L1Head(nn.Module):
    """Continuous actions from hidden states of a chunk: a residual MLP, one row per primitive action."""

    def __init__(self, hidden_size: int, action_dim: int):
        super().__init__()
        self.action_dim = action_dim
        self.model = ResidualMLP(hidden_size * action_dim, hidden_size, action_dim)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the normalised actions float32 ``[N, C, A]`` of hidden states ``[N, C * A, hidden]``, not clamped."""
        features = hidden.to(self.model.fc1.weight.dtype).unflatten(1, (-1, self.action_dim)).flatten(2)
        return self.model(features).float()


class ResidualMLP(nn.Module):
    """A layer, residual blocks and another layer, with a norm before each of the two."""

    def __init__(self, size: int, inner: int, out: int):
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(size)
        self.fc1 = nn.Linear(size, inner)
        self.mlp_resnet_blocks = nn.ModuleList(ResidualBlock(inner) for _ in range(2))
        self.layer_norm2 = nn.LayerNorm(inner)
        self.fc2 = nn.Linear(inner, out)

    def forward(self, features: Tensor) -> Tensor:
        features = F.relu(self.fc1(self.layer_norm1(features)))
        for block in self.mlp_resnet_blocks:
            features = block(features)
        return self.fc2(self.layer_norm2(features))


class ResidualBlock(nn.Module):
    """``x + relu(linear(norm(x)))``."""

    def __init__(self, size: int):
        super().__init__()
        self.ffn = nn.Sequential(nn.LayerNorm(size), nn.Linear(size, size), nn.ReLU())

    def forward(self, features: Tensor) -> Tensor:
        return features + self.ffn(features)


class ProprioProjector(nn.Module):
    """Proprioception ``[N, S]`` in -1..1 as one token ``[N, 1, hidden]``."""

    def __init__(self, state_dim: int, hidden_size: int):
        super().__init__()
        self.fc1 = nn.Linear(state_dim, hidden_size)
        self.fc2 = nn.Linear(hidden_size, hidden_size)

    def forward(self, states: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(states.to(self.fc1.weight.dtype)))).unsqueeze(1)
