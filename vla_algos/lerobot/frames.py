"""Images of a data set of LeRobot, decoded when a batch asks for them."""

import io
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vla_algos.lerobot.dataset import VIDEOS, Camera, LeRobotFolder, damaged, needs, reading

MEMORY = 2**30  # bytes of encoded images that are kept; more are read again
_VIDEOS = 16  # that are kept open


class FrameReader:
    """Reads the images of some cameras; a ``ModuleNotFoundError`` if what decodes videos is not installed.

    Of parquet files the encoded images of a row group (LeRobot writes one per episode) are read together, and kept
    while they take less than :data:`MEMORY` in all. Of videos single frames are decoded, from the key frame before.
    """

    def __init__(self, folder: LeRobotFolder):
        self.folder = folder
        self._groups: dict[tuple[str, int, int], Any] = {}  # encoded images, by camera, file and row group
        self._video = lru_cache(_VIDEOS)(partial(_open_video, folder.path))

    def read(self, camera: Camera, frames: np.ndarray) -> np.ndarray:
        """Return images uint8 ``[K, H, W, 3]`` of frames, int64 ``[K]``, numbers of rows of the folder's table.

        ValueError: an image is missing, cannot be decoded, or has another size than the data set says.
        """
        images = np.empty((len(frames), camera.height, camera.width, 3), np.uint8)
        table = self.folder.table
        read = self._from_video if camera.video else self._from_table
        places = sorted(range(len(frames)), key=lambda place: (table.episode[frames[place]], table.step[frames[place]]))
        for place in places:  # in the order of the files
            image = read(camera, int(frames[place]))
            if image.shape != images.shape[1:]:
                has, said = f"{image.shape[0]} x {image.shape[1]}", f"{camera.height} x {camera.width}"
                what = f"an image of {camera.name} has {has} pixels, meta/info.json says {said}"
                raise damaged(self.folder.path, what)
            images[place] = image
        return images

    def _from_table(self, camera: Camera, frame: int) -> np.ndarray:
        table, path = self.folder.table, self.folder.path
        file, group, row = int(table.file[frame]), int(table.group[frame]), int(table.row[frame])
        if (key := (camera.name, file, group)) not in self._groups:
            with reading(path, table.files[file]) as opened:
                column = opened.read_row_group(group, columns=[camera.name])[camera.name]
            images = column.combine_chunks().field("bytes") if str(column.type).startswith("struct") else column
            while self._groups and images.nbytes + sum(each.nbytes for each in self._groups.values()) > MEMORY:
                del self._groups[next(iter(self._groups))]  # the oldest
            self._groups[key] = images
        encoded = self._groups[key][row].as_py()
        where = f"{camera.name} of frame {table.step[frame]} of episode {table.episode[frame]}"
        if not isinstance(encoded, bytes):
            raise damaged(path, f"{where} is not in its parquet file")
        try:
            image = Image.open(io.BytesIO(encoded), formats=("PNG", "JPEG"))
            if image.size != (camera.width, camera.height):  # it may be huge, and is refused by its size
                return np.empty((image.height, image.width, 0), np.uint8)
            return np.asarray(image.convert("RGB"))
        except (OSError, ValueError, Image.DecompressionBombError) as error:
            raise damaged(path, f"{where} is no image: {error}") from None

    def _from_video(self, camera: Camera, frame: int) -> np.ndarray:
        folder = self.folder
        file, begin = folder.video(camera.name, int(folder.table.episode[frame]))
        video = self._video(file)
        wanted = begin + int(folder.table.step[frame]) / folder.fps
        stream = video.streams.video[0]
        try:
            # A little earlier: rounding must not skip a key frame at the very time.
            video.seek(max(0, int((wanted - 0.25 / folder.fps) / stream.time_base)), stream=stream, backward=True)
            for image in video.decode(stream):
                ahead = image.pts * float(stream.time_base) - wanted
                if ahead > 0.5 / folder.fps:
                    break
                if ahead > -0.5 / folder.fps:
                    return image.to_ndarray(format="rgb24")
        except (OSError, ValueError, TypeError) as error:  # PyAV's errors are OSErrors and ValueErrors
            raise damaged(folder.path, f"{file.relative_to(folder.path)}: {error}") from None
        raise damaged(folder.path, f"{file.relative_to(folder.path)} has no frame at {wanted:.3f} s")


def _open_video(path: Path, file: Path) -> Any:
    av = needs(path, *VIDEOS)
    try:
        video = av.open(str(file), format="mp4")  # not what the content asks for, such as a list of addresses
        if not video.streams.video:
            raise ValueError("no video is in it")
    except (OSError, ValueError) as error:
        raise damaged(path, f"{file.relative_to(path)}: {error}") from None
    return video
