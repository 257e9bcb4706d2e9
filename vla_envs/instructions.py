"""Instructions in tensordicts: as text, which refuses the storages that would mix it up, and as bytes.

What goes wrong with text, and where: ``docs/explanation/nontensor-storage.md``. Where TorchRL and tensordict keep text,
``Instruction`` and ``Instructions`` are no longer needed; a test says when that is.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDictBase
from torchrl.data import Bounded, Composite
from torchrl.envs import Transform

from vla_common import keys, texts
from vla_common.settings import Count


class Instruction(NonTensorData):
    """A text that refuses what TorchRL 0.14 does not keep: ``LazyMemmapStorage``, ``dumps`` and ``state_dict``.

    It stays one through stacking, indexing, cloning and pickling. In files it is plain ``NonTensorData``.
    """

    __repr__ = NonTensorData.__repr__

    def _memmap_(self, *, inplace: bool = True, like: bool = False, copy_existing: bool = False, **options: Any) -> Any:
        if like or copy_existing:  # like: LazyMemmapStorage makes room; copy_existing: a storage is dumped
            _refuse()
        if inplace:
            # Its file names the class, and is to be read without this library.
            object.__setattr__(self, "__class__", NonTensorData)
            return self._memmap_(inplace=True, **options)
        plain = NonTensorData(data=self.data, batch_size=self.batch_size, device=self.device)
        return plain._memmap_(inplace=False, **options)

    def state_dict(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse: a state has tensors alone."""
        _refuse()

    @classmethod
    def _stack_non_tensor(cls, items: Sequence[Any], dim: int = 0, raise_if_non_unique: bool = False) -> Any:
        if raise_if_non_unique:
            return NonTensorData._stack_non_tensor(items, dim, raise_if_non_unique)
        return Instructions(*items, stack_dim=dim)


class Instructions(NonTensorStack):
    """Texts ``[*B]`` of :class:`Instruction`."""

    @classmethod
    def of(cls, instructions: Iterable[str], device: torch.device | None = None) -> "Instructions":
        """Make ``[N]`` of ``N`` texts."""
        return cls(*(Instruction(text, device=device) for text in instructions))

    def _memmap_(self, *, inplace: bool = True, like: bool = False, copy_existing: bool = False, **options: Any) -> Any:
        if like or copy_existing:
            _refuse()
        if inplace:
            self.__class__ = NonTensorStack
            return self._memmap_(inplace=True, **options)
        return NonTensorStack(*self.tensordicts, stack_dim=self.stack_dim)._memmap_(inplace=False, **options)

    state_dict = Instruction.state_dict
    _stack_non_tensor = Instruction._stack_non_tensor


def _refuse() -> NoReturn:
    raise ValueError(
        "instructions that are text do not survive this storage of TorchRL 0.14 (see docs/explanation/"
        "nontensor-storage.md): add InstructionsToBytes() to the environment or to the buffer, or store prompt_tokens"
    )


class InstructionsToBytes(Transform):
    """Makes ``task_descriptions`` a tensor: uint8 ``[*B, width]``, UTF-8 padded with zeros, under the same key.

    Text does not survive every storage (``docs/explanation/nontensor-storage.md``) and cannot be concatenated, mapped
    or compiled; policies of this library take either. In an environment the observation changes; in a replay buffer
    ``extend`` stores bytes, also those under ``next``. What is bytes already stays as it is.

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
        return texts.encode(texts.decode(value), self.width).view(*value.batch_size, self.width).to(value.device)

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
