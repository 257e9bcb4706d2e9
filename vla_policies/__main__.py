"""``python -m vla_policies inspect FOLDER``: what a checkpoint is, and what it lacks."""

from __future__ import annotations

import argparse
import sys


def main(arguments: list[str] | None = None) -> int:
    """Print the report of a checkpoint; 0 if it can be loaded, 1 if it is none or something is missing."""
    parser = argparse.ArgumentParser(prog="python -m vla_policies", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("inspect", help="family, head, layout, statistics, chunk, size, what is missing")
    command.add_argument("folder", help="checkpoint folder or hub id, such as openvla/openvla-7b")
    folder = parser.parse_args(arguments).folder

    from vla_policies.registry import inspect_policy

    try:
        report = inspect_policy(folder)
    except (FileNotFoundError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    print(report)
    return 1 if report.missing else 0


if __name__ == "__main__":
    sys.exit(main())
