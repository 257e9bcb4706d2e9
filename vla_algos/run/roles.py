"""What this process does in a run: collect, learn, or both, as the section ``placement`` says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from vla_algos import parallel
from vla_algos.placement import Placement
from vla_algos.run.sharding import Sharding, check_shards


def read_placement(settings: Mapping[str, Any]) -> Placement:
    """Read the section ``placement`` for the processes that were started.

    Raises:
        ValueError: it cannot be; says what would be right.
    """
    return Placement.read(settings, parallel.processes_started(), parallel.processes_per_node())


@dataclass(frozen=True)
class Roles:
    """Who does what, by the numbers of the processes.

    Attributes:
        actors: who learns, ascending.
        rollouts: who collects, ascending: all of ``actors``, some of them, or none.
        transfers: by number of one that collects, those that its rows go to, in even parts; itself keeps its own.
        rank: number of this process.
        placement: what it comes of; ``None`` of a recipe that has no such section.
    """

    actors: tuple[int, ...]
    rollouts: tuple[int, ...]
    transfers: Mapping[int, tuple[int, ...]]
    rank: int = field(default_factory=parallel.rank)
    placement: Placement | None = None

    @classmethod
    def of(cls, settings: Mapping[str, Any] | None) -> Roles:
        """Read the section ``placement``; without one all processes do everything.

        Raises:
            ValueError: it cannot be; says what would be right.
        """
        if settings is None:
            everybody = tuple(range(parallel.world_size()))
            return cls(everybody, everybody, {rank: (rank,) for rank in everybody})
        placement = read_placement(settings)
        return cls(
            placement.actors,
            placement.rollouts,
            placement.batch_transfers(),
            placement=placement,
        )

    @property
    def learns(self) -> bool:
        """Whether this process does."""
        return self.rank in self.actors

    @property
    def collects(self) -> bool:
        """Whether this process does."""
        return self.rank in self.rollouts

    @property
    def apart(self) -> bool:
        """Whether no process does both."""
        return not set(self.actors) & set(self.rollouts)

    def shard(self, settings: Mapping[str, Any]) -> Sharding:
        """Read the section ``sharding``, which is of the actors; all processes call it, and get ready for their roles.

        Raises:
            ValueError: shards that the actors cannot be arranged in.
        """
        shards = settings.get("shards", "all")
        check_shards(shards, len(self.actors))
        if self.actors != self.rollouts:
            parallel.make_groups(self.actors, self.rollouts, len(self.actors) if shards == "all" else shards)
        with self.own():
            # Who only collects has no gradients and no Adam, and all weights while it does.
            return Sharding(**{**settings, **({} if self.learns else {"shards": "all", "cpu_offload": False})})

    def gpus(self, named: Sequence[int] | None) -> tuple[int, ...] | None:
        """Return the GPUs on which this process's simulators draw, where ``placement`` or several processes say it.

        Args:
            named: by ``env.gpus``.

        Raises:
            ValueError: by ``placement.env`` too.
        """
        apart = self.placement is not None and self.placement.env != self.placement.rollout
        if named is not None and apart:
            raise ValueError(f"env.gpus={list(named)}: placement.env says it already; leave one of them out")
        several = parallel.processes_started() > 1 and torch.cuda.device_count() > 1
        if named is not None or not self.collects or self.placement is None or not (apart or several):
            return None
        return self.placement.env_gpus(self.rank)

    def own(self) -> AbstractContextManager[None]:
        """Work with those that share a policy with this process: all that learn; who only collects has it alone."""
        return parallel.among(self.actors if self.learns else (self.rank,))

    def describe(self) -> str:
        """Say which processes do what, for printing; nothing where all do everything."""
        placed = self.placement
        plain = placed is None or (placed.mode == "collocated" and placed.env == placed.rollout)
        return "" if placed is None or plain else placed.describe()
