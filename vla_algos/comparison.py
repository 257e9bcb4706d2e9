"""Two evaluations of the same episodes, compared episode by episode."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from vla_algos.metrics import Estimate, mean_of_estimates, paired_difference
from vla_algos.results import EpisodeResult
from vla_common.errors import unknown_name


@dataclass(frozen=True)
class Row:
    """Success in both evaluations, 0 to 1, over the same episodes, and the difference."""

    episodes: int
    first: float
    second: float
    difference: Estimate

    @classmethod
    def of(cls, pairs: Sequence[tuple[bool, bool]]) -> Row:
        """Compare the outcomes of some episodes, see :func:`~vla_algos.metrics.paired_difference`."""
        first, second = (sum(each) / len(pairs) for each in zip(*pairs, strict=True))
        return cls(len(pairs), first, second, paired_difference(pairs))


@dataclass(frozen=True)
class Comparison:
    """What :func:`compare` has found.

    Attributes:
        pairs: results of the same episode in the first and the second evaluation.
        first_alone: episodes that the first one alone has.
        second_alone: episodes that the second one alone has.
        crashed: episodes of both that have no result in one of them.
        mean_of: groups of which the mean is taken too, each counting the same.
    """

    pairs: list[tuple[EpisodeResult, EpisodeResult]]
    first_alone: int
    second_alone: int
    crashed: int
    mean_of: tuple[str, ...] = ()

    @property
    def all(self) -> Row:
        """Over all episodes that both have."""
        return Row.of([_outcomes(pair) for pair in self.pairs])

    def by_task(self) -> dict[str, Row]:
        """Return a row for each task, from what the second evaluation does better to what it does worse."""
        rows = self._rows(first.task for first, _ in self.pairs)
        return dict(sorted(rows.items(), key=lambda row: -row[1].difference.value))

    def by_group(self) -> dict[str, Row]:
        """Return a row for each suite or difficulty, where there is more than one."""
        rows = self._rows(first.group for first, _ in self.pairs)
        return rows if len(rows) > 1 else {}

    @property
    def mean(self) -> Row | None:
        """The mean of the groups of ``mean_of``; ``None`` where there are none, or no pairs of one of them.

        Each counts the same, and its interval is :func:`~vla_algos.metrics.mean_of_estimates` of theirs.
        """
        groups = self._rows(first.group for first, _ in self.pairs)
        if not self.mean_of or not groups.keys() >= {*self.mean_of}:
            return None
        rows = [groups[name] for name in self.mean_of]
        return Row(
            sum(row.episodes for row in rows),
            sum(row.first for row in rows) / len(rows),
            sum(row.second for row in rows) / len(rows),
            mean_of_estimates([row.difference for row in rows]),
        )

    def metrics(self, prefix: str) -> dict[str, float | tuple[float, float]]:
        """Return differences and their intervals, over all, per group and of the mean, under ``prefix/``."""
        rows = {"": self.all, **{f"group/{name}/": row for name, row in self.by_group().items()}}
        rows |= {"mean/": self.mean} if self.mean else {}
        found: dict[str, float | tuple[float, float]] = {f"{prefix}/paired_episodes": len(self.pairs)}
        for place, row in rows.items():
            found[f"{prefix}/{place}difference"] = row.difference.value
            found[f"{prefix}/{place}difference/interval"] = (row.difference.low, row.difference.high)
        return found

    def table(self, first: str, second: str, *, tasks: bool = False) -> str:
        """Tabulate success in both and the difference with its 95 % interval, in points of 100, for the terminal.

        Args:
            first: name of the first evaluation.
            second: name of the second one.
            tasks: a row for each task too.
        """
        rows = self.by_task() if tasks else {}
        rows |= {f"all {name}": row for name, row in self.by_group().items()}
        rows["all tasks"] = self.all
        rows |= {f"mean of {', '.join(self.mean_of)}": self.mean} if self.mean else {}
        width = max(map(len, ["task", *rows]))
        left, right = max(7, len(first)), max(7, len(second))
        lines = [f"{'task':<{width}}  episodes  {first:>{left}}  {second:>{right}}  difference  {'95 % interval':>16}"]
        for name, row in rows.items():
            both = f"{100 * row.first:{left - 1}.1f}%  {100 * row.second:{right - 1}.1f}%"
            interval = f"{100 * row.difference.low:+6.1f} to {100 * row.difference.high:+6.1f}"
            lines.append(f"{name:<{width}}  {row.episodes:8}  {both}  {100 * row.difference.value:+10.1f}  {interval}")
        if self.first_alone or self.second_alone:
            lines.append(f"not compared: {self.first_alone} episodes of {first} alone, {self.second_alone} of {second}")
        if self.mean_of and not self.mean:
            lines.append(f"mean of {', '.join(self.mean_of)}: none, no episode of one of them is in both")
        if self.crashed:
            lines.append(f"not compared: {self.crashed} episodes that crashed in one of them")
        return "\n".join(lines)

    def _rows(self, names: Iterable[str]) -> dict[str, Row]:
        parts: dict[str, list[tuple[bool, bool]]] = {}
        for name, pair in zip(names, self.pairs, strict=True):
            parts.setdefault(name, []).append(_outcomes(pair))
        return {name: Row.of(pairs) for name, pairs in parts.items()}


def compare(first: Sequence[EpisodeResult], second: Sequence[EpisodeResult], mean_of: Sequence[str] = ()) -> Comparison:
    """Pair the episodes of two evaluations by task, trial and seed; of repeated ones the first run with the first, ....

    Args:
        first: results of the one.
        second: results of the other.
        mean_of: groups of which the mean is taken too, each counting the same.

    Raises:
        ValueError: they share no episode with a result, or no group of that name.
    """
    one, other = _by_identity(first), _by_identity(second)
    shared = [(result, other[identity]) for identity, result in one.items() if identity in other]
    pairs = [pair for pair in shared if not any(result.crashed for result in pair)]
    if not pairs:
        raise ValueError(
            f"they share no episode: of {len(one)} and {len(other)} none has the same task, trial and seed and a "
            f"result in both ({_example(first)}; {_example(second)}); take two of the same "
            "environment and seed (recipes: env.id, eval.seed)"
        )
    groups = list(dict.fromkeys(result.group for result in [*first, *second]))
    for name in mean_of:
        if name not in groups:
            raise unknown_name("group in mean_of", name, groups)
    alone = len(one) - len(shared), len(other) - len(shared)
    return Comparison(pairs, *alone, len(shared) - len(pairs), tuple(mean_of))


def _by_identity(results: Iterable[EpisodeResult]) -> dict[Hashable, EpisodeResult]:
    runs: Counter[Hashable] = Counter()
    found: dict[Hashable, EpisodeResult] = {}
    for result in sorted(results, key=lambda result: result.index):
        identity = (result.task, result.episode.trial_id, result.episode.seed)
        found[(*identity, runs[identity])] = result
        runs[identity] += 1
    return found


def _outcomes(pair: tuple[EpisodeResult, EpisodeResult]) -> tuple[bool, bool]:
    return pair[0].success_once, pair[1].success_once


def _example(results: Sequence[EpisodeResult]) -> str:
    return f"such as {results[0].name}" if results else "nothing"
