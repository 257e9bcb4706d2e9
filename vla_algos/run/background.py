"""Work that a thread does while the run goes on, and whose error is not lost."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Background:
    """Does work in a thread of its own, from now on.

    It is a daemon: it must not keep a process alive in which everything else has ended. Who wants its result waits.

    Args:
        work: what to do.
        name: of the thread.
    """

    def __init__(self, work: Callable[[], object], name: str):
        self._error: BaseException | None = None

        def run() -> None:
            try:
                work()
            except BaseException as error:  # raised where somebody waits for it
                self._error = error

        self._thread = threading.Thread(target=run, name=name, daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether it has ended, in whatever way."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Wait until it has ended; signals are handled meanwhile. Raises what it raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error
