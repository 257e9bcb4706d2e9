"""Which processes of a run collect, and which learn: the section ``placement``."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from vla_algos import parallel


@dataclass(frozen=True)
class Roles:
    """The roles of the processes, by their numbers.

    Attributes:
        actors: those that learn, ascending.
        rollouts: those that collect, ascending.
        text: how a run says it; empty where every process does both.
        rank: number of this process.
    """

    actors: tuple[int, ...]
    rollouts: tuple[int, ...]
    text: str = ""
    rank: int = field(default_factory=parallel.rank)

    @classmethod
    def of(cls, placement: Mapping[str, Any] | None) -> Roles:
        """Read the section ``placement``; without one all processes do everything."""
        everybody = tuple(range(parallel.world_size()))
        if placement is None:
            return cls(everybody, everybody)
        raise NotImplementedError

    @property
    def learns(self) -> bool:
        """Whether this process does."""
        return self.rank in self.actors

    @property
    def collects(self) -> bool:
        """Whether this process does."""
        return self.rank in self.rollouts

    def own(self) -> AbstractContextManager[None]:
        """Work with those that share a policy with this process: all that learn; who only collects has it alone."""
        return parallel.among(self.actors if self.learns else (self.rank,))

    def describe(self) -> str:
        """Say which processes do what, for printing."""
        return self.text
