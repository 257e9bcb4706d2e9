"""What this machine has and lacks for the environments, and what to type about each thing that fails.

Everything risky (importing a simulator, opening a graphics context) runs in a process of its own without
a standard input and with a time-out: a crash, a prompt or a hang becomes a line of the report.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from vla_envs.doctor.probe import run_probe
from vla_envs.libero import package as libero
from vla_envs.maniskill import assets as maniskill
from vla_envs.registry import BENCHMARKS, list_envs
from vla_envs.rendering import vulkan
from vla_envs.rendering.egl import egl_devices

DISTRIBUTION = "vla-torchrl"
SYSTEM_PACKAGES = ("libegl1", "libegl-mesa0", "libgl1-mesa-dri", "libosmesa6")
APT_INSTALL = f"sudo apt-get update && sudo apt-get install -y {' '.join(SYSTEM_PACKAGES)}"
_WITHOUT_DEPENDENCIES = {"libero": ("hf-libero==0.1.4",)}  # what is not in an extra, because it asks for too much
_MODULES = {"maniskill": "mani_skill"}  # where a benchmark's package is not called as the benchmark
_IMPORTS = {
    "libero": "from vla_envs.libero import package; package.check_versions(); package.import_libero()",
    "maniskill": "from vla_envs.rendering.vulkan import choose_driver; choose_driver(); import mani_skill.envs",
}
_ON_MUJOCO = ("metaworld", "libero")

# Renders a red ball with MuJoCo and says what drew it. A black frame counts as broken.
_RENDER_PROBE = """
import mujoco
from OpenGL import GL
ball = "<light pos='0 0 3'/><geom type='sphere' size='.5' rgba='1 0 0 1'/>"
model = mujoco.MjModel.from_xml_string(f"<mujoco><worldbody>{ball}</worldbody></mujoco>")
data = mujoco.MjData(model)
mujoco.mj_forward(model, data)
renderer = mujoco.Renderer(model, 64, 64)
renderer.update_scene(data)
if renderer.render().std() < 1:
    raise SystemExit("the frame is empty")
print(GL.glGetString(GL.GL_RENDERER).decode())
"""


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        status: ``"ok"``, ``"missing"`` (nothing there) or ``"broken"`` (there, but it does not work).
        name: what was looked at.
        detail: what was found.
        remedy: what to type; empty where nothing is wrong.
    """

    status: str
    name: str
    detail: str
    remedy: str = ""


def check_packages(requirements: Iterable[str] | None = None, extra: str = "") -> list[Finding]:
    """Compare installed versions with those that the package asks for.

    Args:
        requirements: as in ``pyproject.toml``; the installed package's own if ``None``.
        extra: check the requirements of this extra instead of the ones of the package itself.
    """
    if requirements is None:
        try:
            requirements = metadata.requires(DISTRIBUTION) or []
        except metadata.PackageNotFoundError:
            remedy = "pip install -e '.[metaworld]'  (in the checkout)"
            unknown = Finding("missing", DISTRIBUTION, "not installed, so versions cannot be checked", remedy)
            return [] if extra else [unknown]
    return [
        _check_requirement(requirement)
        for requirement in map(Requirement, requirements)
        if _applies(requirement, extra)
    ]


def _applies(requirement: Requirement, extra: str) -> bool:
    marker = requirement.marker
    everywhere = marker is None or marker.evaluate({"extra": ""})
    return not everywhere and marker.evaluate({"extra": extra}) if extra else everywhere


def _check_requirement(requirement: Requirement) -> Finding:
    name, wanted = requirement.name, str(requirement.specifier)
    alone = "--no-deps " if any(str(requirement) in packages for packages in _WITHOUT_DEPENDENCIES.values()) else ""
    remedy = f"pip install {alone}'{name}{wanted}'"
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return Finding("missing", name, f"needs {wanted or 'any version'}", remedy)
    if not requirement.specifier.contains(version, prereleases=True):
        return Finding("broken", name, f"{version}, needs {wanted}: results may differ", remedy)
    return Finding("ok", name, f"{version} ({wanted})" if wanted else version)


def check_renderers() -> list[Finding]:
    """Render one frame with each MuJoCo backend; the first finding is the one that environments use."""
    if find_spec("mujoco") is None:
        remedy = f"pip install '{DISTRIBUTION}[metaworld]'"
        return [Finding("missing", "MuJoCo", "not installed, so nothing can be rendered", remedy)]
    used = os.environ.get("MUJOCO_GL") or ("egl" if egl_devices() else "osmesa")
    backends = list(dict.fromkeys([used, "egl", "osmesa"]))
    with ThreadPoolExecutor() as threads:
        results = list(threads.map(lambda name: run_probe(_RENDER_PROBE, {"MUJOCO_GL": name}), backends))
    working = [backend for backend, (ok, _) in zip(backends, results, strict=True) if ok]
    remedy = f"export MUJOCO_GL={working[0]}, or: {APT_INSTALL}" if working else APT_INSTALL
    findings = []
    for backend, (ok, detail) in zip(backends, results, strict=True):
        note = f"{detail}, in use" if backend == used else detail
        findings.append(Finding("ok" if ok else "broken", f"MUJOCO_GL={backend}", note, "" if ok else remedy))
    return findings


