"""How this program was started, in the words that were typed: for commands that are shown to be typed again.

Nothing but the standard library is imported here, see :mod:`vla_common.program`.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_STARTED_AS = "VLA_STARTED_AS"  # of a program that became another one
_COMMANDS = ("torchrun", "vla-recipe")  # scripts that are typed by their name


def started(arguments: Sequence[str]) -> list[str] | None:
    """Return what was typed before the arguments, such as ``python recipes/ppo.py``; ``None`` where nothing tells.

    Called once, before others are started: what :func:`handed_on` says is forgotten.

    Args:
        arguments: those that were typed.
    """
    became = os.environ.pop(_STARTED_AS, None)
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun's own arguments are known to it alone
        whole = _command_of(os.getppid())
    elif became is not None:
        return json.loads(became)
    else:
        whole = sys.orig_argv
    typed = list(arguments)
    place = len(whole) - len(typed)
    if place < 1 or whole[place:] != typed:
        return None
    start = whole[:place]
    if len(start) > 1 and (name := Path(start[1]).name) in _COMMANDS:
        found = shutil.which(name)
        return [name if found and os.path.samefile(found, start[1]) else start[1], *start[2:]]
    return start


def handed_on(start: Sequence[str] | None) -> Mapping[str, str]:
    """Return the environment of a program that this one becomes, which then says that it was started so."""
    return os.environ if start is None else {**os.environ, _STARTED_AS: json.dumps(list(start))}


def _command_of(process: int) -> list[str]:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes().decode().rstrip("\0").split("\0")
    except (OSError, UnicodeDecodeError):  # another's process, or no /proc
        return []
