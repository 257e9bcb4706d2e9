"""What is seen behind robot and objects: a photograph of a table, by segmentation, and textures mixed in.

Pictures are resized in double precision: in single precision a few pixels depend on torch's number of threads.
"""

from pathlib import Path

import imageio.v3 as imageio
import torch
import torch.nn.functional as F
from torch import Tensor

from vla_envs.maniskill.assets import model_table

HEIGHT, WIDTH = 480, 640  # of the benchmark's camera and photographs
_ROUNDING = 1e-6  # far above the errors of double precision


class Overlay:
    """Photographs, textures and how strongly each texture is mixed in, by their numbers, for frames on ``device``."""

    def __init__(self, folder: Path, device: torch.device, with_textures: bool):
        entries = model_table(folder, "table")
        self._tables = _stack([entry["folder"] / "imgs" / entry["file"] for entry in entries]).to(device)
        textures = [entry["folder"] / "textures" / entry["texture"] for entry in entries]
        self._textures = _stack(textures).to(device) if with_textures else None
        self._mix = [float(entry["mix"]) for entry in entries]
        self._is_foreground = torch.zeros(2**15, dtype=torch.bool, device=device)

    def set_foreground(self, numbers: list[int]) -> None:
        """Set the numbers of the segmentation that are left as they were drawn: robot and objects."""
        self._is_foreground.zero_()
        self._is_foreground[numbers] = True

    def foreground(self, segmentation: Tensor) -> Tensor:
        """Find where robot and objects are, bool ``[N, 480, 640]``, from int16 ``[N, 480, 640, 1]``."""
        return self._is_foreground[segmentation[..., 0].long()]

    def compose(self, frames: Tensor, segmentation: Tensor, tables: list[int]) -> Tensor:
        """Put photographs behind frames, uint8 ``[N, 480, 640, 3]``, by segmentation, int16 ``[N, 480, 640, 1]``."""
        chosen = self._tables[torch.tensor(tables, device=frames.device)]
        return torch.where(self.foreground(segmentation)[..., None], frames, chosen)

    def perturb(self, frame: Tensor, foreground: Tensor, texture: int, strength: float, everywhere: bool) -> Tensor:
        """Mix a share of a texture, ``strength`` times its ``mix``, into one picture, uint8 ``[480, 640, 3]``.

        Over robot and objects, bool ``[480, 640]``, the texture is stretched to the smallest rectangle around them.
        Over the whole picture, a part of the doubled texture is taken, which the middle of that rectangle chooses.
        """
        assert self._textures is not None, "textures were not loaded"
        share = self._mix[texture] * strength
        left, top, right, bottom = _rectangle(foreground)
        picture, image = frame.double(), self._textures[texture].double()
        if everywhere:
            down = min(max((top + bottom) // 2, 1), HEIGHT - 1)
            along = min(max((left + right) // 2, 1), WIDTH - 1)
            part = _doubled(image)[down : down + HEIGHT, along : along + WIDTH]
            # In single precision, as the benchmark: many sums are whole but for its last digit, which decides.
            return (frame.float() * (1 - share) + part.float() * share).clamp(0, 255).to(torch.uint8)
        inside = slice(top, bottom + 1), slice(left, right + 1)
        part = _resized(image, bottom + 1 - top, right + 1 - left)
        mixed = picture.clone()
        blended = picture[inside] * (1 - share) + part * share
        mixed[inside] = torch.where(foreground[inside][..., None], blended, picture[inside])
        return _pixels(mixed)  # cut off, as the benchmark does


def resize(frames: Tensor, height: int, width: int) -> Tensor:
    """Resize uint8 ``[N, h, w, 3]`` to ``[N, height, width, 3]``, bilinear with antialiasing."""
    if tuple(frames.shape[1:3]) == (height, width):
        return frames
    smaller = F.interpolate(
        frames.permute(0, 3, 1, 2).double(), (height, width), mode="bilinear", antialias=True, align_corners=False
    )
    return _pixels(smaller + 0.5).permute(0, 2, 3, 1).contiguous()


def _stack(paths: list[Path]) -> Tensor:
    pictures = [torch.from_numpy(imageio.imread(path)[..., :3].copy()) for path in paths]
    for path, picture in zip(paths, pictures, strict=True):
        if tuple(picture.shape) != (HEIGHT, WIDTH, 3):
            raise RuntimeError(
                f"{path} has {picture.shape[0]} x {picture.shape[1]} pixels, not {HEIGHT} x {WIDTH}: it is not the "
                "benchmark's; download the assets again"
            )
    return torch.stack(pictures)


def _rectangle(mask: Tensor) -> tuple[int, int, int, int]:
    rows, columns = mask.any(1).nonzero().view(-1), mask.any(0).nonzero().view(-1)
    if not len(rows):
        return 0, 0, 0, 0
    return int(columns[0]), int(rows[0]), int(columns[-1]), int(rows[-1])


def _pixels(values: Tensor) -> Tensor:
    """Return the whole parts as uint8, except for rounding errors."""
    return (values + _ROUNDING).clamp(0, 255).to(torch.uint8)


def _doubled(image: Tensor) -> Tensor:
    """Double the size of a picture to whole numbers as OpenCV does: it cuts off each row's share at a quarter."""
    wide = _resized(image, image.shape[0], 2 * image.shape[1])
    above, below = torch.cat([wide[:1], wide[:-1]]), torch.cat([wide[1:], wide[-1:]])
    quarters = torch.stack([above.floor() + (3 * wide).floor(), (3 * wide).floor() + below.floor()], dim=1)
    return ((quarters + 2) / 4).floor().flatten(0, 1)


def _resized(image: Tensor, height: int, width: int) -> Tensor:
    resized = F.interpolate(image.permute(2, 0, 1)[None], (height, width), mode="bilinear", align_corners=False)
    return resized[0].permute(1, 2, 0)
