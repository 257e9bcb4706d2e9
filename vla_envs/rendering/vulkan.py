"""The Vulkan driver that SAPIEN draws with. Decided before sapien is imported.

SAPIEN runs nothing without one, not even tasks without images. A GPU brings its own. Elsewhere Mesa's lavapipe draws on
the CPU, in a newer version than Debian 12's 22.3: ``scripts/install_vulkan_driver.py`` fetches 25.0 from Debian's
backports into a folder of ours, because upgrading Mesa for the whole machine would change MuJoCo's pixels too.
"""

import ctypes
import os
import sys
import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from vla_envs.probe import run_probe
from vla_envs.rendering.gpus import WORKER, gpu_of_worker, show, visible_names

FOLDER = Path.home() / ".cache" / "vla-torchrl" / "vulkan"
MANIFEST = FOLDER / "lavapipe.json"  # names the driver in our folder
LIBRARIES = ("libdrm.so.2", "libdrm_amdgpu.so.1")  # newer than the system's, and loaded before it asks for them
_INSTALLER = "install_vulkan_driver.py"
_INSTALLERS = (  # in a checkout, and where pip puts it
    Path(__file__).parents[2] / "scripts" / _INSTALLER,
    Path(sys.prefix) / "share" / "vla-torchrl" / _INSTALLER,
)
_CHOICES = ("VK_DRIVER_FILES", "VK_ICD_FILENAMES")  # by which a user says which driver to take
_NVIDIA_DRIVER = "libGLX_nvidia.so.0"
_own: list[str] = []  # GPU of this worker, which is shown it alone
NO_CUDA = (
    "SAPIEN would draw with this machine's GPU, but torch cannot use it: install a torch with CUDA, or draw on the CPU "
    "by typing CUDA_VISIBLE_DEVICES= before the command"
)
_PROBE = """
from vla_envs.rendering.vulkan import choose_driver
choose_driver()
import sapien
print(sapien.render.RenderSystem({device}).device.name)
"""


class VulkanError(RuntimeError):
    """There is no Vulkan driver that SAPIEN can draw with; the message says what to type."""


def choose_driver() -> None:
    """Let this process draw with the driver in our folder, if it is there and neither user nor GPU has another."""
    os.environ.setdefault("LP_NUM_THREADS", "1")  # several worlds share the cores
    warnings.filterwarnings("ignore", message="Failed to find system libvulkan")  # SAPIEN brings one
    asked = {os.environ.get(name) for name in _CHOICES} - {None, "", str(MANIFEST)}
    if asked or has_gpu() or not MANIFEST.is_file():
        return
    for name in LIBRARIES:
        ctypes.CDLL(str(FOLDER / name), ctypes.RTLD_GLOBAL)
    os.environ["VK_ICD_FILENAMES"] = str(MANIFEST)


def has_gpu() -> bool:
    """Tell whether an NVIDIA GPU and its graphics driver are there, which are then taken.

    A container may have the device without the driver (``NVIDIA_DRIVER_CAPABILITIES`` without ``graphics``). A user who
    hides the GPU from CUDA, or chooses the driver in our folder, wants the CPU to draw.
    """
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if hidden or str(MANIFEST) in (os.environ.get(name) for name in _CHOICES):
        return False
    return Path("/dev/nvidiactl").exists() and loads(_NVIDIA_DRIVER)


def show_own_gpu(shown: int) -> None:
    """Show a worker process its own GPU alone, of as many as CUDA shows it; called before sapien is imported."""
    if _own or WORKER not in os.environ or not has_gpu():
        return
    if not shown:
        raise RuntimeError(NO_CUDA)
    names, gpu = visible_names(os.environ.get("CUDA_VISIBLE_DEVICES")), gpu_of_worker(shown)
    _own.append(names[gpu] if names else str(gpu))
    os.environ["CUDA_VISIBLE_DEVICES"] = _own[0]


def check_gpus(gpus: Sequence[int]) -> None:
    """Refuse chosen GPUs where SAPIEN would draw on the CPU, before a worker is started."""
    if not has_gpu():
        raise ValueError(
            f"gpus={show(gpus)}: SAPIEN draws on the CPU here, for want of the GPU's graphics driver "
            f"({_NVIDIA_DRIVER}) or because VK_ICD_FILENAMES or VK_DRIVER_FILES says so; leave out env.gpus (null), or "
            "run `python -m vla_envs` to see what is missing"
        )


def check_driver() -> str:
    """Return the name of the device that frames would be drawn with."""
    works, detail = try_driver()
    if works:
        return detail
    install = (
        f"Type: {install_command()}   (Debian 12; otherwise install Mesa 24 or later, package mesa-vulkan-drivers)"
    )
    if has_gpu():  # whose driver is taken, whatever else is installed
        install = (
            "This machine has an NVIDIA GPU: give Vulkan the file that names its driver, VK_ICD_FILENAMES="
            f"/usr/share/vulkan/icd.d/nvidia_icd.json, or draw on the CPU: {install_command()}, then "
            f"VK_ICD_FILENAMES={MANIFEST}"
        )
    raise VulkanError(f"no Vulkan driver that SAPIEN can draw with ({detail}). {install}")


@cache
def try_driver() -> tuple[bool, str]:
    """Tell whether a process of its own can open a device, with its name or what went wrong."""
    return run_probe(_PROBE.format(device="" if has_gpu() else "sapien.Device('cpu')"))


def install_command() -> str:
    """Return what to type to get a driver for the CPU."""
    return f"python {next((path for path in _INSTALLERS if path.is_file()), f'scripts/{_INSTALLER}')}"


def loads(library: str) -> bool:
    """Tell whether the system has a library."""
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True
