"""What a policy takes of a GPU, calculated from its parameters; nothing is allocated.

Under FSDP2 (Zhao et al. 2023, arXiv 2304.11277) each of ``shards`` GPUs has its share of weights, gradients and Adam's
two moments. Groups (transformer blocks, and the rest) are gathered in the precision of the computation: in an update
the rest and two blocks at a time with the gradients of what is trained, in a rollout all of them. Activations are those
of the blocks, run on fake tensors.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call

from vla_policies.nn.blocks import blocks_of

PROMPT_LENGTH = 32  # tokens of an instruction with what stands around it
GB = 1e9
_MOMENTS = 2  # of Adam, each as large as what is trained; its step count is a number per tensor, on the CPU
_FLOAT32, _BFLOAT16 = 4, 2  # bytes
_LEFT_OUT = (
    "simulators, the batch that is learnt from (host memory), CUDA's own memory (about half a GB of each process), "
    "buffers of NCCL, what the allocator cannot use, a frozen copy of the policy (loss.reference_kl_coeff), pixels, "
    "projector and heads"
)


@dataclass(frozen=True)
class ParamGroup:
    """Bytes of parameters that are gathered together: as stored, ``lowered`` to bfloat16, and their ``gradients`` then.

    ``trained`` is a number of parameters, which are stored in float32.
    """

    weights: int
    lowered: int
    trained: int = 0
    gradients: int = 0

    def gathered(self, compute: bool, training: bool = False) -> int:
        """Return bytes while the group is gathered: ``compute`` in bfloat16, ``training`` with gradients."""
        gradients = (self.gradients if compute else self.trained * _FLOAT32) if training else 0
        return (self.lowered if compute else self.weights) + gradients


@dataclass(frozen=True)
class MemoryPlan:
    """How a policy is trained: on how many GPUs, ``compute`` in bfloat16 on float32 weights, what is in host memory.

    ``optimizer_offload``: Adam's moments while a rollout runs; ``cpu_offload``: weights, gradients and moments always.
    ``acting``: not trained at all.
    """

    shards: int = 1
    compute: bool = False
    optimizer_offload: bool = False
    cpu_offload: bool = False
    acting: bool = False

    @property
    def gathers(self) -> bool:
        """Whether computations use a copy of what is stored."""
        return not self.acting and (self.shards > 1 or self.compute or self.cpu_offload)

    def __str__(self) -> str:
        if self.acting:
            return f"acts only{', in bf16' if self.compute else ''}"
        words = [f"{self.shards} shards" if self.shards > 1 else "1 GPU has all"]
        said = (self.compute, "bf16 compute"), (self.optimizer_offload, "Adam to the host")
        return ", ".join([*words, *(word for chosen, word in (*said, (self.cpu_offload, "CPU offload")) if chosen)])


@dataclass(frozen=True)
class Memory:
    """Bytes per GPU without activations; ``host`` is in host memory. ``gathered`` is for a rollout."""

    weights: int
    gradients: int
    adam: int
    gathered_in_update: int
    gathered: int
    update: int
    rollout: int
    host: int


def calculate(groups: Sequence[ParamGroup], plan: MemoryPlan) -> Memory:
    """Calculate what a policy takes of a GPU; ``groups`` are the rest and the blocks, see :func:`group_parameters`.

    Where nothing is gathered gradients stay during a rollout: they are dropped when the next update begins.
    """
    gathered = sum(group.gathered(plan.compute) for group in groups)
    if plan.acting:
        return Memory(gathered, 0, 0, 0, 0, 0, gathered, 0)
    trained = sum(group.trained for group in groups) * _FLOAT32
    stored = sum(group.weights for group in groups), trained, _MOMENTS * trained
    weights, gradients, adam = (-(-whole // plan.shards) for whole in stored)
    at_a_time, everything = 0, weights + gradients + adam
    if plan.gathers:
        rest, *blocks = (group.gathered(plan.compute, training=True) for group in groups)
        at_a_time = rest + sum(sorted(blocks, reverse=True)[:2])
    else:
        gathered = 0
    if plan.cpu_offload:
        return Memory(weights, gradients, adam, at_a_time, gathered, at_a_time, gathered, everything)
    host = adam if plan.optimizer_offload else 0
    rollout = weights + (0 if plan.gathers else gradients) + adam - host + gathered
    return Memory(weights, gradients, adam, at_a_time, gathered, everything + at_a_time, rollout, host)


def group_parameters(
    module: nn.Module, stays: Callable[[str], bool] = lambda name: False, blocks: bool = True
) -> list[ParamGroup]:
    """Count parameters by group: what is in no block, then block by block; all as one without ``blocks``.

    ``stays`` tells of a parameter's name whether it is float32 whatever the others are in.
    """
    found = [prefix for prefix, _ in blocks_of(module)] if blocks else []
    sums = {prefix: np.zeros(4, np.int64) for prefix in ("", *found)}
    owner = {f"{block}.{name}": block for block in found for name, _ in module.get_submodule(block).named_parameters()}
    for name, each in module.named_parameters():
        size, trained = each.element_size(), each.requires_grad
        low = size if stays(name) else min(size, _BFLOAT16)
        sums[owner.get(name, "")] += each.numel() * np.array([size, low, trained, trained * low])
    return [ParamGroup(*each.tolist()) for each in sums.values()]


@dataclass(frozen=True)
class Stack:
    """``depth`` blocks like ``block``; ``call`` runs one on hidden states ``[rows, tokens, width]`` of a decision."""

    block: nn.Module
    depth: int
    tokens: int
    width: int
    call: Callable[[Callable[..., Any], Tensor], Any]
    rows: int = 1

    def bytes_of_block(self, lowered: bool, frozen: bool = False) -> tuple[int, int]:
        """Return bytes that one block keeps for the backward pass, and those of its hidden states.

        Of a ``frozen`` one as if all of it were trained: so much there is at a time without a backward pass too.
        """
        kept: dict[int, Any] = {}

        def pack(tensor: Tensor) -> Tensor:
            kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage()  # held, so that no other has its address
            return tensor

        with FakeTensorMode(allow_non_fake_inputs=True):
            own = {
                name: torch.empty(  # on the CPU, whose attention is fused as a GPU's is
                    each.shape,
                    dtype=torch.bfloat16 if lowered else each.dtype,
                    requires_grad=frozen or each.requires_grad,
                )
                for name, each in self.block.named_parameters()
            }
            dtype = next(each.dtype for name, each in own.items() if ".lora_" not in name and each.ndim > 1)
            hidden = torch.zeros(self.rows, self.tokens, self.width, dtype=dtype, requires_grad=True)
            with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                self.call(lambda *given, **named: functional_call(self.block, own, given, named), hidden)
            addresses = {each.untyped_storage()._cdata for each in own.values()}
            size = hidden.numel() * hidden.element_size()
            return sum(each.nbytes() for address, each in kept.items() if address not in addresses), size


@dataclass(frozen=True)
class DecisionMemory:
    """What a decision takes of a GPU besides the parameters, in bytes."""

    stacks: Sequence[Stack]  # that a gradient goes through in an update
    held: int = 0  # what an update keeps too, such as keys and values of a frozen part
    kept_for_update: int = 0  # at most, of all decisions of an update
    cache: int = 0  # while the policy acts
    frozen: Sequence[Stack] = ()  # that run before, without gradients
    frozen_rows: int = 0  # decisions of a pass of these when what comes of it is kept for the update

    def activations(self, lowered: bool = False) -> tuple[int, int, int]:
        """Estimate bytes in an update, in one with gradient checkpointing, and in a rollout."""
        found = [(stack.depth, *stack.bytes_of_block(lowered)) for stack in self.stacks]
        largest = max((saved for _, saved, _ in found), default=0)
        kept = self.held + sum(depth * saved for depth, saved, _ in found)
        recomputed = self.held + sum(depth * hidden for depth, _, hidden in found) + largest
        return kept, recomputed, self.cache + max(largest, self.frozen_activations(lowered))

    def frozen_activations(self, lowered: bool = False) -> int:
        """Estimate bytes of the frozen part while it is computed."""
        return max((stack.bytes_of_block(lowered, frozen=True)[0] for stack in self.frozen), default=0)


class PolicyMemory:
    """What a policy, also on the meta device, takes of a GPU; activations as far as the family estimates them."""

    def __init__(self, policy: Any):
        self.groups = group_parameters(policy, policy.stays_float32)
        self.decision = policy.decision_memory() or DecisionMemory(())
        self.activations = cache(self.decision.activations)
        self.frozen_activations = cache(self.decision.frozen_activations)

    def gigabytes(
        self, plan: MemoryPlan, *, checkpointing: bool = True, decisions: int = 1, num_envs: int = 1, keeps: bool = True
    ) -> tuple[float, float]:
        """Return GB in an update and in a rollout.

        ``checkpointing`` recomputes blocks in the backward pass, which is of ``decisions``; ``num_envs`` decide
        together. What comes of a frozen part is computed in each minibatch, or before if the policy ``keeps`` it.
        """
        memory = calculate(self.groups, plan)
        kept, recomputed, acting = self.activations(plan.compute)
        prefix, frozen = self.decision.kept_for_update if keeps else 0, self.frozen_activations(plan.compute)
        parts = [prefix + decisions * (recomputed if checkpointing else kept), decisions * frozen]
        if prefix:
            parts.append(prefix + self.decision.frozen_rows * frozen)
        update = memory.update + max(parts)
        return 0.0 if plan.acting else update / GB, (memory.rollout + num_envs * acting) / GB


def usable(card: str) -> float:
    """Return GB that are counted on of a GPU that is sold as ``card``, such as ``24gb``: nine tenths.

    The rest is for what is left out, and for what the calculation misses. ValueError: no such size.
    """
    size = re.fullmatch(r"(\d+(?:\.\d+)?)gb", card)
    if size is None or not 0 < float(size[1]) <= 1000:
        raise ValueError(f"gpu={card}: must be what a GPU has, such as 12gb, 16gb, 24gb, 48gb or 80gb")
    return 0.9 * float(size[1])


def describe_memory(policy: Any, *, shards: int, gpu_memory: float, decisions: int, num_envs: int) -> str:
    """Write the report, a line per plan; arguments as for :class:`PolicyMemory`, ``gpu_memory`` in GB."""
    counts: Counter[str] = Counter()
    for name, parameter in policy.named_parameters():
        kind = "adapters" if ".lora_" in name else name.partition(".")[0]
        state = "trained" if parameter.requires_grad else "frozen"
        counts[f"{kind}, {state}, {str(parameter.dtype).removeprefix('torch.')}"] += parameter.numel()
    lines = [type(policy).__name__, *(f"{number / 1e6:>12,.1f} M  {key}" for key, number in counts.items()), ""]
    heads = ("weights", "gradients", "Adam", "gathered", "update", "rollout", "host")
    lines.append(f"{'GB per GPU':<42}" + "".join(f"{each:>10}" for each in heads))
    whole = PolicyMemory(policy)
    groups = whole.groups
    lowers = sum(group.lowered for group in groups) < sum(group.weights for group in groups)
    full = MemoryPlan(shards=shards, compute=lowers)
    plans = [MemoryPlan(), MemoryPlan(compute=lowers, cpu_offload=True)]
    if shards > 1:
        plans += [MemoryPlan(shards), full, replace(full, optimizer_offload=True), replace(full, cpu_offload=True)]
    for plan in dict.fromkeys([*plans, MemoryPlan(acting=True), MemoryPlan(acting=True, compute=lowers)]):
        memory, peaks = calculate(groups, plan), whole.gigabytes(plan, decisions=decisions, num_envs=num_envs)
        gathered = f"{memory.gathered_in_update / GB:.1f}/{memory.gathered / GB:.1f}" if plan.gathers else "-"
        cells = [*(f"{number / GB:.1f}" for number in (memory.weights, memory.gradients, memory.adam)), gathered]
        cells += ["-" if plan.acting else f"{peaks[0]:.1f}", f"{peaks[1]:.1f}", f"{memory.host / GB:.1f}"]
        fits = "fits" if max(peaks) <= gpu_memory else "does not fit"
        lines.append(f"{plan!s:<42}{''.join(f'{cell:>10}' for cell in cells)}  {fits}")
    lines.append("gathered: at a time in an update / all for a rollout; host: host memory of each process")
    lines.append("settings: sharding.shards, sharding.compute=bf16, offload.optimizer=true, sharding.cpu_offload=true")
    if not whole.decision.stacks:
        return "\n".join([*lines, "activations: not estimated for this family", f"left out: {_LEFT_OUT}"])
    kept, recomputed, acting = (number / GB for number in whole.activations(False))
    lines.append(
        f"activations, an estimate for prompts of {PROMPT_LENGTH} tokens: {recomputed:.2f} GB of each of {decisions} "
        f"decisions in an update ({kept:.2f} without gradient checkpointing), {acting:.2f} of each of {num_envs} in a "
        "rollout"
    )
    return "\n".join([*lines, f"left out: {_LEFT_OUT}"])
