"""The Vulkan driver that SAPIEN draws with. Decided before sapien is imported.

Nothing of ManiSkill runs without one, not even tasks without images. A GPU brings its own. Elsewhere Mesa's lavapipe
draws on the CPU; SAPIEN needs it in a newer version than Debian 12's own 22.3. ``python -m vla_envs.rendering.vulkan``
fetches 25.0 from Debian's backports into a folder of ours, where it changes nothing for other programs: upgrading Mesa
for the whole machine would change MuJoCo's pixels too.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import subprocess
import sys
import tempfile
import warnings
from functools import cache
from pathlib import Path

from vla_envs.probe import run_probe

FOLDER = Path.home() / ".cache" / "vla-torchrl" / "vulkan"
INSTALL = "python -m vla_envs.rendering.vulkan"
_CHOICES = ("VK_DRIVER_FILES", "VK_ICD_FILENAMES")  # by which a user says which driver to take
_MANIFEST = FOLDER / "lavapipe.json"
_LIBRARIES = ("libdrm.so.2", "libdrm_amdgpu.so.1")  # newer than the system's, and loaded before it asks for them
_DRIVER = "libvulkan_lvp.so"
_NVIDIA_DRIVER = "libGLX_nvidia.so.0"
_MIRROR, _SUITE = "http://deb.debian.org/debian", "bookworm-backports"
_KEYS = "/usr/share/keyrings/debian-archive-keyring.gpg"
_PACKAGES = ("mesa-vulkan-drivers", "libdrm2", "libdrm-amdgpu1")
# What the driver, sapien and OpenCV are linked against and a bare container lacks: packages of the distribution.
_LINKED = {"libX11.so.6": "libx11-6", "libGL.so.1": "libgl1", "libglib-2.0.so.0": "libglib2.0-0"}
_PROBE = """
from vla_envs.rendering.vulkan import choose_driver
choose_driver()
import sapien
print(sapien.render.RenderSystem({device}).device.name)
"""


class VulkanError(RuntimeError):
    """There is no Vulkan driver that SAPIEN can draw with; the message says what to type."""


def choose_driver() -> None:
    """Let this process draw with the driver in our folder, if it is there and neither user nor GPU has another.

    It is told to the process itself, so that a program that imports us needs no ``LD_LIBRARY_PATH``.
    """
    os.environ.setdefault("LP_NUM_THREADS", "1")  # several worlds share the cores
    warnings.filterwarnings("ignore", message="Failed to find system libvulkan")  # SAPIEN brings one
    asked = {os.environ.get(name) for name in _CHOICES} - {None, "", str(_MANIFEST)}
    if asked or has_gpu() or not _MANIFEST.is_file():
        return
    for name in _LIBRARIES:
        ctypes.CDLL(str(FOLDER / name), ctypes.RTLD_GLOBAL)
    os.environ["VK_ICD_FILENAMES"] = str(_MANIFEST)


def has_gpu() -> bool:
    """Whether this machine shows an NVIDIA GPU and its graphics driver to this process, which are then taken.

    A container may have the device without the driver (``NVIDIA_DRIVER_CAPABILITIES`` without ``graphics``). Whoever
    hides the GPU from CUDA, or chooses the driver in our folder, wants the CPU to draw.
    """
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if hidden or str(_MANIFEST) in (os.environ.get(name) for name in _CHOICES):
        return False
    return Path("/dev/nvidiactl").exists() and _loads(_NVIDIA_DRIVER)


def check_driver() -> str:
    """The name of the device that frames would be drawn with.

    Raises:
        VulkanError: there is no driver, or SAPIEN cannot use the one that there is.
    """
    works, detail = _probe()
    if works:
        return detail
    install = f"Type: {INSTALL}   (Debian 12; otherwise install Mesa 24 or later, package mesa-vulkan-drivers)"
    if has_gpu():  # whose driver is taken, whatever else is installed
        install = (
            "This machine has an NVIDIA GPU: give Vulkan the file that names its driver, VK_ICD_FILENAMES="
            f"/usr/share/vulkan/icd.d/nvidia_icd.json, or draw on the CPU: {INSTALL}, then VK_ICD_FILENAMES={_MANIFEST}"
        )
    if "rendering device" in detail or "supported physical device" in detail:
        raise VulkanError(f"the Vulkan driver is too old for SAPIEN ({detail}). {install}")
    if "IncompatibleDriver" in detail or "not support Vulkan" in detail:
        raise VulkanError(f"no Vulkan driver, without which ManiSkill runs nothing ({detail}). {install}")
    raise VulkanError(f"SAPIEN cannot draw: {detail}. {install}")


@cache
def _probe() -> tuple[bool, str]:
    """Whether a process of its own can open a device, with its name or what went wrong; a crash stays there."""
    return run_probe(_PROBE.format(device="" if has_gpu() else "sapien.Device('cpu')"))


def install_driver() -> Path:
    """Fetch lavapipe from Debian's backports into :data:`FOLDER`; returns the file that names the driver.

    It needs ``apt-get``, and root only where the machine lacks libraries that the driver is linked against.

    Raises:
        VulkanError: no such packages, or libraries that are missing and cannot be installed.
    """
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        packages = _download(Path(name))
        for package in packages:
            _run("dpkg-deb", "-x", str(package), str(Path(name) / "root"))
        for library in (*_LIBRARIES, _DRIVER):
            found = next((Path(name) / "root").rglob(library), None)
            if found is None:
                raise VulkanError(f"{library} is in none of {', '.join(path.name for path in packages)}")
            (FOLDER / library).write_bytes(found.read_bytes())
    if missing := _missing_libraries():
        _install_libraries(missing)
    icd = {"api_version": "1.4.305", "library_path": str(FOLDER / _DRIVER)}
    _MANIFEST.write_text(json.dumps({"ICD": icd, "file_format_version": "1.0.0"}))
    return _MANIFEST


def _download(folder: Path) -> list[Path]:
    """The packages, without touching apt's own lists: the system stays as it is."""
    (folder / "lists" / "partial").mkdir(parents=True)
    (folder / "cache" / "archives" / "partial").mkdir(parents=True)
    source = folder / "sources.list"
    source.write_text(f"deb [signed-by={_KEYS}] {_MIRROR} {_SUITE} main\n")
    settings = {
        "Dir::Etc::sourcelist": source,
        "Dir::Etc::sourceparts": "-",
        "Dir::State::lists": folder / "lists",
        "Dir::Cache": folder / "cache",
        "Debug::NoLocking": 1,
        "APT::Sandbox::User": "",
    }
    apt = ["apt-get", "-qq", *(part for name, value in settings.items() for part in ("-o", f"{name}={value}"))]
    _run(*apt, "update")
    _run(*apt, "download", *(f"{package}/{_SUITE}" for package in _PACKAGES), folder=folder)
    return sorted(folder.glob("*.deb"))


