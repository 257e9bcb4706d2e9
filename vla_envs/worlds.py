"""Built worlds, kept by a process from one episode of a task to its next, in any of its simulators."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any


class WorldCache:
    """Worlds that no simulator is using, oldest first.

    A world has a ``key``, what it is built and drawn by; ``megabytes``; a ``renderer``, which several may share, with
    its own ``renderer_megabytes``; and ``close()``. ``build`` makes one, and ``key_of`` returns the key of one, of the
    same arguments.
    """

    def __init__(self, build: Callable[..., Any], key_of: Callable[..., Hashable]) -> None:
        self._build, self._key_of = build, key_of
        self._idle: OrderedDict[int, Any] = OrderedDict()  # by id()

    @property
    def megabytes(self) -> float:
        """About what the idle worlds and their renderers take."""
        renderers = {id(world.renderer): world.renderer_megabytes for world in self._idle.values()}
        return sum(world.megabytes for world in self._idle.values()) + sum(renderers.values())

    def take(self, *arguments: Any) -> Any:
        """Take an idle world, the last one used, or build one."""
        key = self._key_of(*arguments)
        for place, world in reversed(self._idle.items()):
            if world.key == key:
                del self._idle[place]
                return world
        return self._build(*arguments)

    def give_back(self, world: Any, gigabytes: float) -> None:
        """Keep a world for later, as long as all kept ones take at most ``gigabytes``."""
        self._idle[id(world)] = world
        while self._idle and self.megabytes > 1000 * gigabytes:
            self._idle.popitem(last=False)[1].close()
