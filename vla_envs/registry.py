"""Benchmarks and the names of their environments: ``"<benchmark>/<suite or task>"``.

A benchmark is one :class:`Benchmark`, in a room of its own. An installed package declares it as an entry point
(:mod:`vla_common.registry`), a program with :func:`register_benchmark`; nothing else has to know its name.
"""

import contextlib
import inspect
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium

from vla_common.errors import unknown_name
from vla_common.registry import benchmarks
from vla_common.schema import BenchmarkSchema as BenchmarkSchema
from vla_common.schema import Gripper as Gripper
from vla_common.settings import Fraction, check_settings, setting_types
from vla_envs.folders import Download, Packages
from vla_envs.probe import Finding
from vla_envs.simulator import SimulatorSpec
from vla_envs.stress import Kind, stressed

NAMESPACE = "vla"  # of the Gymnasium ids
_unfinished: set[str] = set()  # benchmarks whose module imported us before it had made its Benchmark


@dataclass(frozen=True)
class Benchmark:
    """What there is to know about a benchmark; making one imports no simulator.

    Attributes:
        name: what stands before the slash, such as ``"metaworld"``; of letters, digits, ``_`` and ``-``.
        title: its name in Gymnasium ids and for people, such as ``"MetaWorld"``.
        schema: cameras, states, actions and gripper, and what policy families need to know to act in it.
        make_spec: ``make_spec(suite, **options)`` describes a suite or a task; its keyword-only parameters are the
            benchmark's options and their annotations say what each may be (:mod:`vla_common.settings`).
        suites: names that ``make_spec`` takes; none as long as the benchmark is not built.
        suite_title: how a suite is written in a Gymnasium id; by default without a version (``-v3``): it gets ours.
        checks: what this machine has and lacks for it (:mod:`vla_envs.doctor` has the usual ones); may run in a thread.
        unseen: options that no policy sees, such as where assets are: none is evaluated with those of its training.
        downloads: what ``python -m vla_envs fetch`` brings for it (:mod:`vla_envs.fetch`).

    Example:
        >>> from vla_envs import Benchmark, BenchmarkSchema, register_benchmark
        >>> schema = BenchmarkSchema((64, 64), states=("x (m)",), actions=("dx (m)",), instruction="go right")
        >>> toy = Benchmark("toy", "Toy", schema, make_spec=make_toy_spec, suites=lambda: ["easy"])  # doctest: +SKIP
        >>> register_benchmark(toy)  # doctest: +SKIP
    """

    name: str
    title: str
    schema: BenchmarkSchema
    make_spec: Callable[..., SimulatorSpec]
    suites: Callable[[], Iterable[str]]
    suite_title: Callable[[str], str] = lambda suite: re.sub(r"-v\d+$", "", suite)
    checks: Callable[[], Sequence[Finding]] = tuple
    unseen: Sequence[str] = ()
    downloads: Sequence[Download | Packages] = ()

    def __post_init__(self) -> None:
        for what, value in (("name", self.name), ("title", self.title)):
            if not re.fullmatch(r"[\w-]+", value):
                raise ValueError(f"the {what} of a benchmark is letters, digits, _ and -, got {value!r}")
        check_options(self, self.unseen)
        if self.name in _unfinished:
            _unfinished.remove(self.name)
            _register_ids(self)


def register_benchmark(benchmark: Benchmark) -> None:
    """Add a benchmark and its Gymnasium ids for this process; ``ValueError`` if there is another of that name.

    Worker processes do not need it: they get the :class:`~vla_envs.simulator.SimulatorSpec`.
    """
    benchmarks.register(benchmark.name, benchmark)
    _register_ids(benchmark)


def register_installed() -> None:
    """Register the Gymnasium ids of all installed benchmarks; a package that is broken costs a warning, no more."""
    for name in benchmarks.names():
        try:
            _register_ids(get_benchmark(name))
        except Exception as error:  # whatever a package from outside raises
            if _is_being_imported(name):
                _unfinished.add(name)
            else:
                warnings.warn(f"benchmark {name!r} is left out: {describe_error(error)}", RuntimeWarning, stacklevel=2)


def get_benchmark(name: str) -> Benchmark:
    """Return a benchmark by name; a ``ValueError`` offers the nearest names.

    ImportError: its package cannot be imported, or declares something else.
    """
    benchmark = benchmarks.get(name)
    if not isinstance(benchmark, Benchmark) or benchmark.name != name:
        found = f"one of the name {benchmark.name!r}" if isinstance(benchmark, Benchmark) else repr(benchmark)
        raise ImportError(
            f"the entry point {name!r} of {benchmarks.group} must be a Benchmark of that name, not {found}"
        )
    return benchmark


