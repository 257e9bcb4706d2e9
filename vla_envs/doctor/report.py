"""The report of ``python -m vla_envs``: what this machine has and lacks, and what to type about each thing that fails.

It asks each benchmark for its checks and knows none by name.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from vla_common.registry import benchmarks
from vla_envs.doctor.checks import DISTRIBUTION, check_assets_variable, check_entry_point, check_packages
from vla_envs.probe import ASSETS, RENDERING, SIMULATOR, Finding
from vla_envs.registry import Benchmark, describe_error, get_benchmark


def diagnose(all_names: bool = False) -> int:
    """Print the report.

    Args:
        all_names: print every environment name instead of a summary.

    Returns:
        0 if a simulator can be used as things are, and all that are installed can draw; else 1.
    """
    system = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    print(f"{DISTRIBUTION} on Python {platform.python_version()}, {system}")
    found, broken = _find_benchmarks()
    built = [benchmark for benchmark, names in found if names]
    print("\nEnvironments")
    for benchmark, names in found:
        print("".join(f"{line}\n" for line in _environments(benchmark, names, all_names)), end="")
    if planned := [benchmark.title for benchmark, names in found if not names]:
        print(f"  (not built yet: {', '.join(planned)})")
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
    usable = [name for name, findings in checked.items() if _works(findings)]
    shown = [f"{name}{_restriction(checked[name])}" for name in usable]
    print("\nUsable now:", ", ".join(shown) or "nothing yet, see the lines that begin with ->")
    installed = [findings for findings in checked.values() if _works(_part(findings, SIMULATOR))]
    return 0 if usable and all(_works(_part(findings, RENDERING)) for findings in installed) else 1


def _find_benchmarks() -> tuple[list[tuple[Benchmark, list[str]]], list[Finding]]:
    """Those that can be imported with the names of their environments, and what is wrong with the others."""
    found, broken = [], []
    for name in benchmarks.names():
        try:
            benchmark = get_benchmark(name)
            found.append((benchmark, [f"{name}/{suite}" for suite in benchmark.suites()]))
        except Exception as error:  # whatever the package of a stranger raises
            detail, _, remedy = describe_error(error).partition("; repair it, or type: ")
            broken.append(Finding("broken", f"benchmark {name}", detail, remedy))
    return found, broken


def _check(benchmark: Benchmark) -> Sequence[Finding]:
    try:
        return [*benchmark.checks(), *check_entry_point(benchmark)]
    except Exception as error:  # one benchmark's trouble is a line of the report, not its end
        detail = f"its checks failed: {describe_error(error)}"
        return [Finding("broken", benchmark.title, detail, required=True)]


def _environments(benchmark: Benchmark, names: Sequence[str], all_names: bool) -> list[str]:
    """List the names that ``make_env`` takes of one benchmark: each, or a line for all single tasks."""
    tasks = [] if all_names else [name for name in names if _is_task(benchmark, name.partition("/")[2])]
    lines = [f"  {name}" for name in names if name not in tasks]
    if tasks:
        shown = ", ".join(name.partition("/")[2] for name in tasks[:3])
        lines.append(f"  {tasks[0].partition('/')[0]}/<task>  for each of {len(tasks)} tasks: {shown}, ...")
    return lines


def _is_task(benchmark: Benchmark, suite: str) -> bool:
    """Tell whether a suite is a task alone: it ends in a version, or is called as the only task that it has."""
    if re.search(r"-v\d+$", suite):
        return True
    with contextlib.suppress(Exception):  # what cannot be described is listed
        return [task.name for task in benchmark.make_spec(suite).tasks] == [suite]
    return False


def _part(findings: Iterable[Finding], part: str) -> list[Finding]:
    """List the findings of a part of the report; what several benchmarks looked at comes once."""
    return list({(f.name, f.status, f.detail): f for f in findings if f.part == part}.values())


def _works(findings: Iterable[Finding]) -> bool:
    return all(finding.status == "ok" for finding in findings if finding.required)


def _restriction(findings: Iterable[Finding]) -> str:
    left = [finding.without for finding in findings if finding.without and finding.status != "ok"]
    return f" ({'; '.join(left)})" if left else ""


def _print_sections(sections: Mapping[str, Sequence[Finding]]) -> None:
    width = max(len(finding.name) for found in sections.values() for finding in found)
    for title, found in sections.items():
        if not found:
            continue
        print(f"\n{title}")
        for finding in found:
            print(f"  {finding.status:<8} {finding.name:<{width}}  {finding.detail}")
            if finding.remedy:
                print(f"  {'':<8} {'':<{width}}  -> {finding.remedy}")
