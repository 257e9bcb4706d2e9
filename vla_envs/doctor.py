"""``python -m vla_envs``: what this machine has and lacks for each benchmark, and what to type about what fails.

Everything risky (importing a simulator, opening a graphics context) runs in a process of its own with a time-out: a
crash, a prompt or a hang becomes a line of the report.
"""

import contextlib
import os
import platform
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

from vla_common.registry import benchmarks
from vla_envs.probe import ASSETS, RENDERING, SIMULATOR, Finding, import_path, remedy_for, run_probe
from vla_envs.registry import Benchmark, describe_error, get_benchmark
from vla_envs.rendering import vulkan
from vla_envs.rendering.egl import egl_devices

if TYPE_CHECKING:
    from packaging.requirements import Requirement

DISTRIBUTION = "vla-torchrl"
APT_INSTALL = "sudo apt-get update && sudo apt-get install -y libegl1 libegl-mesa0 libgl1-mesa-dri libosmesa6"
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


def diagnose(all_names: bool = False) -> int:
    """Print the report, with every environment's name if asked.

    Returns:
        0 if a simulator can be used as things are, and all that are installed can draw; else 1.
    """
    system = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    print(f"{DISTRIBUTION} on Python {platform.python_version()}, {system}\n\nEnvironments")
    found, broken = _find_benchmarks()
    for benchmark, names in found:
        print("".join(f"{line}\n" for line in _environments(benchmark, names, all_names)), end="")
    built = [benchmark for benchmark, names in found if names]
    print("\nTrying each of them out takes up to a minute ...", flush=True)
    with ThreadPoolExecutor() as threads:
        checked = dict(zip((b.name for b in built), threads.map(_check, built), strict=True))
    everything = [finding for findings in checked.values() for finding in findings]
    _print_sections(
        {
            "Packages": [*check_packages(), *broken],
            **{f"{SIMULATOR} {name}": _part(findings, SIMULATOR) for name, findings in checked.items()},
            RENDERING: _part(everything, RENDERING),
            ASSETS: [check_assets_variable(), *_part(everything, ASSETS)],
        }
    )
    usable = [f"{name}{_limits(findings)}" for name, findings in checked.items() if _works(findings)]
    print("\nUsable now:", ", ".join(usable) or "nothing yet, see the lines that begin with ->")
    installed = [findings for findings in checked.values() if _works(_part(findings, SIMULATOR))]
    return 0 if usable and all(_works(_part(findings, RENDERING)) for findings in installed) else 1


def _find_benchmarks() -> tuple[list[tuple[Benchmark, list[str]]], list[Finding]]:
    found, broken = [], []
    for name in benchmarks.names():
        try:
            benchmark = get_benchmark(name)
            found.append((benchmark, [f"{name}/{suite}" for suite in benchmark.suites()]))
        except Exception as error:  # whatever a package from outside raises
            detail, _, remedy = describe_error(error).partition("; repair it, or type: ")
            broken.append(Finding("broken", f"benchmark {name}", detail, remedy))
    return found, broken


def _check(benchmark: Benchmark) -> Sequence[Finding]:
    try:
        return [*benchmark.checks(), *check_entry_point(benchmark)]
    except Exception as error:  # one benchmark's trouble is a line of the report, not its end
        return [Finding("broken", benchmark.title, f"its checks failed: {describe_error(error)}", required=True)]


def _environments(benchmark: Benchmark, names: Sequence[str], all_names: bool) -> list[str]:
    tasks = [] if all_names else [name for name in names if _is_task(benchmark, name.partition("/")[2])]
    lines = [f"  {name}" for name in names if name not in tasks]
    if tasks:
        shown = ", ".join(name.partition("/")[2] for name in tasks[:3])
        lines.append(f"  {benchmark.name}/<task>  for each of {len(tasks)} tasks: {shown}, ...")
    return lines