def list_envs() -> list[str]:
    """List all names that :func:`vla_envs.make_env` takes; a benchmark that cannot be imported is left out."""
    names = []
    for name in benchmarks.names():
        with contextlib.suppress(Exception):  # importing vla_envs has said so
            names += [f"{name}/{suite}" for suite in get_benchmark(name).suites()]
    return names


def make_spec(
    id: str | SimulatorSpec, *, stress: Mapping[Kind, Fraction] | None = None, **options: Any
) -> SimulatorSpec:
    """Describe an environment, such as ``"metaworld/MT50"`` of :func:`list_envs`, without starting its simulator.

    ``stress`` is an option of every benchmark, see :func:`~vla_envs.stress.stressed`. ``ValueError`` for an unknown
    benchmark, suite, task or option, with the nearest names; or a value that cannot be. A finished description stays
    as it is, and takes no options.
    """
    if isinstance(id, SimulatorSpec):
        if names := ", ".join([*options, *(["stress"] if stress else [])]):
            raise ValueError(
                f"{names} cannot be set beside the SimulatorSpec of {id.id}, which is complete; change it with "
                "dataclasses.replace, or name the environment"
            )
        return id
    benchmark, suite = find_benchmark(id)
    check_options(benchmark, options)
    types = option_types(benchmark)
    check_settings("", {name: value for name, value in options.items() if name in types}, types)
    try:
        spec = benchmark.make_spec(suite, **options)
    except TypeError as error:
        raise ValueError(
            f"{id}: {error}; see help({benchmark.make_spec.__module__}.make_spec) for its options"
        ) from error
    return stressed(spec, stress)


def find_benchmark(id: str) -> tuple[Benchmark, str]:
    """Return the benchmark and the suite of an environment's name; a ``ValueError`` offers the nearest names."""
    if not isinstance(id, str):
        raise ValueError(f"an environment is named by a text such as 'metaworld/MT50', got {id!r}")
    name, _, suite = id.partition("/")
    if name not in benchmarks or not suite:
        known = list_envs()
        if complete := [other for other in known if other.endswith(f"/{id}")]:  # what lacks its benchmark
            raise ValueError(f"unknown environment {id!r}; did you mean {' or '.join(complete)}?")
        raise unknown_name("environment", id, known, example=next(reversed(known), None))
    return get_benchmark(name), suite


def option_types(benchmark: Benchmark) -> dict[str, Any]:
    """Return the annotations of a benchmark's options by name."""
    return {**setting_types(benchmark.make_spec, without=("suite",)), **setting_types(make_spec, only=("stress",))}


def check_options(benchmark: Benchmark, options: Iterable[str], others: Iterable[str] = ()) -> None:
    """Refuse options that are not read; the ``ValueError`` offers the nearest ones, also of the ``others``."""
    parameters = inspect.signature(benchmark.make_spec).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return  # the benchmark reads them itself
    known = [*option_types(benchmark), *others]
    for name in options:
        if name not in known:
            raise unknown_name(f"option of {benchmark.name}", name, known)


def _register_ids(benchmark: Benchmark) -> None:
    for suite in benchmark.suites():
        id = f"{NAMESPACE}/{benchmark.title}-{re.sub('[^a-zA-Z0-9_.:-]', '_', benchmark.suite_title(suite))}-v0"
        name = f"{benchmark.name}/{suite}"
        if id not in gymnasium.registry:
            gymnasium.register(
                id,
                entry_point="vla_envs.gym:SimulatorEnv",
                vector_entry_point="vla_envs.gym:SimulatorVectorEnv",
                kwargs={"name": name},
            )
        elif gymnasium.registry[id].kwargs.get("name") != name:
            warnings.warn(
                f"the Gymnasium id {id!r} is taken, so {name} has none; give {benchmark.name!r} another title",
                RuntimeWarning,
                stacklevel=2,
            )


def _is_being_imported(name: str) -> bool:
    parts = (benchmarks.module(name) or "").split(".")
    modules = [sys.modules.get(".".join(parts[:end])) for end in range(1, len(parts) + 1)]
    return any(getattr(getattr(module, "__spec__", None), "_initializing", False) for module in modules)


def describe_error(error: Exception) -> str:
    """Say what an error of a package from outside says."""
    return " ".join(str(error).split()) if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"
