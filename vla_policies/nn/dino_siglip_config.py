"""Sizes of OpenVLA's vision backbone, read from a checkpoint, and which of its tensors nothing depends on."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

PREFIX = "vision_backbone."
BACKBONES = ("featurizer", "fused_featurizer")
HEADS = {"vit_small": 6, "vit_base": 12, "vit_large": 16, "vit_so400m": 16, "vit_golden": 4}
"""Attention heads by the beginning of a ``timm_model_ids`` entry: the one size that tensor shapes do not tell."""


def heads_of(config: Mapping[str, Any]) -> tuple[int, int]:
    """Return attention heads of the two transformers of a ``config.json``.

    ``vision_heads`` (two integers, ours) wins over what the names in ``timm_model_ids`` tell. ValueError for other than
    two transformers, or one of no known size.
    """
    names = config.get("timm_model_ids") or ()
    heads = config.get("vision_heads") or [
        next((number for start, number in HEADS.items() if name.startswith(start)), None) for name in names
    ]
    if len(heads) != len(BACKBONES):
        raise ValueError(
            f"timm_model_ids of config.json names {len(heads)} vision models {list(names)}; OpenVLA has two"
        )
    if None in heads:
        raise ValueError(
            f"vision model {names[heads.index(None)]!r} of config.json: its number of attention heads is not known "
            f'(known: {", ".join(f"{start}*" for start in HEADS)}); add "vision_heads": [heads of the first, heads '
            "of the second] to config.json"
        )
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
        blocks = {int(found[1]) for name in shapes if (found := re.match(re.escape(prefix) + r"blocks\.(\d+)\.", name))}
        try:
            _, num_patches, dim = shapes[f"{prefix}pos_embed"]
            registers = shapes[f"{prefix}reg_token"][1] if f"{prefix}reg_token" in shapes else 0
            film = shapes.get(f"{prefix}blocks.0.scale.weight")
            return cls(
                dim=dim,
                depth=len(blocks),
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

    @property
    def film_dim(self) -> int | None:
        return self.featurizer.film_dim

    def unused(self, key: str) -> bool:
        """Tell whether a checkpoint's ``key`` never affects the output: last block, final norm, attention pooling.

        Any prefix before ``featurizer`` is accepted, so adapters are judged like the weights that they adapt.
        """
        for name in BACKBONES:
            last = getattr(self, name).depth - 1
            if re.search(rf"(^|\.){name}\.(blocks\.{last}|norm|fc_norm|attn_pool|head)(\.|$)", key):
                return True
        return False
