"""The network of pi0 and pi0.5: PaliGemma reads images and prompt once, an action expert denoises the actions.

Black et al. 2024, arXiv 2410.24164 (pi0); Physical Intelligence 2025, arXiv 2504.16054 (pi0.5). Parameter names are
those of openpi's PyTorch checkpoints.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla_policies.flow.prefix import PrefixCache, PrefixModel, outside_stacks
from vla_policies.flow.steps import embed_time
from vla_policies.nn.gemma import GemmaConfig
from vla_policies.nn.siglip import SiglipConfig

PREFIX, EXPERT = "paligemma_with_expert.paligemma.", "paligemma_with_expert.gemma_expert."
_VISION, _TEXT = f"{PREFIX}model.vision_tower.vision_model.", f"{PREFIX}model.language_model."
_VISION_HEAD_DIM = 72  # of SigLIP so400m
stays_float32 = partial(outside_stacks, stacks=(PREFIX, EXPERT))  # also in a bfloat16 model


@dataclass(frozen=True)
class Pi0ModelConfig:
    """Sizes of a :class:`Pi0Model`: of its parts, the prompt's vocabulary, and of a padded action or state.

    ``pi05``: state in the prompt and conditioned norms, instead of a state token and an MLP for the time.
    """

    vision: SiglipConfig
    language: GemmaConfig
    expert: GemmaConfig
    vocab_size: int
    action_dim: int
    pi05: bool
    state_dim: int = 0  # 0: as many as of an action

    def __post_init__(self) -> None:
        object.__setattr__(self, "state_dim", self.state_dim or self.action_dim)

    @property
    def image_tokens(self) -> int:
        """How many tokens an image is to the language model."""
        return self.vision.num_patches

    @classmethod
    def from_shapes(cls, shapes: Mapping[str, Sequence[int]], vision_heads: int | None = None) -> "Pi0ModelConfig":
        """Read all sizes from the shapes of a checkpoint's tensors; ValueError if one that tells a size is missing.

        ``vision_heads`` are attention heads of SigLIP, which shapes do not tell; ``None`` for 72 numbers per head.
        """
        try:
            pi05 = "time_mlp_in.weight" in shapes
            table = f"{_TEXT}embed_tokens.weight"
            return cls(
                vision=SiglipConfig.from_shapes(shapes, _VISION, _VISION_HEAD_DIM, vision_heads),
                language=GemmaConfig.from_shapes(shapes, _TEXT),  # all published sizes have a single key-value head
                expert=GemmaConfig.from_shapes(shapes, f"{EXPERT}model.", conditioned=pi05),
                vocab_size=shapes[table if table in shapes else f"{PREFIX}lm_head.weight"][0],
                action_dim=shapes["action_in_proj.weight"][1],
                pi05=pi05,
                state_dim=0 if pi05 else shapes["state_proj.weight"][1],
            )
        except KeyError as missing:
            raise ValueError(f"no tensor {missing}: it is not a PyTorch checkpoint of pi0 or pi0.5") from None


def published_sizes(pi05: bool) -> Pi0ModelConfig:
    """Return the sizes of pi0, or of pi0.5: arXiv 2410.24164, openpi's gemma.py and PaliGemma."""
    language = GemmaConfig(2048, 18, 16_384, 8, 1, 256)
    expert = GemmaConfig(1024, 18, 4096, 8, 1, 256, conditioned=pi05)
    return Pi0ModelConfig(SiglipConfig(), language, expert, 257_152, 32, pi05)


class Pi0Model(PrefixModel):
    """Prefix once, then velocities of noisy actions."""

    vlm_path, expert_path = PREFIX.removesuffix("."), f"{EXPERT}model"
    vision_path, language_path = _VISION.removesuffix("."), _TEXT.removesuffix(".")
    projector_path = f"{PREFIX}model.multi_modal_projector.linear"

    def __init__(self, config: Pi0ModelConfig):
        super().__init__(config, config.vision.width, bias=True)
        expert_width = config.expert.width
        self.action_in_proj = nn.Linear(config.action_dim, expert_width)
        self.action_out_proj = nn.Linear(expert_width, config.action_dim)
        if config.pi05:
            self.time_mlp_in = nn.Linear(expert_width, expert_width)
            self.time_mlp_out = nn.Linear(expert_width, expert_width)
        else:
            self.state_proj = nn.Linear(config.state_dim, expert_width)
            self.action_time_mlp_in = nn.Linear(2 * expert_width, expert_width)
            self.action_time_mlp_out = nn.Linear(expert_width, expert_width)

    def embed_suffix(self, noisy_actions: Tensor, time: Tensor, state: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return tokens ``[N, S, width]`` of the expert and the condition ``[N, width]`` of its norms (pi0.5).

        ``noisy_actions`` are ``[N, H, action_dim]``, ``time`` ``[N]`` from 1 (noise) to 0 (action), ``state`` ``[N,
        state_dim]``, padded; pi0.5 does not read it.
        """
        dtype = self.action_in_proj.weight.dtype  # float32 also in a bfloat16 model
        actions = self.action_in_proj(noisy_actions.to(dtype))
        moment = embed_time(time, self.config.expert.width).to(dtype)
        if self.config.pi05:
            return actions.to(self.dtype), F.silu(self.time_mlp_out(F.silu(self.time_mlp_in(moment))))
        both = torch.cat([actions, moment.unsqueeze(1).expand_as(actions)], dim=-1)
        actions = self.action_time_mlp_out(F.silu(self.action_time_mlp_in(both)))
        return torch.cat([self.state_proj(state.to(dtype)).unsqueeze(1), actions], dim=1).to(self.dtype), None

    def velocity(
        self, prefix: PrefixCache, noisy_actions: Tensor, time: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return velocities (noise minus action) float32 ``[N, H, action_dim]``, hidden states ``[N, H, width]``."""
        tokens, condition = self.embed_suffix(noisy_actions, time, state)
        horizon, new = noisy_actions.shape[1], tokens.shape[1]
        seen = prefix.valid.sum(1, keepdim=True)
        positions = seen + torch.arange(new, device=seen.device)
        mask = None
        if new > horizon or not prefix.full:
            own = prefix.valid.new_ones(new, new)
            own[: new - horizon, new - horizon :] = False  # the state token of pi0 does not see the actions
            own = own.expand(len(seen), -1, -1)
            mask = torch.cat([prefix.valid.unsqueeze(1).expand(-1, new, -1), own], dim=2).unsqueeze(1)
        hidden, _ = self.expert(tokens, positions, mask, before=prefix.layers, condition=condition)
        hidden = hidden[:, -horizon:]
        return self.action_out_proj(hidden.to(self.action_out_proj.weight.dtype)).float(), hidden
