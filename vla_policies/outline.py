"""A policy on the meta device: its parameters as training has them, and what its blocks keep for a backward pass.

Nothing is read but headers and nothing is allocated, so that a machine without GPU tells what a 7B policy takes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from vla_policies.memory import Group, Sizes
from vla_policies.nn.blocks import blocks_of

PROMPT_LENGTH = 32  # tokens of an instruction with what stands around it


@dataclass(frozen=True)
class Stack:
    """Blocks that are alike and that a decision goes through one after the other.

    Attributes:
        block: one of them, on the meta device.
        depth: how many.
        tokens, width: of the hidden states of a decision.
        call: runs a block on hidden states ``[rows, tokens, width]``.
        rows: of a decision.
    """

    block: nn.Module
    depth: int
    tokens: int
    width: int
    call: Callable[[nn.Module, Tensor], Any]
    rows: int = 1


@dataclass(frozen=True)
class Activations:
    """Bytes of a decision, an estimate.

    Attributes:
        kept: for the backward pass, without gradient checkpointing.
        recomputed: with it.
        rollout: when the policy acts: caches, and a block's own.
    """

    kept: int
    recomputed: int
    rollout: int


@dataclass(frozen=True)
class Outline:
    """What a policy is made of.

    Attributes:
        source: where its sizes are from.
        module: parameters on the meta device, with the precision and ``requires_grad`` of training.
        stacks: blocks that a gradient goes through in an update.
        stays: tells of a parameter's name whether it is computed with in float32, whatever the others are in.
        held: bytes of a decision that an update keeps beside, such as keys and values of a frozen part.
        kept_for_update: bytes at most that are kept on the GPU from an update's beginning to its end.
        cache: bytes of a decision that are there while the policy acts.
        remarks: what else to know.
    """

    source: str
    module: nn.Module
    stacks: Sequence[Stack]
    stays: Callable[[str], bool] = lambda name: False
    held: int = 0
    kept_for_update: int = 0
    cache: int = 0
    remarks: Sequence[str] = ()

    def sizes(self) -> Sizes:
        """Count the parameters by what is gathered together."""
        blocks = list(blocks_of(self.module))
        owner = {name: index for index, (prefix, block) in enumerate(blocks) for name in _names(prefix, block)}
        entries: dict[int, list[tuple[int, int, bool, bool]]] = {index: [] for index in range(-1, len(blocks))}
        for name, parameter in self.module.named_parameters():
            entry = parameter.numel(), parameter.element_size(), parameter.requires_grad, self.stays(name)
            entries[owner.get(name, -1)].append(entry)
        return Sizes(Group.of(entries[-1]), tuple(Group.of(entries[index]) for index in range(len(blocks))))

    def activations(self, lowered: bool = False) -> Activations:
        """Estimate what a decision keeps; ``lowered``: computed in bfloat16."""
        found = [(stack, *_saved(stack, lowered)) for stack in self.stacks]
        largest = max((saved for _, saved, _ in found), default=0)
        return Activations(
            kept=self.held + sum(stack.depth * saved for stack, saved, _ in found),
            recomputed=self.held + sum(stack.depth * hidden for stack, _, hidden in found) + largest,
            rollout=self.cache + largest,
        )


def _names(prefix: str, block: nn.Module) -> Iterator[str]:
    return (f"{prefix}.{name}" for name, _ in block.named_parameters())


def _saved(stack: Stack, lowered: bool) -> tuple[int, int]:
    """Return bytes that one block keeps of a decision beside its parameters, and those of its hidden states."""
    block = copy.deepcopy(stack.block).to(torch.bfloat16) if lowered else stack.block
    dtype = next(p.dtype for name, p in block.named_parameters() if ".lora_" not in name and p.ndim > 1)
    hidden = torch.zeros(stack.rows, stack.tokens, stack.width, dtype=dtype, device="meta", requires_grad=True)
    storages: dict[int, Any] = {}
    own = {parameter.untyped_storage()._cdata for parameter in block.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            storages[storage._cdata] = storage  # kept, so that no other gets its address
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), _Fused():
        out = stack.call(block, hidden)
    del out
    return sum(storage.nbytes() for storage in storages.values()), hidden.numel() * hidden.element_size()


class _Fused(TorchFunctionMode):
    """Keeps for attention and norms what the fused kernels of a GPU keep, not what the meta device writes out."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is F.scaled_dot_product_attention:
            return _Attention.apply(*args[:3])
        if function is F.rms_norm:
            return _Norm.apply(args[0])
        return function(*args, **(kwargs or {}))


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = query.new_empty(*query.shape[:-1], value.shape[-1])
        ctx.save_for_backward(query, key, value, out, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return out


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, hidden.new_empty(hidden.shape[:-1], dtype=torch.float32))
        return torch.empty_like(hidden)
