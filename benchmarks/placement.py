"""Where batches are collected and learnt from, with naps in place of work: ``python benchmarks/placement.py FOLDER``.

Toy runs of PPO whose rollout and whose update each take ``--nap`` seconds more than they do, as on GPUs that are busy
as long with both: in one process, in two that take turns (``sync.lag=0``), and in two that work side by side
(``sync.lag=1``). Weights and metrics of the two are compared with those of one process, bit by bit.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from tests.storm import lives
from vla_algos import Learner, StepCollector

APART = ("placement.actor=0", "placement.rollout=1")
WAYS: dict[str, tuple[int, tuple[str, ...]]] = {  # processes and settings
    "one process": (1, ()),
    "one process, lag 1": (1, ("sync.lag=1",)),
    "two processes": (2, APART),
    "two processes, lag 1": (2, (*APART, "sync.lag=1")),
    "two processes, one of which collects": (2, ("placement.actor=0-1", "placement.rollout=1")),
}


def napping(seconds: float) -> Callable[[], None]:
    """Return what has a life sleep in each rollout and each update."""

    def prepare() -> None:
        rollout, update = StepCollector.rollout, Learner.update

        def collect(self):
            time.sleep(seconds)
            return rollout(self)

        def learn(self, *given, **named):
            time.sleep(seconds)
            return update(self, *given, **named)

        StepCollector.rollout, Learner.update = collect, learn

    return prepare


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="for the runs; must be new")
    parser.add_argument("--nap", type=float, default=0.5)
    parser.add_argument("--iterations", type=int, default=6)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True)
    more = (f"iterations={arguments.iterations}", "evaluate_every=0", "checkpoint_every=100")
    seconds, outcomes = {}, {}
    for way, (processes, settings) in WAYS.items():
        folder = arguments.folder / way.replace(",", "").replace(" ", "_")
        if processes == 1:
            started = [lives.live("ppo_async", folder, None, napping(arguments.nap), (*settings, *more))]
        else:
            started = lives.live_together("ppo_async", folder, processes, napping(arguments.nap), (*settings, *more))
        if any(lives.wait(life, 300) for life in started):
            raise SystemExit(lives.last_words(folder))
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        seconds[way] = median(line["time/iteration"] for line in lines if "time/iteration" in line)
        outcomes[way] = lives.outcome(folder)
    print(f"naps of {arguments.nap} s in rollout and update, {arguments.iterations} iterations, medians\n")
    print(f"{'':<38}  s/iteration  speed-up  as one process")
    for way in WAYS:
        one = "one process, lag 1" if "lag 1" in way else "one process"
        same = "bit by bit" if _same(outcomes[way], outcomes[one]) else "other numbers"
        print(f"{way:<38}  {seconds[way]:11.2f}  {seconds['one process'] / seconds[way]:8.2f}  {same}")


def _same(one, other) -> bool:
    return one[0] == other[0] and all((one[1][name] == other[1][name]).all() for name in one[1])


if __name__ == "__main__":
    main()
