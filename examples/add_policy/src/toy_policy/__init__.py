"""A small convolutional policy with Gaussian actions: all that a policy of one's own needs."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.distributions import Normal
from torchrl.envs.utils import ExplorationType, exploration_type

from vla_common import keys
from vla_common.settings import Count, Positive
from vla_common.texts import to_strings
from vla_policies import VLAPolicy

SAMPLE = "toy_sample"  # a name of our own: float32 [N, C, A], what was drawn, before it is clipped to the bounds
MAX_WORDS = 8


@dataclass(frozen=True)
class ToyPolicyConfig:
    """Settings, in conf/policy/toy.yaml too. The first three are the environment's; annotations say what is allowed."""

    action_low: tuple[float, ...]
    action_high: tuple[float, ...]
    state_dim: int
    chunk_size: Count = 3
    width: Count = 64
    initial_std: Positive = 0.3


class ToyPolicy(VLAPolicy):
    """Picture, words and state go into one vector; a linear layer makes the means of a chunk of actions of it."""

    family = "toy"  # the name of the entry point
    config_class = ToyPolicyConfig  # with __init__(self, config) this is all that making, saving and loading need
    in_keys = (keys.IMAGES, keys.STATES, keys.TASK_DESCRIPTIONS)  # what forward reads
    out_keys = (keys.PROMPT_TOKENS, SAMPLE, keys.ACTION, keys.ACTION_LOG_PROB, keys.STATE_VALUE)  # and writes
    sample_key = SAMPLE  # what get_dist is about
    loss_keys = (keys.IMAGES, keys.STATES, keys.PROMPT_TOKENS, SAMPLE)  # what evaluate_actions reads of a rollout
    num_values = 1  # per decision

    def __init__(self, config: ToyPolicyConfig):
        super().__init__()
        self.config = config
        self.chunk_size, self.action_dim, self.state_dim = config.chunk_size, len(config.action_low), config.state_dim
        width = config.width
        self.register_buffer("low", torch.tensor(config.action_low))  # buffers are saved with the weights
        self.register_buffer("high", torch.tensor(config.action_high))
        self.register_buffer("state_mean", torch.zeros(config.state_dim))
        self.register_buffer("state_std", torch.ones(config.state_dim))
        self.vision = nn.Sequential(
            nn.Conv2d(3, 16, 5, stride=2, padding=2), nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(),
            nn.AdaptiveAvgPool2d(8), nn.Flatten(), nn.Linear(32 * 8 * 8, width),
        )  # fmt: skip
        self.words = nn.EmbeddingBag(256, width, padding_idx=0)
        self.state = nn.Linear(config.state_dim, width)
        self.trunk = nn.Sequential(nn.ReLU(), nn.Linear(3 * width, width), nn.ReLU())
        self.mean = nn.Linear(width, config.chunk_size * self.action_dim)
        self.log_std = nn.Parameter(torch.full((self.action_dim,), config.initial_std).log())
        self.value_head = nn.Linear(width, 1)  # "value_head" in the name: the critic, with a learning rate of its own

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Act: sample under ``ExplorationType.RANDOM``, take the mean under ``DETERMINISTIC``."""
        tokens = self.prompt_tokens(to_strings(tensordict))  # text, or bytes
        dist, value = self._read(tensordict[keys.IMAGES], tensordict[keys.STATES], tokens)
        sample = dist.sample() if exploration_type() in (None, ExplorationType.RANDOM) else dist.mean
        tensordict[keys.PROMPT_TOKENS], tensordict[SAMPLE] = tokens, sample
        tensordict[keys.ACTION] = self.low + (sample.clamp(-1, 1) + 1) / 2 * (self.high - self.low)
        tensordict[keys.ACTION_LOG_PROB], tensordict[keys.STATE_VALUE] = dist.log_prob(sample), value
        return tensordict

    def get_dist(self, tensordict: TensorDictBase) -> Normal:
        """Distribution of what was sampled."""
        return self._stored(tensordict)[0]

    def evaluate_actions(self, tensordict: TensorDictBase) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probability and entropy ``[N, C, A]`` of what was sampled, and value ``[N, 1]``: what losses call."""
        dist, value = self._stored(tensordict)
        return dist.log_prob(tensordict[SAMPLE]), dist.entropy(), value

    def imitation_loss(self, tensordict: TensorDictBase, sigma: float) -> Tensor:
        """Negative log-likelihood ``[N, C]`` of demonstrated ``action``, for sft.py and warm starts."""
        wanted = 2 * (tensordict[keys.ACTION] - self.low) / (self.high - self.low) - 1
        return -self._stored(tensordict)[0].log_prob(wanted).mean(-1)

    def set_statistics(self, state_mean: Tensor, state_std: Tensor) -> None:
        """Normalisation of the states, from the first demonstrations: what was learnt is of those that it has."""
        if not self.state_mean.any():
            self.state_mean.copy_(state_mean)
            self.state_std.copy_(state_std)

    def prompt_tokens(self, task_descriptions: Sequence[str], states: Tensor | None = None) -> Tensor:
        """Hash the words of each instruction: int64 ``[N, MAX_WORDS]``, padded with 0."""
        rows = [[1 + zlib.crc32(word.encode()) % 255 for word in text.split()] for text in task_descriptions]
        return torch.tensor([(row + [0] * MAX_WORDS)[:MAX_WORDS] for row in rows], device=self.log_std.device)

    def _stored(self, tensordict: TensorDictBase) -> tuple[Normal, Tensor]:
        return self._read(*(tensordict[key] for key in (keys.IMAGES, keys.STATES, keys.PROMPT_TOKENS)))

    def _read(self, images: Tensor, states: Tensor, tokens: Tensor) -> tuple[Normal, Tensor]:
        picture = self.vision(images.permute(0, 3, 1, 2) / 127.5 - 1)
        state = self.state((states - self.state_mean) / self.state_std)
        features = self.trunk(torch.cat([picture, self.words(tokens), state], -1))
        mean = self.mean(features).unflatten(-1, (self.chunk_size, self.action_dim))
        return Normal(mean, self.log_std.clamp(-3, 1).exp().expand_as(mean)), self.value_head(features)
