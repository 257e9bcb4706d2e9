"""The frames of a video as people want to see them: large enough, and with a text below."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
from PIL import Image, ImageDraw, ImageFont

_WATCHABLE = 256  # pixels of the longer side
_SMALLEST, _SHARE = 9, 0.05  # height of the letters: pixels, and of the frame's width
_WHITE = 255


def enlarge(frames: np.ndarray) -> np.ndarray:
    """Repeat the pixels of small frames, until the longer side has 256 or more: uint8 ``[T, H, W, 3]``.

    They are what the policy saw: nothing is smoothed, and nothing drawn anew.
    """
    factor = -(-_WATCHABLE // max(frames.shape[1:3]))
    return frames.repeat(factor, axis=1).repeat(factor, axis=2)


def describe(told: str, so_far: float, solved: bool) -> str:
    """Return what stands below a frame: what the policy was told, the return so far, and that it is solved."""
    return f"{told}\nreturn {so_far:.2f}{', solved' if solved else ''}"


def caption(frames: np.ndarray, texts: Sequence[str]) -> np.ndarray:
    """Write a text below each frame, white on black, in as many lines as the longest of them needs.

    Args:
        frames: uint8 ``[T, H, W, 3]``.
        texts: one for each, of one line or several.

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
    for paragraph in text.splitlines():
        begun = len(lines)
        for word in paragraph.split():
            if len(lines) > begun and _font(size).getlength(f"{lines[-1]} {word}") <= width:
                lines[-1] += f" {word}"
            else:
                lines.append(word)
    return lines
