"""SmallVLA: a Vision-Language-Action policy of about one million parameters that trains on a CPU in minutes.

Image -> convolutions -> spatial-softmax keypoints -> one token; instruction and state -> one token each; a small
transformer reads them with one query per action of the chunk; a linear head gives the logits of the action
tokens of all dimensions in parallel. Spatial softmax: Levine et al. 2016, "End-to-End Training of Deep
Visuomotor Policies". On few demonstrations it makes the policy look at the image, which patch tokens did not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.nn import functional as F
from torchrl.envs.utils import ExplorationType, exploration_type

from vla_common import keys
from vla_policies.policy import VLAPolicy
from vla_policies.processing.action_tokens import ActionBins
from vla_policies.registry import save_policy
from vla_policies.small.text import HashedText

if TYPE_CHECKING:
    from vla_policies.small.flow_policy import SmallFlowConfig


@dataclass(frozen=True)
class SmallVLAConfig:
    """Shape of a :class:`SmallVLA`.

    Attributes:
        action_low, action_high: bounds of a primitive action, in the simulator's units.
        state_dim: ``S``.
        chunk_size: ``C``, primitive actions per decision.
        num_bins: tokens per action dimension.
        dim, layers, heads: of the transformer.
        channels: of the three convolutions.
        keypoints: number of spatial-softmax maps.
        text_buckets: rows of the hashed word table.
        critic_detach: keep the value loss from shaping the features it reads.
        value_per_action: one value per primitive action (``[N, C]``) instead of one per decision (``[N, 1]``).
    """

    action_low: tuple[float, ...]
    action_high: tuple[float, ...]
    state_dim: int
    chunk_size: int = 5
    num_bins: int = 256
    dim: int = 128
    layers: int = 2
    heads: int = 4
    channels: tuple[int, int, int] = (16, 32, 48)
    keypoints: int = 32
    text_buckets: int = 2048
    critic_detach: bool = True
    value_per_action: bool = False


class SmallVLA(VLAPolicy):
    """See the module's docstring; :class:`~vla_policies.policy.VLAPolicy` has the contract.

    The greedy action is the mean of the token distribution rather than its mode: bins are ordered, and the mode
    of neighbours that are about equally likely is noisy.

    Example:
        >>> policy = SmallVLA(SmallVLAConfig(action_low=(-1,) * 4, action_high=(1,) * 4, state_dim=4))
    """

    config_class = SmallVLAConfig
    in_keys = [keys.IMAGES, keys.STATES, keys.TASK_DESCRIPTIONS]
    out_keys = [keys.PROMPT_TOKENS, keys.ACTION_TOKENS, keys.ACTION, keys.ACTION_LOG_PROB, keys.STATE_VALUE]
    loss_keys = (keys.IMAGES, keys.STATES, keys.PROMPT_TOKENS, keys.ACTION_TOKENS)

    def __init__(self, config: SmallVLAConfig):
        super().__init__()
        self.config = config
        self.chunk_size, self.action_dim, self.state_dim = config.chunk_size, len(config.action_low), config.state_dim
        dim = config.dim
        self.bins = ActionBins(config.action_low, config.action_high, config.num_bins)
        self.encoder = SmallEncoder(config)
        self.queries = nn.Parameter(0.5 * torch.randn(config.chunk_size, dim))
        layer = nn.TransformerEncoderLayer(
            dim, config.heads, 2 * dim, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.trunk = nn.TransformerEncoder(layer, config.layers, nn.LayerNorm(dim), enable_nested_tensor=False)
        self.action_head = nn.Linear(dim, self.action_dim * config.num_bins)
        nn.init.normal_(self.action_head.weight, std=0.02)  # start from nearly uniform tokens
        nn.init.zeros_(self.action_head.bias)
        self.num_values = config.chunk_size if config.value_per_action else 1
        self.value_head = nn.Sequential(
            nn.Linear(3 * dim, dim), nn.GELU(), nn.Linear(dim, dim), nn.GELU(), nn.Linear(dim, self.num_values)
        )
        nn.init.zeros_(self.value_head[-1].weight)

    def set_statistics(self, state_mean: Tensor, state_std: Tensor) -> None:
        """Set the normalisation of ``states``: two tensors ``[S]``; they are saved with the weights."""
        self.encoder.set_statistics(state_mean, state_std)

    def logits_and_value(self, images: Tensor, states: Tensor, prompt_tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Logits ``[N, C, A, num_bins]`` and value ``[N, 1]`` or ``[N, C]``, the one backbone pass.

        Args:
            images: uint8 ``[N, H, W, 3]``.
            states: float32 ``[N, S]``.
            prompt_tokens: int64 ``[N, L]`` of :meth:`HashedText.tokenize`.
        """
        context = self.encoder(images, states, prompt_tokens)
        queries = self.queries.expand(len(images), -1, -1)
        hidden = self.trunk(torch.cat([context, queries], dim=1))
        logits = self.action_head(hidden[:, 3:]).unflatten(-1, (self.action_dim, self.config.num_bins))
        features = hidden[:, :3].flatten(1)
        return logits, self.value_head(features.detach() if self.config.critic_detach else features)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        tokens = self.prompt_tokens(tensordict.get(keys.TASK_DESCRIPTIONS).tolist())
        logits, value = self.logits_and_value(tensordict.get(keys.IMAGES), tensordict.get(keys.STATES), tokens)
        dist = Categorical(logits=logits)
        kind = exploration_type()
        if kind in (None, ExplorationType.RANDOM):
            action_tokens = dist.sample()
            action = self.bins.decode(action_tokens)
        elif kind is ExplorationType.MODE:
            action_tokens = dist.mode
            action = self.bins.decode(action_tokens)
        else:
            mean = self.bins.expectation(logits)
            action_tokens, action = mean.round().long(), self.bins.decode(mean)
        tensordict.set(keys.PROMPT_TOKENS, tokens)
        tensordict.set(keys.ACTION_TOKENS, action_tokens)
        tensordict.set(keys.ACTION, action)
        tensordict.set(keys.ACTION_LOG_PROB, dist.log_prob(action_tokens))
        return tensordict.set(keys.STATE_VALUE, value)

    def get_dist(self, tensordict: TensorDictBase) -> Categorical:
        return Categorical(logits=self._stored(tensordict)[0])

    def evaluate_actions(self, tensordict: TensorDictBase) -> tuple[Tensor, Tensor, Tensor]:
        logits, value = self._stored(tensordict)
        dist = Categorical(logits=logits)
        return dist.log_prob(tensordict.get(keys.ACTION_TOKENS)), dist.entropy(), value

    def imitation_loss(self, tensordict: TensorDictBase, sigma: float) -> Tensor:
        """Cross-entropy ``[N, C]`` against demonstrated ``action`` ``[N, C, A]``, mean over action dimensions.

        Args:
            tensordict: ``images``, ``states``, ``prompt_tokens`` and ``action``.
            sigma: width of the soft label around the demonstrated action, as a fraction of half its range:
                neighbouring bins are nearly as good as the nearest.
        """
        logits, _ = self._stored(tensordict)
        target = self.bins.encode(tensordict.get(keys.ACTION)).unsqueeze(-1)
        distance = torch.arange(self.config.num_bins, device=target.device) - target
        label = (-0.5 * (distance / (sigma * (self.config.num_bins - 1) / 2)) ** 2).softmax(-1)
        return -(label * logits.log_softmax(-1)).sum(-1).mean(-1)

    def prompt_tokens(self, task_descriptions: Sequence[str], states: Tensor | None = None) -> Tensor:
        """Tokens int64 ``[N, L]`` of ``N`` instructions."""
        return self.encoder.tokenize(task_descriptions)

    def _stored(self, tensordict: TensorDictBase) -> tuple[Tensor, Tensor]:
        return self.logits_and_value(*(tensordict.get(key) for key in (keys.IMAGES, keys.STATES, keys.PROMPT_TOKENS)))

    def save_pretrained(self, folder: str | Path) -> None:
        save_policy(folder, "small", asdict(self.config), self.state_dict())

    @classmethod
    def from_config(cls, config: dict) -> SmallVLA:
        """Build from the dictionary that :meth:`save_pretrained` wrote."""
        sequences = {name: tuple(value) for name, value in config.items() if isinstance(value, list)}
        return cls(SmallVLAConfig(**{**config, **sequences}))


