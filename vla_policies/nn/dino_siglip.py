"""The vision backbone of OpenVLA: DINOv2 and SigLIP side by side, features of the second-to-last block.

Names are those of the published checkpoints (timm's). Only what the output depends on is built, see
:meth:`VisionConfig.unused`. OpenVLA, Kim et al. 2024, arXiv 2406.09246; DINOv2 with registers, Darcet et al. 2023,
arXiv 2309.16588; SigLIP, Zhai et al. 2023, arXiv 2303.15343; FiLM in OpenVLA-OFT, Kim et al. 2025, arXiv 2502.19645.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla_policies.nn.blocks import Mlp, count_layers, run_block

PREFIX = "vision_backbone."
BACKBONES = ("featurizer", "fused_featurizer")
HEADS = {"vit_small": 6, "vit_base": 12, "vit_large": 16, "vit_so400m": 16, "vit_golden": 4}
"""Attention heads by the beginning of a ``timm_model_ids`` entry: the one size that tensor shapes do not tell."""


def heads_of(config: Mapping[str, Any]) -> tuple[int, int]:
    """Return attention heads of the two transformers that ``timm_model_ids`` of a ``config.json`` names; ValueError."""
    names = config.get("timm_model_ids") or ()
    heads = [number for name in names for start, number in HEADS.items() if name.startswith(start)]
    if len(names) != len(BACKBONES) or len(heads) != len(BACKBONES):
        known = ", ".join(f"{start}*" for start in HEADS)
        raise ValueError(f"timm_model_ids of config.json is {list(names)}, must be two vision models of {known}")
    return heads[0], heads[1]


@dataclass(frozen=True)
class TransformerConfig:
    """Sizes of one :class:`VisionTransformer`."""

    dim: int  # width of a token
    depth: int  # blocks in the checkpoint; one fewer is built
    heads: int
    mlp_dim: int  # hidden width of a block's MLP
    registers: int | None = None  # besides the class token; None for a model without prefix tokens (SigLIP)
    layer_scale: bool = False  # blocks scale their two branches (DINOv2)
    patch_size: int = 14  # pixels on a side
    num_patches: int = 256  # of one image
    film_dim: int | None = None  # width of the language embedding that modulates the blocks (FiLM)

    def __post_init__(self) -> None:
        if self.dim % self.heads:
            raise ValueError(f"{self.heads} attention heads do not divide the width {self.dim}")

    @property
    def image_size(self) -> int:
        return self.patch_size * round(self.num_patches**0.5)

    @classmethod
    def from_shapes(cls, shapes: Mapping[str, Sequence[int]], heads: int, prefix: str) -> "TransformerConfig":
        """Read the sizes from the shapes of tensors ``prefix...``; ValueError if one that tells a size is missing."""
        try:
            _, num_patches, dim = shapes[f"{prefix}pos_embed"]
            registers = shapes[f"{prefix}reg_token"][1] if f"{prefix}reg_token" in shapes else 0
            film = shapes.get(f"{prefix}blocks.0.scale.weight")
            return cls(
                dim=dim,
                depth=count_layers(shapes, f"{prefix}blocks."),
                heads=heads,
                mlp_dim=shapes[f"{prefix}blocks.0.mlp.fc1.weight"][0],
                registers=registers if f"{prefix}cls_token" in shapes else None,
                layer_scale=f"{prefix}blocks.0.ls1.scale_factor" in shapes,
                patch_size=shapes[f"{prefix}patch_embed.proj.weight"][-1],
                num_patches=num_patches,
                film_dim=film[1] if film else None,
            )
        except KeyError as missing:
            raise ValueError(
                f"the checkpoint has no tensor {missing}: this is not the vision backbone of an OpenVLA checkpoint"
            ) from None


@dataclass(frozen=True)
class VisionConfig:
    """Sizes of a :class:`DualVisionBackbone`: DINOv2 first, SigLIP second. The defaults are those of openvla-7b."""

    featurizer: TransformerConfig = TransformerConfig(1024, 24, 16, 4096, registers=4, layer_scale=True)
    fused_featurizer: TransformerConfig = TransformerConfig(1152, 27, 16, 4304)

    def __post_init__(self) -> None:
        if self.featurizer.num_patches != self.fused_featurizer.num_patches:
            raise ValueError(
                f"the two vision models cut an image into {self.featurizer.num_patches} and "
                f"{self.fused_featurizer.num_patches} patches; must be the same"
            )

    @classmethod
    def from_shapes(cls, shapes: Mapping[str, Sequence[int]], heads: Sequence[int]) -> "VisionConfig":
        """Read the sizes from a checkpoint's shapes, by names with or without ``"vision_backbone."``.

        ``heads`` are those of :func:`heads_of`. ValueError: a tensor that tells a size is missing, or they do not fit.
        """
        prefix = PREFIX if any(name.startswith(PREFIX) for name in shapes) else ""
        parts = zip(BACKBONES, heads, strict=True)
        return cls(*(TransformerConfig.from_shapes(shapes, number, f"{prefix}{name}.") for name, number in parts))

    @property
    def dim(self) -> int:
        return self.featurizer.dim + self.fused_featurizer.dim

    @property
    def num_patches(self) -> int:
        return self.featurizer.num_patches

    @property
    def image_size(self) -> int:
        return self.featurizer.image_size

    def unused(self, key: str) -> bool:
        """Tell whether a checkpoint's ``key`` never affects the output: last block, final norm, attention pooling.

        Any prefix before ``featurizer`` is accepted, so adapters are judged like the weights that they adapt.
        """
        for name in BACKBONES:
            last = getattr(self, name).depth - 1
            if re.search(rf"(^|\.){name}\.(blocks\.{last}|norm|fc_norm|attn_pool|head)(\.|$)", key):
                return True
        return False


class DualVisionBackbone(nn.Module):
    """Two vision transformers that see the same images, each in its own normalisation; features are concatenated."""

    def __init__(self, config: VisionConfig):
        super().__init__()
        self.config = config
        self.featurizer = VisionTransformer(config.featurizer)
        self.fused_featurizer = VisionTransformer(config.fused_featurizer)

    def forward(self, pixels: Tensor, language: Tensor | None = None) -> Tensor:
        """Return patch features ``[B, n * num_patches, dim]``, image after image.

        ``pixels`` are float ``[B, 6 n, H, W]`` (else ValueError): for each of ``n`` images, three channels normalised
        for DINOv2, then three for SigLIP. ``language`` ``[B, film_dim]`` is the instruction's mean embedding, for FiLM.
        """
        size = self.config.image_size
        if pixels.ndim != 4 or pixels.shape[1] % 6 or pixels.shape[2:] != (size, size):
            raise ValueError(f"pixels of shape {tuple(pixels.shape)}; expected [B, 6 * images, {size}, {size}]")
        batch, images = len(pixels), pixels.shape[1] // 6
        first, second = pixels.reshape(batch * images, 2, 3, size, size).unbind(1)
        if language is not None:
            language = language.repeat_interleave(images, dim=0)
        features = torch.cat([self.featurizer(first, language), self.fused_featurizer(second, language)], dim=-1)
        return features.reshape(batch, images * self.config.num_patches, self.config.dim)


class VisionTransformer(nn.Module):
    """Patch features ``[B, num_patches, dim]`` of the second-to-last block; no final norm, no prefix tokens."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.config = config
        self.gradient_checkpointing = False
        self.patch_embed: Any = nn.Module()
        self.patch_embed.proj = nn.Conv2d(3, config.dim, config.patch_size, stride=config.patch_size)
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, config.num_patches, config.dim))
        if config.registers is not None:
            self.cls_token = nn.Parameter(torch.zeros(1, 1, config.dim))
            if config.registers:
                self.reg_token = nn.Parameter(torch.zeros(1, config.registers, config.dim))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth - 1))

    def forward(self, pixels: Tensor, language: Tensor | None = None) -> Tensor:
        if (language is None) != (self.config.film_dim is None):
            raise ValueError(
                "this vision backbone has FiLM layers: pass the language embedding"
                if language is None
                else "a language embedding was passed to a vision backbone without FiLM layers"
            )
        patches = self.patch_embed.proj(pixels.to(self.pos_embed.dtype))
        hidden = patches.flatten(2).transpose(1, 2) + self.pos_embed
        if prefix := [getattr(self, name) for name in ("cls_token", "reg_token") if hasattr(self, name)]:
            hidden = torch.cat([*(token.expand(len(hidden), -1, -1) for token in prefix), hidden], dim=1)
        for block in self.blocks:
            hidden = run_block(block, hidden, language, recompute=self.gradient_checkpointing)
        return hidden[:, -self.config.num_patches :]


