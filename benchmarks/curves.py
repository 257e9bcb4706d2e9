"""Draw the learning curves of several runs: ``python benchmarks/curves.py RUN RUN RUN --output curves.png``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot


def read(run: Path, name: str) -> tuple[list[float], list[float]]:
    """Minutes since the start of a run and the values of one metric."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    points = [(line["time/elapsed"] / 60, line[name]) for line in lines if line.get(name) is not None]
    return [minutes for minutes, _ in points], [value for _, value in points]


def smooth(values: list[float], window: int) -> list[float]:
    """Means over ``window`` neighbours, fewer at the ends."""
    half = window // 2
    parts = (values[max(0, place - half) : place + half + 1] for place in range(len(values)))
    return [sum(part) / len(part) for part in parts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, help="folders that recipes/ppo.py wrote")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--title", default="")
    parser.add_argument("--smooth", type=int, default=1, help="iterations of training to average")
    arguments = parser.parse_args()
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for index, run in enumerate(arguments.runs):
        color = f"C{index}"
        minutes, training = read(run, "env/success_once")
        axes.plot(minutes, smooth(training, arguments.smooth), color=color, alpha=0.4, linewidth=1)
        minutes, evaluation = read(run, "eval/success_once")
        axes.plot(minutes, evaluation, color=color, marker="o", label=run.name)
    axes.set(xlabel="minutes since the start, set-up excluded", ylabel="success", ylim=(0, 1.02), title=arguments.title)
    axes.grid(alpha=0.3)
    axes.legend(title="bold: greedy, held-out grid; thin: sampled, training", loc="lower right")
    figure.savefig(arguments.output, dpi=120)


if __name__ == "__main__":
    main()
