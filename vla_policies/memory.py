"""How much memory a policy takes on a GPU, calculated from its parameters; nothing is allocated.

A model that is sharded (FSDP2, Zhao et al. 2023, arXiv 2304.11277) is cut over ``shards`` GPUs, each of which has that
share of weights, gradients and Adam's two moments. To be computed with, a group of parameters, a transformer block or
what is in none, is gathered in the precision of the computation: in an update the rest and two blocks at a time, the
one that is computed and the one that comes next, and the gradients of what is trained of them; in a rollout all of
them, which stay so until it ends.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

MOMENTS = 2  # of Adam, each as large as what is trained; its step count is a number per tensor, on the CPU
FLOAT32, BFLOAT16 = 4, 2  # bytes


@dataclass(frozen=True)
class Group:
    """Parameters that are gathered together; all numbers are bytes but for ``trained``.

    Attributes:
        weights: as they are stored.
        lowered: the same where computations are in bfloat16.
        trained: parameters that are trained; these are stored in float32.
        gradients: of these, where computations are in bfloat16.
    """

    weights: int
    lowered: int
    trained: int = 0
    gradients: int = 0

    @classmethod
    def of(cls, parameters: Iterable[tuple[int, int, bool, bool]]) -> Group:
        """Add up ``(count, bytes of each, trained, stays in that precision)``."""
        entries = list(parameters)
        return cls(
            weights=sum(count * size for count, size, _, _ in entries),
            lowered=sum(count * (size if stays else min(size, BFLOAT16)) for count, size, _, stays in entries),
            trained=sum(count for count, _, trained, _ in entries if trained),
            gradients=sum(
                count * (size if stays else min(size, BFLOAT16)) for count, size, trained, stays in entries if trained
            ),
        )

    def gathered(self, compute: bool, training: bool) -> int:
        """Return bytes of the group while it is gathered: ``compute`` in bfloat16, ``training`` with gradients."""
        gradients = (self.gradients if compute else self.trained * FLOAT32) if training else 0
        return (self.lowered if compute else self.weights) + gradients


@dataclass(frozen=True)
class Sizes:
    """Parameters of a policy: the blocks, each a group, and the rest, which is one."""

    rest: Group
    blocks: tuple[Group, ...] = ()

    @property
    def groups(self) -> tuple[Group, ...]:
        """All of them."""
        return self.rest, *self.blocks

    @property
    def weights(self) -> int:
        """Bytes, as they are stored."""
        return sum(group.weights for group in self.groups)

    @property
    def trained(self) -> int:
        """Numbers that are trained."""
        return sum(group.trained for group in self.groups)

    def gathered(self, compute: bool) -> int:
        """Return bytes of all weights as a rollout needs them."""
        return sum(group.gathered(compute, training=False) for group in self.groups)

    def gathered_in_update(self, compute: bool) -> int:
        """Return bytes that are gathered at a time in an update, gradients of these included."""
        blocks = sorted((block.gathered(compute, training=True) for block in self.blocks), reverse=True)
        return self.rest.gathered(compute, training=True) + sum(blocks[:2])


@dataclass(frozen=True)
class Way:
    """How a policy is trained, by the settings of the recipes.

    Attributes:
        shards: GPUs that have a share each; 1: each has all.
        compute: in bfloat16 on weights in float32.
        optimizer_offload: Adam's moments are in host memory while a rollout runs.
        cpu_offload: weights, gradients and moments are in host memory all the time.
        acting: not trained at all: an evaluation, or a GPU for rollouts alone.
    """

    shards: int = 1
    compute: bool = False
    optimizer_offload: bool = False
    cpu_offload: bool = False
    acting: bool = False

    @property
    def gathers(self) -> bool:
        """Whether what is computed with is a copy of what is stored."""
        return self.shards > 1 or self.compute or self.cpu_offload

    def __str__(self) -> str:
        if self.acting:
            return f"acts only{', in bf16' if self.compute else ''}"
        words = [f"{self.shards} shards" if self.shards > 1 else "1 GPU has all"]
        words += ["bf16 compute"] if self.compute else []
        words += ["Adam to the host"] if self.optimizer_offload else []
        words += ["CPU offload"] if self.cpu_offload else []
        return ", ".join(words)


@dataclass(frozen=True)
class Memory:
    """Bytes per GPU, and of its process in host memory; without activations.

    Attributes:
        weights, gradients, adam: of this GPU's share, wherever they are.
        gathered_in_update, gathered: what is gathered at a time, and for a rollout.
        update, rollout: on the GPU.
        host: in host memory.
    """

    weights: int
    gradients: int
    adam: int
    gathered_in_update: int
    gathered: int
    update: int
    rollout: int
    host: int


def calculate(sizes: Sizes, way: Way) -> Memory:
    """Calculate what a policy takes that is trained in some way.

    Gradients are there during a rollout where nothing is gathered, because the learner drops them when the next update
    begins; otherwise they are dropped before.
    """
    if way.acting:
        weights = sizes.gathered(way.compute)
        return Memory(weights, 0, 0, 0, 0, 0, weights, 0)
    weights, gradients, adam = (
        -(-whole // way.shards) for whole in (sizes.weights, sizes.trained * FLOAT32, sizes.trained * MOMENTS * FLOAT32)
    )
    at_a_time, gathered = 0, 0
    if way.gathers:
        at_a_time, gathered = sizes.gathered_in_update(way.compute), sizes.gathered(way.compute)
    everything = weights + gradients + adam
    if way.cpu_offload:
        return Memory(weights, gradients, adam, at_a_time, gathered, at_a_time, gathered, everything)
    host = adam if way.optimizer_offload else 0
    rollout = weights + (0 if way.gathers else gradients) + adam - host + gathered
    return Memory(weights, gradients, adam, at_a_time, gathered, everything + at_a_time, rollout, host)


def ways(shards: int, lowers: bool) -> list[Way]:
    """List the ways from the plainest to the one that takes least on a GPU.

    Args:
        shards: how many; 1 for none.
        lowers: whether computing in bfloat16 makes a difference: weights are float32.
    """
    full = Way(shards=shards, compute=lowers)
    found = [Way(), Way(compute=lowers, cpu_offload=True)]
    if shards > 1:
        found += [Way(shards=shards), full, replace(full, optimizer_offload=True), replace(full, cpu_offload=True)]
    return list(dict.fromkeys([*found, Way(acting=True), Way(acting=True, compute=lowers)]))
