"""SmallVLA: a Vision-Language-Action policy of about one million parameters that trains on a CPU in minutes.

A small transformer reads the three tokens of :class:`~vla_policies.small.encoder.SmallEncoder` (image, instruction and
state) with one query per action of the chunk; a linear head gives the logits of the action tokens of all dimensions in
parallel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

import torch
from annotated_types import Ge, Le
from tensordict import TensorDictBase
from torch import Tensor, nn
from torchrl.envs.utils import ExplorationType, exploration_type

from vla_common import keys
from vla_common.schema import EnvironmentShape
from vla_common.settings import Length, Width, check_fields
from vla_common.texts import to_strings
from vla_policies.policy import VLAPolicy
from vla_policies.processing.action_tokens import ActionBins
from vla_policies.processing.sampling import TokenDistribution
from vla_policies.small.encoder import Compute, Crop, SmallEncoder, check_sizes, computing

NUM_BINS = 41  # of policies that are made for an environment: fewer than published models have learn faster


@dataclass(frozen=True)
class SmallVLAConfig:
    """Shape of a :class:`SmallVLA`.

    Attributes:
        action_low, action_high: bounds of a primitive action, in the simulator's units.
        state_dim: ``S``.
        chunk_size: ``C``, primitive actions per decision.
        num_bins: tokens per action dimension; :meth:`SmallVLA.make` takes 41 if nobody says.
        dim, layers, heads: of the transformer.
        channels: of the three convolutions.
        keypoints: number of spatial-softmax maps.
        text_buckets: rows of the hashed word table.
        critic_detach: keep the value loss from shaping the features it reads.
        value_per_action: one value per primitive action (``[N, C]``) instead of one per decision (``[N, 1]``).
        crop: what is cut out of the image, ``(top, left, height, width)`` as parts of it: where nothing ever happens
            costs time, and precision elsewhere. All of it if ``None``.
        blind: see black images only: a twin that shows how much of a result needs no looking.
        compute: ``"bf16"`` runs the network in bfloat16 (:func:`torch.autocast`) on weights in float32, wherever it
            runs; on CPUs that know bfloat16 it learns faster.
    """

    action_low: tuple[float, ...]
    action_high: tuple[float, ...]
    state_dim: int
    chunk_size: Length = 5
    num_bins: Annotated[int, Ge(2), Le(65_536)] = 256
    dim: Width = 128
    layers: Annotated[int, Ge(1), Le(100)] = 2
    heads: Width = 4
    channels: tuple[Width, Width, Width] = (16, 32, 48)
    keypoints: Width = 32
    text_buckets: Annotated[int, Ge(2), Le(1_000_000)] = 2048
    critic_detach: bool = True
    value_per_action: bool = False
    crop: Crop | None = None
    blind: bool = False
    compute: Compute = "float32"

    def __post_init__(self) -> None:
        check_fields(self)
        check_sizes(self)


class SmallVLA(VLAPolicy):
    """See the module's docstring; :class:`~vla_policies.policy.VLAPolicy` has the contract.

    The greedy action is the mean of the token distribution rather than its mode: bins are ordered, and the mode
    of neighbours that are about equally likely is noisy.

    Example:
        >>> policy = SmallVLA(SmallVLAConfig(action_low=(-1,) * 4, action_high=(1,) * 4, state_dim=4))
    """

    family: ClassVar[str] = "small"
    config_class: ClassVar[type[SmallVLAConfig]] = SmallVLAConfig
    in_keys: ClassVar[list[str]] = [keys.IMAGES, keys.STATES, keys.TASK_DESCRIPTIONS]
    out_keys: ClassVar[list[str]] = [
        keys.PROMPT_TOKENS,
        keys.ACTION_TOKENS,
        keys.ACTION,
        keys.ACTION_LOG_PROB,
        keys.STATE_VALUE,
    ]
    sample_key = keys.ACTION_TOKENS
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
        first, second, last = nn.Linear(3 * dim, dim), nn.Linear(dim, dim), nn.Linear(dim, self.num_values)
        self.value_head = nn.Sequential(first, nn.GELU(), second, nn.GELU(), last)
        nn.init.zeros_(last.weight)

    @classmethod
    def make(cls, shape: EnvironmentShape, checkpoint: str | Path | None = None, **settings: Any) -> Self:
        """Make a policy for an environment, see :meth:`VLAPolicy.make`; a new one has 41 tokens per dimension."""
        return super().make(shape, checkpoint, **(settings if checkpoint else {"num_bins": NUM_BINS, **settings}))

    @property
    def sight(self) -> nn.Module:
        """What has made of image and instruction ``[N, 2 dim]``, see :class:`~vla_policies.policy.VLAPolicy`."""
        return self.encoder.sight

    def set_statistics(self, state_mean: Tensor, state_std: Tensor) -> None:
        """Set the normalisation of ``states``: two tensors ``[S]``; they are saved with the weights."""
        self.encoder.set_statistics(state_mean, state_std)

    def logits_and_value(self, images: Tensor, states: Tensor, prompt_tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits ``[N, C, A, num_bins]`` and value ``[N, 1]`` or ``[N, C]``, the one backbone pass.

        Args:
            images: uint8 ``[N, H, W, 3]``.
            states: float32 ``[N, S]``.
            prompt_tokens: int64 ``[N, L]`` of :meth:`HashedText.tokenize`.
        """
        with computing(self.config, images.device):
            context = self.encoder(images, states, prompt_tokens)
            queries = self.queries.expand(len(images), -1, -1)
            hidden = self.trunk(torch.cat([context, queries], dim=1))
            logits = self.action_head(hidden[:, 3:]).unflatten(-1, (self.action_dim, self.config.num_bins))
            features = hidden[:, :3].flatten(1)
            value = self.value_head(features.detach() if self.config.critic_detach else features)
        return logits.float(), value.float()

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        tokens = self.prompt_tokens(to_strings(tensordict))
        logits, value = self.logits_and_value(tensordict.get(keys.IMAGES), tensordict.get(keys.STATES), tokens)
        dist = TokenDistribution(logits=logits)
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

    def get_dist(self, tensordict: TensorDictBase) -> TokenDistribution:
        return TokenDistribution(logits=self._stored(tensordict)[0])

    def evaluate_actions(self, tensordict: TensorDictBase) -> tuple[Tensor, Tensor, Tensor]:
        logits, value = self._stored(tensordict)
        dist = TokenDistribution(logits=logits)
        return dist.log_prob(tensordict.get(keys.ACTION_TOKENS)), dist.entropy(), value

    def imitation_loss(self, tensordict: TensorDictBase, sigma: float) -> Tensor:
        """Return the cross-entropy ``[N, C]`` against demonstrated ``action`` ``[N, C, A]``, mean over dimensions.

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
        """Return tokens int64 ``[N, L]`` of ``N`` instructions."""
        return self.encoder.tokenize(task_descriptions)

    def _stored(self, tensordict: TensorDictBase) -> tuple[Tensor, Tensor]:
        return self.logits_and_value(*(tensordict.get(key) for key in (keys.IMAGES, keys.STATES, keys.PROMPT_TOKENS)))
