"""What this process does in a run: collect, learn, or both, as the section ``placement`` says."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from omegaconf import DictConfig

from vla_algos import distributed
from vla_algos.disaggregated.placement import Placement
from vla_algos.run.environments import own_share
from vla_algos.run.sharding import Sharding
from vla_envs import SimulatorSpec


def members(config: DictConfig) -> tuple[int, ...] | None:
    """Return the numbers of the processes that work, by rank; ``None`` for all. ValueError: ``placement`` is wrong."""
    placement = Roles.of(config.placement).placement
    return None if placement.members == tuple(range(placement.processes)) else placement.members


class Roles:
    """Which processes learn and which collect, and what this one does.

    ``actors`` and ``rollouts`` are the ranks that learn, and that collect: all actors, some of them, or none.
    ``learns`` and ``collects`` say whether this process is one of them, ``disaggregated`` that no process is both.
    """

    def __init__(self, placement: Placement, rank: int | None = None):
        self.placement, self.rank = placement, distributed.rank() if rank is None else rank
        self.actors, self.rollouts = placement.actors, placement.rollouts
        self.learns, self.collects = self.rank in self.actors, self.rank in self.rollouts
        self.disaggregated = placement.mode == "disaggregated"

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> "Roles":
        """Read the section ``placement``; a ``ValueError`` says what would be right."""
        return cls(Placement.read(settings, distributed.processes_started(), distributed.processes_per_node()))

    def shard(self, settings: Mapping[str, Any]) -> Sharding:
        """Read the section ``sharding``, which is of the actors, and make the groups of the roles; all processes do.

        A ``ValueError`` for shards that the actors cannot be arranged in.
        """
        shards = settings.get("shards", "all")
        distributed.check_shards(shards, len(self.actors))
        if self.actors != self.rollouts:
            distributed.make_role_groups(self.actors, self.rollouts, len(self.actors) if shards == "all" else shards)
        with self.on_own_ranks():
            # A process that only collects has no gradients and no Adam, and all weights.
            return Sharding(**{**settings, **({} if self.learns else {"shards": "all", "cpu_offload": False})})

    def share(self, env: Mapping[str, Any], spec: SimulatorSpec, pipeline: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings of an environment as this process starts it: its part of the simulators, on its GPUs.

        A ``ValueError`` if they cannot be shared evenly, or both ``env.gpus`` and ``placement.env`` name GPUs.
        """
        named, apart = env.get("gpus"), self.placement.env != self.placement.rollout
        if named is not None and apart:
            raise ValueError(f"env.gpus={list(named)}: placement.env says it already; leave one of them out")
        settings = own_share(env, spec, pipeline, processes=len(self.rollouts))
        if named is None and self.collects and apart:
            settings["gpus"] = self.placement.env_gpus(self.rank)
        return settings

    def on(self, ranks: tuple[int, ...], make: Callable[[], Any]) -> Any:
        """Call ``make`` on some ranks, which are all that there are within; ``None`` in the others."""
        if self.rank not in ranks:
            return None
        with distributed.subgroup(ranks):
            return make()

    def on_own_ranks(self) -> AbstractContextManager[None]:
        """Work with the processes that share a policy with this one: all actors, or a rollout alone."""
        return distributed.subgroup(self.actors if self.learns else (self.rank,))

    def describe(self) -> str:
        """Say which processes do what, for printing; nothing where all do everything."""
        plain = self.placement.mode == "collocated" and self.placement.env == self.placement.rollout
        return "" if plain else self.placement.describe()
