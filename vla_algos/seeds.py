"""Several seeds of training: means and the probability of improvement (Agarwal et al. 2021), with intervals."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from vla_algos.intervals import Estimate
from vla_algos.results import EpisodeResult


@dataclass(frozen=True)
class Seeds:
    """Of each of ``S`` seeds on each of ``T`` tasks, how many episodes were run and solved: int64 ``[S, T]``."""

    episodes: np.ndarray
    solved: np.ndarray

    @classmethod
    def of(cls, evaluations: Mapping[str, Sequence[EpisodeResult]]) -> "Seeds":
        """Count results but crashed ones; a ``ValueError`` with the name of an evaluation that has none of a task."""
        tasks = sorted({result.task for results in evaluations.values() for result in results})
        episodes, solved = np.zeros((2, len(evaluations), len(tasks)), np.int64)
        for seed, (name, results) in enumerate(evaluations.items()):
            for result in results:
                episodes[seed, tasks.index(result.task)] += not result.crashed
                solved[seed, tasks.index(result.task)] += result.success_once and not result.crashed
            if not episodes[seed].all():
                missing = tasks[episodes[seed].argmin()]
                raise ValueError(f"{name} has no result of {missing}; take evaluations of the same env.id")
        return cls(episodes, solved)

    @property
    def scores(self) -> np.ndarray:
        """Success rates, float64 ``[S, T]``."""
        return self.solved / self.episodes

    def pooled(self) -> "Seeds":
        """Return the same with all episodes of a seed as those of one task, ``[S, 1]``."""
        return Seeds(self.episodes.sum(1, keepdims=True), self.solved.sum(1, keepdims=True))


def hierarchical_bootstrap(statistic: Callable[..., float], *groups: Seeds) -> Estimate:
    """Estimate a statistic of the scores of independent groups of seeds, by the percentiles of 4000 draws about it.

    Seeds are drawn with replacement, then within each as many episodes of every task (Davison and Hinkley 1997,
    "Bootstrap Methods and their Application", section 3.8). An episode is solved or not, so that these are binomial.
    What is no mean is drawn too low or too high by their noise: the draws are moved until their median is the estimate.
    The generator is fixed: the same input is the same output. Of few seeds that differ much it is too narrow.
    """
    random = np.random.default_rng(0)

    def draw(group: Seeds) -> np.ndarray:
        seeds = random.integers(len(group.episodes), size=len(group.episodes))
        chance = (group.solved[seeds] + 0.5) / (group.episodes[seeds] + 1)  # never 0 or 1, which would not vary
        return random.binomial(group.episodes[seeds], chance) / group.episodes[seeds]

    drawn = [statistic(*map(draw, groups)) for _ in range(4000)]
    value, (low, middle, high) = statistic(*(group.scores for group in groups)), np.quantile(drawn, [0.025, 0.5, 0.975])
    moved = np.clip([low + value - middle, high + value - middle], -1 if min(drawn) < 0 else 0, 1)
    return Estimate(float(value), *map(float, moved))


def interquartile_mean(scores: np.ndarray) -> float:
    """Mean of the middle half of all scores ``[S, T]``: a quarter of them, rounded down, is left out at either end."""
    values = np.sort(scores, axis=None)
    left_out = values.size // 4
    return float(values[left_out : values.size - left_out].mean())


def probability_of_improvement(first: np.ndarray, second: np.ndarray) -> float:
    """How likely a seed of the second scores more than one of the first on a task: ``[S_1, T]`` and ``[S_2, T]``.

    Of scores ``x`` and ``y``, over all tasks ``t`` and pairs of seeds (Mann and Whitney's ``U`` of each task)::

        sum_t sum_ij ([y_jt > x_it] + [y_jt = x_it] / 2) / (T S_1 S_2)
    """
    return float(0.5 + np.sign(second - first[:, None]).mean() / 2)
