"""Tile videos of episodes into one picture that moves: ``python benchmarks/episodes.py FOLDER --output grid.gif``."""

from __future__ import annotations

import argparse
from pathlib import Path

import imageio.v3 as imageio
import numpy as np
from PIL import Image

_GREEN, _RED = (40, 160, 60), (190, 50, 50)
_BORDER = 3  # pixels, green around an episode that was solved


def tile(path: Path, width: int) -> np.ndarray:
    """Frames uint8 ``[T, H, width, 3]`` of one episode; the colour of the border is its outcome, of the file's name."""
    frames = []
    for frame in imageio.imiter(path):
        image = Image.fromarray(frame)
        image = image.resize((width - 2 * _BORDER, round(image.height * (width - 2 * _BORDER) / image.width)))
        framed = Image.new(
            "RGB", (width, image.height + 2 * _BORDER), _GREEN if path.stem.endswith("_success") else _RED
        )
        framed.paste(image, (_BORDER, _BORDER))
        frames.append(np.asarray(framed))
    return np.stack(frames)


def grid(tiles: list[np.ndarray], columns: int) -> np.ndarray:
    """One film of all, uint8 ``[T, H, W, 3]``; an episode that has ended shows its last frame."""
    length, height = max(map(len, tiles)), max(each.shape[1] for each in tiles)
    width = tiles[0].shape[2]
    whole = np.zeros((length, -(-len(tiles) // columns) * height, columns * width, 3), np.uint8)
    for number, each in enumerate(tiles):
        row, column = divmod(number, columns)
        held = np.concatenate([each, np.repeat(each[-1:], length - len(each), axis=0)])
        whole[:, row * height : row * height + each.shape[1], column * width : (column + 1) * width] = held
    return whole


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "videos", nargs="+", type=Path, help="mp4 files, or folders of them: in the order of their names"
    )
    parser.add_argument("--output", type=Path, required=True, help=".gif, or .png for the last frame alone")
    parser.add_argument("--columns", type=int, default=10)
    parser.add_argument("--width", type=int, default=96, help="pixels of a tile")
    parser.add_argument("--fps", type=float, default=8.0)
    arguments = parser.parse_args()
    paths = [
        path for given in arguments.videos for path in (sorted(given.glob("*.mp4")) if given.is_dir() else [given])
    ]
    if not paths:
        parser.error(f"no .mp4 in {', '.join(map(str, arguments.videos))}; evaluate with eval.videos=50")
    film = grid([tile(path, arguments.width) for path in paths], arguments.columns)
    if arguments.output.suffix == ".png":
        Image.fromarray(film[-1]).save(arguments.output)
        return
    first, *others = (Image.fromarray(frame).quantize(128) for frame in film)
    first.save(
        arguments.output,
        save_all=True,
        append_images=others,
        duration=round(1000 / arguments.fps),
        loop=0,
        optimize=True,
    )


if __name__ == "__main__":
    main()
