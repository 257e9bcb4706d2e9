"""Offscreen MuJoCo rendering with one graphics context per process and one upload of meshes per model."""

from __future__ import annotations

import atexit
import importlib
import os
from collections.abc import Mapping
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

if not os.environ.get("MUJOCO_GL"):  # read when mujoco is imported; empty means a window, which workers lack
    os.environ["MUJOCO_GL"] = "egl"
import mujoco  # noqa: E402

_renderers: WeakValueDictionary[tuple, Renderer] = WeakValueDictionary()
_gl_context: Any = None


def shared_renderer(model_file: str, model: mujoco.MjModel, **options: Any) -> Renderer:
    """The renderer of this process for all worlds built from ``model_file`` with the same options.

    Meshes and textures are uploaded once; poses come from the world's own model and data at each frame. It
    lives as long as somebody holds it; at benchmark quality it takes about 90 MB.
    """
    key = (model_file, repr(sorted(options.items())))
    renderer = _renderers.get(key)
    if renderer is None:
        renderer = _renderers[key] = Renderer(model, **options)
    return renderer


class Renderer:
    """Renders worlds of one MuJoCo model.

    Args:
        model: the model whose meshes and textures are uploaded.
        size: ``(height, width)`` in pixels.
        quality: ``"benchmark"`` keeps what the model says, ``"fast"`` switches shadows and multisampling off,
            ``"minimal"`` reflections and the sky box as well.
        camera: name of a camera of the model, or ``lookat``, ``distance``, ``azimuth`` and ``elevation``.
        upside_down: turn the image by 180 degrees.
        hide_sites: leave out the sites, such as goal markers.
    """

    def __init__(
        self,
        model: mujoco.MjModel,
        *,
        size: tuple[int, int],
        quality: str,
        camera: str | Mapping[str, Any],
        upside_down: bool = False,
        hide_sites: bool = False,
    ):
        _make_gl_context_current()
        height, width = size
        model.vis.global_.offheight, model.vis.global_.offwidth = height, width
        if quality != "benchmark":  # must be set before the context is made
            model.vis.quality.shadowsize = 0
            model.vis.quality.offsamples = 0
        self._context = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_150)
        self._scene = mujoco.MjvScene(model, maxgeom=1000)
        if quality == "minimal":
            self._scene.flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = 0
            self._scene.flags[mujoco.mjtRndFlag.mjRND_SKYBOX] = 0
        self._viewport = mujoco.MjrRect(0, 0, width, height)
        self._perturbation = mujoco.MjvPerturb()
        self._options = mujoco.MjvOption()
        if hide_sites:
            self._options.sitegroup[:] = 0
        self._camera = mujoco.MjvCamera()
        if isinstance(camera, str):
            self._camera.type = mujoco.mjtCamera.mjCAMERA_FIXED
            self._camera.fixedcamid = model.camera(camera).id
        else:
            self._camera.type = mujoco.mjtCamera.mjCAMERA_FREE
            self._camera.lookat[:] = camera["lookat"]
            self._camera.distance = camera["distance"]
            self._camera.azimuth = camera["azimuth"]
            self._camera.elevation = camera["elevation"]
        self._upside_down = upside_down
        self._pixels = np.empty((height, width, 3), np.uint8)

    def render(self, model: mujoco.MjModel, data: mujoco.MjData) -> np.ndarray:
        """Render one world: uint8 ``[H, W, 3]``, a view that the next call overwrites."""
        mujoco.mjv_updateScene(
            model, data, self._options, self._perturbation, self._camera, mujoco.mjtCatBit.mjCAT_ALL, self._scene
        )
        # Several renderers share the process's graphics context: draw into our own framebuffer, not the last one made.
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self._context)
        mujoco.mjr_render(self._viewport, self._scene, self._context)
        mujoco.mjr_readPixels(self._pixels, None, self._viewport, self._context)
        # OpenGL's rows run from the bottom up: turned by 180 degrees, only the columns are still reversed.
        return self._pixels[:, ::-1] if self._upside_down else self._pixels[::-1]


def _make_gl_context_current() -> None:
    global _gl_context
    if _gl_context is None:
        backend = os.environ["MUJOCO_GL"]
        try:
            # mujoco.GLContext was chosen when mujoco was imported, perhaps before MUJOCO_GL was set above.
            _gl_context = importlib.import_module(f"mujoco.{backend}").GLContext(64, 64)
        except Exception as error:
            other = "osmesa" if backend == "egl" else "egl"
            raise RuntimeError(
                f"MuJoCo cannot render with MUJOCO_GL={backend} ({error}). Run `python -m vla_envs` to see what is "
                f"missing, or try the other renderer: MUJOCO_GL={other}"
            ) from error
        atexit.register(_gl_context.free)  # its own destructor may come when the graphics library is gone
    _gl_context.make_current()
