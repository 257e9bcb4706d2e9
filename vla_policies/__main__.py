"""``python -m vla_policies``, see :mod:`vla_policies.cli`."""

from vla_common.program import run_main
from vla_policies.cli import main

if __name__ == "__main__":
    run_main(main)
