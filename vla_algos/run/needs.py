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
_TO_A_CORE = 4  # simulators, of the default run in a job: 16 on 4 cores
_MANY_TO_A_CORE = 8  # more than these are hardly meant


@dataclass(frozen=True)
class Needs:
    """Host memory of the node that needs most, in GB, and what simulates on it.

    Attributes:
        processes: of the recipe, on the node.
        simulators: in worker processes, on the node; 0 where all run on a GPU.
        working, workers: simulators, and processes of them, that may work at a time.
        simulating: GB of these; ``None`` where nobody has said.
        policy: GB of weights, gradients and Adam that are not on a GPU; ``None`` where it is not known.
    """

    processes: int
    simulators: int
    working: int
    workers: int
    simulating: float | None
    policy: float | None

    @classmethod
    def of(cls, run: Rehearsal) -> Needs:
        """Estimate them."""
        placed = run.placed
        on_a_node = Counter(number // placed.per_node for number in placed.rollout)
        collecting, processes = max(on_a_node.values()), min(placed.per_node, placed.processes)
        weights = _policy_gb(run)
        policy = None if weights is None else processes * weights
        if run.spec.batched:
            return cls(processes, 0, 0, 0, None, policy)
        suites: list[Mapping[str, Any]] = [run.plan.workers(run.config.env)]
        if run.plan.other_suite is not None:  # beside those of training, which then wait
            suites.append(run.plan.other_suite.settings)
        simulators, workers = (sum(suite[name] for suite in suites) for name in ("num_envs", "num_workers"))
        simulating = None
        if run.spec.worker_gb is not None:
            first, further = run.spec.worker_gb
            simulating = collecting * (workers * first + (simulators - workers) * further)
        return cls(
            processes,
            collecting * simulators,
            collecting * max(suite["num_envs"] for suite in suites),
            collecting * max(suite["num_workers"] for suite in suites),
            simulating,
            policy,
        )

    @property
    def total(self) -> float:
        """GB of memory, as far as they are known."""
        return self.processes * _PROCESS_GB + (self.simulating or 0.0) + (self.policy or 0.0)

    def describe(self, launcher: dict[str, Any]) -> Iterator[str]:
        """Yield lines to print: the estimate, and what of the request is smaller."""
        tasks = launcher["tasks_per_node"]
        cores = (launcher["cpus"] or 0) * tasks  # 0: left to the cluster
        parts, without = [], "batches"
        if self.simulating is None:
            without = "simulators and batches"
        else:
            on = f" on {_count(cores, 'core', 's')}" if cores else ""
            parts.append(f"{self.simulators} simulators in {_count(self.workers)}{on} {self.simulating:.1f}")
        parts.append(f"{_count(self.processes)} of the recipe {self.processes * _PROCESS_GB:.1f}")
        parts += [] if (self.policy or 0.0) < 0.05 else [f"the policy in host memory {self.policy:.1f}"]
        yield f"needs about {self.total:.1f} GB of memory on a node, {without} not counted: {', '.join(parts)}"
        asked = launcher["memory_gb"]
        if asked and asked < self.total:
            enough = math.ceil(1.25 * self.total)
            yield f"warning: launcher.memory_gb={asked} is less than that; type launcher.memory_gb={enough}"
        if cores and self.workers > cores:
            yield (
                f"warning: launcher.cpus={launcher['cpus']}: {self.workers} processes simulate on {cores} cores of a "
                f"node and take turns; type launcher.cpus={-(-self.workers // tasks)}, or leave out env.num_workers"
            )
        elif cores and self.working > _MANY_TO_A_CORE * cores:
            enough = -(-self.working // (_TO_A_CORE * tasks))
            yield (
                f"warning: launcher.cpus={launcher['cpus']}: {self.working} simulators share "
                f"{_count(cores, 'core', 's')} of a node, and a decision waits for {self.working / cores:.0f} of them "
                f"one after the other; type launcher.cpus={enough}, or fewer of them (env.num_envs)"
            )


def _count(number: int, what: str = "process", several: str = "es") -> str:
    return f"{number} {what}{several if number > 1 else ''}"


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
