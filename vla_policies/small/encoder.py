"""What the small policies see: image, instruction and state as one token each.

Image -> convolutions -> spatial-softmax keypoints -> one token; instruction and state -> one token each. Spatial
softmax: Levine et al. 2016, "End-to-End Training of Deep Visuomotor Policies". On few demonstrations it makes the
policy look at the image, which patch tokens did not. Where the maps start matters: nearly equal ones under a sharp
softmax put all keypoints into the middle of the image, and a policy that finds nothing there learns to do without.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Literal, Protocol

import torch
from annotated_types import Ge, Le
from torch import Tensor, nn
from torch.nn import functional as F

from vla_policies.checkpoint.settings import SettingError
from vla_policies.small.text import HashedText

Part = Annotated[float, Ge(0), Le(1)]  # of the image's height or width
Crop = tuple[Part, Part, Part, Part]
Compute = Literal["float32", "bf16"]

_GROUPS = 4  # of channels that are normalised together
_LEAST = 8  # pixels of a side of what is cut out


class EncoderConfig(Protocol):
    """Sizes of a :class:`SmallEncoder` and of the transformer that reads it."""

    @property
    def state_dim(self) -> int:
        """Length ``S`` of ``states``."""

    @property
    def dim(self) -> int:
        """Width of a token."""

    @property
    def heads(self) -> int:
        """Attention heads of the transformer."""

    @property
    def channels(self) -> tuple[int, int, int]:
        """Channels of the three convolutions."""

    @property
    def keypoints(self) -> int:
        """Points that the images are reduced to."""

    @property
    def text_buckets(self) -> int:
        """Rows of the embedding that words are hashed into."""

    @property
    def crop(self) -> Crop | None:
        """What is cut out of the image: top, left, height and width as parts of it; all of it if ``None``."""

    @property
    def blind(self) -> bool:
        """See black images only."""

    @property
    def compute(self) -> Compute:
        """What the network computes in; its weights are float32."""


def check_sizes(config: EncoderConfig) -> None:
    """Refuse sizes that make no network.

    Raises:
        ValueError: says which setting.
    """
    if config.dim % config.heads:
        raise SettingError(f"heads={config.heads}: must divide dim={config.dim}; type heads=4 with dim=128")
    if any(number % _GROUPS for number in config.channels[1:]):
        channels = list(config.channels)
        raise SettingError(f"channels={channels}: the last two must be multiples of {_GROUPS}; type [16,32,48]")
    if config.crop is not None:
        top, left, height, width = config.crop
        if min(height, width) <= 0 or top + height > 1 or left + width > 1:
            raise SettingError(
                f"crop={list(config.crop)}: [top, left, height, width] are parts of the image, and what is cut out "
                "lies within it; type [0.2,0.3,0.6,0.6], or null for all of it"
            )


@contextmanager
def computing(config: EncoderConfig, device: torch.device) -> Iterator[None]:
    """Within, a small policy's network runs: with ``compute="bf16"`` most of it in bfloat16.

    Whether it acts or learns. PyTorch's fast path of transformers, which is taken where nothing is learnt, does not
    know autocast on CPUs and computes in float32: log-probabilities of a rollout would not be those of the update.
    """
    if config.compute != "bf16":
        yield
        return
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.autocast(device.type, torch.bfloat16):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


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
        self.sight = nn.Identity()  # image and instruction pass through it: see VLAPolicy.sight

    def set_statistics(self, state_mean: Tensor, state_std: Tensor) -> None:
        """Set the normalisation of ``states``: two tensors ``[S]``."""
        self.state_mean.copy_(state_mean)
        self.state_std.copy_(state_std)

    def forward(self, images: Tensor, states: Tensor, prompt_tokens: Tensor) -> Tensor:
        if images.dtype != torch.uint8:
            raise ValueError(
                f"images are uint8 [N, H, W, 3] from 0 to 255, got {images.dtype}; of values from 0 to 1 pass (255 * "
                "images).to(torch.uint8)"
            )
        text = self.text_projection(self.text(prompt_tokens))
        seen = self.sight(torch.cat([self._look(images), text], dim=-1))
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

    def tokenize(self, task_descriptions: Sequence[str]) -> Tensor:
        """Return tokens int64 ``[N, L]`` of ``N`` instructions, on the device of the module."""
        return self.text.tokenize(task_descriptions).to(self.state_mean.device)


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
        return self.project(spatial_softmax(maps.float(), self.log_sharpness.squeeze().exp()))


def spatial_softmax(maps: Tensor, sharpness: Tensor) -> Tensor:
    """Return the expected position of each map: ``[N, K, H, W]`` -> ``[N, 2 K]``, coordinates from -1 to 1."""
    weights = (maps.flatten(2) * sharpness).softmax(-1).view_as(maps)
    rows, columns = (torch.linspace(-1, 1, size, device=maps.device) for size in maps.shape[-2:])
    # No matrix products, which autocast would round to bfloat16: to a seventh of a pixel.
    return torch.cat([(weights.sum(2) * columns).sum(-1), (weights.sum(3) * rows).sum(-1)], dim=-1)
