"""Videos for those who show GIFs alone."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import imageio

_LARGEST = 320  # pixels of a side: a GIF of an episode is to be some hundred kilobytes


def as_gif(path: Path) -> tuple[bytes, int, int]:
    """Read a video and return it as an animated GIF, with its height and width in pixels.

    Of a larger one every second or third pixel is taken, so that no side has more than 320. A GIF counts time in
    hundredths of a second: 8 frames per second become 7.7 or 8.3.

    Raises:
        OSError: it cannot be read.
    """
    with contextlib.closing(imageio.get_reader(path)) as reader:
        about = reader.get_meta_data()
        every = -(-max(about["size"]) // _LARGEST)
        frames = [frame[::every, ::every] for frame in reader.iter_data()]
    gif = io.BytesIO()
    imageio.mimwrite(gif, frames, format="GIF", duration=1000 / about["fps"], loop=0)
    return gif.getvalue(), *frames[0].shape[:2]