class Block(nn.Module):
    """Pre-norm transformer block, with LayerScale (DINOv2) and FiLM between its two branches where configured.

    FiLM: ``x * (1 + scale(language)) + shift(language)``.
    """

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.norm1 = nn.LayerNorm(config.dim, eps=1e-6)
        self.attn = Attention(config.dim, config.heads)
        self.ls1 = LayerScale(config.dim) if config.layer_scale else nn.Identity()
        self.norm2 = nn.LayerNorm(config.dim, eps=1e-6)
        self.mlp = Mlp(config.dim, config.mlp_dim)
        self.ls2 = LayerScale(config.dim) if config.layer_scale else nn.Identity()
        if config.film_dim is not None:
            self.scale = nn.Linear(config.film_dim, config.dim)
            self.shift = nn.Linear(config.film_dim, config.dim)

    def forward(self, hidden: Tensor, language: Tensor | None = None) -> Tensor:
        hidden = hidden + self.ls1(self.attn(self.norm1(hidden)))
        if language is not None:
            hidden = hidden * (1 + self.scale(language).unsqueeze(1)) + self.shift(language).unsqueeze(1)
        return hidden + self.ls2(self.mlp(self.norm2(hidden)))


class Attention(nn.Module):
    """Bidirectional self-attention with one projection for queries, keys and values."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, hidden: Tensor) -> Tensor:
        query, key, value = self.qkv(hidden).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))


class LayerScale(nn.Module):
    """Learned scale per channel, by the checkpoints' name."""

    def __init__(self, dim: int):
        super().__init__()
        self.scale_factor = nn.Parameter(torch.ones(dim))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * self.scale_factor
