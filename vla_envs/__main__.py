"""``python -m vla_envs``: which environments there are, and what this machine lacks for them.

``python -m vla_envs fetch calvin`` brings what a benchmark lacks, ``... check metaworld/reach-v3`` tries one.
"""

from vla_common.program import FAILED, OneLineParser, run_main
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
    checking = commands.add_parser("check", help="run a simulator: the same episode has to be the same bits anywhere")
    checking.add_argument("name", help="such as metaworld/reach-v3; of a benchmark's name, its first suite")
    arguments = parser.parse_args()
    if arguments.command == "fetch":
        return fetch(arguments.name, arguments.source)
    return _check(arguments.name) if arguments.command == "check" else diagnose(all_names=arguments.all)


def _check(name: str) -> int:
    from vla_envs.check import check_simulator  # imports torch, which the doctor does not need

    problems = check_simulator(name, say=lambda line: print("ok      ", line, flush=True))
    print("".join(f"problem  {line}\n" for line in problems), end="")
    return FAILED if problems else 0


if __name__ == "__main__":
    run_main(main)
