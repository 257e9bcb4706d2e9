"""What an action expert needs of images and prompt: keys and values of a Vision-Language-Model, computed once."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, cast

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.nn import functional as F

from vla_common.keys import PREFIX_KEYS, PREFIX_VALID, PREFIX_VALUES
from vla_policies.nn.gemma import Gemma, KeysValues
from vla_policies.nn.rotary import positions_of
from vla_policies.nn.siglip import Siglip


@dataclass(frozen=True)
class PrefixCache:
    """Keys and values of a prefix."""

    layers: list[KeysValues]  # keys and values [N, kv_heads, P, head_dim] of each
    valid: Tensor  # bool [N, P], which of them are no padding
    output: Tensor | None = None  # hidden states [N, P, width], if they were asked for

    @cached_property
    def full(self) -> bool:
        """Whether none of them is padding; a GPU is asked once, not in each step of denoising."""
        return bool(self.valid.all())

    def repeat(self, count: int) -> "PrefixCache":
        """Return each row ``count`` times in a row, without ``output``."""
        layers = [(k.repeat_interleave(count, dim=0), v.repeat_interleave(count, dim=0)) for k, v in self.layers]
        return PrefixCache(layers, self.valid.repeat_interleave(count, dim=0))

    def mean(self) -> Tensor:
        """Return the mean of ``output`` over its tokens that are no padding: float32 ``[N, width]``."""
        assert self.output is not None  # asked for when it is pooled
        return (self.output.float() * self.valid.unsqueeze(-1)).sum(1) / self.valid.sum(1, keepdim=True)

    def to_entries(self, length: int) -> dict[tuple[str, str], Tensor]:
        """Return it as entries of a TensorDict, filled up to ``length`` tokens: kept while it is frozen."""
        missing = length - self.valid.shape[1]
        first, second = (F.pad(torch.stack(parts, 1), (0, 0, 0, missing)) for parts in zip(*self.layers, strict=True))
        return {PREFIX_KEYS: first, PREFIX_VALUES: second, PREFIX_VALID: F.pad(self.valid, (0, missing))}

    @classmethod
    def from_entries(cls, tensordict: TensorDictBase) -> "PrefixCache | None":
        """Invert :meth:`to_entries`; ``None`` if the batch has no such entries."""
        valid = tensordict.get(PREFIX_VALID, None)
        if valid is None:
            return None
        stored = (tensordict.get(key).unbind(1) for key in (PREFIX_KEYS, PREFIX_VALUES))
        return cls(list(zip(*stored, strict=True)), valid)


class PrefixModel(nn.Module):
    """A VLM that reads images and prompt once, and an expert that denoises actions, by a checkpoint's names.

    A family adds ``velocity``. ``patch_width``: numbers that the projector makes a token of; ``bias``: with one.
    """

    vlm_path: ClassVar[str]  # where the module is, as those below
    vision_path: ClassVar[str]
    projector_path: ClassVar[str]
    language_path: ClassVar[str]
    expert_path: ClassVar[str]

    def __init__(self, config: Any, patch_width: int, bias: bool):
        super().__init__()
        self.config, width = config, config.language.width
        self._place(self.vision_path, Siglip(config.vision))
        self._place(self.projector_path, nn.Linear(patch_width, width, bias=bias))
        self._place(self.language_path, Gemma(config.language, config.vocab_size))
        self._place(self.expert_path, Gemma(config.expert))

    def _place(self, path: str, part: nn.Module) -> None:
        *outer, last = path.split(".")
        place: nn.Module = self
        for name in outer:
            if not hasattr(place, name):
                place.add_module(name, nn.Module())
            place = place.get_submodule(name)
        place.add_module(last, part)

    @property
    def dtype(self) -> torch.dtype:
        """Of the stacks; see :func:`outside_stacks` for what is more precise."""
        return self.language.embed_tokens.weight.dtype

    @property
    def vlm(self) -> nn.Module:
        """What reads images and prompt."""
        return self.get_submodule(self.vlm_path)

    @property
    def vision(self) -> Siglip:
        return cast(Siglip, self.get_submodule(self.vision_path))

    @property
    def projector(self) -> nn.Module:
        return self.get_submodule(self.projector_path)

    @property
    def language(self) -> Gemma:
        return cast(Gemma, self.get_submodule(self.language_path))

    @property
    def expert(self) -> Gemma:
        return cast(Gemma, self.get_submodule(self.expert_path))

    def set_gradient_checkpointing(self, enabled: bool) -> None:
        for part in (self.vision, self.language, self.expert):
            part.gradient_checkpointing = enabled

    def embed_images(self, pixels: Tensor) -> Tensor:
        """Return the tokens ``[N, T, width]`` of images float ``[N, 3, H, W]`` from -1 to 1."""
        return self.projector(self.vision(pixels))

    def embed_prefix(
        self, pixels: Tensor, tokens: Tensor, token_valid: Tensor, image_valid: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the embeddings ``[N, P, width]`` of images and prompt, and which of them are valid, bool ``[N, P]``.

        ``pixels`` are float ``[N, n, 3, H, W]`` from -1 to 1, ``tokens`` int64 ``[N, L]``, ``token_valid`` bool
        ``[N, L]``, ``image_valid`` bool ``[N, n]`` (``None``: all). An image that no row has should be left out.
        """
        count = pixels.shape[1]
        images = self.embed_images(pixels.flatten(0, 1)).unflatten(0, (-1, count))
        text = self.language.embed_tokens(tokens) * math.sqrt(self.config.language.width)
        if image_valid is None:
            image_valid = token_valid.new_ones(len(tokens), count)
        patches = image_valid.repeat_interleave(images.shape[2], dim=1)
        return torch.cat([images.flatten(1, 2), text.to(images.dtype)], dim=1), torch.cat([patches, token_valid], dim=1)

    def prefix(self, *inputs: Tensor, output: bool = False) -> PrefixCache:
        """Compute keys and values of ``embed_prefix(*inputs)``, with ``output`` the last hidden states too."""
        embeddings, valid = self.embed_prefix(*inputs)
        mask = None if bool(valid.all()) else valid[:, None, None, :]
        hidden, layers = self.language(embeddings, positions_of(valid), mask, output=output)
        return PrefixCache(layers, valid, hidden)


def outside_stacks(name: str, stacks: tuple[str, ...]) -> bool:
    """Tell of a tensor whether it is in none of the ``stacks`` (prefixes of names), or of a norm or an image embedding.

    Those stay float32 in a bfloat16 model, as in openpi, with all that actions, state and time pass outside the stacks:
    three digits are too few for noise that K steps take away.
    """
    precise = {"embeddings", "input_layernorm", "post_attention_layernorm", "norm"}
    return not name.startswith(stacks) or not precise.isdisjoint(name.split("."))
