"""Draw who did what when, of runs with ``timeline=true``: ``python benchmarks/timeline.py RUN [RUN ...] --output PNG``.

A row for each process; with ``--inside`` two more, when its policy decides and when it waits for its simulators. What
is empty is waiting. Seconds are counted from the first span of the iterations that are drawn.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch

COLOURS = {
    "collect": "#9ecae1",
    "policy": "#3182bd",
    "env": "#fdae6b",
    "learn": "#74c476",
    "deliver": "#756bb1",
    "weights": "#de2d26",
}
_INNER = ("policy", "env")  # within collecting: a row of their own


def read(run: Path) -> dict[int, list[dict[str, Any]]]:
    """Read the spans of a run by process.

    Raises:
        FileNotFoundError: it has none.
    """
    files = sorted((run / "timeline").glob("process_*.jsonl"))
    if not files:
        raise FileNotFoundError(f"{run} has no timeline: type timeline=true when you start it")
    return {
        int(file.stem.rpartition("_")[2]): [json.loads(line) for line in file.read_text().splitlines()]
        for file in files
    }


def draw(axes: Axes, spans: dict[int, list[dict[str, Any]]], first: int, last: int, seconds: float) -> set[str]:
    """Draw the iterations from ``first`` to ``last``, no more than some seconds; returns what is there to see."""
    begins = [each["start"] for some in spans.values() for each in some if each.get("iteration") == first]
    ends = [each["end"] for some in spans.values() for each in some if each.get("iteration") == last]
    start = min(begins)
    end = min(start + seconds, max(ends))
    shown, labels = set(), []
    inner = any(each["what"] in _INNER for some in spans.values() for each in some)
    for process, some in spans.items():
        rows = {"": len(labels)}
        labels.append(f"process {process}")
        if inner and any(each["what"] in _INNER for each in some):
            for what in reversed(_INNER):
                rows[what] = len(labels)
                labels.append("deciding" if what == "policy" else "waiting for simulators")
        for each in some:
            if each["end"] < start or each["start"] > end or each["what"] not in COLOURS:
                continue
            row, left = rows.get(each["what"], rows[""]), max(each["start"], start) - start
            width = min(each["end"], end) - start - left
            axes.barh(row, width, left=left, height=0.7, color=COLOURS[each["what"]], linewidth=0)
            shown.add(each["what"])
            named = each["what"] in ("collect", "learn") and width > 0.03 * (end - start)
            if named:
                axes.text(left + width / 2, row, str(each.get("iteration", "")), ha="center", va="center", fontsize=8)
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set_xlim(0, end - start)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="folders of runs, drawn below each other")
    parser.add_argument("--titles", nargs="*", default=[], help="of the runs; their names if there are none")
    parser.add_argument("--output", type=Path, default=Path("timeline.png"))
    parser.add_argument("--first", type=int, default=2, help="iteration")
    parser.add_argument("--last", type=int, default=4, help="iteration")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="draw no more than that")
    parser.add_argument("--inside", action="store_true", help="draw policy and simulators too")
    arguments = parser.parse_args()
    spans = [read(run) for run in arguments.runs]
    if not arguments.inside:
        spans = [{rank: [e for e in some if e["what"] not in _INNER] for rank, some in each.items()} for each in spans]
    heights = [
        0.6 + 0.5 * sum(1 + 2 * any(e["what"] in _INNER for e in some) for some in each.values()) for each in spans
    ]
    figure, axes = plt.subplots(
        len(spans), 1, figsize=(9, sum(heights) + 0.8), squeeze=False, gridspec_kw={"height_ratios": heights}
    )
    shown: set[str] = set()
    for index, (axis, each) in enumerate(zip(axes[:, 0], spans, strict=True)):
        shown |= draw(axis, each, arguments.first, arguments.last, arguments.seconds)
        titles = [*arguments.titles, *(run.name for run in arguments.runs[len(arguments.titles) :])]
        axis.set_title(titles[index], loc="left", fontsize=10)
    axes[-1, 0].set_xlabel("seconds; numbers are those of batches")
    legend = [Patch(color=colour, label=what) for what, colour in COLOURS.items() if what in shown]
    figure.legend(handles=legend, loc="lower center", ncols=len(legend), frameon=False)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(arguments.output, dpi=120)
    print(arguments.output)


if __name__ == "__main__":
    main()
