"""What a JPEG file does to an image, in plain torch on any device: encoded and decoded as TensorFlow does, bit by bit.

Data sets in RLDS store their frames as JPEG, so OpenVLA-OFT shows frames of a simulator to the model only after a round
trip: ``tf.io.encode_jpeg``, ``tf.io.decode_image``. Both call libjpeg-turbo with quality 95, chroma of half the height
and width, the accurate DCT on the way in and, unlike Pillow and OpenCV, the fast inverse DCT on the way out; that
alone is 1.3 levels of 255 in the mean and 10 at most. Only what loses something is computed, in the integers of the
library; the lossless coding of a file is left out.
"""

from collections.abc import Callable
from functools import lru_cache
from math import cos, pi

import torch
from torch import Tensor
from torch.nn import functional as F

_BLOCK = 8
# Annex K of the standard (ITU-T T.81), luminance and chrominance, scaled to quality 95.
_LUMINANCE = (
    (16, 11, 10, 16, 24, 40, 51, 61),
    (12, 12, 14, 19, 26, 58, 60, 55),
    (14, 13, 16, 24, 40, 57, 69, 56),
    (14, 17, 22, 29, 51, 87, 80, 62),
    (18, 22, 37, 56, 68, 109, 103, 77),
    (24, 35, 55, 64, 81, 104, 113, 92),
    (49, 64, 78, 87, 103, 121, 120, 101),
    (72, 92, 95, 98, 112, 100, 103, 99),
)
_CHROMINANCE = (
    (17, 18, 24, 47, 99, 99, 99, 99),
    (18, 21, 26, 66, 99, 99, 99, 99),
    (24, 26, 56, 99, 99, 99, 99, 99),
    (47, 66, 99, 99, 99, 99, 99, 99),
    *((99,) * 8,) * 4,
)
_PERCENT = 10  # of the tables: 200 - 2 * quality, from quality 50 on
# The accurate DCT as one matrix of 13 fractional bits: left halves of its rows, the right ones mirror them with the
# sign (-1)^row. Sums of the library's rounded constants, so that a few entries are 1 off the cosine's.
_DCT_BITS = 13
_DCT = (
    (8192, 8192, 8192, 8192),
    (11363, 9633, 6437, 2260),
    (10703, 4433, -4433, -10703),
    (9633, -2259, -11362, -6436),
    (8192, -8192, -8192, 8192),
    (6437, -11362, 2261, 9633),
    (4433, -10704, 10704, -4433),
    (2260, -6436, 9633, -11363),
)
_RGB_TO_YCC = ((19595, 38470, 7471), (-11059, -21709, 32768), (32768, -27439, -5329))  # 16 fractional bits
_RED_OF_CR, _BLUE_OF_CB, _GREEN_OF_CB, _GREEN_OF_CR = 91881, 116130, -22554, -46802
_HALF = 1 << 15


