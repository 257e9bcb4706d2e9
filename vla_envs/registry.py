"""Names of environments: ``"<benchmark>/<suite or task>"``."""

from __future__ import annotations

import importlib
from typing import Any

from vla_common.errors import unknown_name
from vla_envs.simulator import SimulatorSpec

# A benchmark's module offers make_spec(suite, **options) and suites(), without importing its simulator.
BENCHMARKS = {"metaworld": "vla_envs.metaworld", "libero": "vla_envs.libero", "maniskill": "vla_envs.maniskill"}


def list_envs() -> list[str]:
    """All names that :func:`vla_envs.make_env` takes."""
    return [
        f"{benchmark}/{suite}"
        for benchmark, module in BENCHMARKS.items()
        for suite in importlib.import_module(module).suites()
    ]


def make_spec(id: str, **options: Any) -> SimulatorSpec:
    """Describe an environment without starting its simulator.

    Args:
        id: such as ``"metaworld/MT50"``; see :func:`list_envs`.
        **options: of the benchmark, see ``make_spec`` in its module.

    Raises:
        ValueError: an unknown benchmark, suite, task or option; the message offers the nearest names.
    """
    benchmark, _, suite = id.partition("/")
    if benchmark not in BENCHMARKS or not suite:
        raise unknown_name("environment", id, list_envs(), example="metaworld/MT50")
    try:
        return importlib.import_module(BENCHMARKS[benchmark]).make_spec(suite, **options)
    except TypeError as error:
        raise ValueError(f"{id}: {error}; see help({BENCHMARKS[benchmark]}.make_spec) for its options") from error
