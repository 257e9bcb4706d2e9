"""Videos (mp4) as people want to see them: large enough, with a text below, and playing everywhere."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import imageio
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from vla_algos import distributed
from vla_algos.evaluation import EvaluationResult
from vla_algos.files import write_atomically

_WATCHABLE = 256  # pixels of the longer side
_SMALLEST, _SHARE = 9, 0.05  # height of the letters: pixels, and of the frame's width


def caption(frames: np.ndarray, texts: Sequence[str]) -> np.ndarray:
    """Enlarge frames, uint8 ``[T, H, W, 3]``, to 256 pixels or more; below each its text: ``[T, H + lines, W, 3]``."""
    factor = -(-_WATCHABLE // max(frames.shape[1:3]))
    frames = frames.repeat(factor, axis=1).repeat(factor, axis=2)
    width = frames.shape[2]
    size = max(_SMALLEST, int(_SHARE * width))
    height, margin = round(1.4 * size), size // 2
    lines = {text: _wrap(text, size, width - 2 * margin) for text in set(texts)}
    strips = {}
    for text, wrapped in lines.items():
        strip = Image.new("RGB", (width, margin + height * max(map(len, lines.values()))))
        for number, line in enumerate(wrapped):
            ImageDraw.Draw(strip).text((margin, margin // 2 + number * height), line, "white", _font(size))
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


def write_video(path: Path, frames: np.ndarray, fps: float) -> Path:
    """Write an mp4 that plays everywhere (H.264, yuv420p), of frames uint8 ``[T, H, W, 3]``.

    Missing folders are made; the last row or column of odd sides is repeated. With one frame per decision, ``fps`` of
    control frequency / chunk length is real time. OSError: it could not be written whole; nothing is left of it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    frames = np.pad(frames, ((0, 0), (0, frames.shape[1] % 2), (0, frames.shape[2] % 2), (0, 0)), mode="edge")
    how: dict[str, Any] = {"codec": "libx264", "macro_block_size": 1, "quality": 8, "ffmpeg_log_level": "fatal"}
    content = imageio.mimwrite("<bytes>", list(frames), "mp4", fps=fps, **how)
    if b"moov" not in content:  # the index, which comes last; ffmpeg's failure goes unnoticed
        raise OSError(f"{path}: ffmpeg broke off; is there room?")
    write_atomically(path, content)
    return path


def save_videos(folder: Path, result: EvaluationResult, fps: float) -> list[Path]:
    """Let rank 0 write the recorded episodes as mp4, named after task, trial and outcome; ``fps`` is of decisions."""
    paths = []
    for index, frames in result.videos.items() if distributed.is_main() else ():
        episode = result.episodes[index]
        outcome = "success" if episode.success_once else "failure"
        name = f"{index:03d}_{episode.task}_trial{episode.episode.trial_id}_{outcome}.mp4"
        paths.append(write_video(folder / name, caption(frames, result.captions[index]), fps))
    return paths
