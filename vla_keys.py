"""The data contract under its short name; see :mod:`vla_common.keys`."""

from vla_common.keys import *  # noqa: F403
