"""What the small policies see: image, instruction and state as one token each.

Image -> convolutions -> spatial-softmax keypoints -> one token. Spatial softmax: Levine et al. 2016, "End-to-End
Training of Deep Visuomotor Policies"; on few demonstrations it makes the policy look at the image, which patch tokens
did not. Where the maps start matters: nearly equal ones under a sharp softmax put all keypoints into the middle of the
image, and a policy that finds nothing there learns to do without.
"""

import itertools
import re
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

import torch
from annotated_types import Ge, Le
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.nn import functional as F

from vla_common import keys
from vla_common.settings import Length, Width, check_fields
from vla_common.texts import to_strings
from vla_policies.checkpoint import layout
from vla_policies.checkpoint.settings import SettingError
from vla_policies.policy import VLAPolicy
from vla_policies.small.precision import Compute, computing, settle

Part = Annotated[float, Ge(0), Le(1)]  # of the image's height or width
Crop = tuple[Part, Part, Part, Part]

_GROUPS = 4  # of channels that are normalised together
_LEAST = 8  # pixels of a side of what is cut out
_PADDING, _MAX_WORDS = 0, 24


@dataclass(frozen=True)
class EncoderConfig:
    """Shape of a small policy: its :class:`SmallEncoder` and the transformer that reads it.

    Attributes:
        action_low, action_high: bounds of a primitive action, in the simulator's units.
        state_dim: ``S``.
        chunk_size: ``C``, primitive actions per decision.
        dim, layers, heads: of the transformer.
        channels: of the three convolutions.
        keypoints: number of spatial-softmax maps.
        text_buckets: rows of the hashed word table.
        crop: what is cut out of the image, ``(top, left, height, width)`` as parts of it; all of it if ``None``.
        blind: see black images only: a twin that shows how much of a result needs no looking.
        compute: ``"bf16"`` runs the network in bfloat16 (:func:`torch.autocast`) on weights in float32: faster on
            processors that know bfloat16, many times slower on others. ``"auto"`` becomes ``"bf16"`` on the former and
            ``"float32"`` on the latter, when the policy is made.
    """

    action_low: tuple[float, ...]
    action_high: tuple[float, ...]
    state_dim: int
    chunk_size: Length = 5
    dim: Width = 128
    layers: Annotated[int, Ge(1), Le(100)] = 2
    heads: Width = 4
    channels: tuple[Width, Width, Width] = (16, 32, 48)
    keypoints: Width = 32
    text_buckets: Annotated[int, Ge(2), Le(1_000_000)] = 2048
    crop: Crop | None = None
    blind: bool = False
    compute: Compute = "float32"

    def __post_init__(self) -> None:
        check_fields(self)
        low, high = self.action_low, self.action_high
        if len(low) != len(high) or not all(one < other for one, other in zip(low, high, strict=True)):
            raise SettingError(f"action_low={low}: must be as many numbers as action_high={high}, each below it")
        if self.dim % self.heads:
            near = max(1, self.dim // self.heads) * self.heads
            raise SettingError(f"heads={self.heads}: must divide dim={self.dim}; a dim of {near} would do")
        if any(number % _GROUPS for number in self.channels[1:]):
            channels = list(self.channels)
            raise SettingError(f"channels={channels}: the last two must be multiples of {_GROUPS}; type [16,32,48]")
        if self.crop is not None:
            top, left, height, width = self.crop
            if min(height, width) <= 0 or top + height > 1 or left + width > 1:
                raise SettingError(
                    f"crop={list(self.crop)}: [top, left, height, width] are parts of the image, and what is cut out "
                    "lies within it; type [0.2,0.3,0.6,0.6], or null for all of it"
                )
        settle(self)


def make_trunk(config: EncoderConfig) -> nn.TransformerEncoder:
    """Make the transformer that reads the three tokens and those of the actions."""
    layer = nn.TransformerEncoderLayer(
        config.dim, config.heads, 2 * config.dim, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    )
    return nn.TransformerEncoder(layer, config.layers, nn.LayerNorm(config.dim), enable_nested_tensor=False)


def make_value_head(dim: int, num_values: int) -> nn.Sequential:
    """Make a head on the three tokens ``[N, 3 dim]`` whose values begin as 0."""
    first, second, last = nn.Linear(3 * dim, dim), nn.Linear(dim, dim), nn.Linear(dim, num_values)
    nn.init.zeros_(last.weight)
    return nn.Sequential(first, nn.GELU(), second, nn.GELU(), last)


class SmallEncoder(nn.Module):
    """Image, instruction and state as one token each: ``[N, 3, dim]``. Shared by the small policies."""

    state_mean: Tensor
    state_std: Tensor

    def __init__(self, config: EncoderConfig):
        super().__init__()
        dim = config.dim
        self.register_buffer("state_mean", torch.zeros(config.state_dim))
        self.register_buffer("state_std", torch.ones(config.state_dim))
        self.crop, self.blind = config.crop, config.blind
        self.vision = KeypointEncoder(config.channels, config.keypoints, dim)
        self.text = HashedText(config.text_buckets, dim)
        self.text_projection = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, dim))
        self.state = nn.Sequential(nn.Linear(config.state_dim, dim), nn.GELU(), nn.Linear(dim, dim))
        self.modality = nn.Parameter(0.02 * torch.randn(3, dim))
        self.vision_features = nn.Identity()  # image and instruction pass through it

    def forward(self, images: Tensor, states: Tensor, prompt_tokens: Tensor) -> Tensor:
        if images.dtype != torch.uint8:
            raise ValueError(f"images are uint8 [N, H, W, 3] from 0 to 255, got {images.dtype}")
        text = self.text_projection(self.text(prompt_tokens))
        seen = self.vision_features(torch.cat([self._look(images), text], dim=-1))
        state = self.state((states - self.state_mean) / self.state_std)
        return torch.stack([*seen.chunk(2, dim=-1), state], dim=1) + self.modality

    def _look(self, images: Tensor) -> Tensor:
        if self.crop is not None:
            size = images.shape[1:3]
            top, left, height, width = (round(part * size[n % 2]) for n, part in enumerate(self.crop))
            if min(height, width) < _LEAST:
                raise ValueError(
                    f"crop={list(self.crop)} leaves {height} x {width} of {size[0]} x {size[1]} pixels; take a larger "
                    "image (env.image_size), or cut out more"
                )
            images = images[:, top : top + height, left : left + width]
        if self.blind:  # all see the same
            return self.vision(torch.zeros_like(images[:1])).expand(len(images), -1)
        return self.vision(images)


