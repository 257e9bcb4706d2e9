"""Checks that benchmarks share: packages, a simulator's import, what frames are drawn with, folders of assets.

Everything risky (importing a simulator, opening a graphics context) runs in a process of its own without
a standard input and with a time-out: a crash, a prompt or a hang becomes a line of the report.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from threading import Lock

from packaging.requirements import Requirement

from vla_envs.probe import ASSETS, RENDERING, Finding, run_probe
from vla_envs.registry import Benchmark
from vla_envs.rendering.egl import egl_devices
from vla_envs.rendering.gpus import describe_turns

DISTRIBUTION = "vla-torchrl"
SYSTEM_PACKAGES = ("libegl1", "libegl-mesa0", "libgl1-mesa-dri", "libosmesa6")
APT_INSTALL = f"sudo apt-get update && sudo apt-get install -y {' '.join(SYSTEM_PACKAGES)}"
_drawing = Lock()  # of benchmarks that ask for the same renderers at once, the second waits for the first's answer

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


def check_packages(
    requirements: Iterable[str] | None = None,
    extra: str = "",
    *,
    distribution: str = DISTRIBUTION,
    without_dependencies: bool = False,
) -> list[Finding]:
    """Compare installed versions with those that a package asks for.

    Args:
        requirements: as in ``pyproject.toml``; those of the installed ``distribution`` if ``None``.
        extra: check the requirements of this extra instead of the ones of the package itself.
        distribution: the package.
        without_dependencies: what is missing is to be installed without what it asks for itself.
    """
    if requirements is None:
        try:
            requirements = metadata.requires(distribution) or []
        except metadata.PackageNotFoundError:
            ours = distribution == DISTRIBUTION
            remedy = "pip install -e .  (in the checkout)" if ours else f"pip install {distribution}"
            unknown = Finding("missing", distribution, "not installed, so versions cannot be checked", remedy)
            return [] if extra else [unknown]
    pip = "pip install --no-deps" if without_dependencies else "pip install"
    return [
        _check_requirement(requirement, pip)
        for requirement in map(Requirement, requirements)
        if _applies(requirement, extra)
    ]


def _applies(requirement: Requirement, extra: str) -> bool:
    marker = requirement.marker
    everywhere = marker is None or marker.evaluate({"extra": ""})
    return marker is not None and not everywhere and marker.evaluate({"extra": extra}) if extra else everywhere


def _check_requirement(requirement: Requirement, pip: str) -> Finding:
    name, wanted = requirement.name, str(requirement.specifier)
    remedy = f"{pip} '{name}{wanted}'"
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return Finding("missing", name, f"needs {wanted or 'any version'}", remedy)
    if not requirement.specifier.contains(version, prereleases=True):
        return Finding("broken", name, f"{version}, needs {wanted}: results may differ", remedy)
    return Finding("ok", name, f"{version} ({wanted})" if wanted else version)


def check_import(module: str, install: str, code: str = "") -> Finding:
    """Import a simulator's module in a process of its own.

    Args:
        module: its name.
        install: what to type where it is missing.
        code: what to run instead of a plain import.
    """
    # Without a renderer, whose faults have lines of their own.
    ok, detail = run_probe(code or f"import {module}", {"MUJOCO_GL": "off"})
    if ok:
        return Finding("ok", f"import {module}", "works", required=True)
    status = "missing" if f"No module named '{module}'" in detail else "broken"
    return Finding(status, f"import {module}", detail, install, required=True)


def check_simulator(
    extra: str, module: str = "", code: str = "", *, without_dependencies: Iterable[str] = ()
) -> list[Finding]:
    """Check the packages of an extra of ours; the last finding is whether its simulator can be imported.

    Args:
        extra: its name.
        module: the simulator's; called as the extra if empty.
        code: see :func:`check_import`.
        without_dependencies: requirements that are in no extra, because they ask for too much.
    """
    return [
        *check_packages(extra=extra),
        *check_packages(without_dependencies, without_dependencies=True),
        check_import(module or extra, f"pip install '{DISTRIBUTION}[{extra}]'", code),
    ]


def check_entry_point(benchmark: Benchmark) -> list[Finding]:
    """Import the simulator class of a benchmark's first environment as a worker does; a finding if that fails."""
    spec = benchmark.make_spec(next(iter(benchmark.suites())))
    module, _, name = spec.entry_point.partition(":")
    code = f"import importlib\ngetattr(importlib.import_module({module!r}), {name!r})"
    ok, detail = run_probe(code, {"MUJOCO_GL": "off", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))})
    remedy = 'entry_point="module:Class" of its SimulatorSpec has to name a class that can be imported'
    return [] if ok else [Finding("broken", f"import {spec.entry_point}", detail, remedy, required=True)]


