"""Group-relative policy optimisation: groups of runs of one episode, compared with each other."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from vla_algos import distributed
from vla_algos.advantages import group_advantages
from vla_algos.collectors import OUTCOME_KEYS, EpisodeCollector
from vla_algos.progress import tell
from vla_common.keys import ADVANTAGE, CRASHED, DONE, EPISODE_LEN, NEXT, REWARD, STEP_MASK, SUCCESS, TASK_ID
from vla_common.settings import Count, Fraction, checked
from vla_envs.episodes import EpisodeSampler


def score(episode: TensorDictBase) -> Tensor:
    """Sum of the rewards of an episode ``[T]`` up to and including its first ``done``."""
    done = episode[NEXT, DONE].squeeze(-1).long()
    until_then = done.cumsum(0) - done == 0
    return episode[NEXT, REWARD].squeeze(-1)[until_then].sum()


@dataclass(frozen=True)
class Group:
    """Runs of one episode (one task, one initial state) by one policy.

    Crashed runs have no score: those that are left are compared with each other. One alone, or none, has no signal.

    Attributes:
        episodes: each ``[T]``; crashed ones are left out.
        crashed: how many have no result because the simulator died in every attempt.
    """

    episodes: tuple[TensorDictBase, ...]
    crashed: int = 0

    @classmethod
    def of(cls, runs: Sequence[TensorDictBase]) -> "Group":
        """Make the group of ``runs``, from an :class:`~vla_algos.collectors.EpisodeCollector`."""
        kept = tuple(episode for episode in runs if not episode[NEXT, CRASHED][-1])
        return cls(kept, crashed=len(runs) - len(kept))

    @property
    def scores(self) -> Tensor:
        """:func:`score` of each episode, ``[E]``."""
        return torch.stack([score(episode) for episode in self.episodes])

    @property
    def success(self) -> float:
        """Share of the episodes that were solved at some time."""
        return sum(bool(episode[NEXT, SUCCESS][-1]) for episode in self.episodes) / max(1, len(self.episodes))

    @property
    def failed(self) -> bool:
        """Whether no run was solved."""
        return bool(self.episodes) and self.success == 0

    @property
    def solved(self) -> bool:
        """Whether every run was solved."""
        return self.success == 1

    @property
    def has_signal(self) -> bool:
        """Whether the scores differ, so that some run was better than another."""
        return len(self.episodes) > 1 and bool(self.scores.min() < self.scores.max())

    def learnable(self, bounds: tuple[float, float] | None) -> bool:
        """Tell whether it has a signal, and :attr:`success` lies within ``bounds``, both included."""
        return self.has_signal and (bounds is None or bounds[0] <= self.success <= bounds[1])


def check_groups(
    group_size: int, groups: int, max_groups: int, success_bounds: tuple[float, float] | None = None
) -> None:
    """Raise a ValueError with what would be right for settings of :func:`collect_groups` that cannot be."""
    if group_size < 2:
        raise ValueError(f"group_size={group_size}: a group of one has nothing to compare; use at least 2 (8 is usual)")
    if not 1 <= groups <= max_groups:
        raise ValueError(f"need 1 <= groups <= max_groups, got groups={groups} and max_groups={max_groups}")
    if success_bounds is not None and not 0 <= success_bounds[0] <= success_bounds[1] <= 1:
        raise ValueError(
            f"success_bounds is {list(success_bounds)}: lower and upper bound of a group's success rate, from 0 to 1 "
            "whatever the reward coefficient; try [0.1, 0.9]"
        )


@checked
def collect_groups(
    collector: EpisodeCollector,
    episodes: EpisodeSampler,
    groups: Count,
    max_groups: Count,
    success_bounds: tuple[Fraction, Fraction] | None = None,
) -> list[Group]:
    """Run groups until enough of them carry signal (dynamic sampling: Yu et al. 2025, DAPO, arXiv 2503.14476).

    All groups are run by the policy as it is now. A new one is queued whenever slots may run out of episodes and the
    number that is expected to carry signal, extrapolating from the groups that have finished, falls short. No slot
    waits for a group to be complete, and what is queued in vain is no more than the slots hold.

    Args:
        collector: with an exhausted queue, else ``ValueError``. If collecting fails, what it was to run is forgotten.
        episodes: gives the groups; its ``group_size`` is theirs.
        groups: how many groups with signal are wanted, as far as ``max_groups`` allows.
        max_groups: run no more than that; equal to ``groups`` for no dynamic sampling.
        success_bounds: groups with a success rate outside count as without signal; see :func:`check_groups`.

    Returns:
        All groups that were run, in the order in which they were drawn. Those without signal keep actions,
        identities and outcomes alone: what the policy saw is let go as soon as a group is complete.
    """
    size = episodes.group_size
    check_groups(size, groups, max_groups, success_bounds)
    if len(collector):
        raise ValueError(f"{len(collector)} episodes wait in the collector, of no group: iterate over it or clear() it")
    first = len(collector.queue)
    drawn, complete, useful = 0, 0, 0
    runs: dict[int, list[TensorDictBase]] = {}

    def refill() -> None:
        nonlocal drawn
        # One more of both, so that the first groups count as useful until they prove otherwise.
        chance = (useful + 1) / (complete + 1)
        slots = collector.env.batch_size[0]
        while collector.queue.waiting < slots and drawn < max_groups and useful + chance * (drawn - complete) < groups:
            collector.extend(episodes.next() for _ in range(size))
            drawn += 1

    def note(index: int, episode: TensorDictBase) -> None:
        nonlocal complete, useful
        members = runs.setdefault((index - first) // size, [])
        members.append(episode)
        if len(members) == size:
            complete += 1
            if Group.of(members).learnable(success_bounds):
                useful += 1
            else:
                _forget_observations(members)
            tell("collecting", min(useful, groups), groups)
        refill()

    collector.on_episode = note
    try:
        refill()
        ordered = list(collector.iterator())
    finally:
        collector.on_episode = None
        collector.clear()  # nothing is left but after a failure
    return [Group.of(ordered[start : start + size]) for start in range(0, len(ordered), size)]


def grpo(
    groups: Sequence[Group], success_bounds: tuple[float, float] | None = None, *, move: bool = False
) -> TensorDictBase | None:
    """Compute group-relative advantages of all groups that carry signal.

    The others, and those with a success rate outside ``success_bounds``, are dropped: they enter no mean.

    Args:
        groups: from :func:`collect_groups`.
        success_bounds: lower and upper bound of a group's success rate, both included.
        move: the groups keep actions, identities and outcomes alone; else what the policy saw is in memory twice.

    Returns:
        Decisions ``[D]`` of the remaining episodes in order, with ``advantage`` ``[D, 1]``; ``None`` if none is left.
    """
    kept = [group for group in groups if group.learnable(success_bounds)]
    if not kept:
        return None
    episodes, scores = [each for group in kept for each in group.episodes], torch.cat([each.scores for each in kept])
    labels = torch.arange(len(kept)).repeat_interleave(torch.tensor([len(group.episodes) for group in kept]))
    advantages = group_advantages(scores, labels.to(scores.device))
    lengths = torch.tensor([len(episode) for episode in episodes], device=scores.device)
    batch: TensorDictBase = torch.empty_like(episodes[0][:1].expand(int(lengths.sum())))
    for part, episode in zip(batch.split(lengths.tolist()), episodes, strict=True):
        part.copy_(episode)
        if move:
            _forget_observations([episode])
    batch[ADVANTAGE] = advantages.repeat_interleave(lengths).unsqueeze(-1)
    return batch


def _forget_observations(episodes: Sequence[TensorDictBase]) -> None:
    for episode in episodes:
        episode.select(*OUTCOME_KEYS, strict=False, inplace=True)


def gather_outcomes(groups: Sequence[Group]) -> list[Group]:
    """Return the groups of all processes, without what the policy saw and did."""
    own = [
        Group(tuple(each.select(NEXT, TASK_ID, strict=False).cpu() for each in group.episodes), group.crashed)
        for group in groups
    ]
    return [group for part in distributed.all_gather_object(own) for group in part]


def concatenate(groups: Sequence[Group]) -> TensorDictBase:
    """Join the decisions ``[D]`` of all episodes of all groups, one after the other, with the entries that all have.

    Where every run crashed, that is ``[0]`` with what :func:`~vla_algos.metrics.env_metrics` reads.
    """
    episodes = [episode for group in groups for episode in group.episodes]
    if not episodes:
        flags = {key: torch.zeros(0, 1, dtype=torch.bool) for key in (CRASHED, DONE, STEP_MASK)}
        after = TensorDict({**flags, SUCCESS: flags[DONE], EPISODE_LEN: torch.zeros(0, 1, dtype=torch.int64)}, [0])
        return TensorDict({NEXT: after, TASK_ID: torch.zeros(0, dtype=torch.int64)}, [0])
    shared = set(episodes[0].keys()).intersection(*(episode.keys() for episode in episodes))
    return torch.cat([episode.select(*shared) for episode in episodes])


def check_signal(state: dict[str, Any], iteration: int, groups: Sequence[Group], learnt: bool, patience: int) -> str:
    """Return a line that no group of an iteration had something to learn from; end a run that finds none for long.

    ``groups`` are of all processes; if some was ``learnt`` from, the line is empty. ``state``, of the run, counts such
    iterations in a row; at ``patience`` of them its entry ``ended`` ends it.
    """
    in_a_row = state["iterations_without_signal"] = 0 if learnt else state.get("iterations_without_signal", 0) + 1
    if learnt:
        return ""
    if in_a_row % patience == 0:  # resume=force continues the run for as many again
        state["ended"] = f"{in_a_row} iterations in a row without a group to learn from (patience={patience})"
    failed, solved = sum(group.failed for group in groups), sum(group.solved for group in groups)
    found = f"{failed} failed every time, {solved} succeeded every time"
    if crashed := sum(not group.episodes for group in groups):
        found += f", {crashed} crashed every time"
    return f"iteration {iteration}: none of {len(groups)} groups carries signal ({found}); nothing was learnt"


def group_metrics(groups: Sequence[Group], success_bounds: tuple[float, float] | None = None) -> dict[str, float]:
    """Count what became of the groups of an iteration, under ``rollout/groups...``."""
    without_signal = [group for group in groups if not group.has_signal]
    trained = sum(group.learnable(success_bounds) for group in groups)
    return {
        "rollout/groups": float(len(groups)),
        "rollout/groups_all_failed": float(sum(group.failed for group in without_signal)),
        "rollout/groups_all_solved": float(sum(group.solved for group in without_signal)),
        "rollout/groups_all_crashed": float(sum(not group.episodes for group in without_signal)),
        "rollout/groups_out_of_bounds": float(len(groups) - len(without_signal) - trained),
        "rollout/groups_trained": float(trained),
    }
