"""Which GPUs do what: the roles actor, rollout and env, by the numbers of the processes that a launcher has started.

There is one process per GPU, numbered node by node. *Actors* train, *rollouts* ask the policy what to do and own the
simulators, *env* are the GPUs on which these draw or compute. Simulators share memory with the rollout that owns them:
env is no process of its own, and lies on the node of its rollout.

Three modes come of it: *collocated*, actors roll out; *hybrid*, some of them do; *disaggregated*, other processes do,
which are sent the weights, and send what they have collected.
"""

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

T = TypeVar("T")
Mode = Literal["collocated", "hybrid", "disaggregated"]
DEFAULTS: Mapping[str, Any] = {"actor": "all", "rollout": "all", "env": "same"}
_SPELLING = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")


@dataclass(frozen=True)
class Placement:
    """Roles of the processes of a launcher, and their ranks in the group of those that work.

    A *number* is the launcher's, a *rank* ours: actors first, so that rank 0, which writes and logs, is one, then the
    rollouts that are no actors. A GPU that only draws has no process in the group.
    """

    actor: tuple[int, ...]  # numbers, ascending, here and in the next two
    rollout: tuple[int, ...]
    env: tuple[int, ...]
    processes: int  # how many the launcher has started
    per_node: int  # how many of them on each node

    @classmethod
    def read(cls, settings: Mapping[str, Any], processes: int, per_node: int) -> "Placement":
        """Make a placement of what the section ``placement`` says; a ``ValueError`` in one line if it cannot be.

        Args:
            settings: by role which GPUs have it: ``all``, a number, a range ``0-3``, several of these, ``0-1,4-5``, or
                a list; env may be ``same``, where its rollout is. A role that is not named is ``all``, env ``same``.
            processes: how many the launcher has started.
            per_node: how many of them on each node.
        """
        if processes < 1 or per_node < 1 or processes % per_node:
            raise ValueError(
                f"{processes} processes cannot be {per_node} on each node; start as many on each: "
                "torchrun --nnodes --nproc-per-node, or launcher.nodes and launcher.tasks_per_node"
            )
        given, there = {**DEFAULTS, **settings}, _count(processes, per_node)
        actor, rollout = (_numbers(role, given[role], processes, there) for role in ("actor", "rollout"))
        env = rollout if given["env"] == "same" else _numbers("env", given["env"], processes, there)
        both, apart = set(actor) & set(rollout), set(rollout) - set(actor)
        if both and apart:
            raise ValueError(
                f"placement: of rollout {_spelled(rollout)} {_spelled(both)} are actors and {_spelled(apart)} are not; "
                f"have all among them ({_typed('actor', {*actor, *rollout})} or {_typed('rollout', both)}) or all "
                f"apart ({_typed('rollout', apart)})"
            )
        placement = cls(actor, rollout, env, processes, per_node)
        placement._check_nodes()
        return placement

    # ---- roles

    @property
    def mode(self) -> Mode:
        """Whether actors roll out, some of them do, or other processes."""
        if self.actor == self.rollout:
            return "collocated"
        return "hybrid" if set(self.rollout) < set(self.actor) else "disaggregated"

    @property
    def members(self) -> tuple[int, ...]:
        """Numbers of the processes that have a part, by rank."""
        return (*self.actor, *(number for number in self.rollout if number not in self.actor))

    @property
    def actors(self) -> tuple[int, ...]:
        """Ranks that train."""
        return tuple(range(len(self.actor)))

    @property
    def rollouts(self) -> tuple[int, ...]:
        """Ranks that roll out, ascending."""
        return tuple(self.members.index(number) for number in self.rollout)

    def env_gpus(self, rank: int) -> tuple[int, ...]:
        """Return the GPUs, as numbered on their node, on which the simulators of a rollout draw or compute.

        GPUs of a node are dealt to its rollouts evenly, both ascending, blocks of neighbours to each; where there are
        fewer, neighbours share one.
        """
        number = self.members[rank]
        node = self._node(number)
        neighbours = [each for each in self.rollout if self._node(each) == node]
        gpus = [each % self.per_node for each in self.env if self._node(each) == node]
        return tuple(dealt(gpus, len(neighbours))[neighbours.index(number)])

    def describe(self) -> str:
        """Say in one line, for the log, the roles."""
        drawing = set(self.env) - set(self.members)
        idle = set(range(self.processes)) - set(self.members) - set(self.env)
        roles = ", ".join(f"{role} {_spelled(getattr(self, role))}" for role in DEFAULTS)
        text = f"{self.mode}, {_count(self.processes, self.per_node)}: {roles}"
        text += f"; {_spelled(drawing)} only draw" if drawing else ""
        return text + (f"; {_spelled(idle)} idle" if idle else "")

    # ---- transfers

    def batch_transfers(self) -> dict[int, tuple[int, ...]]:
        """Return, by rank of a rollout, the actors that get its rows: even parts, in this order; itself keeps its own.

        An actor that rolls out shares its rows with the actors that do not and are dealt to it. Where no actor does,
        rollouts are dealt to actors, or actors to rollouts where those are more: evenly, neighbours together.
        """
        if self.mode == "disaggregated":
            return dict(zip(self.rollouts, map(tuple, dealt(self.actors, len(self.rollouts))), strict=True))
        helpers = blocks([rank for rank in self.actors if rank not in self.rollouts], len(self.rollouts))
        return {rank: (rank, *some) for rank, some in zip(self.rollouts, helpers, strict=True)}

    # ---- checks

    def _node(self, number: int) -> int:
        return number // self.per_node

    def _check_nodes(self) -> None:
        """Refuse simulators on another node than the process that shares memory with them."""
        of_env, of_rollout = ({self._node(number) for number in some} for some in (self.env, self.rollout))
        lonely = [number for number in self.env if self._node(number) not in of_rollout]
        without = [number for number in self.rollout if self._node(number) not in of_env]
        problems = [f"env {_spelled(lonely)} has no rollout on its node"] * bool(lonely)
        problems += [f"rollout {_spelled(without)} has no env on its node"] * bool(without)
        if problems:
            raise ValueError(
                f"placement: {' and '.join(problems)} ({_count(self.processes, self.per_node)}), and simulators share "
                f"memory with their rollout; type placement.env=same (that is {_spelled(self.rollout)}), or have both "
                "on each node"
            )