class SmallPolicy(VLAPolicy):
    """What small policies leave to their :class:`SmallEncoder`."""

    encoder: SmallEncoder

    @classmethod
    def _restore(cls, path: Path, settings: dict[str, Any], device: torch.device | str) -> Self:
        with torch.device("meta"), suppress(TypeError):  # of unknown settings, which are refused below
            layout.load(cls(cls.config_class(**settings)), path, check=True)  # a small file can claim a large policy
        return super()._restore(path, settings, device)

    @property
    def vision_features(self) -> nn.Module:
        return self.encoder.vision_features

    def set_statistics(self, state_mean: Tensor, state_std: Tensor) -> None:
        if not self.encoder.state_mean.any():  # it is new; what another has learnt is of those that it has
            self.encoder.state_mean.copy_(state_mean)
            self.encoder.state_std.copy_(state_std)

    def take_statistics(self, name: str, actions: Tensor, states: Tensor, step_mask: Tensor) -> None:
        if self.encoder.state_mean.any():  # a new policy's are set as it is cloned
            self.encoder.state_mean.copy_(states.mean(0))
            self.encoder.state_std.copy_(states.std(0, correction=0) + 1e-2)  # a constant entry must not be blown up

    def prompt_tokens(self, task_descriptions: Sequence[str], states: Tensor | None = None) -> Tensor:
        return self.encoder.text.tokenize(task_descriptions).to(self.encoder.state_mean.device)

    # ---- to be steered: vla_policies.steered.Steerable

    def write_prompt(self, tensordict: TensorDictBase) -> TensorDictBase:
        tokens = self.prompt_tokens(to_strings(tensordict))
        tensordict.set(keys.PROMPT_TOKENS, tokens)
        return tensordict.select(keys.IMAGES, keys.STATES).to(tokens.device).set(keys.PROMPT_TOKENS, tokens)

    def observe(self, tensordict: TensorDictBase) -> Tensor:
        images, *others = (tensordict.get(key) for key in (keys.IMAGES, keys.STATES, keys.PROMPT_TOKENS))
        with computing(self.config, images.device):
            return self.encoder(images, *others).float()

    def keep_features(self) -> int:
        return 3 * self.config.dim

    def features(self, observed: Tensor) -> Tensor:
        return F.layer_norm(observed, observed.shape[2:]).flatten(1)


