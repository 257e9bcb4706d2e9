"""Camera frames as a policy keeps them for learning: resized once, when it acts, to what its model sees.

A rollout then stores 150 kB for each camera of a 224-pixel model instead of 921 kB for a frame of 480 x 640, and the
epochs of an update resize nothing. The resize knows no weights, so the update sees the pixels that the policy acted on.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from tensordict import TensorDictBase
from torch import Tensor

from vla_common import keys
from vla_common.texts import to_strings

CAMERAS = (keys.IMAGES, keys.WRIST_IMAGES)


class ModelImages:
    """Mixin of a policy that resizes: it writes ``model_images`` when it acts, and reads it when it learns.

    ``model_images`` is uint8 ``[N, n, h, w, 3]``: what :meth:`resize_cameras` returned, or, where that has more pixels
    than they do, the ``n`` cameras as they are; height and width tell which. Cameras of several sizes are always
    resized. Where cameras are at hand, they are what is read: nothing stale.

    ``resize_rounds``: the model resizes to numbers between those of 8 bits, so that cameras of one size are kept as
    they are, however many pixels they have.
    """

    resize_rounds: ClassVar[bool] = False
    adapter: Any  # of vla_policies.processing.adapters
    num_images: int

    @property
    @abstractmethod
    def model_image_size(self) -> tuple[int, int]:
        """Height and width of the model's input."""

    def cameras(self, tensordict: TensorDictBase) -> list[Tensor]:
        """Return the cameras that the model looks at, as observed: uint8 ``[N, H, W, 3]`` each."""
        return self.adapter.cameras(tensordict, self.num_images)

    @abstractmethod
    def resize_cameras(self, cameras: Sequence[Tensor]) -> Tensor:
        """Return all that the model sees of its cameras: uint8 ``[N, n, h, w, 3]``, of :attr:`model_image_size`."""

    def write_prompt(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write ``model_images`` and ``prompt_tokens``; returns what the model reads, on its device."""
        policy: Any = self
        inputs = self.shrink_images(tensordict.select(*policy.in_keys[:-1], strict=False).to(policy.device))
        tokens = policy.prompt_tokens(to_strings(tensordict), tensordict.get(keys.STATES, None))
        inputs.set(keys.PROMPT_TOKENS, tokens)
        tensordict.update(inputs.select(keys.MODEL_IMAGES, keys.PROMPT_TOKENS))
        return inputs

    def shrink_images(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Replace the cameras of observations by ``model_images``; in place."""
        images = self.kept_images(self.cameras(tensordict))
        return tensordict.exclude(*CAMERAS, inplace=True).set(keys.MODEL_IMAGES, images)

    def kept_images(self, cameras: Sequence[Tensor]) -> Tensor:
        """Return what is kept of cameras, uint8 ``[N, n, h, w, 3]``."""
        sizes, (height, width) = {camera.shape[1:3] for camera in cameras}, self.model_image_size
        smaller = self.resize_rounds or cameras[0].shape[1] * cameras[0].shape[2] < height * width
        return torch.stack(list(cameras), dim=1) if len(sizes) == 1 and smaller else self.resize_cameras(cameras)

    def model_images(self, tensordict: TensorDictBase) -> Tensor:
        """Return what the model sees, uint8 ``[N, n, h, w, 3]``, of observations or of what was stored of them."""
        if keys.IMAGES in tensordict:
            return self.resize_cameras(self.cameras(tensordict))
        images = tensordict.get(keys.MODEL_IMAGES)
        return images if images.shape[2:4] == self.model_image_size else self.resize_cameras(images.unbind(1))