def check_simulator(benchmark: str) -> list[Finding]:
    """Check the packages of a benchmark; the last finding is whether its simulator can be imported."""
    packages = [*check_packages(extra=benchmark), *check_packages(_WITHOUT_DEPENDENCIES.get(benchmark, ()))]
    # Without a renderer, whose faults have lines of their own.
    module = _MODULES.get(benchmark, benchmark)
    ok, detail = run_probe(_IMPORTS.get(benchmark, f"import {module}"), {"MUJOCO_GL": "off"})
    if ok:
        imported = Finding("ok", f"import {module}", "works")
    else:
        status = "missing" if f"No module named '{module}'" in detail else "broken"
        remedy = f"pip install '{DISTRIBUTION}[{benchmark}]'"
        imported = Finding(status, f"import {module}", detail, remedy)
    return [*packages, imported]


def check_vulkan() -> Finding:
    """Open the device that ManiSkill would draw with."""
    if find_spec("sapien") is None:
        return Finding("missing", "Vulkan", "sapien is not installed", f"pip install '{DISTRIBUTION}[maniskill]'")
    try:
        return Finding("ok", "Vulkan", f"SAPIEN draws with {vulkan.check_driver()!r}")
    except vulkan.VulkanError as error:
        detail, _, remedy = str(error).partition(" Type: ")
        return Finding("broken", "Vulkan", detail, remedy)


def check_benchmark_assets(title: str, package: Any) -> Finding:
    """Look for a benchmark's meshes and textures.

    Args:
        title: the benchmark's name.
        package: the module that knows where they may be: ``find_assets()`` and ``describe_assets()``.
    """
    try:
        folder = package.find_assets()
    except FileNotFoundError as error:
        where = [line.strip() for line in str(error).splitlines()[1:-1]]
        remedy = str(error).splitlines()[-1].strip().removeprefix("Type: ")
        return Finding("missing", f"{title}'s assets", "; ".join(where), remedy)
    return Finding("ok", f"{title}'s assets", "; ".join([str(folder), *package.describe_assets()]))


def check_assets() -> Finding:
    """Look for the folder of simulator assets."""
    folder = os.environ.get("VLA_TORCHRL_ASSETS")
    if not folder:
        return Finding("ok", "VLA_TORCHRL_ASSETS", "not set; Meta-World needs no assets beyond its package")
    if not Path(folder).is_dir():
        remedy = "export VLA_TORCHRL_ASSETS=/path/to/assets, or: unset VLA_TORCHRL_ASSETS"
        return Finding("missing", "VLA_TORCHRL_ASSETS", f"{folder} is not a folder", remedy)
    packs = ", ".join(sorted(path.name for path in Path(folder).iterdir() if path.is_dir()))
    return Finding("ok", "VLA_TORCHRL_ASSETS", f"{folder}: {packs or 'empty'}")


def describe_environments() -> list[str]:
    """The names that ``make_env`` takes: a line per benchmark and kind."""
    single = re.compile(r"-v\d+$")  # names of single tasks end in Meta-World's own version
    lines = []
    for benchmark in BENCHMARKS:
        names = [name for name in list_envs() if name.startswith(f"{benchmark}/")]
        tasks = [name for name in names if single.search(name)]
        lines.extend(f"  {name}" for name in names if name not in tasks)
        if tasks:
            shown = ", ".join(name.partition("/")[2] for name in tasks[:3])
            lines.append(f"  {benchmark}/<task>  for each of {len(tasks)} tasks: {shown}, ...")
    return lines


def diagnose(all_names: bool = False) -> int:
    """Print the report.

    Args:
        all_names: print every environment name instead of a summary.

    Returns:
        0 if a simulator can be used as things are, and all that are installed can draw; else 1.
    """
    system = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    print(f"{DISTRIBUTION} on Python {platform.python_version()}, {system}")
    print("\nEnvironments")
    print("\n".join([f"  {name}" for name in list_envs()] if all_names else describe_environments()))
    with ThreadPoolExecutor() as threads:
        renderers = threads.submit(check_renderers)
        vulkan_driver = threads.submit(check_vulkan)
        simulators = {benchmark: threads.submit(check_simulator, benchmark) for benchmark in BENCHMARKS}
    assets = {
        "libero": check_benchmark_assets("LIBERO", libero),
        "maniskill": check_benchmark_assets("Plate-25", maniskill),
    }
    sections = {
        "Packages": check_packages(),
        **{f"Simulator {benchmark}": found.result() for benchmark, found in simulators.items()},
        "Rendering": [*renderers.result(), vulkan_driver.result()],
        "Assets": [check_assets(), *assets.values()],
    }
    _print_sections(sections)
    drawing = {name: renderers.result()[0] if name in _ON_MUJOCO else vulkan_driver.result() for name in BENCHMARKS}
    installed = [name for name, found in simulators.items() if found.result()[-1].status == "ok"]
    blind = [name for name in installed if drawing[name].status != "ok"]
    without_assets = {name for name, finding in assets.items() if finding.status != "ok"}
    usable = [name for name in installed if name not in blind and name not in without_assets - {"maniskill"}]
    notes = {"maniskill": "maniskill (its own tasks, not plate-25)"} if "maniskill" in without_assets else {}
    shown = ", ".join(notes.get(name, name) for name in usable)
    print("\nUsable now:", shown or "nothing yet, see the lines that begin with ->")
    return 0 if usable and not blind else 1


def _print_sections(sections: Mapping[str, list[Finding]]) -> None:
    width = max(len(finding.name) for found in sections.values() for finding in found)
    for title, found in sections.items():
        print(f"\n{title}")
        for finding in found:
            print(f"  {finding.status:<8} {finding.name:<{width}}  {finding.detail}")
            if finding.remedy:
                print(f"  {'':<8} {'':<{width}}  -> {finding.remedy}")