def dealt(items: Sequence[T], count: int) -> list[Sequence[T]]:
    """Deal items to so many, evenly and in order: blocks of neighbours, or where there are fewer, one to neighbours."""
    if len(items) >= count:
        return blocks(items, count)
    return [[items[place * len(items) // count]] for place in range(count)]


def blocks(items: Any, count: int) -> list[Any]:
    """Divide items, or the rows of a batch, into so many blocks of neighbours, as even as can be."""
    bounds = [place * len(items) // count for place in range(count + 1)]
    return [items[start:end] for start, end in itertools.pairwise(bounds)]


def _numbers(role: str, value: Any, processes: int, there: str) -> tuple[int, ...]:
    """Read which numbers a setting means; ``ValueError`` for none, or one that there is not."""
    if value == "all":
        return tuple(range(processes))
    text = str(value) if isinstance(value, str) or not isinstance(value, Sequence) else ",".join(map(str, value))
    name = f"placement.{role}={text}"
    example = "all, or same" if role == "env" else "all"
    if value is None or not text.strip():
        raise ValueError(f"placement.{role} is empty; type placement.{role}=0-3, one number, or {example}")
    ranges = [_range(role, part.strip(), name, example) for part in text.split(",")]
    if beyond := next((each for each in ranges if each[-1] >= processes), None):
        typed = _spelled(range(min(beyond[0], processes - 1), processes))
        raise ValueError(
            f"{name}: there is no {beyond[-1]}, but {there}, 0 to {processes - 1}; type placement.{role}={typed}, or "
            "start more processes"
        )
    found = [*itertools.chain(*ranges)]
    if (ascending := sorted(set(found))) != found:
        twice = Counter(found) - Counter(ascending)
        what = f"{_spelled(twice)} is there twice" if twice else "numbers ascend"
        raise ValueError(f"{name}: {what}; type {_typed(role, ascending)}")
    return tuple(found)


def _range(role: str, part: str, name: str, example: str) -> range:
    matched = _SPELLING.fullmatch(part)
    if matched is None:
        raise ValueError(f"{name}: {part!r} is no number and no range; type placement.{role}=0-3 or {example}")
    first, last = int(matched[1]), int(matched[2] or matched[1])
    if last < first:
        raise ValueError(f"{name}: {part} descends; type placement.{role}={last}-{first}")
    return range(first, last + 1)


def _typed(role: str, numbers: Iterable[int]) -> str:
    """Write a setting as it is typed: where there are commas as a list, which Hydra does not take for a sweep."""
    text = _spelled(numbers)
    return f"placement.{role}=[{text}]" if "," in text else f"placement.{role}={text}"


def _spelled(numbers: Iterable[int]) -> str:
    """Write numbers as ranges: ``0-3,6``."""
    runs = itertools.groupby(enumerate(sorted(numbers)), lambda item: item[1] - item[0])
    found = [[number for _, number in run] for _, run in runs]
    return ",".join(str(each[0]) if len(each) == 1 else f"{each[0]}-{each[-1]}" for each in found)


def _count(processes: int, per_node: int) -> str:
    nodes = processes // per_node
    return f"{processes} GPU{'s' * (processes > 1)}" + (f" on {nodes} nodes" if nodes > 1 else "")
