"""A window on the screen for ``render_mode="human"``."""

from __future__ import annotations

from importlib.util import find_spec

import gymnasium
import numpy as np


def has_pygame() -> bool:
    """Tell whether windows can be opened."""
    return find_spec("pygame") is not None


class Window:
    """Shows frames at the speed of the robot.

    Args:
        fps: frames per second, at most.

    Raises:
        gymnasium.error.DependencyNotInstalled: there is no pygame.
    """

    def __init__(self, fps: int):
        if not has_pygame():
            raise gymnasium.error.DependencyNotInstalled(
                "render_mode='human' opens a window with pygame; type: pip install 'vla-torchrl[video]'"
            )
        self._fps = fps
        self._opened = False

    def show(self, image: np.ndarray) -> None:
        """Show a frame, uint8 ``[H, W, 3]``; the first one opens the window."""
        import pygame

        if not self._opened:
            pygame.display.init()
            pygame.display.set_mode(image.shape[1::-1])
            self._clock, self._opened = pygame.time.Clock(), True
        pygame.event.pump()  # a window that answers nothing is taken for dead
        pygame.surfarray.blit_array(pygame.display.get_surface(), image.swapaxes(0, 1))
        pygame.display.flip()
        self._clock.tick(self._fps)

    def close(self) -> None:
        """Close it, if it was opened."""
        if self._opened:
            import pygame

            pygame.display.quit()
            self._opened = False