def _is_task(benchmark: Benchmark, suite: str) -> bool:
    """Tell whether a suite is one task: it ends in a version, or has the name of its only task."""
    if re.search(r"-v\d+$", suite):
        return True
    with contextlib.suppress(Exception):  # what cannot be described is listed
        return [task.name for task in benchmark.make_spec(suite).tasks] == [suite]
    return False


def _part(findings: Iterable[Finding], part: str) -> list[Finding]:
    # What several benchmarks looked at comes once.
    return list({(f.name, f.status, f.detail): f for f in findings if f.part == part}.values())


def _works(findings: Iterable[Finding]) -> bool:
    return all(finding.status == "ok" for finding in findings if finding.required)


def _limits(findings: Iterable[Finding]) -> str:
    left = "; ".join(finding.without for finding in findings if finding.without and finding.status != "ok")
    return f" ({left})" if left else ""


def _print_sections(sections: Mapping[str, Sequence[Finding]]) -> None:
    width = max(len(finding.name) for found in sections.values() for finding in found)
    for title, found in sections.items():
        if found:
            print(f"\n{title}")
        for finding in found:
            print(f"  {finding.status:<8} {finding.name:<{width}}  {finding.detail}")
            if finding.remedy:
                print(f"  {'':<8} {'':<{width}}  -> {finding.remedy}")


def check_extra(
    extra: str, module: str = "", code: str = "", *, without_dependencies: Iterable[str] = ()
) -> list[Finding]:
    """Check the packages of an extra of ours; the last finding is whether its simulator can be imported.

    Args:
        extra: its name.
        module: the simulator's; called as the extra if empty.
        code: what to run instead of a plain import.
        without_dependencies: requirements that are in no extra, because they ask for too much; ``fetch`` of the extra's
            name installs them.
    """
    module = module or extra
    # Without a renderer, whose faults have lines of their own.
    ok, detail = run_probe(code or f"import {module}", {"MUJOCO_GL": "off"})
    status = "ok" if ok else "missing" if f"No module named '{module}'" in detail else "broken"
    install = f"python -m vla_envs fetch {extra}" if without_dependencies else f"pip install '{DISTRIBUTION}[{extra}]'"
    return [
        *check_packages(extra=extra),
        *check_packages(without_dependencies, pip="pip install --no-deps"),
        Finding(status, f"import {module}", "works" if ok else detail, remedy_for(ok, detail, install), required=True),
    ]


def check_packages(
    requirements: Iterable[str] | None = None, extra: str = "", pip: str = "pip install"
) -> list[Finding]:
    """Compare installed versions with ``requirements``, or those of this library, or of an ``extra`` of it."""
    if requirements is None:
        try:
            requirements = metadata.requires(DISTRIBUTION) or []
        except metadata.PackageNotFoundError:
            detail, remedy = "not installed, so versions cannot be checked", "pip install -e .  (in the checkout)"
            return [] if extra else [Finding("missing", DISTRIBUTION, detail, remedy)]
    from packaging.requirements import Requirement  # takes time, and every benchmark imports this module

    found = []
    for requirement in map(Requirement, requirements):
        marker = requirement.marker
        always, with_extra = (marker is None or marker.evaluate({"extra": name}) for name in ("", extra))
        if with_extra and not (extra and always):
            found.append(_check_requirement(requirement, pip))
    return found


def _check_requirement(requirement: "Requirement", pip: str) -> Finding:
    name, wanted = requirement.name, str(requirement.specifier)
    remedy = f"{pip} '{name}{wanted}'"
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return Finding("missing", name, f"needs {wanted or 'any version'}", remedy)
    if not requirement.specifier.contains(version, prereleases=True):
        return Finding("broken", name, f"{version}, needs {wanted}: results may differ", remedy)
    return Finding("ok", name, f"{version} ({wanted})" if wanted else version)


