"""Draw the learning curves of several runs, for the pages of the recipes; needs matplotlib.

``python benchmarks/curves.py RUN RUN RUN --output curves.png``; ``vla-recipe report RUN RUN RUN`` has more of them.
"""

import argparse
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from vla_algos.run.logging import entries
from vla_algos.run.plots import points

ALONG = {
    "minutes": "minutes since the start, set-up excluded",
    "iterations": "iteration",
    "episodes": "training episodes",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, help="folders: of a run, or of runs, whose mean is drawn")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--success", default="eval/success_once", help="of evaluations, such as eval/mean/success_once")
    parser.add_argument("--smooth", type=int, default=1, help="iterations of training to average")
    parser.add_argument("--along", nargs="+", choices=[*ALONG], default=["minutes"], help="a picture of each")
    arguments = parser.parse_args()
    runs = [(folder.name, read(folder)) for folder in arguments.runs]
    size = (2 + 5 * len(arguments.along), 4)
    figure, every = pyplot.subplots(1, len(arguments.along), figsize=size, layout="constrained", squeeze=False)
    for axes, along in zip(every.flat, arguments.along, strict=True):
        for index, (name, lines) in enumerate(runs):
            places, training = mean([points(each, "env/success_once", along) for each in lines])
            axes.plot(places, smooth(training, arguments.smooth), color=f"C{index}", alpha=0.4, linewidth=1)
            places, evaluation = mean([points(each, arguments.success, along) for each in lines])
            axes.plot(places, evaluation, color=f"C{index}", marker="o", label=name)
        axes.set(xlabel=ALONG[along], ylabel="success", ylim=(0, 1.02))
        axes.grid(alpha=0.3)
    title = "bold: greedy, held-out; thin: sampled, training"
    figure.legend(*every[0, 0].get_legend_handles_labels(), title=title, loc="outside upper center", ncols=5)
    figure.savefig(arguments.output, dpi=120)


def read(folder: Path) -> list[list[dict[str, Any]]]:
    """Read the lines of each run, and add what they are drawn along."""
    files = [*folder.glob("metrics.jsonl")] or sorted(folder.glob("*/metrics.jsonl"))
    if not files:
        raise SystemExit(f"{folder} has no metrics.jsonl, nor has a folder in it; name the folder of a run")
    runs = [entries(file) for file in files]
    for lines in runs:
        for line, episodes in zip(lines, accumulate(line.get("env/num_episodes", 0) for line in lines), strict=True):
            line |= {"iterations": line["step"], "minutes": line["time/elapsed"] / 60, "episodes": episodes}
    return runs


def mean(curves: list[list[tuple[float, float]]]) -> tuple[list[float], list[float]]:
    """Average the places and the values of the runs' first points, of their second ones and so on."""
    several = [[fmean(each) for each in zip(*of_all, strict=True)] for of_all in zip(*curves, strict=False)]
    return [place for place, _ in several], [value for _, value in several]


def smooth(values: list[float], window: int) -> list[float]:
    half = window // 2
    parts = (values[max(0, place - half) : place + half + 1] for place in range(len(values)))
    return [sum(part) / len(part) for part in parts]


if __name__ == "__main__":
    main()
