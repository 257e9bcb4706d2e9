"""A vision model of transformers with a Gaussian head: the shortest policy that PPO trains."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributions import Normal
from torch.nn.functional import interpolate
from torchrl.envs.utils import ExplorationType, exploration_type
from transformers import AutoModel, ViTConfig

from vla_common import keys
from vla_common.settings import Count
from vla_policies import VLAPolicy

TINY = ViTConfig(image_size=64, patch_size=16, hidden_size=64, num_hidden_layers=4, num_attention_heads=4,
                 intermediate_size=128)  # fmt: skip


@dataclass(frozen=True)
class HuggingFaceConfig:
    """The first three are the environment's, the others are in conf/policy/huggingface.yaml."""

    action_low: tuple[float, ...]
    action_high: tuple[float, ...]
    state_dim: int
    chunk_size: Count = 3
    backbone: str | None = None


class HuggingFacePolicy(VLAPolicy):
    """Image and states to a Gaussian over actions, where the bounds are -1 and 1. It reads no instructions."""

    family, config_class, num_values, sample_key = "huggingface", HuggingFaceConfig, 1, "gaussian_sample"
    in_keys = (keys.IMAGES, keys.STATES)
    out_keys = (sample_key, keys.ACTION, keys.ACTION_LOG_PROB, keys.STATE_VALUE)

    def __init__(self, config):
        super().__init__()
        self.config, self.chunk_size, self.state_dim = config, config.chunk_size, config.state_dim
        low, high = torch.tensor(config.action_low), torch.tensor(config.action_high)
        self.register_buffer("center", (low + high) / 2)
        self.register_buffer("scale", (high - low) / 2)
        self.action_dim, shape = len(low), (self.chunk_size, len(low))
        self.vision = AutoModel.from_pretrained(config.backbone) if config.backbone else AutoModel.from_config(TINY)
        width = self.vision.config.hidden_size + self.state_dim
        self.mean = nn.Sequential(nn.Linear(width, 64), nn.Tanh(), nn.Linear(64, shape[0] * shape[1]))
        self.log_std = nn.Parameter(torch.full(shape, -1.0))
        self.value_head = nn.Sequential(nn.Linear(width, 64), nn.Tanh(), nn.Linear(64, 1))  # its own learning rate

    def read(self, td):
        """Distribution ``[N, C, A]`` and value ``[N, 1]``."""
        size = self.vision.config.image_size
        pixels = interpolate(td[keys.IMAGES].permute(0, 3, 1, 2) / 127.5 - 1, (size, size), mode="bilinear")
        features = torch.cat([self.vision(pixels).pooler_output, td[keys.STATES]], -1)
        mean = self.mean(features).unflatten(-1, self.log_std.shape)
        return Normal(mean, self.log_std.exp().expand_as(mean)), self.value_head(features)

    def forward(self, td):  # noqa: D102  as VLAPolicy says, here and below
        dist, value = self.read(td)
        sample = dist.sample() if exploration_type() in (None, ExplorationType.RANDOM) else dist.mean
        action = self.center + self.scale * sample.clamp(-1, 1)
        return td.update(dict(zip(self.out_keys, (sample, action, dist.log_prob(sample), value), strict=True)))

    def get_dist(self, td):  # noqa: D102
        return self.read(td)[0]

    def evaluate_actions(self, td):  # noqa: D102
        dist, value = self.read(td)
        return dist.log_prob(td[self.sample_key]), dist.entropy(), value

    def imitation_loss(self, td, sigma):  # noqa: D102
        return -self.get_dist(td).log_prob((td[keys.ACTION] - self.center) / self.scale).mean(-1)