def check_entry_point(benchmark: Benchmark) -> list[Finding]:
    """Import the simulator class of a benchmark's first environment as a worker does; a finding if that fails."""
    spec = benchmark.make_spec(next(iter(benchmark.suites())))
    code = f"from pkgutil import resolve_name\nassert callable(resolve_name({spec.entry_point!r}))"
    ok, detail = run_probe(code, {"MUJOCO_GL": "off", "PYTHONPATH": import_path()})
    remedy = 'entry_point="module:Class" of its SimulatorSpec has to name a class that can be imported'
    typed = remedy_for(ok, detail, remedy)
    return [] if ok else [Finding("broken", f"import {spec.entry_point}", detail, typed, required=True)]


def check_renderers(extra: str) -> list[Finding]:
    """Render one frame with each MuJoCo backend, which ``extra`` brings; the first finding is of the one in use."""
    if find_spec("mujoco") is None:
        remedy, detail = f"pip install '{DISTRIBUTION}[{extra}]'", "not installed, so nothing can be rendered"
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
    found = []
    for backend, (ok, detail) in zip(backends, results, strict=True):
        if backend == used:
            detail += f", in use{_turns() if backend == 'egl' else ''}"
        status, typed = "ok" if ok else "broken", remedy_for(ok, detail, remedy)
        found.append(Finding(status, f"MUJOCO_GL={backend}", detail, typed, RENDERING, required=backend == used))
    return tuple(found)


def check_vulkan(extra: str) -> Finding:
    """Open the device that SAPIEN, which ``extra`` brings, would draw with."""
    status, remedy = "ok", ""
    try:
        if find_spec("sapien") is None:
            status, detail, remedy = "missing", "sapien is not installed", f"pip install '{DISTRIBUTION}[{extra}]'"
        else:
            detail = f"SAPIEN draws with {vulkan.check_driver()!r}{_turns() if vulkan.has_gpu() else ''}"
    except vulkan.VulkanError as error:
        status, (detail, _, remedy) = "broken", str(error).partition(" Type: ")
    return Finding(status, "Vulkan", detail, remedy, RENDERING, required=True)


def _turns() -> str:
    import torch

    shown = torch.cuda.device_count()
    return "" if shown < 2 else f"; workers take turns on GPUs 0 to {shown - 1} (env.gpus chooses)"


def check_asset_folder(
    title: str, find: Callable[[], Path], describe: Callable[[], Iterable[str]], without: str = ""
) -> Finding:
    """Look for the meshes and textures of a benchmark.

    Args:
        title: the benchmark's.
        find: returns their folder, or raises the ``FileNotFoundError`` of :func:`vla_envs.folders.find_folder`.
        describe: what differs in them from the benchmark's own.
        without: what works without them; they are required if nothing does.
    """
    name, required = f"{title}'s assets", not without
    try:
        folder = find()
    except FileNotFoundError as error:
        _, *where, last = (line.strip() for line in str(error).splitlines())
        return Finding("missing", name, "; ".join(where), last.removeprefix("Type: "), ASSETS, required, without)
    return Finding("ok", name, "; ".join([str(folder), *describe()]), "", ASSETS, required, without)


def check_assets_variable() -> Finding:
    """Look for the folder in which all benchmarks look for their assets first."""
    name, folder = "VLA_TORCHRL_ASSETS", os.path.expanduser(os.environ.get("VLA_TORCHRL_ASSETS", ""))
    if not folder:
        return Finding("ok", name, "not set; benchmarks look for assets in their own places", part=ASSETS)
    if not Path(folder).is_dir():
        remedy = "export VLA_TORCHRL_ASSETS=/path/to/assets, or: unset VLA_TORCHRL_ASSETS"
        return Finding("missing", name, f"{folder} is not a folder", remedy, ASSETS)
    packs = ", ".join(sorted(path.name for path in Path(folder).iterdir() if path.is_dir()))
    return Finding("ok", name, f"{folder}: {packs or 'empty'}", part=ASSETS)