def check_renderers(extra: str) -> list[Finding]:
    """Render one frame with each MuJoCo backend; the first finding is the one that environments use.

    Args:
        extra: that brings MuJoCo.
    """
    if find_spec("mujoco") is None:
        remedy = f"pip install '{DISTRIBUTION}[{extra}]'"
        detail = "not installed, so nothing can be rendered"
        return [Finding("missing", "MuJoCo", detail, remedy, RENDERING, required=True)]
    with _drawing:
        return list(_try_renderers(os.environ.get("MUJOCO_GL") or ("egl" if egl_devices() else "osmesa")))


@cache
def _try_renderers(used: str) -> tuple[Finding, ...]:
    backends = list(dict.fromkeys([used, "egl", "osmesa"]))
    with ThreadPoolExecutor() as threads:
        results = list(threads.map(lambda name: run_probe(_RENDER_PROBE, {"MUJOCO_GL": name}), backends))
    working = [backend for backend, (ok, _) in zip(backends, results, strict=True) if ok]
    remedy = f"export MUJOCO_GL={working[0]}, or: {APT_INSTALL}" if working else APT_INSTALL
    return tuple(
        Finding(
            "ok" if ok else "broken",
            f"MUJOCO_GL={backend}",
            f"{detail}, in use{_turns() if backend == 'egl' else ''}" if backend == used else detail,
            "" if ok else remedy,
            RENDERING,
            required=backend == used,
        )
        for backend, (ok, detail) in zip(backends, results, strict=True)
    )


def check_vulkan(extra: str) -> Finding:
    """Open the device that SAPIEN would draw with.

    Args:
        extra: that brings SAPIEN.
    """
    from vla_envs.rendering import vulkan  # not before it is needed: it is a program too

    status, detail, remedy = "ok", "", ""
    if find_spec("sapien") is None:
        status, detail, remedy = "missing", "sapien is not installed", f"pip install '{DISTRIBUTION}[{extra}]'"
    else:
        try:
            detail = f"SAPIEN draws with {vulkan.check_driver()!r}{_turns() if vulkan.has_gpu() else ''}"
        except vulkan.VulkanError as error:
            status = "broken"
            detail, _, remedy = str(error).partition(" Type: ")
    return Finding(status, "Vulkan", detail, remedy, RENDERING, required=True)


def _turns() -> str:
    import torch

    return describe_turns(torch.cuda.device_count())


def check_asset_folder(
    title: str, find: Callable[[], Path], describe: Callable[[], Iterable[str]], without: str = ""
) -> Finding:
    """Look for a benchmark's meshes and textures.

    Args:
        title: whose they are.
        find: returns their folder, or raises ``FileNotFoundError`` whose first line is a heading, whose last line says
            what to type, and whose lines in between say where was looked.
        describe: what differs in them from the benchmark's own.
        without: what works without them; they are required if nothing does.
    """
    name, required = f"{title}'s assets", not without
    try:
        folder = find()
    except FileNotFoundError as error:
        where = [line.strip() for line in str(error).splitlines()[1:-1]]
        remedy = str(error).splitlines()[-1].strip().removeprefix("Type: ")
        return Finding("missing", name, "; ".join(where), remedy, ASSETS, required, without)
    return Finding("ok", name, "; ".join([str(folder), *describe()]), "", ASSETS, required, without)


def check_assets_variable() -> Finding:
    """Look for the folder in which all benchmarks look for their assets first."""
    name, folder = "VLA_TORCHRL_ASSETS", os.environ.get("VLA_TORCHRL_ASSETS")
    if not folder:
        return Finding("ok", name, "not set; benchmarks look for assets in their own places", part=ASSETS)
    if not Path(folder).is_dir():
        remedy = "export VLA_TORCHRL_ASSETS=/path/to/assets, or: unset VLA_TORCHRL_ASSETS"
        return Finding("missing", name, f"{folder} is not a folder", remedy, ASSETS)
    packs = ", ".join(sorted(path.name for path in Path(folder).iterdir() if path.is_dir()))
    return Finding("ok", name, f"{folder}: {packs or 'empty'}", part=ASSETS)
