"""Which graphics device MuJoCo draws with in this process. Decided before mujoco is imported, which reads it once."""

from __future__ import annotations

import ctypes
import os
import warnings
from typing import Any

WORKER = "VLA_TORCHRL_WORKER"  # number of this worker process, which the pool sets: workers take turns on the GPUs
_PLATFORM_DEVICE, _CUDA_DEVICE = 0x313F, 0x323A  # EGL_PLATFORM_DEVICE_EXT, EGL_CUDA_DEVICE_NV
_MAX_DEVICES = 64
_RENDERERS = ("egl", "osmesa", "glfw")


def check_renderer() -> None:
    """Refuse a ``MUJOCO_GL`` that no worker could draw with, before one is started.

    Raises:
        ValueError: it names no renderer.
    """
    asked = os.environ.get("MUJOCO_GL", "")
    if asked not in ("", *_RENDERERS):
        raise ValueError(
            f"MUJOCO_GL={asked}: is no renderer of MuJoCo's; type MUJOCO_GL=egl (drawn by a GPU), MUJOCO_GL=osmesa (by "
            "the CPU), or leave it out"
        )


def choose_device() -> None:
    """Set ``MUJOCO_GL`` and ``MUJOCO_EGL_DEVICE_ID`` where the user has not.

    EGL is taken if it works, otherwise OSMesa, with a warning. Of several GPUs that CUDA shows to this process, worker
    ``w`` takes the one after worker ``w - 1``'s; EGL numbers devices in an order of its own.
    """
    asked = os.environ.get("MUJOCO_GL")  # empty means a window, which workers lack
    if asked and asked != "egl":
        return
    devices = egl_devices()
    if not devices:
        if asked:  # MuJoCo says what is wrong
            return
        os.environ["MUJOCO_GL"] = "osmesa"
        warnings.warn(
            "EGL finds no device to draw with, so frames are drawn on the CPU by OSMesa. Run `python -m vla_envs` to "
            "see what is missing; MUJOCO_GL=osmesa says that this is as it should be",
            RuntimeWarning,
            stacklevel=2,
        )
        return
    os.environ["MUJOCO_GL"] = "egl"
    chosen = device_of_worker(devices, os.environ.get("CUDA_VISIBLE_DEVICES"), int(os.environ.get(WORKER, 0)))
    if chosen is not None:
        os.environ.setdefault("MUJOCO_EGL_DEVICE_ID", str(chosen))


def device_of_worker(devices: dict[int, int | None], visible: str | None, worker: int) -> int | None:
    """Choose the EGL device of a worker by number, ``None`` to leave it to MuJoCo.

    Args:
        devices: of :func:`egl_devices`.
        visible: ``CUDA_VISIBLE_DEVICES``; names that are not numbers (UUIDs) count as all.
        worker: number of the worker.
    """
    by_cuda = {cuda: egl for egl, cuda in devices.items() if cuda is not None}
    wanted = sorted(by_cuda)
    names = [name.strip() for name in (visible or "").split(",") if name.strip()]
    if names and all(name.isdigit() for name in names):
        wanted = [int(name) for name in names if int(name) in by_cuda]
    return by_cuda[wanted[worker % len(wanted)]] if wanted else None


def egl_devices() -> dict[int, int | None]:
    """EGL devices that can be opened: number -> number of the same device in CUDA, ``None`` if it has none."""
    try:
        egl = ctypes.CDLL("libEGL.so.1")
    except OSError:
        return {}
    egl.eglGetProcAddress.restype = ctypes.c_void_p
    query, attribute, display = (
        _function(egl, name, result, *arguments)
        for name, result, *arguments in (
            ("eglQueryDevicesEXT", ctypes.c_uint, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p),
            ("eglQueryDeviceAttribEXT", ctypes.c_uint, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p),
            ("eglGetPlatformDisplayEXT", ctypes.c_void_p, ctypes.c_uint, ctypes.c_void_p, ctypes.c_void_p),
        )
    )
    if query is None or display is None:
        return {}
    found, count = (ctypes.c_void_p * _MAX_DEVICES)(), ctypes.c_int(0)
    if not query(_MAX_DEVICES, found, ctypes.byref(count)):
        return {}
    egl.eglInitialize.argtypes = [ctypes.c_void_p] * 3
    devices: dict[int, int | None] = {}
    for number, device in enumerate(found[: count.value]):
        opened = display(_PLATFORM_DEVICE, device, None)
        if not opened or not egl.eglInitialize(opened, None, None):
            continue
        cuda = ctypes.c_ssize_t(-1)
        known = attribute is not None and attribute(device, _CUDA_DEVICE, ctypes.byref(cuda))
        devices[number] = cuda.value if known and cuda.value >= 0 else None
    return devices


def _function(egl: ctypes.CDLL, name: str, result: type, *arguments: type) -> Any:
    address = egl.eglGetProcAddress(name.encode())
    return ctypes.CFUNCTYPE(result, *arguments)(address) if address else None
