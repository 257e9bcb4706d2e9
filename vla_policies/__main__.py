"""``python -m vla_policies inspect FOLDER``: what a checkpoint is, and what it lacks."""

from __future__ import annotations

from vla_common.program import OneLineParser, report, run_main


def main(arguments: list[str] | None = None) -> int:
    """Print the report of a checkpoint; returns 0 if it can be loaded, 1 if something is missing, 2 if it is none."""
    parser = OneLineParser(prog="python -m vla_policies", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("inspect", help="family, head, layout, statistics, chunk, size, what is missing")
    command.add_argument("folder", help="checkpoint folder or hub id, such as openvla/openvla-7b")
    folder = parser.parse_args(arguments).folder

    from vla_policies.registry import inspect_policy

    try:
        found = inspect_policy(folder)
    except (FileNotFoundError, ValueError) as error:
        return report(error)
    print(found)
    return 1 if found.missing else 0


if __name__ == "__main__":
    run_main(main)
