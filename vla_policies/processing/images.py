"""Image preprocessing in plain torch, on uint8 batches and on any device: the pixels that a checkpoint was trained on.

OpenVLA's order is that of the reference: resize to the model's size, crop (optional), scale to 0..1, normalise once per
vision backbone. Each checkpoint is trained on the pixels of one resize: Pillow's bicubic, to the last bit, or a JPEG
round trip and TensorFlow's Lanczos filter (OpenVLA-OFT). No version of an image library decides a pixel.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from vla_policies.processing.jpeg import image_by_image, jpeg_round_trip
from vla_policies.processing.normalization import numbers

PRECISION_BITS = 22
"""Fixed-point fraction of Pillow's resampling weights for 8-bit images: 32 bits less 8 of a pixel and 2 of headroom."""

CROP_AREA = 0.9


@dataclass(frozen=True)
class ImagePreprocessor:
    """What a checkpoint expects of its images, see :meth:`resize` and :meth:`normalize`."""

    # An RGB triple per vision backbone (DINOv2, SigLIP), for pixels from 0 to 1.
    means: tuple[tuple[float, ...], ...] = ((0.485, 0.456, 0.406), (0.5, 0.5, 0.5))
    stds: tuple[tuple[float, ...], ...] = ((0.229, 0.224, 0.225), (0.5, 0.5, 0.5))
    size: tuple[int, int] = (224, 224)  # height and width of the model's input
    resize_method: str = "bicubic"  # resize_exact; or "lanczos3", a JPEG round trip before resize_lanczos3
    crop: bool = False  # keep the central 0.9 of the area, as for policies that were trained on random crops of it

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, resize_method: str = "bicubic", crop: bool = False) -> Self:
        """Read a checkpoint's ``preprocessor_config.json``; it does not know of the other settings.

        ValueError: an entry is missing, or the images are not to be resized as published OpenVLA models do.
        """
        if missing := [name for name in ("means", "stds", "input_sizes") if name not in config]:
            raise ValueError(f"preprocessor_config.json has no {missing}: is it that of an OpenVLA checkpoint?")
        strategy = config.get("image_resize_strategy", "resize-naive")
        if strategy != "resize-naive" or set(config.get("interpolations", ["bicubic"])) != {"bicubic"}:
            raise ValueError(
                f"preprocessor_config.json asks for {strategy!r} with {config.get('interpolations')}; only "
                "'resize-naive' with 'bicubic', that of the published OpenVLA checkpoints, is supported"
            )
        sizes = {tuple(size[-2:]) for size in config["input_sizes"]}
        if len(sizes) != 1 or not len(config["means"]) == len(config["stds"]) == len(config["input_sizes"]) == 2:
            raise ValueError(
                f"preprocessor_config.json describes {len(config['input_sizes'])} inputs of sizes {sorted(sizes)}; "
                "OpenVLA has two, of one size"
            )
        what = "the colours of preprocessor_config.json"
        means, stds = (tuple(numbers(rgb, what) for rgb in config[name]) for name in ("means", "stds"))
        if {*map(len, means + stds)} != {3} or min(map(min, stds)) <= 0:
            raise ValueError(f"{what} have {means=}, {stds=}: must be three of each, stds above 0; copy it again")
        return cls(means, stds, sizes.pop(), resize_method, crop)

    def resize(self, cameras: Sequence[Tensor]) -> Tensor:
        """Return all that the model sees of ``n`` cameras, cropped: uint8 ``[N, n, h, w, 3]``.

        Each camera is uint8 ``[N, H, W, 3]``, of its own size; else ValueError.
        """
        return torch.stack([self._resize_camera(camera) for camera in cameras], dim=1)

    def _resize_camera(self, images: Tensor) -> Tensor:
        _check(images)
        if self.resize_method == "lanczos3":
            images = resize_lanczos3(jpeg_round_trip(images), self.size)
        else:
            images = resize_exact(images, self.size)
        return center_crop(images) if self.crop else images

    def normalize(self, images: Tensor) -> Tensor:
        """Scale what :meth:`resize` returned: float32 ``[N, 6 n, h, w]``.

        Per camera, three channels are normalised for DINOv2, then three for SigLIP.
        """
        flat = images.flatten(0, 1)
        scaled = [normalize(flat, *statistics) for statistics in zip(self.means, self.stds, strict=True)]
        return torch.cat(scaled, dim=1).unflatten(0, images.shape[:2]).flatten(1, 2)