class SmallEncoder(nn.Module):
    """Image, instruction and state as one token each: ``[N, 3, dim]``. Shared by the small policies.

    Args:
        config: has ``dim``, ``channels``, ``keypoints``, ``text_buckets`` and ``state_dim``.
    """

    def __init__(self, config: SmallVLAConfig | SmallFlowConfig):
        super().__init__()
        dim = config.dim
        self.register_buffer("state_mean", torch.zeros(config.state_dim))
        self.register_buffer("state_std", torch.ones(config.state_dim))
        self.vision = KeypointEncoder(config.channels, config.keypoints, dim)
        self.text = HashedText(config.text_buckets, dim)
        self.text_projection = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, dim))
        self.state = nn.Sequential(nn.Linear(config.state_dim, dim), nn.GELU(), nn.Linear(dim, dim))
        self.modality = nn.Parameter(0.02 * torch.randn(3, dim))

    def set_statistics(self, state_mean: Tensor, state_std: Tensor) -> None:
        """Set the normalisation of ``states``: two tensors ``[S]``."""
        self.state_mean.copy_(state_mean)
        self.state_std.copy_(state_std)

    def forward(self, images: Tensor, states: Tensor, prompt_tokens: Tensor) -> Tensor:
        tokens = (
            self.vision(images),
            self.text_projection(self.text(prompt_tokens)),
            self.state((states - self.state_mean) / self.state_std),
        )
        return torch.stack(tokens, dim=1) + self.modality

    def tokenize(self, task_descriptions: Sequence[str]) -> Tensor:
        """Tokens int64 ``[N, L]`` of ``N`` instructions, on the device of the module."""
        return self.text.tokenize(task_descriptions).to(self.state_mean.device)


