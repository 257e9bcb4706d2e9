"""Llama-2, the language model of OpenVLA: causal or bidirectional, with a key-value cache, on checkpoint names.

Touvron et al. 2023, arXiv 2307.09288.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from vla_policies.nn import rotary


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a :class:`Llama`, named as in a checkpoint's ``text_config``; the defaults are those of OpenVLA-7B.

    The published OpenVLA checkpoints leave ``rms_norm_eps`` to the default of ``transformers``, which is 1e-6.
    """

    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = 32
    vocab_size: int = 32064
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0

    @classmethod
    def from_dict(cls, text_config: Mapping[str, Any]) -> LlamaConfig:
        """Read the ``text_config`` of a ``config.json``; entries that do not shape the model are ignored."""
        known = {entry.name: text_config[entry.name] for entry in fields(cls) if entry.name in text_config}
        known.setdefault("num_key_value_heads", known.get("num_attention_heads", cls.num_attention_heads))
        return cls(**known)

    @property
    def head_dim(self) -> int:
        """Numbers of a query or key."""
        return self.hidden_size // self.num_attention_heads


class KeyValueCache:
    """Keys and values of the tokens seen so far, for decoding token by token.

    No dataclass: FSDP2 copies those among the arguments of a layer, and what is appended to a copy is lost.

    Attributes:
        capacity: tokens that fit.
        length: tokens seen.
        layers: per layer, keys and values ``[N, heads, capacity, head_dim]``.
    """

    def __init__(self, capacity: int):
        self.capacity, self.length = capacity, 0
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store ``[N, heads, S, head_dim]`` after the ``length`` tokens seen; returns all keys and values so far."""
        end = self.length + keys.shape[2]
        if end > self.capacity:
            raise ValueError(f"the cache has room for {self.capacity} tokens, not for {end}")
        if layer not in self.layers:
            shape = (*keys.shape[:2], self.capacity, keys.shape[3])
            self.layers[layer] = (keys.new_empty(shape), values.new_empty(shape))
        all_keys, all_values = self.layers[layer]
        all_keys[:, :, self.length : end], all_values[:, :, self.length : end] = keys, values
        return all_keys[:, :, :end], all_values[:, :, :end]


class Llama(nn.Module):
    """Embeddings in, hidden states out; logits only for the rows of the vocabulary that are asked for.

    Attributes:
        gradient_checkpointing: recompute the layers in the backward pass instead of keeping their activations.
    """

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.config = config
        self.gradient_checkpointing = False
        self.model = LlamaModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the embeddings ``[..., hidden]`` of token ids ``[...]``."""
        return self.model.embed_tokens(tokens)

    def hidden_states(
        self,
        embeddings: Tensor,
        valid: Tensor,
        positions: Tensor,
        *,
        causal: bool,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """Return the hidden states ``[N, S, hidden]`` after the final norm.

        Args:
            embeddings: ``[N, S, hidden]``, the tokens that are new to the cache.
            valid: bool ``[N, T]``, which of all tokens may be attended to: the cached ones and the ``S`` new ones.
                The first is never padding.
            positions: int64 ``[N, S]`` of the new tokens; those of padding do not matter.
            causal: attend to earlier tokens only; otherwise every token attends to all.
            cache: is extended by the new tokens.
        """
        attention = _attention_mask(valid, embeddings.shape[1], causal)
        rotation = rotary.rotation(positions, self.config.head_dim, self.config.rope_theta, embeddings.dtype)
        hidden = embeddings
        for index, layer in enumerate(self.model.layers):
            if self.gradient_checkpointing and cache is None and torch.is_grad_enabled():
                hidden = checkpoint(layer, hidden, rotation, attention, use_reentrant=False)
            else:
                hidden = layer(hidden, rotation, attention, cache, index)
        if cache is not None:
            cache.length += embeddings.shape[1]
        return self.model.norm(hidden)

    def window_logits(self, hidden: Tensor, window: slice) -> Tensor:
        """Return logits float32 ``[..., W]`` of the ``W`` token ids in ``window``, without those of the other ids.

        Knows the low-rank update that peft puts around ``lm_head``: ``x W^T + scaling (x A^T) B^T``.
        """
        hidden = hidden.float()
        head: Any = self.lm_head
        base = getattr(head, "base_layer", head)
        logits = F.linear(hidden, base.weight[window].float())
        if base is head or head.disable_adapters or head.merged:
            return logits
        for name in head.active_adapters:
            down, up = head.lora_A[name].weight.float(), head.lora_B[name].weight[window].float()
            logits = logits + head.scaling[name] * F.linear(F.linear(hidden, down), up)
        return logits


class LlamaModel(nn.Module):
    """Everything but the vocabulary's logits."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)


class DecoderLayer(nn.Module):
    """Attention and gated MLP, each behind a norm and on a residual path."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        size = config.hidden_size
        self.input_layernorm = nn.RMSNorm(size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(size, config.rms_norm_eps)
        self.mlp = GatedMLP(size, config.intermediate_size)

    def forward(
        self,
        hidden: Tensor,
        rotation: tuple[Tensor, Tensor],
        attention: tuple[Tensor | None, bool],
        cache: KeyValueCache | None = None,
        index: int = 0,
    ) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rotation, attention, cache, index)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Attention(nn.Module):
    """Multi-head attention with rotary positions; several query heads may share one key-value head."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.head_dim = config.head_dim
        queries, keys = config.hidden_size, config.num_key_value_heads * self.head_dim
        self.shared = config.num_key_value_heads != config.num_attention_heads
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=False)

    def forward(
        self,
        hidden: Tensor,
        rotation: tuple[Tensor, Tensor],
        attention: tuple[Tensor | None, bool],
        cache: KeyValueCache | None,
        index: int,
    ) -> Tensor:
        q, k, v = (
            project(hidden).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotary.rotate(q, rotation), rotary.rotate(k, rotation)
        if cache is not None:
            k, v = cache.append(index, k, v)
        mask, is_causal = attention
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal, enable_gqa=self.shared)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class GatedMLP(nn.Module):
    """``down(silu(gate(x)) * up(x))``."""

    def __init__(self, size: int, inner: int):
        super().__init__()
        self.gate_proj = nn.Linear(size, inner, bias=False)
        self.up_proj = nn.Linear(size, inner, bias=False)
        self.down_proj = nn.Linear(inner, size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


def _attention_mask(valid: Tensor, new: int, causal: bool) -> tuple[Tensor | None, bool]:
    """Mask what the ``new`` last of ``T`` tokens may attend to: bool ``[N, 1, new or 1, T]``, and "is causal".

    Without padding there is no mask to read (``None``), which lets the fastest attention kernels run.
    """
    total, padded = valid.shape[1], not bool(valid.all())
    if not causal or new == 1:
        return (valid[:, None, None, :] if padded else None), False
    if not padded and new == total:
        return None, True
    order = torch.ones(new, total, dtype=torch.bool, device=valid.device).tril(total - new)
    return valid[:, None, None, :] & order, False
