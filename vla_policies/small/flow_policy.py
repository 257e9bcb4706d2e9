"""SmallFlow: the small policy with a flow instead of action tokens, which trains on a CPU in minutes.

A small transformer reads the three tokens of :class:`~vla_policies.small.encoder.SmallEncoder`, made once per decision,
with one token per noisy action, to which its time is added, and says how fast each flows.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from vla_common import keys
from vla_policies.checkpoint.settings import SettingError
from vla_policies.flow.config import FlowConfig
from vla_policies.flow.policy import FlowPolicy
from vla_policies.flow.steps import embed_time
from vla_policies.small.encoder import EncoderConfig, SmallEncoder, SmallPolicy, make_trunk, make_value_head
from vla_policies.small.precision import computing


@dataclass(frozen=True, kw_only=True)
class SmallFlowConfig(FlowConfig, EncoderConfig):
    """Settings of a :class:`SmallFlow`: those of a flow and those of a small policy."""

    def __post_init__(self) -> None:
        super().__post_init__()
        EncoderConfig.__post_init__(self)
        if self.dim % 2:
            raise SettingError(f"dim={self.dim}: must be even: half of it are sines of the time, half cosines")


class SmallFlow(SmallPolicy, FlowPolicy):
    """See the module's docstring; :class:`~vla_policies.policy.VLAPolicy` has the contract.

    Example:
        >>> policy = SmallFlow(SmallFlowConfig(action_low=(-1,) * 4, action_high=(1,) * 4, state_dim=4))
    """

    family: ClassVar[str] = "small_flow"
    config_class: ClassVar[type[SmallFlowConfig]] = SmallFlowConfig
    in_keys = (keys.IMAGES, keys.STATES, keys.TASK_DESCRIPTIONS)
    loss_keys = (keys.IMAGES, keys.STATES, keys.PROMPT_TOKENS, *FlowPolicy.drawn_keys)

    center: Tensor
    half_range: Tensor

    def __init__(self, config: SmallFlowConfig):
        action_dim = len(config.action_low)
        super().__init__(
            config,
            chunk_size=config.chunk_size,
            horizon=config.chunk_size,
            model_action_dim=action_dim,
            trained_dims=action_dim,
            hidden_size=config.dim,
        )
        self.action_dim, self.state_dim = action_dim, config.state_dim
        self.config, dim = config, config.dim
        low, high = torch.tensor(config.action_low), torch.tensor(config.action_high)
        self.register_buffer("center", (low + high) / 2, persistent=False)
        self.register_buffer("half_range", (high - low) / 2, persistent=False)
        self.encoder = SmallEncoder(config)
        self.queries = nn.Parameter(0.5 * torch.randn(config.chunk_size, dim))
        self.action_in = nn.Linear(self.action_dim, dim)
        self.time_in = nn.Sequential(nn.Linear(dim, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.trunk = make_trunk(config)
        self.action_out = nn.Linear(dim, self.action_dim)
        nn.init.zeros_(self.action_out.weight)
        nn.init.zeros_(self.action_out.bias)
        self.value_head = make_value_head(dim, 1) if config.value_head else None

    def repeat(self, observed: Tensor, count: int) -> Tensor:
        return observed.repeat_interleave(count, dim=0)

    def velocity(self, observed: Tensor, noisy: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
        with computing(self.config, noisy.device):
            moment = self.time_in(embed_time(time, self.config.dim)).unsqueeze(1)
            actions = self.action_in(noisy) + self.queries + moment
            hidden = self.trunk(torch.cat([observed, actions], dim=1))[:, observed.shape[1] :]
            return self.action_out(hidden).float(), hidden.float()

    def value(self, observed: Tensor, hidden: Tensor) -> Tensor | None:
        if self.value_head is None:
            return None
        features = observed.flatten(1)
        return self.value_head(features.detach() if self.flow.detach_critic else features)

    def to_simulator(self, actions: Tensor, states: Tensor) -> Tensor:
        return self.center + self.half_range * actions.clamp(-1, 1)

    def to_model(self, actions: Tensor, states: Tensor) -> Tensor:
        return (actions - self.center) / self.half_range