class KeypointEncoder(nn.Module):
    """Where in the image each of a number of learned features is: one token ``[N, dim]``."""

    def __init__(self, channels: tuple[int, int, int], keypoints: int, dim: int):
        super().__init__()
        first, second, third = channels
        self.first = nn.Conv2d(5, first, kernel_size=5, stride=2, padding=2)
        self.second = nn.Conv2d(first, second, kernel_size=3, stride=2, padding=1)
        self.second_norm = nn.GroupNorm(4, second)
        self.third = nn.Conv2d(second, third, kernel_size=3, padding=1)
        self.third_norm = nn.GroupNorm(4, third)
        self.maps = nn.Conv2d(third, keypoints, kernel_size=1)
        nn.init.normal_(self.maps.weight, std=0.02)
        self.log_sharpness = nn.Parameter(torch.tensor(10.0).log())
        self.project = nn.Sequential(nn.Linear(2 * keypoints, dim), nn.GELU(), nn.Linear(dim, dim))

    def forward(self, images: Tensor) -> Tensor:
        pixels = images.permute(0, 3, 1, 2).to(self.maps.weight.dtype) / 127.5 - 1.0
        rows, columns = (torch.linspace(-1, 1, size, device=images.device) for size in pixels.shape[-2:])
        grid = torch.stack(torch.meshgrid(columns, rows, indexing="xy")).expand(len(pixels), -1, -1, -1)
        features = F.relu(self.first(torch.cat([pixels, grid], dim=1)))
        features = F.relu(self.second_norm(self.second(features)))
        maps = self.maps(F.relu(self.third_norm(self.third(features))))
        return self.project(spatial_softmax(maps, self.log_sharpness.exp()))


def spatial_softmax(maps: Tensor, sharpness: Tensor) -> Tensor:
    """Expected position of each map: ``[N, K, H, W]`` -> ``[N, 2 K]``, coordinates from -1 to 1."""
    weights = (maps.flatten(2) * sharpness).softmax(-1).view_as(maps)
    rows, columns = (torch.linspace(-1, 1, size, device=maps.device) for size in maps.shape[-2:])
    return torch.cat([weights.sum(2) @ columns, weights.sum(3) @ rows], dim=-1)
