"""How far a run has come: what goes wrong before work begins is mostly the user's, and is said in one line."""

from __future__ import annotations

_begun = False


def begin_work() -> None:
    """Say that settings are checked, the parts are made and work begins."""
    global _begun
    _begun = True


def has_begun() -> bool:
    """Tell whether :func:`begin_work` was called in this process, since the run of a sweep before this one."""
    return _begun


def begin_anew() -> None:
    """Forget it: another run begins in this process."""
    global _begun
    _begun = False
