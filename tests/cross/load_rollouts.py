"""LeRobot loads what ``vla-recipe rollouts`` wrote: by hand, in an environment of LeRobot's own. No test.

    python tests/cross/load_rollouts.py FOLDER

With LeRobot 0.4.4, its ``datasets`` and ``pandas`` installed by ``pip install --no-deps``: what it imports of
torchvision is put in place by hand, since that cannot stand beside our torch. Every frame is compared with its PNG.
"""

import importlib.machinery
import io
import sys
import types

import numpy as np
import pyarrow.parquet as pq
import torch
from PIL import Image

V1, V2 = "torchvision.transforms", "torchvision.transforms.v2"


def stand_in() -> None:
    """Let LeRobot import torchvision; of it, the reader of images takes ``ToTensor`` alone."""

    class ToTensor:
        def __call__(self, image):
            return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255

    names = ("torchvision", V1, V2, f"{V1}.functional", f"{V2}.functional")
    for name in names:
        module = types.ModuleType(name)
        module.__spec__, module.__path__ = importlib.machinery.ModuleSpec(name, None), []
        sys.modules[name] = module
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], own, module)
    sys.modules[V1].ToTensor = ToTensor
    for name in ("Transform", "Compose", "Identity"):
        setattr(sys.modules[V2], name, type(name, (), {}))


def main(folder: str) -> None:
    """Load all, with chunks of three actions, and two episodes alone."""
    stand_in()
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    found = LeRobotDataset("owner/name", root=folder)
    chunks = LeRobotDataset("owner/name", root=folder, delta_timestamps={"action": [n / found.fps for n in range(3)]})
    files = [pq.read_table(path) for path in sorted(found.root.glob("data/*/*.parquet"))]
    frame, differing = 0, 0
    for table in files:
        for row in table.to_pylist():
            seen, after = found[frame], chunks[frame]
            assert seen["index"] == row["index"] == frame
            assert torch.equal(after["action"][0], torch.tensor(row["action"]))
            for camera in found.meta.camera_keys:
                image = np.asarray(Image.open(io.BytesIO(row[camera]["bytes"])))
                loaded = (seen[camera] * 255).round().byte().permute(1, 2, 0).numpy()
                differing += not np.array_equal(loaded, image)
            frame += 1
    assert frame == len(found)
    last = LeRobotDataset("owner/name", root=folder, episodes=[found.num_episodes - 1])
    assert {int(last[n]["episode_index"]) for n in range(len(last))} == {found.num_episodes - 1}
    print(f"{found.num_episodes} episodes, {len(found)} frames, {differing} images differ; tasks:\n{found.meta.tasks}")


if __name__ == "__main__":
    main(sys.argv[1])
