"""Storms of faults against toy runs: ``python -m benchmarks.storm [NAME ...] [--scale 0.1] [--seed 0]``.

Each module beside this one is a storm: ``run(count, seed) -> Tally`` and ``COUNT``, its full number of faults. All of
them together print the table of docs/reliability.md; the tests run each with fewer faults.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from pathlib import Path

from benchmarks.storm.tally import table

NAMES = sorted(path.stem for path in Path(__file__).parent.glob("[!_]*.py") if path.stem not in ("tally", "toy"))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.storm", description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(NAMES)}; all unless given")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the faults, such as 0.1")
    parser.add_argument("--seed", type=int, default=0, help="of the faults")
    chosen = parser.parse_args()
    if unknown := set(chosen.names) - set(NAMES):
        parser.error(f"unknown storm {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    tallies = []
    for name in chosen.names or NAMES:
        storm = importlib.import_module(f"benchmarks.storm.{name}")
        started = time.perf_counter()
        tally = storm.run(max(1, round(storm.COUNT * chosen.scale)), chosen.seed)
        print(f"{tally.name}: {dict(tally.kinds)} in {time.perf_counter() - started:.0f} s", flush=True)
        print("".join(f"  {line}\n" for line in tally.failures), end="", flush=True)
        tallies.append(tally)
    print(f"\n{table(tallies)}")
    return 0 if all(tally.clean for tally in tallies) else 1


if __name__ == "__main__":
    sys.exit(main())
