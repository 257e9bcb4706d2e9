"""What a job takes of each node, by what was measured of simulators and is counted of the policy."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from vla_algos.run.launcher_settings import asks_for_gpus
from vla_algos.run.rehearsal import Rehearsal
from vla_algos.run.sharding import Sharding
from vla_policies.memory import Group, Sizes, Way, calculate

_PROCESS_GB = 0.4  # of a recipe with its imports; measured 0.33 for the small policy, 0.41 with the large ones


@dataclass(frozen=True)
class Needs:
    """Host memory of the node that needs most, in GB, and what simulates on it.

    Attributes:
        processes: of the recipe, on the node.
        simulators, workers: on the node.
        simulating: GB of these.
        policy: GB of weights, gradients and Adam that are not on a GPU; ``None`` where it is not known.
    """

    processes: int
    simulators: int
    workers: int
    simulating: float
    policy: float | None

    @classmethod
    def of(cls, run: Rehearsal) -> Needs | None:
        """Estimate them; ``None`` where nobody has said what a simulator takes, or all run on a GPU."""
        if run.spec.worker_gb is None or run.spec.batched:
            return None
        placed = run.placed
        on_a_node = Counter(number // placed.per_node for number in placed.rollout)
        collecting, processes = max(on_a_node.values()), min(placed.per_node, placed.processes)
        suites: list[Mapping[str, Any]] = [run.plan.workers(run.config.env)]
        if run.plan.other_suite is not None:  # beside those of training
            suites.append(run.plan.other_suite.settings)
        simulators, workers = (sum(suite[name] for suite in suites) for name in ("num_envs", "num_workers"))
        first, further = run.spec.worker_gb
        weights = _policy_gb(run)
        return cls(
            processes,
            collecting * simulators,
            collecting * max(suite["num_workers"] for suite in suites),  # that simulate at a time
            collecting * (workers * first + (simulators - workers) * further),
            None if weights is None else processes * weights,
        )

    @property
    def total(self) -> float:
        """GB of memory."""
        return self.processes * _PROCESS_GB + self.simulating + (self.policy or 0.0)

    def describe(self, launcher: dict[str, Any]) -> Iterator[str]:
        """Yield lines to print: the estimate, and what of the request is smaller."""
        parts = [
            f"{self.simulators} simulators in {_count(self.workers)} {self.simulating:.1f}",
            f"{_count(self.processes)} of the recipe {self.processes * _PROCESS_GB:.1f}",
        ]
        parts += [] if (self.policy or 0.0) < 0.05 else [f"the policy in host memory {self.policy:.1f}"]
        yield f"needs about {self.total:.1f} GB of memory on a node, batches not counted: {', '.join(parts)}"
        asked = launcher["memory_gb"]
        if asked and asked < self.total:
            enough = math.ceil(1.25 * self.total)
            yield f"warning: launcher.memory_gb={asked} is less than that; type launcher.memory_gb={enough}"
        cores, tasks = launcher["cpus"], launcher["tasks_per_node"]
        if cores and self.workers > cores * tasks:
            yield (
                f"warning: launcher.cpus={cores}: {self.workers} processes simulate on {cores * tasks} cores of a node "
                f"and take turns; type launcher.cpus={-(-self.workers // tasks)}, or leave out env.num_workers"
            )


def _count(processes: int) -> str:
    return f"{processes} process{'es' if processes > 1 else ''}"


def _policy_gb(run: Rehearsal) -> float | None:
    """GB of a process for what is trained, as far as it is not on a GPU."""
    policy = getattr(run, "policy", None)
    if policy is None:
        return None
    if hasattr(run.config, "sharding"):
        settings = Sharding(**{**run.config.sharding, "shards": 1})
        shards = run.config.sharding.get("shards", "all")
        way = Way(
            len(run.placed.actors) if shards == "all" else shards,
            settings.compute is not None,
            run.config.offload["optimizer"],
            settings.cpu_offload,
        )
    else:
        way = Way(acting=not hasattr(run.config, "cloning"))
    whole = Group.of((each.numel(), each.element_size(), each.requires_grad, False) for each in policy.parameters())
    memory = calculate(Sizes(whole), way)
    on_gpu = policy.needs_checkpoint and asks_for_gpus(run.config.launcher)
    return (memory.host if on_gpu else max(memory.update, memory.rollout) + memory.host) / 1e9
