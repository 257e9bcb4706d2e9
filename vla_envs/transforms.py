"""Transforms of TorchRL for the entries that its own do not know: the instructions."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.data import Bounded, Composite
from torchrl.envs import Transform

from vla_common import keys, texts
from vla_common.settings import Count


class InstructionsToBytes(Transform):
    """Makes ``task_descriptions`` a tensor: uint8 ``[*B, width]``, UTF-8 padded with zeros, under the same key.

    Text does not survive every storage (``docs/explanation/nontensor-storage.md``), and is nothing that can be
    concatenated, mapped or compiled. Bytes are; the policies of this library take either, and
    :func:`vla_common.texts.to_strings` reads both.

    In an environment it is the observation that changes. In a replay buffer it is what comes in: ``extend`` stores
    bytes and ``sample`` gives bytes, also those under ``next``. What is bytes already stays as it is.

    Args:
        width: bytes per text; a longer text is an error.

    Example:
        >>> from torchrl.envs import TransformedEnv
        >>> env = TransformedEnv(make_env("metaworld/MT50", 8), InstructionsToBytes())  # doctest: +SKIP
        >>> buffer = ReplayBuffer(storage=LazyMemmapStorage(1024), transform=InstructionsToBytes())  # doctest: +SKIP
    """

    def __init__(self, width: Count = texts.WIDTH):
        super().__init__(in_keys=[keys.TASK_DESCRIPTIONS], out_keys=[keys.TASK_DESCRIPTIONS])
        self.width = width

    def _apply_transform(self, value: Any) -> torch.Tensor:
        if isinstance(value, torch.Tensor):
            return value
        encoded = texts.encode(texts.decode(value), self.width)
        return encoded.view(*value.batch_size, self.width).to(value.device)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write bytes for the texts of ``tensordict``, and for those under ``next``."""
        for key in (keys.TASK_DESCRIPTIONS, (keys.NEXT, keys.TASK_DESCRIPTIONS)):
            value = tensordict.get(key, None)
            if value is not None and not isinstance(value, torch.Tensor):
                tensordict.set(key, self._apply_transform(value))
        return tensordict

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        return self.forward(tensordict)  # what a replay buffer calls with what comes in

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        return self._call(tensordict_reset)

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Declare the bytes."""
        text = observation_spec[keys.TASK_DESCRIPTIONS]
        observation_spec[keys.TASK_DESCRIPTIONS] = Bounded(
            low=0, high=255, shape=(*text.shape, self.width), dtype=torch.uint8, device=text.device
        )
        return observation_spec
