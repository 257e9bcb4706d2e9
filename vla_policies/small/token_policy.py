"""SmallVLA: a Vision-Language-Action policy of about one million parameters that trains on a CPU in minutes.

A small transformer reads the three tokens of :class:`~vla_policies.small.encoder.SmallEncoder` with one query per
action of the chunk; a linear head gives the logits of the action tokens of all dimensions in parallel.
"""

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
from vla_policies.processing.action_tokens import ActionBins, TokenDistribution, soft_cross_entropy
from vla_policies.small.encoder import EncoderConfig, SmallEncoder, SmallPolicy, make_trunk, make_value_head
from vla_policies.small.precision import computing


@dataclass(frozen=True)
class SmallVLAConfig(EncoderConfig):
    """Settings of a :class:`SmallVLA`, in addition to those of every small policy.

    Attributes:
        num_bins: tokens per action dimension; :meth:`SmallVLA.make` takes 41 by default.
        critic_detach: keep the value loss from shaping the features it reads.
        value_per_action: one value per primitive action (``[N, C]``) instead of one per decision (``[N, 1]``).
    """

    num_bins: Annotated[int, Ge(2), Le(65_536)] = 256
    critic_detach: bool = True
    value_per_action: bool = False


class SmallVLA(SmallPolicy):
    """See the module's docstring; :class:`~vla_policies.policy.VLAPolicy` has the contract.

    The greedy action is the mean of the token distribution rather than its mode: bins are ordered, and the mode of
    neighbours that are about equally likely is noisy.

    Example:
        >>> policy = SmallVLA(SmallVLAConfig(action_low=(-1,) * 4, action_high=(1,) * 4, state_dim=4))
    """

    family: ClassVar[str] = "small"
    config_class: ClassVar[type[SmallVLAConfig]] = SmallVLAConfig
    in_keys = (keys.IMAGES, keys.STATES, keys.TASK_DESCRIPTIONS)
    out_keys = (keys.PROMPT_TOKENS, keys.ACTION_TOKENS, keys.ACTION, keys.ACTION_LOG_PROB, keys.STATE_VALUE)
    sample_key = keys.ACTION_TOKENS

    def __init__(self, config: SmallVLAConfig):
        super().__init__()
        self.config, self.trained_dims = config, len(config.action_low)
        self.chunk_size, self.action_dim, self.state_dim = config.chunk_size, len(config.action_low), config.state_dim
        dim = config.dim
        self.bins = ActionBins(config.action_low, config.action_high, config.num_bins)
        self.encoder = SmallEncoder(config)
        self.queries = nn.Parameter(0.5 * torch.randn(config.chunk_size, dim))
        self.trunk = make_trunk(config)
        self.action_head = nn.Linear(dim, self.action_dim * config.num_bins)
        nn.init.normal_(self.action_head.weight, std=0.02)  # start from nearly uniform tokens
        nn.init.zeros_(self.action_head.bias)
        self.num_values = config.chunk_size if config.value_per_action else 1
        self.value_head = make_value_head(dim, self.num_values)

    @classmethod
    def make(cls, shape: EnvironmentShape, checkpoint: str | Path | None = None, **settings: Any) -> Self:
        """Make a policy; a new one has 41 tokens per dimension: fewer than published models have learn faster."""
        return super().make(shape, checkpoint, **(settings if checkpoint else {"num_bins": 41, **settings}))

    def logits_and_value(self, images: Tensor, states: Tensor, prompt_tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits ``[N, C, A, num_bins]`` and value ``[N, 1]`` or ``[N, C]``, the one backbone pass.

        ``images`` are uint8 ``[N, H, W, 3]``, ``states`` float32 ``[N, S]``, ``prompt_tokens`` int64 ``[N, L]``.
        """
        with computing(self.config, images.device):
            hidden, logits = self._read(self.encoder(images, states, prompt_tokens))
            features = hidden[:, :3].flatten(1)
            value = self.value_head(features.detach() if self.config.critic_detach else features)
        return logits.float(), value.float()

    def _read(self, context: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.trunk(torch.cat([context, self.queries.expand(len(context), -1, -1)], dim=1))
        return hidden, self.action_head(hidden[:, 3:]).unflatten(-1, (self.action_dim, self.config.num_bins))

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        logits, value = self._read_observations(self.write_prompt(tensordict))
        dist = TokenDistribution(logits=logits)
        kind = exploration_type()
        if kind in (None, ExplorationType.RANDOM):
            chosen = action_tokens = dist.sample()
        elif kind is ExplorationType.MODE:
            chosen = action_tokens = dist.mode
        else:
            chosen = self.bins.expectation(logits)  # between bins
            action_tokens = chosen.round().long()
        tensordict.set(keys.ACTION_TOKENS, action_tokens)
        tensordict.set(keys.ACTION, self.bins.decode(chosen))
        tensordict.set(keys.ACTION_LOG_PROB, dist.log_prob(action_tokens))
        return tensordict.set(keys.STATE_VALUE, value)

    def get_dist(self, tensordict: TensorDictBase) -> TokenDistribution:
        return TokenDistribution(logits=self._read_observations(tensordict)[0])

    def evaluate_actions(self, tensordict: TensorDictBase) -> tuple[Tensor, Tensor, Tensor]:
        logits, value = self._read_observations(tensordict)
        dist = TokenDistribution(logits=logits)
        return dist.log_prob(tensordict.get(keys.ACTION_TOKENS)), dist.entropy(), value

    def imitation_loss(self, tensordict: TensorDictBase, sigma: float) -> Tensor:
        """Return the cross-entropy ``[N, C]``, mean over dimensions; neighbouring bins are nearly as good."""
        logits, _ = self._read_observations(tensordict)
        target = self.bins.encode(tensordict.get(keys.ACTION))
        return soft_cross_entropy(logits.log_softmax(-1), target, sigma).mean(-1)

    # ---- to be steered: vla_policies.steered.Steerable

    def plan(self, observed: Tensor, batch: int) -> Tensor:
        with computing(self.config, observed.device):
            logits = self._read(observed)[1].float()
        return self.to_model(self.bins.decode(self.bins.expectation(logits)), observed)

    def to_simulator(self, actions: Tensor, states: Tensor) -> Tensor:
        low, high = self.bins.low, self.bins.high
        return ((low + high + (high - low) * actions) / 2).clamp(low, high)

    def to_model(self, actions: Tensor, states: Tensor) -> Tensor:
        low, high = self.bins.low, self.bins.high
        return (2 * actions - low - high) / (high - low)

    def _read_observations(self, tensordict: TensorDictBase) -> tuple[Tensor, Tensor]:
        return self.logits_and_value(*(tensordict.get(key) for key in (keys.IMAGES, keys.STATES, keys.PROMPT_TOKENS)))
