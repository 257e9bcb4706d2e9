"""OpenVLA-OFT: a chunk of actions per decision, all its tokens decoded at once. Kim et al. 2025, arXiv 2502.19645."""

from typing import Any, ClassVar

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.nn import functional as F

from vla_common import keys
from vla_policies.openvla.base import PrismaticPolicy
from vla_policies.openvla.checkpoint import OpenVLACheckpoint
from vla_policies.openvla.config import OpenVLAOFTConfig, pixels_of
from vla_policies.openvla.model import STOP, Prismatic


class OpenVLAOFT(PrismaticPolicy):
    """Parallel decoding: as many empty tokens as there are action tokens, attention in both directions, one pass.

    See :class:`~vla_policies.openvla.base.PrismaticPolicy`; the contract is :class:`~vla_policies.policy.VLAPolicy`'s.

    Example:
        >>> policy = OpenVLAOFT.from_pretrained("checkpoints/oft-libero-10", benchmark="libero", layout="rlinf")
    """

    family: ClassVar[str] = "openvla_oft"
    config_class: ClassVar[type[OpenVLAOFTConfig]] = OpenVLAOFTConfig
    checkpoint_settings = ("statistics", "head", "layout", "num_action_chunks", "num_images_in_input", "use_proprio")

    head_names = ("action_head", "proprio_projector", "value_head")

    config: OpenVLAOFTConfig

    def __init__(self, model: Prismatic, folder: OpenVLACheckpoint, config: OpenVLAOFTConfig):
        super().__init__(model, folder, config)
        if config.head == "l1":
            self.out_keys = [key for key in self.out_keys if key not in (keys.ACTION_TOKENS, keys.ACTION_LOG_PROB)]
            self.loss_keys = tuple(key for key in self.loss_keys if key != keys.ACTION_TOKENS)
        if config.use_proprio:
            proprio_dim = len(self.statistics.proprio or ())
            if proprio_dim != self.state_dim:
                raise ValueError(
                    f"the checkpoint reads proprioception of {proprio_dim} numbers, states of {config.benchmark} have "
                    f"{self.state_dim}; set benchmark to the one that it was trained on, or use_proprio=False"
                )

    def make_heads(self) -> None:
        super().make_heads()
        config, hidden_size = self.config, self.model.config.language.hidden_size
        self.action_head = L1Head(hidden_size, config.action_dim or self.token_dim) if config.head == "l1" else None
        self.proprio_projector = None
        if config.use_proprio:
            self.proprio_projector = ProprioProjector(config.proprio_dim or self.state_dim, hidden_size)

    @classmethod
    def infer_settings(cls, checkpoint: OpenVLACheckpoint, settings: dict[str, Any], stored: bool) -> dict[str, Any]:
        """Add head, proprioception and FiLM as the files have them, and the pixels of the sequence layout."""
        settings, film = super().infer_settings(checkpoint, settings, stored), checkpoint.film is not None
        if settings.setdefault("use_film", film) != film:
            has = "was trained with FiLM" if film else "has no vision_backbone--*.pt, where FiLM's weights are"
            raise ValueError(f"use_film is {settings['use_film']}, but {checkpoint.path} {has}; leave use_film out")
        if not stored:
            settings.setdefault("head", "l1" if checkpoint.action_head else "tokens")
            settings.setdefault("use_proprio", checkpoint.proprio_projector is not None)
            if settings["head"] == "tokens" and "layout" not in settings:
                raise ValueError(
                    f"{checkpoint.path} does not say how its sequences end; set layout='official' for checkpoints of "
                    "openvla-oft and SimpleVLA-RL, layout='rlinf' for those of RLinf"
                )
            for name, value in pixels_of(settings.get("layout", cls.config_class.layout)).items():
                settings.setdefault(name, value)
        return settings

    def action_states(self, tensordict: TensorDictBase, action_tokens: Tensor | None = None) -> Tensor:
        """Return the hidden states ``[N, C * A, hidden]``; parallel decoding does not read ``action_tokens``."""
        extra = None
        if self.proprio_projector is not None:
            extra = self.proprio_projector(self.statistics.normalize_states(self.adapter.states(tensordict)))
        ends = self.config.layout == "official"
        prefix = self._prefix(tensordict, extra, stop=ends)
        embeddings = prefix[0]
        count = self.chunk_size * self.token_dim
        suffix = embeddings.new_zeros(len(embeddings), count, embeddings.shape[2])
        if ends:
            stop = torch.full((len(embeddings), 1), STOP, device=embeddings.device)
            suffix = torch.cat([suffix, self.model.language_model.embed(stop)], dim=1)
        return self.model.action_states(prefix, suffix, count, causal=False)

    def sample_actions(self, tensordict: TensorDictBase, greedy: bool) -> tuple[Tensor, Tensor, Tensor]:
        states = self.action_states(tensordict)
        dist = self.distribution(self._logits(states))
        tokens = dist.logits.argmax(-1) if greedy else dist.sample()
        return tokens, dist.log_prob(tokens), states[:, 0]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """With the L1 head there is nothing to sample."""
        if self.action_head is None:
            return super().forward(tensordict)
        with torch.no_grad():
            states = self.action_states(self.write_prompt(tensordict))
            tensordict.set(keys.ACTION, self.to_simulator(self.action_head(states)))
            return self.write_value(tensordict, states[:, 0])

    def imitation_loss(self, tensordict: TensorDictBase, sigma: float) -> Tensor:
        """With the L1 head, the absolute error of normalised actions."""
        if self.action_head is None:
            return super().imitation_loss(tensordict, sigma)
        predicted = self.action_head(self.action_states(tensordict))
        return (predicted - self.to_model(tensordict.get(keys.ACTION))).abs().mean(-1)

    def _logits(self, states: Tensor) -> Tensor:
        if self.action_head is not None:
            raise ValueError("the L1 head has no log-probability; take the recipe sft, or head='tokens' for PPO, GRPO")
        return super()._logits(states)


# What OpenVLA-OFT adds to OpenVLA, by the names in its checkpoint files (without "module.").


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
