"""Gemma as it stands in pi0: a stack whose tokens attend to each other and to the keys and values of another stack.

Gemma Team 2024, arXiv 2403.08295; pi0, Black et al. 2024, arXiv 2410.24164; conditioned norms of pi0.5, Physical
Intelligence 2025, arXiv 2504.16054; SmolLM2 (a Llama) and layers that read the other stack alone, of SmolVLA, Shukor et
al. 2025, arXiv 2506.01844. Names are those of openpi's and LeRobot's PyTorch checkpoints.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla_policies.nn import rotary
from vla_policies.nn.blocks import count_layers, run_block

KeysValues = tuple[Tensor, Tensor]
_EPSILON, _LLAMA_EPSILON, _THETA = 1e-6, 1e-5, 10_000.0


@dataclass(frozen=True)
class GemmaConfig:
    """Sizes of a :class:`Gemma`; several query heads share a key-value head.

    ``conditioned``: norms are scaled, shifted and gated by a condition of ``width`` (adaptive RMS norm, pi0.5).
    ``llama``: SiLU, and norms that are scaled by their weight. ``cross``: layers that attend to the tokens before
    alone, whose keys and values they project once more, with positions from 0.
    """

    width: int
    depth: int
    mlp_dim: int
    heads: int
    kv_heads: int
    head_dim: int
    conditioned: bool = False
    llama: bool = False
    cross: tuple[int, ...] = ()

    @classmethod
    def from_shapes(
        cls, shapes: Mapping[str, Sequence[int]], prefix: str, head_dim: int | None = None, **kinds: bool
    ) -> "GemmaConfig":
        """Read sizes from the shapes of tensors ``prefix...``; KeyError if one is missing.

        ``head_dim`` is what shapes do not tell (``None``: there is one key-value head); ``kinds`` as in the class.
        """

        def keys_of(layer: int) -> Sequence[int]:
            return shapes[f"{prefix}layers.{layer}.self_attn.k_proj.weight"]

        queries, width = shapes[f"{prefix}layers.0.self_attn.q_proj.weight"]
        keys, depth = keys_of(0)[0], count_layers(shapes, f"{prefix}layers.")
        head_dim = head_dim or keys
        mlp_dim = shapes[f"{prefix}layers.0.mlp.gate_proj.weight"][0]
        cross = tuple(layer for layer in range(depth) if keys_of(layer)[1] != width)
        return cls(width, depth, mlp_dim, queries // head_dim, keys // head_dim, head_dim, cross=cross, **kinds)


class Gemma(nn.Module):
    """Layers and the final norm; ``vocab_size`` adds the token embeddings."""

    def __init__(self, config: GemmaConfig, vocab_size: int | None = None):
        super().__init__()
        self.config, self.gradient_checkpointing = config, False
        if vocab_size is not None:
            self.embed_tokens = nn.Embedding(vocab_size, config.width)
        self.layers = nn.ModuleList(GemmaLayer(config, index in config.cross) for index in range(config.depth))
        self.norm = _norm(config)

    def forward(
        self,
        hidden: Tensor,  # [N, S, width]
        positions: Tensor,  # int64 [N, S]
        mask: Tensor | None,  # bool [N, 1, S or 1, T]: to which of the P tokens before and these S; None for all
        *,
        before: Sequence[KeysValues] | None = None,  # of the P tokens before, [N, kv_heads, P, head_dim], per layer
        condition: Tensor | None = None,  # [N, width], for conditioned norms
        output: bool = True,
    ) -> tuple[Tensor | None, list[KeysValues]]:
        """Return hidden states ``[N, S, width]`` after the final norm, and keys and values of these tokens per layer.

        Without ``output`` there are no hidden states (``None``), which saves the work of the last layer.
        """
        crossing: tuple[KeysValues, Tensor | None] | None = None
        if self.config.cross:
            assert before is not None  # of the other stack, which they read
            from_zero = rotary.rotation(positions - positions[:, :1], self.config.head_dim, _THETA, hidden.dtype)
            crossing = from_zero, None if mask is None else mask[..., : before[0][0].shape[2]]
        rotation = rotary.rotation(positions, self.config.head_dim, _THETA, hidden.dtype)
        found: list[KeysValues] = []
        for index, layer in enumerate(cast(Iterable[GemmaLayer], self.layers)):
            earlier = None if before is None else before[index]
            if not output and index == len(self.layers) - 1:
                _, own = layer(hidden, rotation, mask, earlier, condition, output=False)
                return None, [*found, own]
            turned, seen = crossing if crossing and index in self.config.cross else (rotation, mask)
            inputs = (hidden, turned, seen, earlier, condition)
            hidden, own = run_block(layer, *inputs, recompute=self.gradient_checkpointing)
            found.append(own)
        return self.norm(hidden, condition)[0], found


class GemmaLayer(nn.Module):
    """Attention and gated MLP, each behind a norm and on a residual path, which the norm may gate."""

    def __init__(self, config: GemmaConfig, cross: bool = False):
        super().__init__()
        self.self_attn = GemmaAttention(config, cross)
        self.mlp = GemmaMLP(config)
        self.input_layernorm = _norm(config)
        self.post_attention_layernorm = _norm(config)

    def forward(
        self,
        hidden: Tensor,
        rotation: KeysValues,
        mask: Tensor | None,
        before: KeysValues | None,
        condition: Tensor | None,
        output: bool = True,
    ) -> tuple[Tensor | None, KeysValues]:
        """Return hidden states, ``None`` without ``output``, and keys and values."""
        normed, gate = self.input_layernorm(hidden, condition)
        if not output:
            return None, self.self_attn.keys_values(normed, rotation)
        attended, own = self.self_attn(normed, rotation, mask, before)
        hidden = hidden + (attended if gate is None else attended * gate)
        normed, gate = self.post_attention_layernorm(hidden, condition)
        changed = self.mlp(normed)
        return hidden + (changed if gate is None else changed * gate), own


class GemmaAttention(nn.Module):
    """Attention with rotary positions over the tokens before and these; with ``cross`` over those before alone."""

    def __init__(self, config: GemmaConfig, cross: bool = False):
        super().__init__()
        self.head_dim, self.cross = config.head_dim, cross
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
        read = keys if cross else config.width
        self.q_proj = nn.Linear(config.width, queries, bias=False)
        self.k_proj = nn.Linear(read, keys, bias=False)
        self.v_proj = nn.Linear(read, keys, bias=False)
        self.o_proj = nn.Linear(queries, config.width, bias=False)

    def keys_values(self, hidden: Tensor, rotation: KeysValues) -> KeysValues:
        """Return keys (already turned by their positions) and values ``[N, kv_heads, S, head_dim]``."""
        return rotary.rotate(self._heads(self.k_proj(hidden)), rotation), self._heads(self.v_proj(hidden))

    def forward(
        self, hidden: Tensor, rotation: KeysValues, mask: Tensor | None, before: KeysValues | None
    ) -> tuple[Tensor, KeysValues]:
        queries = rotary.rotate(self._heads(self.q_proj(hidden)), rotation)
        if self.cross:
            assert before is not None
            keys, values = (each.transpose(1, 2).flatten(2) for each in before)
            own = keys, values = self._heads(self.k_proj(keys)), self._heads(self.v_proj(values))
        else:
            own = keys, values = self.keys_values(hidden, rotation)
            if before is not None:
                keys, values = (torch.cat(both, dim=2) for both in zip(before, own, strict=True))
        shared = queries.shape[1] != keys.shape[1]
        out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=shared)
        return self.o_proj(out.transpose(1, 2).flatten(2)), own

    def _heads(self, projected: Tensor) -> Tensor:
        return projected.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class GemmaMLP(nn.Module):
    """``down(gelu(gate(x)) * up(x))``, with the tanh approximation of GELU, or SiLU."""

    def __init__(self, config: GemmaConfig):
        super().__init__()
        self.silu = config.llama
        self.gate_proj = nn.Linear(config.width, config.mlp_dim, bias=False)
        self.up_proj = nn.Linear(config.width, config.mlp_dim, bias=False)
        self.down_proj = nn.Linear(config.mlp_dim, config.width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        gate = self.gate_proj(hidden)
        return self.down_proj((F.silu(gate) if self.silu else F.gelu(gate, approximate="tanh")) * self.up_proj(hidden))


class Norm(nn.Module):
    """RMS norm in float32, scaled by ``1 + weight``, or with ``llama`` by ``weight``; its gate is ``None``."""

    def __init__(self, width: int, llama: bool):
        super().__init__()
        self.weight, self.llama = nn.Parameter(torch.full((width,), float(llama))), llama

    def forward(self, hidden: Tensor, condition: Tensor | None = None) -> tuple[Tensor, None]:
        weight = self.weight.float()
        scale, epsilon = (weight, _LLAMA_EPSILON) if self.llama else (1 + weight, _EPSILON)
        return (_normalised(hidden, epsilon) * scale).to(hidden.dtype), None


class ConditionedNorm(nn.Module):
    """RMS norm in float32 whose scale, shift and gate are linear in a condition ``[N, width]``."""

    def __init__(self, width: int):
        super().__init__()
        self.dense = nn.Linear(width, 3 * width)

    def forward(self, hidden: Tensor, condition: Tensor) -> tuple[Tensor, Tensor]:
        scale, shift, gate = self.dense(condition).unsqueeze(1).chunk(3, dim=-1)
        normed = _normalised(hidden) * (1 + scale.float()) + shift.float()
        return normed.to(hidden.dtype), gate.to(hidden.dtype)


def _norm(config: GemmaConfig) -> Norm | ConditionedNorm:
    return ConditionedNorm(config.width) if config.conditioned else Norm(config.width, config.llama)


def _normalised(hidden: Tensor, epsilon: float = _EPSILON) -> Tensor:
    hidden = hidden.float()
    return hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + epsilon)
