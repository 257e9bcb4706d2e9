"""Draw the learning curves of several runs: ``python benchmarks/curves.py RUN RUN RUN --output curves.png``."""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from vla_algos.run.curves import points, smooth
from vla_algos.run.logging import entries


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, help="folders that recipes/ppo.py wrote")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--title", default="")
    parser.add_argument("--success", default="eval/success_once", help="of evaluations, such as eval/mean/success_once")
    parser.add_argument("--smooth", type=int, default=1, help="iterations of training to average")
    parser.add_argument("--iterations", action="store_true", help="along iterations, of runs on different machines")
    arguments = parser.parse_args()
    along, unit, scale = "time/elapsed", "minutes since the start, set-up excluded", 60
    if arguments.iterations:
        along, unit, scale = "step", "iteration", 1
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for index, run in enumerate(arguments.runs):
        color = f"C{index}"
        lines = entries(run / "metrics.jsonl")
        places, training = points(lines, "env/success_once", along)
        axes.plot(
            [place / scale for place in places], smooth(training, arguments.smooth), color=color, alpha=0.4, linewidth=1
        )
        places, evaluation = points(lines, arguments.success, along)
        axes.plot([place / scale for place in places], evaluation, color=color, marker="o", label=run.name)
    axes.set(xlabel=unit, ylabel="success", ylim=(0, 1.02), title=arguments.title)
    axes.grid(alpha=0.3)
    axes.legend(title="bold: greedy, held-out grid; thin: sampled, training", loc="lower right")
    figure.savefig(arguments.output, dpi=120)


if __name__ == "__main__":
    main()
