"""Draw the learning curves of several runs, for the pages of the recipes; needs matplotlib.

``python benchmarks/curves.py RUN RUN RUN --output curves.png``; ``vla-recipe report RUN RUN RUN`` has more of them.
"""

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from vla_algos.run.logging import entries
from vla_algos.run.plots import points


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
        places, training = split(points(lines, "env/success_once", along), scale)
        axes.plot(places, smooth(training, arguments.smooth), color=color, alpha=0.4, linewidth=1)
        places, evaluation = split(points(lines, arguments.success, along), scale)
        axes.plot(places, evaluation, color=color, marker="o", label=run.name)
    axes.set(xlabel=unit, ylabel="success", ylim=(0, 1.02), title=arguments.title)
    axes.grid(alpha=0.3)
    axes.legend(title="bold: greedy, held-out grid; thin: sampled, training", loc="lower right")
    figure.savefig(arguments.output, dpi=120)


def split(pairs: list[tuple[float, float]], scale: float) -> tuple[list[float], list[float]]:
    return [place / scale for place, _ in pairs], [value for _, value in pairs]


def smooth(values: list[float], window: int) -> list[float]:
    half = window // 2
    parts = (values[max(0, place - half) : place + half + 1] for place in range(len(values)))
    return [sum(part) / len(part) for part in parts]


if __name__ == "__main__":
    main()
