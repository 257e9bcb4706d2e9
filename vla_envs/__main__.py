"""``python -m vla_envs``: which environments there are and what this machine lacks for them; ``fetch`` brings it."""

from __future__ import annotations

from vla_common.program import OneLineParser, run_main
from vla_envs.doctor import diagnose
from vla_envs.fetch import fetch


def main() -> int:
    """Run the doctor, or what was typed instead of it; returns the exit status."""
    parser = OneLineParser(prog="python -m vla_envs", description=__doc__)
    parser.add_argument("--all", action="store_true", help="print the name of every environment")
    commands = parser.add_subparsers(dest="command")
    fetching = commands.add_parser("fetch", help="bring what a benchmark lacks, as the report says")
    fetching.add_argument("name", help="such as calvin, robotwin, libero, libero-assets, maniskill-assets")
    fetching.add_argument("--from", dest="source", metavar="FOLDER|URL", help="a copy or a mirror of it")
    arguments = parser.parse_args()
    if arguments.command == "fetch":
        return fetch(arguments.name, arguments.source)
    return diagnose(all_names=arguments.all)


if __name__ == "__main__":
    run_main(main)
