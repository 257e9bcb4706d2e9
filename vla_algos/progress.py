"""How far the long parts of an iteration are: they :func:`tell` it, and a progress bar is :func:`listening`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Listener = Callable[[str, int, int], object]
_listeners: list[Listener] = []


def tell(part: str, done: int, total: int) -> None:
    """Tell the listeners that ``done`` of ``total`` of a part, such as ``"collecting"``, are done."""
    for listener in _listeners:
        listener(part, done, total)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Have ``listener(part, done, total)`` called while the body runs."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