def image_by_image(function: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
    """Apply a function of images ``[N, H, W, 3]`` to all at once, or to each on a CPU, which is faster in its cache."""
    if images.device.type != "cpu":
        return function(images)
    return torch.cat([function(image) for image in images.split(1)])


def jpeg_round_trip(images: Tensor) -> Tensor:
    """Return images as TensorFlow would read them from a JPEG file that it wrote: uint8 ``[N, H, W, 3]``, RGB."""
    return image_by_image(_round_trip, images) if len(images) else images


def _round_trip(images: Tensor) -> Tensor:
    height, width = images.shape[1:3]
    red, green, blue = images.to(torch.int32).unbind(-1)
    rounding = (_HALF, (128 << 16) + _HALF - 1, (128 << 16) + _HALF - 1)
    luma, *chroma = [
        (r * red + g * green + b * blue + half) >> 16 for (r, g, b), half in zip(_RGB_TO_YCC, rounding, strict=True)
    ]
    luma = _quantised(_padded(luma, -height % _BLOCK, -width % _BLOCK), _LUMINANCE)[:, :height, :width]
    blue_part, red_part = (_doubled(_quantised(_halved(plane), _CHROMINANCE), height, width) - 128 for plane in chroma)
    decoded = (
        luma + ((_RED_OF_CR * red_part + _HALF) >> 16),
        luma + ((_GREEN_OF_CB * blue_part + _GREEN_OF_CR * red_part + _HALF) >> 16),
        luma + ((_BLUE_OF_CB * blue_part + _HALF) >> 16),
    )
    return torch.stack(decoded, dim=-1).clamp_(0, 255).to(torch.uint8)


def _padded(plane: Tensor, rows: int, columns: int) -> Tensor:
    """Repeat the last row and the last column of ``[N, H, W]``."""
    if not rows and not columns:
        return plane
    return F.pad(plane.unsqueeze(1).double(), (0, columns, 0, rows), mode="replicate").squeeze(1).to(plane.dtype)


def _halved(plane: Tensor) -> Tensor:
    """Average 2 x 2 pixels, rounding down and up by turns, and fill up blocks: ``[N, H, W]`` to ``[N, h, w]``."""
    height, width = plane.shape[1:]
    plane = _padded(plane, height % 2, -width % (2 * _BLOCK))
    bias = 1 + torch.arange(plane.shape[2] // 2, device=plane.device, dtype=plane.dtype) % 2
    rows = plane[:, ::2] + plane[:, 1::2]
    half = (rows[:, :, ::2] + rows[:, :, 1::2] + bias) >> 2
    return _padded(half, -half.shape[1] % _BLOCK, 0)


def _doubled(plane: Tensor, height: int, width: int) -> Tensor:
    """Interpolate to twice the size, a pixel's own value counting three times, per direction: ``[N, H, W]``."""
    plane = plane[:, : (height + 1) // 2, : (width + 1) // 2]
    rows = 3 * plane
    above = torch.cat([plane[:, :1], plane[:, :-1]], dim=1)
    below = torch.cat([plane[:, 1:], plane[:, -1:]], dim=1)
    rows = torch.stack([rows + above, rows + below], dim=2).flatten(1, 2)
    columns = 3 * rows
    left = torch.cat([rows[:, :, :1], rows[:, :, :-1]], dim=2)
    right = torch.cat([rows[:, :, 1:], rows[:, :, -1:]], dim=2)
    doubled = torch.stack([(columns + left + 8) >> 4, (columns + right + 7) >> 4], dim=3).flatten(2, 3)
    return doubled[:, :height, :width]


def _quantised(plane: Tensor, table: tuple[tuple[int, ...], ...]) -> Tensor:
    """Transform int32 ``[N, H, W]`` of whole blocks, quantise, and transform back: levels 0 to 255."""
    matrix, divisor, multiplier = (values.to(plane.device) for values in _tables(table))
    blocks = plane.unflatten(2, (-1, _BLOCK)).unflatten(1, (-1, _BLOCK)) - 128
    # Whole numbers below 2^53, hence exact, and matrix products of integers are only for the CPU.
    rows = ((blocks.double() @ matrix.T) / (1 << (_DCT_BITS - 2)) + 0.5).floor_()
    columns = (torch.einsum("ki,nhiwj->nhkwj", matrix, rows) / (1 << (_DCT_BITS + 2)) + 0.5).floor_()
    levels = columns.sign() * ((columns.abs() + divisor // 2) / divisor).floor_()
    coefficients = levels.to(torch.int32) * multiplier
    spatial = _fast_inverse(_fast_inverse(coefficients, 2), 4)
    return ((spatial >> 5) + 128).clamp_(0, 255).flatten(3, 4).flatten(1, 2)


def _fast_inverse(values: Tensor, dim: int) -> Tensor:
    """Invert the DCT along ``dim``: Arai, Agui and Nakajima's algorithm with 8 fractional bits, cut off."""
    x = values.unbind(dim)
    outer, inner = x[0] + x[4], x[0] - x[4]
    total = x[2] + x[6]
    difference = ((x[2] - x[6]) * 362 >> 8) - total
    even = (outer + total, inner + difference, inner - difference, outer - total)
    a, b, c, d = x[5] + x[3], x[5] - x[3], x[1] + x[7], x[1] - x[7]
    odd = [c + a]
    turned = (b + d) * 473 >> 8
    odd.append((b * -669 >> 8) + turned - odd[0])
    odd.append(((c - a) * 362 >> 8) - odd[1])
    odd.append(-((d * 277 >> 8) - turned + odd[2]))
    first = [left + right for left, right in zip(even, odd, strict=True)]
    last = [left - right for left, right in zip(even, odd, strict=True)]
    return torch.stack([*first, *reversed(last)], dim)


@lru_cache(maxsize=2)
def _tables(table: tuple[tuple[int, ...], ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the DCT float64 ``[8, 8]``, divisors float64 ``[8, 1, 8]`` and multipliers int32 ``[8, 1, 8]``.

    The DCT is scaled by 8; the coefficients of the fast inverse by a product of cosines, with 2 fractional bits.
    """
    half = torch.tensor(_DCT, dtype=torch.float64)
    signs = torch.tensor([1, -1] * 4).unsqueeze(1)
    steps = (torch.tensor(table) * _PERCENT + 50).div(100, rounding_mode="floor").clamp(1, 255).unsqueeze(1)
    cosines = [1.0, *(2**0.5 * cos(k * pi / 16) for k in range(1, _BLOCK))]
    scales = torch.tensor([[[round(row * column * (1 << 14)) for column in cosines]] for row in cosines])
    multiplier = ((steps * scales + (1 << 11)) >> 12).to(torch.int32)
    return torch.cat([half, signs * half.flip(1)], dim=1), steps * 8.0, multiplier