def resize_exact(images: Tensor, size: tuple[int, int], kernel: str = "bicubic") -> Tensor:
    """Resize as Pillow's ``Image.resize(..., BICUBIC)`` or ``BILINEAR`` does, equal in every bit.

    Pillow resizes columns, then rows, and rounds to 8 bits in between; weights are fixed-point numbers with
    ``PRECISION_BITS`` of fraction. Downscaling widens the filter (antialiasing). uint8 ``[N, H, W, 3]`` (else
    ValueError) to ``[N, h, w, 3]`` of ``size`` ``(h, w)``; ``kernel`` is ``"bicubic"`` or ``"bilinear"``.
    """
    _check(images)
    if images.shape[1:3] == size:
        return images
    height, width = size

    def resize(part: Tensor) -> Tensor:
        return _resize_rows(_resize_rows(part.transpose(1, 2), width, kernel).transpose(1, 2), height, kernel)

    return image_by_image(resize, images)


def resize_lanczos3(images: Tensor, size: tuple[int, int]) -> Tensor:
    """Resize as TensorFlow's ``tf.image.resize(..., method="lanczos3", antialias=True)``, rounded and clipped.

    float32, pixels' centres at halves, the kernel widened when shrinking and cut off at the border; not rounded between
    rows and columns. Shapes and errors as in :func:`resize_exact`.
    """
    _check(images)
    if images.shape[1:3] == size:
        return images

    def resize(part: Tensor) -> Tensor:
        values = part.float()
        for dim in (1, 2):
            if values.shape[dim] != size[dim - 1]:
                first, weights = _lanczos3(values.shape[dim], size[dim - 1], images.device)
                values = _filtered(values, dim, first, weights)
        return values.round_().clamp_(0, 255).to(torch.uint8)

    return image_by_image(resize, images)


def resize_with_pad(images: Tensor, size: tuple[int, int]) -> Tensor:
    """Resize bilinearly in proportion and fill up with black, as openpi does; shapes of :func:`resize_exact`."""
    _check(images)
    height, width = size
    ratio = max(images.shape[1] / height, images.shape[2] / width)
    inner = int(images.shape[1] / ratio), int(images.shape[2] / ratio)
    top, left = (height - inner[0]) // 2, (width - inner[1]) // 2
    padded = images.new_zeros(len(images), height, width, 3)
    padded[:, top : top + inner[0], left : left + inner[1]] = resize_exact(images, inner, "bilinear")
    return padded


