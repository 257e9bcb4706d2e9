"""``python -m vla_envs``: which environments there are and what this machine lacks for them."""

from __future__ import annotations

from vla_common.program import OneLineParser, run_main
from vla_envs.doctor import diagnose


def main() -> int:
    """Run the doctor; returns the exit status."""
    parser = OneLineParser(prog="python -m vla_envs", description=__doc__)
    parser.add_argument("--all", action="store_true", help="print the name of every environment")
    return diagnose(all_names=parser.parse_args().all)


if __name__ == "__main__":
    run_main(main)
