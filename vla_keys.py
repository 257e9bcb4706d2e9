"""The data contract under its short name; see :mod:`vla_common.keys`."""

from vla_common import keys
from vla_common.keys import *  # noqa: F403


def __getattr__(name: str) -> str:
    return getattr(keys, name)  # names of earlier versions
