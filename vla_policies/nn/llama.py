"""Llama-2, the language model of OpenVLA: layers of transformers, causal or bidirectional, on checkpoint names.

Touvron et al. 2023, arXiv 2307.09288. Importing this module does not import transformers; making a model does.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla_policies.nn import rotary
from vla_policies.nn.blocks import run_block

if TYPE_CHECKING:
    from transformers import DynamicCache


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a :class:`Llama`, named as in a checkpoint's ``text_config``; the defaults are those of OpenVLA-7B.

    Published OpenVLA checkpoints leave ``rms_norm_eps`` to the default of ``transformers``, 1e-6.
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
    def from_dict(cls, text_config: Mapping[str, Any]) -> "LlamaConfig":
        """Read the ``text_config`` of a ``config.json``; entries that do not shape the model are ignored."""
        known = {entry.name: text_config[entry.name] for entry in fields(cls) if entry.name in text_config}
        known.setdefault("num_key_value_heads", known.get("num_attention_heads", cls.num_attention_heads))
        if not all(type(value) in (int, float) and 0 < value < math.inf for value in known.values()):
            raise ValueError(f"text_config {known}: must be finite numbers above 0; copy config.json again")
        return cls(**known)

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads


class Llama(nn.Module):
    """Embeddings in, hidden states out; logits only for the rows of the vocabulary that are asked for."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.config = config
        self.gradient_checkpointing = False
        self.model = LlamaLayers(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def embed(self, tokens: Tensor) -> Tensor:
        return self.model.embed_tokens(tokens)

    def hidden_states(
        self, embeddings: Tensor, valid: Tensor, positions: Tensor, *, causal: bool, cache: "DynamicCache | None" = None
    ) -> Tensor:
        """Return the hidden states ``[N, S, hidden]`` after the final norm, of the tokens that are new to ``cache``.

        Of these are ``embeddings`` ``[N, S, hidden]`` and ``positions`` int64 ``[N, S]``, which do not matter of
        padding; the cache is extended by them. ``valid``, bool ``[N, T]``, says which of the cached and the new tokens
        may be attended to; the first is never padding. ``causal``: attend to earlier tokens only; otherwise to all.
        """
        mask, is_causal = _attention_mask(valid, embeddings.shape[1], causal)
        rotation = rotary.rotation(positions, self.config.head_dim, self.config.rope_theta, embeddings.dtype)
        arguments: dict[str, Any] = {
            "attention_mask": mask,
            "is_causal": is_causal,
            "position_embeddings": tuple(part.squeeze(1) for part in rotation),
            "past_key_values": cache,
        }
        hidden = embeddings
        for layer in self.model.layers:
            hidden = run_block(layer, hidden, recompute=self.gradient_checkpointing and cache is None, **arguments)
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


class LlamaLayers(nn.Module):
    """``transformers.LlamaModel`` without its initialisation and buffers, which would be lost on the meta device."""

    def __init__(self, config: LlamaConfig):
        from transformers.models.llama.configuration_llama import LlamaConfig as TransformersConfig
        from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

        super().__init__()
        sizes = TransformersConfig(**asdict(config) | {"attn_implementation": "sdpa"})
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(LlamaDecoderLayer(sizes, index) for index in range(config.num_hidden_layers))
        for layer in self.layers:  # gradients are clipped by a norm that is summed up in this order
            for name in ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp"):
                layer._modules[name] = layer._modules.pop(name)
        self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)


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
