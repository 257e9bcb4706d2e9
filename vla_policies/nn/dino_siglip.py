"""The vision backbone of OpenVLA: DINOv2 and SigLIP side by side, features of the second-to-last block.

Names are those of the published checkpoints (timm's). Only what the output depends on is built, see
:meth:`~vla_policies.nn.dino_siglip_config.VisionConfig.unused`. OpenVLA, Kim et al. 2024 (arXiv 2406.09246); DINOv2
with registers, Darcet et al. 2023 (arXiv 2309.16588); SigLIP, Zhai et al. 2023 (arXiv 2303.15343); FiLM in
OpenVLA-OFT, Kim et al. 2025 (arXiv 2502.19645).
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla_policies.nn.blocks import Mlp, run_block
from vla_policies.nn.dino_siglip_config import TransformerConfig, VisionConfig


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
        prefix = [getattr(self, name) for name in ("cls_token", "reg_token") if hasattr(self, name)]
        if prefix:
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
