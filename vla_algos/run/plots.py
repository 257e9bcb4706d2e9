"""The curves of runs: what a page shows of ``metrics.jsonl``, as points in per cent of a picture's sides."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

from vla_algos.intervals import wilson_interval

Lines = Sequence[Mapping[str, Any]]  # of a run's metrics.jsonl
_MANY = 80  # points of a line; of more, neighbours are one
_FEW = 30  # points, up to which each is marked
_PARTS = 5  # of an axis, at most
_TRAINING, _GREEDY, _SAMPLED = "training, sampled", "evaluation, greedy", "evaluation, sampled"


@dataclass(frozen=True)
class Panel:
    """One picture: metrics with what stands in the legend, ends of its axis, and below what nothing is said."""

    title: str
    lines: Mapping[str, str]
    percent: bool = False
    low: float | None = None
    high: float | None = None
    least: float = -math.inf
    only_changing: bool = False


PANELS = (
    Panel(
        "success, % of episodes",
        {"env/success_once": _TRAINING, "eval/success_once": _GREEDY, "eval_sampled/success_once": _SAMPLED},
        percent=True,
        low=0,
        high=100,
    ),
    Panel("solved tasks of a chain", {"env/avg_num_subtasks": _TRAINING, "eval/avg_num_subtasks": _GREEDY}, low=0),
    Panel("return of an episode", {"env/return": _TRAINING, "eval/return": _GREEDY}),
    Panel("loss", {"train/loss": "training", "heldout/loss": "held-out demonstrations"}),
    Panel("error of held-out actions, share of half the range", {"heldout/error": ""}, low=0),
    Panel("KL from the policy that acted, nats", {"train/actor/kl_k3": ""}, low=0),
    Panel("explained variance of the critic, 1 at best", {"train/critic/explained_variance": ""}, high=1, least=-1),
    Panel("learning rate", {"train/actor/lr": "policy", "train/critic/lr": "critic"}, only_changing=True),
    Panel(
        "seconds of an iteration",
        {"time/iteration": "all", "time/rollout": "collecting", "time/train": "update"},
        low=0,
    ),
)


def number(line: Mapping[str, Any], name: str) -> float | None:
    """Return a value of a line; ``None`` where there is no finite number."""
    value = line.get(name)
    return value if isinstance(value, (int, float)) and math.isfinite(value) else None


def points(lines: Lines, name: str, along: str = "step") -> list[tuple[float, float]]:
    """List the values of a metric, each behind that of another one in its line."""
    found = ((number(line, along), number(line, name)) for line in lines)
    return [(place, value) for place, value in found if place is not None and value is not None]


class Point(NamedTuple):
    """A mean, and from where to where: the smallest to the largest value, or the 95 % interval of a success rate."""

    step: float
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Curve:
    """A metric of the runs of one setting; ``color`` counts, ``intervals`` are of the points, which have no band."""

    metric: str
    label: str
    color: int
    points: list[Point]
    dots: bool
    intervals: bool


class Plot:
    """A panel as a template draws it, x and y from 0 to 100, y downwards; ``groups`` are the lines of runs by label."""

    def __init__(self, panel: Panel, groups: Mapping[str, Sequence[Lines]]):
        self.title, self.curves = panel.title, list(_curves(panel, groups))
        every = [point for curve in self.curves for point in curve.points] or [Point(0, 0, 0, 0)]
        least, most = min(point.low for point in every), max(point.high for point in every)
        pad = 0.06 * (most - least) or 0.5 * abs(most) or 1.0
        self._low = max(least - pad, panel.least) if panel.low is None else panel.low
        self._high = max(most, self._low) + pad if panel.high is None else panel.high
        self._last = max(1.0, *(point.step for point in every))
        self.x_ticks = [(self.x(value), f"{value:.0f}") for value in _ticks(0, self._last) if value == round(value)]
        self.y_ticks = [(self.y(value), f"{value:.4g}") for value in _ticks(self._low, self._high)]

    def x(self, step: float) -> float:
        """Place a step."""
        return round(100 * step / self._last, 2)

    def y(self, value: float) -> float:
        """Place a value; one that is out of bounds is at the border."""
        within = min(max(value, self._low), self._high)
        return round(100 * (self._high - within) / (self._high - self._low), 2)


def plots(groups: Mapping[str, Sequence[Lines]]) -> list[Plot]:
    """Make a plot of each panel that there is a line for."""
    made = (Plot(panel, groups) for panel in PANELS)
    return [plot for plot in made if any(len(curve.points) > 1 for curve in plot.curves)]


def _curves(panel: Panel, groups: Mapping[str, Sequence[Lines]]) -> Iterator[Curve]:
    for place, (name, label) in enumerate(panel.lines.items()):
        if place and len(groups) > 1 and not name.startswith("eval"):  # more lines would hide each other
            continue
        seen = [pair for runs in groups.values() for lines in runs for pair in points(lines, name)]
        if len({value for _, value in seen}) <= int(panel.only_changing):  # there is nothing to see of it
            continue
        evaluated = name.startswith("eval")
        width = 1 if evaluated else max(1, math.ceil((max(seen)[0] + 1) / _MANY))
        for turn, (group, runs) in enumerate(groups.items()):
            merged = _merged([points(lines, name) for lines in runs], width)
            intervals = evaluated and panel.percent and len(runs) == 1
            if intervals:
                merged = [_with_interval(point, runs[0], name) for point in merged]
            if panel.percent:
                merged = [Point(step, *(100 * value for value in values)) for step, *values in merged]
            text, color = ": ".join(filter(None, [group, label])), turn + 1 if len(groups) > 1 else place
            if merged:
                yield Curve(name, text, color, merged, evaluated or len(merged) <= _FEW, intervals)


def _merged(runs: Sequence[Sequence[tuple[float, float]]], width: int) -> list[Point]:
    """Join ``width`` neighbours of a run; of several runs the means of that."""
    if len(runs) > 1:
        runs = [[(point.step, point.value) for point in _merged([run], width)] for run in runs]
    near: dict[int, list[tuple[float, float]]] = {}
    for step, value in sorted(each for run in runs for each in run):
        near.setdefault(int(step // width), []).append((step, value))
    parts = (tuple(zip(*each, strict=True)) for each in near.values())
    return [Point(fmean(steps), fmean(values), min(values), max(values)) for steps, values in parts]


def _with_interval(point: Point, lines: Lines, name: str) -> Point:
    counts = dict(points(lines, f"{name.partition('/')[0]}/num_episodes"))
    if not (episodes := int(counts.get(point.step, 0))):
        return point
    return Point(point.step, point.value, *wilson_interval(round(point.value * episodes), episodes))


def _ticks(low: float, high: float) -> list[float]:
    """List round numbers from ``low`` to ``high``."""
    rough = (high - low) / _PARTS
    unit = 10.0 ** math.floor(math.log10(rough))
    step = min(each * unit for each in (1, 2, 5, 10) if each * unit >= rough)
    return [step * turn for turn in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]
