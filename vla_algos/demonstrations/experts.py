"""What scripted experts solve while their actions are disturbed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vla_envs.simulator import Episode, SimulatorSpec


@dataclass
class ExpertTally:
    """How often the expert solved each task while its actions were disturbed.

    Attributes:
        spec: of the tasks.
        tried, solved, in_time: episodes by ``task_id``; ``in_time`` are those solved within the horizon.
    """

    spec: SimulatorSpec
    tried: Counter[int] = field(default_factory=Counter)
    solved: Counter[int] = field(default_factory=Counter)
    in_time: Counter[int] = field(default_factory=Counter)

    def add(self, episode: Episode, steps: int | None) -> None:
        """Count an episode that took the expert ``steps`` actions, or was not solved."""
        self.tried[episode.task_id] += 1
        if steps is not None:
            self.solved[episode.task_id] += 1
            self.in_time[episode.task_id] += steps <= self.spec.max_episode_steps

    def tasks(self) -> list[dict[str, Any]]:
        """List the tasks with their numbers, as :data:`FACTS` has them."""
        return [
            {
                "name": task.name,
                "instruction": task.instruction,
                "group": task.group,
                "tried": self.tried[number],
                "solved": self.solved[number],
                "within_horizon": self.in_time[number],
            }
            for number, task in enumerate(self.spec.tasks)
        ]


def describe_experts(tasks: Sequence[Mapping[str, Any]], horizon: int) -> str:
    """Say in a line how often experts solved what they tried; below it by group, where there are several.

    Args:
        tasks: of :meth:`ExpertTally.tasks`.
        horizon: primitive actions of an episode.
    """
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for task in tasks:
        if task["tried"]:
            groups.setdefault(task["group"] or "all", []).append(task)
    said = f"the expert solved {_shares([*tasks], horizon)}"
    if never := [task["name"] for task in tasks if task["tried"] and not task["solved"]]:
        said += f"; never {', '.join(never)}"
    if len(groups) < 2:
        return said
    width = max(map(len, groups))
    return "\n".join([said, *(f"  {name:<{width}}  {_shares(rows, horizon)}" for name, rows in groups.items())])


def _shares(tasks: Sequence[Mapping[str, Any]], horizon: int) -> str:
    tried, solved, in_time = (sum(task[name] for task in tasks) for name in ("tried", "solved", "within_horizon"))
    share = 100 / max(tried, 1)
    return (
        f"{solved:,} of {tried:,} episodes ({share * solved:.0f} %), {in_time:,} ({share * in_time:.0f} %) within the "
        f"horizon of {horizon}"
    )