def _missing_libraries() -> list[str]:
    lines = _run("ldd", str(FOLDER / _DRIVER)).splitlines()
    return [line.split()[0] for line in lines if "not found" in line] + [name for name in _LINKED if not _loads(name)]


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _install_libraries(missing: list[str]) -> None:
    """The distribution's own package of the driver brings what both versions are linked against."""
    command = ("apt-get", "install", "-y", "--no-install-recommends", _PACKAGES[0], *_LINKED.values())
    if os.geteuid() != 0:
        raise VulkanError(f"the driver lacks {', '.join(missing)}. Type: sudo {' '.join(command)}")
    _run("apt-get", "update")
    _run(*command)
    if still := _missing_libraries():
        raise VulkanError(f"the driver lacks {', '.join(still)}, which {' '.join(command)} did not bring")


def _run(*command: str, folder: Path | None = None) -> str:
    try:
        return subprocess.run(command, check=True, cwd=folder, capture_output=True, text=True).stdout
    except FileNotFoundError as error:
        raise VulkanError(f"{command[0]} is not here: the driver can be fetched on Debian only") from error
    except subprocess.CalledProcessError as error:
        raise VulkanError(f"{' '.join(command)} failed: {error.stderr.strip()}") from error


def main() -> None:
    """Fetch the driver if there is none that works."""
    try:
        with contextlib.suppress(VulkanError):
            print(f"nothing to do: SAPIEN draws with {check_driver()!r}")
            return
        print(f"lavapipe is in {install_driver().parent}")
        _probe.cache_clear()
        print(f"SAPIEN draws with {check_driver()!r}")
    except VulkanError as problem:
        sys.exit(str(problem))


if __name__ == "__main__":
    main()
