"""The curves of a run as a picture: what a person looks at first of ``metrics.jsonl``."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from vla_algos.files import write_atomically
from vla_algos.intervals import wilson_interval
from vla_algos.run.logging import entries

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAME = "curves.png"
_COLUMNS, _WIDTH, _HEIGHT, _DPI = 3, 4.2, 2.9, 100  # of the panels; inches
_MANY = 60  # points, above which a mean is drawn over them
_FEW = 30  # points, up to which each is marked
_COLORS = 128  # of the picture, which is small then
_TRAINING, _GREEDY = "training, sampled", "evaluation, greedy"


@dataclass(frozen=True)
class _Panel:
    title: str
    lines: Mapping[str, str]  # by metric, what stands in the legend, if there are several
    percent: bool = False
    bounds: tuple[float | None, float | None] = (None, None)  # of what is shown
    least: float = -math.inf  # what is below says nothing more
    only_changing: bool = False


_PANELS = (
    _Panel(
        "success, % of episodes",
        {
            "env/success_once": _TRAINING,
            "eval/success_once": f"{_GREEDY}, 95 % interval",
            "eval_sampled/success_once": "evaluation, sampled, 95 % interval",
        },
        percent=True,
        bounds=(-2, 102),
    ),
    _Panel(
        "solved tasks of a chain",
        {"env/avg_num_subtasks": _TRAINING, "eval/avg_num_subtasks": _GREEDY},
        bounds=(0, None),
    ),
    _Panel("return of an episode", {"env/return": _TRAINING, "eval/return": _GREEDY}),
    _Panel("loss", {"train/loss": "training", "heldout/loss": "held-out demonstrations"}),
    _Panel("error of held-out actions, share of half the range", {"heldout/error": ""}, bounds=(0, None)),
    _Panel("KL of the update from the policy that acted, nats", {"train/actor/kl_k3": ""}, bounds=(0, None)),
    _Panel(
        "explained variance of the critic (1: perfect)",
        {"train/critic/explained_variance": ""},
        bounds=(None, 1.05),
        least=-1,
    ),
    _Panel("learning rate", {"train/actor/lr": "policy", "train/critic/lr": "critic"}, only_changing=True),
    _Panel(
        "seconds of an iteration",
        {"time/iteration": "all", "time/rollout": "collecting", "time/train": "update"},
        bounds=(0, None),
    ),
)


def points(lines: Sequence[Mapping[str, Any]], name: str, along: str = "step") -> tuple[list[float], list[float]]:
    """Return where a metric of the lines of ``metrics.jsonl`` has values, along another one, and the values."""
    found = [(line[along], line[name]) for line in lines if line.get(name) is not None and line.get(along) is not None]
    return [place for place, _ in found], [value for _, value in found]


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Return means over ``window`` neighbours, fewer at the ends."""
    half = window // 2
    parts = (values[max(0, place - half) : place + half + 1] for place in range(len(values)))
    return [sum(part) / len(part) for part in parts]


def draw(folder: Path, title: str, unit: str) -> Path | None:
    """Draw the curves of a run into its folder, a panel for each kind of number that it has; ``unit`` is of ``step``.

    Returns:
        The picture; ``None`` where there is nothing to draw.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    lines = entries(folder / "metrics.jsonl")
    panels = [(panel, shown) for panel in _PANELS if (shown := _shown(panel, lines))]
    if not panels:
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # they take half a second, and are an extra
    from matplotlib.figure import Figure

    columns = 2 if len(panels) in (1, 2, 4) else _COLUMNS
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(columns * _WIDTH, 0.3 + rows * _HEIGHT), dpi=_DPI, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    figure.suptitle(title, x=0.01, ha="left", weight="bold", fontsize="medium")
    grid: Any = figure.subplots(rows, columns, squeeze=False)
    last = max(line["step"] for line in lines)
    for (panel, shown), axes in zip(panels, grid.flat, strict=False):
        _draw(axes, panel, shown, lines)
        axes.set(xlabel=unit, xlim=(-0.03 * max(1, last), 1.03 * max(1, last)))
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    canvas.draw()
    picture = io.BytesIO()
    Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB").quantize(_COLORS).save(picture, "png")
    write_atomically(folder / NAME, picture.getvalue())
    return folder / NAME


def _shown(panel: _Panel, lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """List the metrics of a panel that there is something to see of."""
    least = 2 if panel.only_changing else 1
    return [name for name in panel.lines if len(set(points(lines, name)[1])) >= least]


def _draw(axes: Axes, panel: _Panel, shown: Sequence[str], lines: Sequence[Mapping[str, Any]]) -> None:
    for name in shown:
        places, values = points(lines, name)
        color, label = f"C{list(panel.lines).index(name)}", panel.lines[name]
        values = [100 * value for value in values] if panel.percent else values
        if name.startswith("eval"):
            axes.plot(places, values, color=color, marker="o", markersize=4, label=label, zorder=3)
            if panel.percent:
                _draw_intervals(axes, lines, name, color)
        elif len(values) > _MANY and not panel.only_changing:
            axes.plot(places, values, color=color, alpha=0.25, linewidth=0.8)
            axes.plot(places, smooth(values, len(values) // 20), color=color, linewidth=1.6, label=label)
        else:
            marker = "." if len(values) <= _FEW else None
            axes.plot(places, values, color=color, marker=marker, linewidth=1.4, label=label)
    axes.set_title(panel.title, fontsize="medium", loc="left")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.locator_params(axis="x", integer=True)
    axes.ticklabel_format(axis="y", scilimits=(-2, 4), useMathText=True)
    low, high = (mine if fixed is None else fixed for mine, fixed in zip(axes.get_ylim(), panel.bounds, strict=True))
    axes.set_ylim(max(low, panel.least), high)
    if len(panel.lines) > 1:
        axes.legend(frameon=False, fontsize="small")


def _draw_intervals(axes: Axes, lines: Sequence[Mapping[str, Any]], name: str, color: str) -> None:
    count = f"{name.partition('/')[0]}/num_episodes"
    for line in lines:
        if line.get(name) is None or not line.get(count):
            continue
        episodes = int(line[count])
        low, high = wilson_interval(round(line[name] * episodes), episodes)
        axes.vlines(line["step"], 100 * low, 100 * high, color=color, linewidth=1.2, alpha=0.6, zorder=2)
