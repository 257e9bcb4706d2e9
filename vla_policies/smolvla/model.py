"""The network of SmolVLA: a SmolVLM reads images, prompt and state once, an action expert denoises the actions.

Shukor et al. 2025, arXiv 2506.01844; SmolVLM, Marafioti et al. 2025, arXiv 2504.05299. Parameter names are those of
LeRobot's checkpoints without the ``model.`` that each begins with there.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla_policies.flow.prefix import PrefixCache, PrefixModel, outside_stacks
from vla_policies.flow.steps import embed_time
from vla_policies.nn.gemma import GemmaConfig
from vla_policies.nn.siglip import SiglipConfig

VLM, EXPERT = "vlm_with_expert.vlm.", "vlm_with_expert.lm_expert."
_VISION, _TEXT, _CONNECTOR = (f"{VLM}model.{part}" for part in ("vision_model.", "text_model.", "connector."))
_HEAD_DIM = 64  # of both stacks of SmolVLM2-500M and of the expert
stays_float32 = partial(outside_stacks, stacks=(VLM, EXPERT))  # also in a bfloat16 model


@dataclass(frozen=True)
class SmolVLAModelConfig:
    """Sizes of a :class:`SmolVLAModel`: its parts, the prompt's vocabulary, a padded state and a padded action.

    ``shuffle``: patches of a square with sides of so many become one token.
    """

    vision: SiglipConfig
    language: GemmaConfig
    expert: GemmaConfig
    vocab_size: int
    state_dim: int
    action_dim: int
    shuffle: int

    @classmethod
    def from_shapes(cls, shapes: Mapping[str, Sequence[int]], vlm: Mapping[str, Any] | None = None) -> Self:
        """Read all sizes from the shapes of a checkpoint's tensors.

        ``vlm`` is the ``config.json`` of its VLM, for the numbers of heads, which shapes do not tell (``None``: of
        SmolVLM2-500M). ValueError: a tensor that tells a size is missing, or the heads do not divide the width.
        """
        text, vision = ((vlm or {}).get(f"{part}_config") or {} for part in ("text", "vision"))
        head_dim = text.get("head_dim") or _HEAD_DIM
        try:
            sizes = SiglipConfig.from_shapes(shapes, _VISION, _HEAD_DIM, vision.get("num_attention_heads"))
            _, merged = shapes[f"{_CONNECTOR}modality_projection.proj.weight"]
            config = cls(
                vision=sizes,
                language=GemmaConfig.from_shapes(shapes, _TEXT, head_dim, llama=True),
                expert=GemmaConfig.from_shapes(shapes, EXPERT, head_dim, llama=True),
                vocab_size=shapes[f"{_TEXT}embed_tokens.weight"][0],
                state_dim=shapes["state_proj.weight"][1],
                action_dim=shapes["action_in_proj.weight"][1],
                shuffle=math.isqrt(merged // sizes.width),
            )
        except KeyError as missing:
            raise ValueError(f"no tensor {missing}: it is not a checkpoint of SmolVLA") from None
        stacks = config.language, config.expert
        if any(stack.kv_heads < 1 or stack.heads % stack.kv_heads for stack in stacks) or sizes.heads < 1:
            raise ValueError(f"heads of {head_dim} numbers do not fit its VLM, which is not SmolVLM2-500M")
        if config.language.depth != config.expert.depth:
            depths = f"{config.language.depth} layers and the action expert {config.expert.depth}"
            raise ValueError(f"the VLM has {depths}; only an expert with as many layers as the VLM is supported")
        return config

    @property
    def image_tokens(self) -> int:
        """How many tokens an image is to the language model."""
        return self.vision.num_patches // self.shuffle**2


def published_sizes() -> SmolVLAModelConfig:
    """Return the sizes of lerobot/smolvla_base: arXiv 2506.01844, and SmolVLM2-500M's first 16 layers."""
    vision = SiglipConfig(width=768, depth=12, heads=12, mlp_dim=3072, patch_size=16, num_patches=1024)
    language = GemmaConfig(960, 16, 2560, 15, 5, 64, llama=True)
    expert = GemmaConfig(720, 16, 2048, 15, 5, 64, llama=True, cross=tuple(range(1, 16, 2)))
    return SmolVLAModelConfig(vision, language, expert, 49_280, 32, 32, shuffle=4)