class HashedText(nn.Module):
    """Mean embedding of the words and adjacent word pairs of an instruction (as fastText does for n-grams).

    Words that share one of ``num_buckets`` cannot be told apart; instructions are cut after 24 words.
    """

    def __init__(self, num_buckets: int, dim: int):
        super().__init__()
        self.num_buckets = num_buckets
        self.table = nn.Embedding(num_buckets, dim, padding_idx=_PADDING)

    def tokenize(self, texts: Sequence[str]) -> Tensor:
        """Return bucket ids int64 ``[N, 48]``, padded with 0."""
        tokens = torch.full((len(texts), 2 * _MAX_WORDS), _PADDING)
        for row, text in zip(tokens, texts, strict=True):
            words = re.findall(r"[\w-]+", text.lower())[:_MAX_WORDS]
            grams = words + [f"{a} {b}" for a, b in itertools.pairwise(words)]
            buckets = [1 + zlib.crc32(gram.encode()) % (self.num_buckets - 1) for gram in grams]
            row[: len(buckets)] = torch.tensor(buckets, dtype=torch.int64)
        return tokens

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the embeddings ``[N, dim]`` of tokens ``[N, L]``."""
        count = (tokens != _PADDING).sum(-1, keepdim=True).clamp_min(1)
        return self.table(tokens).sum(-2) / count


class KeypointEncoder(nn.Module):
    """Where in the image each of a number of learned features is: one token ``[N, dim]``."""

    def __init__(self, channels: tuple[int, int, int], keypoints: int, dim: int):
        super().__init__()
        first, second, third = channels
        self.first = nn.Conv2d(5, first, kernel_size=5, stride=2, padding=2)
        self.second = nn.Conv2d(first, second, kernel_size=3, stride=2, padding=1)
        self.second_norm = nn.GroupNorm(_GROUPS, second)
        self.third = nn.Conv2d(second, third, kernel_size=3, padding=1)
        self.third_norm = nn.GroupNorm(_GROUPS, third)
        self.maps = nn.Conv2d(third, keypoints, kernel_size=1)
        nn.init.kaiming_normal_(self.maps.weight)  # maps that differ, and a softmax that follows them:
        self.log_sharpness = nn.Parameter(torch.ones(1))
        self.project = nn.Sequential(nn.Linear(2 * keypoints, dim), nn.GELU(), nn.Linear(dim, dim))

    def forward(self, images: Tensor) -> Tensor:
        pixels = images.permute(0, 3, 1, 2).to(self.maps.weight.dtype) / 127.5 - 1.0
        rows, columns = (torch.linspace(-1, 1, size, device=images.device) for size in pixels.shape[-2:])
        grid = torch.stack(torch.meshgrid(columns, rows, indexing="xy")).expand(len(pixels), -1, -1, -1)
        features = F.relu(self.first(torch.cat([pixels, grid], dim=1)))
        features = F.relu(self.second_norm(self.second(features)))
        maps = self.maps(F.relu(self.third_norm(self.third(features))))
        weights = (maps.float().flatten(2) * self.log_sharpness.squeeze().exp()).softmax(-1).view_as(maps)
        rows, columns = (torch.linspace(-1, 1, size, device=maps.device) for size in maps.shape[-2:])
        # The expected position of each. No matrix products: autocast would round them to a seventh of a pixel.
        return self.project(torch.cat([(weights.sum(2) * columns).sum(-1), (weights.sum(3) * rows).sum(-1)], dim=-1))
