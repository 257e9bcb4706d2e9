"""Fetch a Vulkan driver that draws on the CPU, for SAPIEN: ``python scripts/install_vulkan_driver.py`` (Debian 12).

It takes Mesa's lavapipe 25.0 from Debian's backports and unpacks it into ``~/.cache/vla-torchrl/vulkan``, where
:mod:`vla_envs.rendering.vulkan` finds it. It needs ``apt-get``, and root only where the machine lacks libraries that
the driver is linked against. Where SAPIEN can draw already, it does nothing.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from vla_envs.rendering.vulkan import FOLDER, LIBRARIES, MANIFEST, VulkanError, check_driver, loads, try_driver

DRIVER = "libvulkan_lvp.so"
MIRROR, SUITE = "http://deb.debian.org/debian", "bookworm-backports"
KEYS = "/usr/share/keyrings/debian-archive-keyring.gpg"
PACKAGES = ("mesa-vulkan-drivers", "libdrm2", "libdrm-amdgpu1")
# What the driver, sapien and OpenCV are linked against and a bare container lacks: packages of the distribution.
LINKED = {"libX11.so.6": "libx11-6", "libGL.so.1": "libgl1", "libglib-2.0.so.0": "libglib2.0-0"}


def main() -> None:
    """Fetch the driver if there is none that works."""
    try:
        with contextlib.suppress(VulkanError):
            print(f"nothing to do: SAPIEN draws with {check_driver()!r}")
            return
        print(f"lavapipe is in {install_driver().parent}")
        try_driver.cache_clear()
        print(f"SAPIEN draws with {check_driver()!r}")
    except VulkanError as problem:
        sys.exit(str(problem))


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
        for library in (*LIBRARIES, DRIVER):
            found = next((Path(name) / "root").rglob(library), None)
            if found is None:
                raise VulkanError(f"{library} is in none of {', '.join(path.name for path in packages)}")
            (FOLDER / library).write_bytes(found.read_bytes())
    if missing := _missing_libraries():
        _install_libraries(missing)
    icd = {"api_version": "1.4.305", "library_path": str(FOLDER / DRIVER)}
    MANIFEST.write_text(json.dumps({"ICD": icd, "file_format_version": "1.0.0"}))
    return MANIFEST


def _download(folder: Path) -> list[Path]:
    """Download the packages without touching apt's own lists: the system stays as it is."""
    (folder / "lists" / "partial").mkdir(parents=True)
    (folder / "cache" / "archives" / "partial").mkdir(parents=True)
    source = folder / "sources.list"
    source.write_text(f"deb [signed-by={KEYS}] {MIRROR} {SUITE} main\n")
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
    _run(*apt, "download", *(f"{package}/{SUITE}" for package in PACKAGES), folder=folder)
    return sorted(folder.glob("*.deb"))


def _missing_libraries() -> list[str]:
    lines = _run("ldd", str(FOLDER / DRIVER)).splitlines()
    return [line.split()[0] for line in lines if "not found" in line] + [name for name in LINKED if not loads(name)]


def _install_libraries(missing: list[str]) -> None:
    """Install the distribution's own package of the driver, which brings what both versions are linked against."""
    command = ("apt-get", "install", "-y", "--no-install-recommends", PACKAGES[0], *LINKED.values())
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


if __name__ == "__main__":
    main()
