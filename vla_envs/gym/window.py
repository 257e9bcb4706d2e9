"""A window on the screen for ``render_mode="human"``."""

from __future__ import annotations

import os
from importlib.util import find_spec

import gymnasium
import numpy as np

_SCREENS = ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER")


def why_no_window() -> str:
    """Say why no window can be opened here; empty if one can."""
    if find_spec("pygame") is None:
        return "render_mode='human' opens a window with pygame; type: pip install 'vla-torchrl[video]'"
    # Asked for a window all the same, SDL draws offscreen by EGL, and closing that takes MuJoCo's EGL with it.
    if not any(map(os.environ.get, _SCREENS)):
        return (
            "render_mode='human' needs a screen ($DISPLAY): take render_mode='rgb_array' and Gymnasium's RecordVideo, "
            "or SDL_VIDEODRIVER=dummy for a window that nobody sees"
        )
    return ""


class Window:
    """Shows frames at the speed of the robot.

    Args:
        fps: frames per second, at most.

    Raises:
        gymnasium.error.DependencyNotInstalled: there is no pygame, or no screen.
    """

    def __init__(self, fps: float):
        if reason := why_no_window():
            raise gymnasium.error.DependencyNotInstalled(reason)
        self._fps = fps
        self._opened = False

    def show(self, image: np.ndarray) -> None:
        """Show a frame, uint8 ``[H, W, 3]``; the first one opens the window."""
        import pygame

        if not self._opened:
            os.environ.setdefault("SDL_FRAMEBUFFER_ACCELERATION", "0")  # no OpenGL beside the simulator's
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