class SmolVLAModel(PrefixModel):
    """Prefix once, then velocities of noisy actions."""

    vlm_path, expert_path = VLM.removesuffix("."), EXPERT.removesuffix(".")
    vision_path, language_path = _VISION.removesuffix("."), _TEXT.removesuffix(".")
    projector_path = f"{_CONNECTOR}modality_projection.proj"

    def __init__(self, config: SmolVLAModelConfig):
        super().__init__(config, config.vision.width * config.shuffle**2, bias=False)
        expert_width = config.expert.width
        self.state_proj = nn.Linear(config.state_dim, config.language.width)
        self.action_in_proj = nn.Linear(config.action_dim, expert_width)
        self.action_out_proj = nn.Linear(expert_width, config.action_dim)
        self.action_time_mlp_in = nn.Linear(2 * expert_width, expert_width)
        self.action_time_mlp_out = nn.Linear(expert_width, expert_width)

    def embed_images(self, pixels: Tensor) -> Tensor:
        """Join the patches of each square, row by row: of ``[N, h w, width]`` become ``[N, h w / s^2, s^2 width]``."""
        side, step = math.isqrt(self.config.vision.num_patches), self.config.shuffle
        squares = self.vision(pixels).unflatten(1, (side // step, step, side // step, step))
        joined = squares.transpose(2, 3).flatten(3).flatten(1, 2)
        return self.projector(joined) * math.sqrt(self.config.language.width)

    def embed_state(self, state: Tensor) -> Tensor:
        """Return the token ``[N, 1, width]`` of a padded state ``[N, state_dim]``."""
        return self.state_proj(state.to(self.state_proj.weight.dtype)).unsqueeze(1).to(self.dtype)

    def add_state(self, prefix: PrefixCache, state: Tensor) -> PrefixCache:
        """Append the token of a padded state ``[N, state_dim]``, which sees images and prompt and is not seen by them.

        That is why keys and values of a frozen VLM can be kept while the state's projection is trained.
        """
        seen = F.pad(prefix.valid, (0, 1), value=True)
        mask = None if bool(seen.all()) else seen[:, None, None, :]
        positions = prefix.valid.sum(1, keepdim=True)
        _, own = self.language(self.embed_state(state), positions, mask, before=prefix.layers, output=False)
        pairs = zip(prefix.layers, own, strict=True)
        layers = [(torch.cat([k, key], dim=2), torch.cat([v, value], dim=2)) for (k, v), (key, value) in pairs]
        return PrefixCache(layers, seen)

    def velocity(self, prefix: PrefixCache, noisy_actions: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
        """Return velocities (noise minus action) float32 ``[N, H, action_dim]``, hidden states ``[N, H, width]``.

        ``prefix`` has the state (:meth:`add_state`); ``noisy_actions`` are padded ``[N, H, action_dim]``, ``time``
        ``[N]`` from 1 (noise) to 0 (action). An action sees state and earlier actions where layers do not cross.
        """
        dtype = self.action_in_proj.weight.dtype  # float32 also in a bfloat16 model
        actions = self.action_in_proj(noisy_actions.to(dtype))
        moment = embed_time(time, self.config.expert.width).to(dtype)
        both = torch.cat([actions, moment.unsqueeze(1).expand_as(actions)], dim=-1)
        tokens = self.action_time_mlp_out(F.silu(self.action_time_mlp_in(both))).to(self.dtype)
        horizon = noisy_actions.shape[1]
        positions = prefix.valid.sum(1, keepdim=True) + torch.arange(horizon, device=noisy_actions.device)
        own = prefix.valid.new_ones(horizon, horizon).tril().expand(len(prefix.valid), -1, -1)
        mask = torch.cat([prefix.valid.unsqueeze(1).expand(-1, horizon, -1), own], dim=2).unsqueeze(1)
        hidden, _ = self.expert(tokens, positions, mask, before=prefix.layers)
        return self.action_out_proj(hidden.to(self.action_out_proj.weight.dtype)).float(), hidden
