"""Text below the frames of a video."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
from PIL import Image, ImageDraw, ImageFont

_SMALLEST, _SHARE = 9, 0.05  # height of the letters: pixels, and of the frame's width
_WHITE = 255


def caption(frames: np.ndarray, texts: Sequence[str]) -> np.ndarray:
    """Write a text below each frame, white on black, in as many lines as the longest of them needs.

    Args:
        frames: uint8 ``[T, H, W, 3]``.
        texts: one for each.

    Returns:
        uint8 ``[T, H + lines, W, 3]``; the frames themselves are what they were.
    """
    width = frames.shape[2]
    size = max(_SMALLEST, int(_SHARE * width))
    height, margin = round(1.4 * size), size // 2
    lines = {text: _wrap(text, size, width - 2 * margin) for text in set(texts)}
    strips = {}
    for text, wrapped in lines.items():
        strip = Image.new("RGB", (width, margin + height * max(map(len, lines.values()))))
        for number, line in enumerate(wrapped):
            ImageDraw.Draw(strip).text((margin, margin // 2 + number * height), line, (_WHITE,) * 3, _font(size))
        strips[text] = np.asarray(strip)
    return np.concatenate([frames, np.stack([strips[text] for text in texts])], axis=1)


@cache
def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)


def _wrap(text: str, size: int, width: int) -> list[str]:
    """Break a text into lines of at most ``width`` pixels; a longer word has a line of its own."""
    lines: list[str] = []
    for word in text.split():
        if lines and _font(size).getlength(f"{lines[-1]} {word}") <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines
