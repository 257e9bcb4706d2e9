"""Which device MuJoCo draws with: one GPU per worker in turn, OSMesa where EGL finds nothing."""

import ctypes.util
import os
import subprocess
import sys

import pytest

from vla_envs.rendering.egl import device_of_worker, egl_devices

# EGL's number -> CUDA's: two GPUs in another order than CUDA's, and Mesa on the CPU.
DEVICES = {0: 1, 1: 0, 2: None}


@pytest.mark.parametrize(
    ("devices", "visible", "chosen"),
    [
        (DEVICES, None, [1, 0, 1]),
        (DEVICES, "0,1", [1, 0, 1]),
        (DEVICES, "1,0", [0, 1, 0]),
        (DEVICES, "1", [0, 0, 0]),
        (DEVICES, "GPU-8f0c,GPU-77aa", [1, 0, 1]),
        (DEVICES, "", [1, 0, 1]),
        (DEVICES, "7", [None, None, None]),
        ({0: None}, "0", [None, None, None]),
    ],
)
def test_workers_take_turns_on_the_gpus_that_cuda_shows(devices, visible, chosen):
    assert [device_of_worker(devices, visible, worker) for worker in range(3)] == chosen


def drawn(environment):
    """Draws a Meta-World frame in a process with this environment; returns backend, brightness and warnings."""
    pytest.importorskip("metaworld", reason="Meta-World is not installed: make setup")
    code = """
import os
from vla_envs import make_spec
from vla_envs.simulator import Episode
simulator = make_spec("metaworld/reach", image_size=32, render_quality="fast").make()
simulator.reset(Episode(0, 0))
print(os.environ["MUJOCO_GL"], simulator.observe().images.mean())
"""
    unset = {key: value for key, value in os.environ.items() if key not in ("MUJOCO_GL", "PYOPENGL_PLATFORM")}
    ran = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**unset, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
    )
    assert ran.returncode == 0, ran.stderr
    backend, brightness = ran.stdout.split()
    return backend, float(brightness), ran.stderr


@pytest.mark.skipif(not egl_devices(), reason="EGL finds no device: sudo apt-get install libegl1 libegl-mesa0")
def test_egl_where_it_works():
    backend, _, said = drawn({})
    assert backend == "egl"
    assert "Warning" not in said


@pytest.mark.skipif(not ctypes.util.find_library("OSMesa"), reason="no OSMesa: sudo apt-get install libosmesa6")
def test_osmesa_with_a_warning_where_egl_finds_nothing():
    hidden = {"__EGL_VENDOR_LIBRARY_FILENAMES": "/nowhere"}
    backend, brightness, said = drawn(hidden)
    assert backend == "osmesa"
    assert "EGL finds no device" in said
    assert "MUJOCO_GL=osmesa" in said
    asked, same, said = drawn({**hidden, "MUJOCO_GL": "osmesa"})
    assert (asked, same) == ("osmesa", brightness)
    assert "Warning" not in said
