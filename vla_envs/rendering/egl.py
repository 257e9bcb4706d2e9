"""Which graphics device MuJoCo draws with in this process. Decided before mujoco is imported, which reads it once."""

import ctypes
import json
import os
import warnings
from collections.abc import Sequence
from typing import Any

from vla_envs.probe import run_probe
from vla_envs.rendering.gpus import WORKER, chosen_gpus, show, visible_names

_PLATFORM_DEVICE, _CUDA_DEVICE = 0x313F, 0x323A  # EGL_PLATFORM_DEVICE_EXT, EGL_CUDA_DEVICE_NV
_MAX_DEVICES = 64
_LEAVE_OUT = "leave out env.gpus (null)"


def check_renderer() -> None:
    """Refuse a ``MUJOCO_GL`` that no worker could draw with, before one is started."""
    asked = os.environ.get("MUJOCO_GL", "")
    if asked not in ("", "egl", "osmesa", "glfw"):
        raise ValueError(
            f"MUJOCO_GL={asked}: is no renderer of MuJoCo's; type MUJOCO_GL=egl (drawn by a GPU), MUJOCO_GL=osmesa (by "
            "the CPU), or leave it out"
        )


def check_gpus(gpus: Sequence[int]) -> None:
    """Refuse GPUs, as CUDA numbers them here, that MuJoCo could not draw with, before a worker is started."""
    asked = os.environ.get("MUJOCO_GL", "")
    if asked not in ("", "egl"):
        raise ValueError(f"gpus={show(gpus)}: MUJOCO_GL={asked} draws with no GPU; type MUJOCO_GL=egl, or {_LEAVE_OUT}")
    check_devices(gpus, "MUJOCO_EGL_DEVICE_ID")


def check_devices(gpus: Sequence[int], variable: str) -> None:
    """Refuse GPUs that EGL does not have, or where a ``variable`` of the user's says which device is taken."""
    if (device := os.environ.get(variable)) and f"VLA_TORCHRL_{variable}" not in os.environ:
        raise ValueError(
            f"gpus={show(gpus)}: {variable}={device} says which device draws, too; type unset {variable}, or "
            f"{_LEAVE_OUT}"
        )
    # In a process of its own: this one may fork later, which EGL does not survive.
    works, found = run_probe(f"import json\nfrom {__name__} import egl_devices\nprint(json.dumps(egl_devices()))")
    devices = {int(egl): cuda for egl, cuda in json.loads(found).items()} if works else {}
    for worker in range(len(gpus)):
        device_of_worker(devices, os.environ.get("CUDA_VISIBLE_DEVICES"), worker, gpus)


def choose_device() -> None:
    """Set ``MUJOCO_GL`` and ``MUJOCO_EGL_DEVICE_ID`` where the user has not: EGL, or OSMesa with a warning.

    Workers take turns on the chosen GPUs, or on all that CUDA shows; EGL numbers devices in an order of its own.
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
    take_device("MUJOCO_EGL_DEVICE_ID", devices)


def take_device(variable: str, devices: dict[int, int | None]) -> None:
    """Name the device of this process (:func:`device_of_worker`), unless the user has; its parent's does not count."""
    visible, worker = os.environ.get("CUDA_VISIBLE_DEVICES"), int(os.environ.get(WORKER, 0))
    chosen, mark = device_of_worker(devices, visible, worker, chosen_gpus()), f"VLA_TORCHRL_{variable}"
    if chosen is not None and (variable not in os.environ or mark in os.environ):
        os.environ |= {variable: str(chosen), mark: "chosen here"}


def device_of_worker(
    devices: dict[int, int | None], visible: str | None, worker: int, gpus: Sequence[int] = ()
) -> int | None:
    """Choose the EGL device of a worker by number, ``None`` to leave it to MuJoCo.

    Workers take turns on ``gpus``, as CUDA numbers them here, or on all of ``visible`` (``CUDA_VISIBLE_DEVICES``; names
    that are no numbers count as all). ``devices``: of :func:`egl_devices`.
    """
    by_cuda = {cuda: egl for egl, cuda in devices.items() if cuda is not None}
    names = visible_names(visible)
    numbers = [int(name) for name in names] if all(map(str.isdigit, names)) else None
    if gpus:
        if numbers is None:
            raise ValueError(
                f"gpus={show(gpus)}: EGL does not know the names of CUDA_VISIBLE_DEVICES={visible}; type their numbers "
                f"there, or {_LEAVE_OUT}"
            )
        gpu = gpus[worker % len(gpus)]
        cuda = numbers[gpu] if numbers else gpu
        if cuda not in by_cuda:
            raise ValueError(
                f"gpus={show(gpus)}: EGL, which draws, does not have GPU {gpu}; run `python -m vla_envs` to see what "
                f"is missing, or {_LEAVE_OUT}"
            )
        return by_cuda[cuda]
    wanted = [cuda for cuda in numbers or sorted(by_cuda) if cuda in by_cuda]
    return by_cuda[wanted[worker % len(wanted)]] if wanted else None


def egl_devices() -> dict[int, int | None]:
    """EGL devices that can be opened: number -> number of the same device in CUDA, ``None`` if it has none."""
    try:
        egl = ctypes.CDLL("libEGL.so.1")
    except OSError:
        return {}
    egl.eglGetProcAddress.restype = ctypes.c_void_p
    uint, integer, pointer = ctypes.c_uint, ctypes.c_int, ctypes.c_void_p
    query = _function(egl, "eglQueryDevicesEXT", uint, integer, pointer, pointer)
    attribute = _function(egl, "eglQueryDeviceAttribEXT", uint, pointer, integer, pointer)
    display = _function(egl, "eglGetPlatformDisplayEXT", pointer, uint, pointer, pointer)
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
