"""``python -m vla_from_rlinf FILE``, as the command ``vla-from-rlinf``."""

import sys

from vla_from_rlinf.command import run

if __name__ == "__main__":
    sys.exit(run())
