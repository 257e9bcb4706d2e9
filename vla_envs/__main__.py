"""``python -m vla_envs``: which environments there are and what this machine lacks for them; ``check`` tries one."""

from __future__ import annotations

from vla_common.program import FAILED, OneLineParser, run_main
from vla_envs.doctor import diagnose


def main() -> int:
    """Run the doctor, or the command; returns the exit status."""
    parser = OneLineParser(prog="python -m vla_envs", description=__doc__)
    parser.add_argument("--all", action="store_true", help="print the name of every environment")
    commands = parser.add_subparsers(dest="command")
    check = commands.add_parser("check", help="run a simulator: the same episode has to be the same bits anywhere")
    check.add_argument("name", help="such as metaworld/reach-v3; of a benchmark's name, its first suite")
    arguments = parser.parse_args()
    return _check(arguments.name) if arguments.command == "check" else diagnose(all_names=arguments.all)


def _check(name: str) -> int:
    from vla_envs.check import check_simulator  # imports torch, which the doctor does not need

    problems = check_simulator(name, say=lambda line: print("ok      ", line, flush=True))
    print("".join(f"problem  {line}\n" for line in problems), end="")
    return FAILED if problems else 0


if __name__ == "__main__":
    run_main(main)