def interpolate_with_pad(images: Tensor, size: tuple[int, int], *, centred: bool) -> Tensor:
    """Resize bilinearly in proportion without antialiasing and fill up with black, as LeRobot does.

    uint8 ``[N, H, W, 3]`` to float32 ``[N, 3, h, w]`` from 0 to 1. What is filled up is on the left and top (SmolVLA),
    or, ``centred``, on both sides (pi0).
    """
    _check(images)
    pixels, (height, width) = images.permute(0, 3, 1, 2).float() / 255, size
    ratio = max(images.shape[1] / height, images.shape[2] / width)
    inner = int(images.shape[1] / ratio), int(images.shape[2] / ratio)
    if inner != images.shape[1:3]:
        pixels = F.interpolate(pixels, inner, mode="bilinear", align_corners=False)
    top, left = height - inner[0], width - inner[1]
    below, right = (top - top // 2, left - left // 2) if centred else (0, 0)
    return F.pad(pixels, (left - right, right, top - below, below))


def center_crop(images: Tensor) -> Tensor:
    """Crop the central box with 0.9 of the area and resize it to the whole, bilinearly and without antialiasing.

    The formula of TensorFlow's ``crop_and_resize`` and ``convert_image_dtype``, with which the reference evaluates.
    With ``s = sqrt(0.9)``, output row ``i`` of ``H`` samples the image at ``(H - 1) ((1 - s) / 2 + i s / (H - 1))``,
    between the rows above and below (columns alike); the result ``p`` in 0..1 becomes ``floor(255.5 p)``. uint8
    ``[N, H, W, 3]``.
    """
    _check(images)
    side = CROP_AREA**0.5
    pixels = images * (1 / 255)
    for dim in (2, 1):
        size = images.shape[dim]
        step = side * (size - 1) / max(size - 1, 1)
        position = (1 - side) / 2 * (size - 1) + torch.arange(size, device=images.device) * step
        before = position.long()
        after = (before + 1).clamp_(max=size - 1)
        fraction = (position - before).view(-1, *[1] * (3 - dim))
        pixels = pixels.index_select(dim, before).lerp(pixels.index_select(dim, after), fraction)
    return (pixels * 255.5).clamp_(0, 255).to(torch.uint8)


def normalize(images: Tensor, means: tuple[float, ...], stds: tuple[float, ...]) -> Tensor:
    """Compute ``(images / 255 - means) / stds``: uint8 ``[N, H, W, 3]`` to float32 ``[N, 3, H, W]``."""
    _check(images)
    mean, std = (_of_channels(values, images.device) for values in (means, stds))
    return images.permute(0, 3, 1, 2).div(255).contiguous().sub_(mean).div_(std)


@lru_cache(maxsize=64)
def _of_channels(values: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, device=device).view(3, 1, 1)


def _check(images: Tensor) -> None:
    if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[-1] != 3:
        raise ValueError(f"images {images.dtype} {tuple(images.shape)}; expected torch.uint8 RGB [N, H, W, 3]")


def _resize_rows(images: Tensor, length: int, kernel: str) -> Tensor:
    """Sum weighted rows: uint8 ``[N, H, W, 3]`` to ``[N, length, W, 3]``. Sums fit into 32 bits as in Pillow."""
    if images.shape[1] == length:
        return images
    first, weights = _weights(images.shape[1], length, kernel, images.device)
    rows = images.to(torch.int32, memory_format=torch.contiguous_format)
    total = _filtered(rows, 1, first, weights, 1 << (PRECISION_BITS - 1))
    return (total >> PRECISION_BITS).clamp_(0, 255).to(torch.uint8)


def _filtered(values: Tensor, dim: int, first: Tensor, weights: Tensor, start: int = 0) -> Tensor:
    """Add to ``start`` the ``values`` from ``first`` ``[new]`` on along ``dim``, by ``weights`` ``[taps, new]``."""
    shape = list(values.shape)
    shape[dim] = len(first)
    total = values.new_full(shape, start)
    for tap, weight in enumerate(weights):
        index = (first + tap).clamp_(max=values.shape[dim] - 1)
        total.addcmul_(values.index_select(dim, index), weight.view(-1, *[1] * (3 - dim)))
    return total


@lru_cache(maxsize=64)
def _weights(old: int, new: int, kernel: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the first input of each output int64 ``[new]``, and its weights int32 ``[taps, new]``, fixed-point.

    Keys' cubic with ``a = -0.5``, or a triangle; as wide as the scale when it shrinks, cut at the border, of sum 1.
    """
    reach = {"bicubic": 2, "bilinear": 1}[kernel]
    scale = old / new
    stretch = max(scale, 1.0)
    centre = (torch.arange(new, dtype=torch.float64) + 0.5) * scale
    first = (centre - reach * stretch + 0.5).clamp(min=0).long()
    last = (centre + reach * stretch + 0.5).long().clamp(max=old)
    position = first + torch.arange(int((last - first).max())).unsqueeze(1)
    x = ((position - centre + 0.5) / stretch).abs()
    if kernel == "bilinear":
        weights = (1 - x).clamp(min=0)
    else:
        near = (1.5 * x - 2.5) * x * x + 1
        far = -0.5 * (((x - 5) * x + 8) * x - 4)
        weights = torch.where(x < 1, near, torch.where(x < 2, far, 0.0))
    weights = weights * (position < last)
    weights = weights / weights.sum(0) * (1 << PRECISION_BITS)
    return first.to(device), (weights + weights.sign() / 2).to(device, torch.int32)


@lru_cache(maxsize=64)
def _lanczos3(old: int, new: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the first input of each output int64 ``[new]``, and its weights float32 ``[taps, new]`` of sum 1.

    ``3 sin(pi x) sin(pi x / 3) / (pi x)^2`` up to 3, as wide as the scale when it shrinks. float32 throughout, which
    decides whether an input at the very edge of the kernel counts.
    """
    scale = 1 / (torch.tensor(float(new)) / old)
    stretch = scale.clamp(min=1)
    centre = (torch.arange(new) + 0.5) * scale
    first = (centre - 3 * stretch - 0.5).ceil().long().clamp(0, old - 1)
    last = (centre + 3 * stretch - 0.5).floor().long().clamp(0, old - 1) + 1
    position = first + torch.arange(int((last - first).max())).unsqueeze(1)
    x = ((position + 0.5 - centre) / stretch).abs()
    angle = torch.pi * x
    weights = torch.where(x > 1e-3, 3 * angle.sin() * (angle / 3).sin() / angle.square(), 1.0)
    weights = weights * ((position < last) & (x <= 3))
    return first.to(device), (weights / weights.sum(0)).to(device)
