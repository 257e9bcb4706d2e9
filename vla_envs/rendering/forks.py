"""A graphics library does not survive a fork: the child waits for ever for threads that only its parent has."""

from __future__ import annotations

import os

_drawing: dict[str, int] = {}  # by library: the process that draws with it


def refuse_fork(library: str) -> None:
    """Note that this process draws with a library.

    Raises:
        RuntimeError: it was forked from one that does, and would hang.
    """
    if _drawing.setdefault(library, os.getpid()) != os.getpid():
        raise RuntimeError(
            f"this process was forked from one that draws with {library}, which a fork cannot use: start it with "
            'context="spawn" (AsyncVectorEnv(..., context="spawn"), ParallelEnv(..., mp_start_method="spawn")), or let '
            'gymnasium.make_vec(..., vectorization_mode="vector_entry_point") start all processes'
        )
