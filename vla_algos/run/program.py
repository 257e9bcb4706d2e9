"""A recipe as a program: what is wrong is one line ``error: ...`` on stderr and the exit status, never a traceback."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ParamSpec

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

from vla_algos.parallel import ProcessLost
from vla_algos.run import command
from vla_algos.run.arguments import combinations, read_arguments
from vla_algos.run.as_trained import as_trained
from vla_algos.run.checkpoints import CheckpointError
from vla_algos.run.console import file_of_failed
from vla_algos.run.explanations import explain
from vla_algos.run.phase import begin_anew, has_begun
from vla_common import program
from vla_envs import SimulatorCrash

P = ParamSpec("P")
_EXPECTED = (CheckpointError, SimulatorCrash, ProcessLost, OSError)
OTHERS_FIRST = 5.0  # seconds; a mistake that all processes see is said by the first, at whose end the others are ended


class _Program:
    """The program that runs, if there is one; otherwise errors of :func:`in_program` are the caller's."""

    running = False
    name = ""
    conf = Path()
    only_checks = False
    launched = False
    status = 0


def run_program(name: str, main: Callable[[], Any]) -> None:
    """Run a recipe: the last line of its file.

    ``name`` and ``main`` are those of ``@hydra.main(config_name=name)``. Ends the process with status 2 after what was
    wrong before work began, 1 after a failure, 130 after Ctrl-C. ``VLA_TRACEBACK=1`` shows tracebacks too.
    """
    conf = Path(inspect.getfile(inspect.unwrap(main))).resolve().parent / "conf"
    _Program.running, _Program.name, _Program.conf = True, name, conf
    program.end_imports()
    try:
        with _hydra_raises():
            typed = sys.argv[1:]
            sys.argv[1:] = read_arguments(name, typed, conf)
            command.remember(typed, sys.argv[1:])
            if name == "evaluate":
                sys.argv[1:] = as_trained(sys.argv[1:], conf)
            _check_sweep(name, main, conf)
            main()
        sys.stdout.flush()
    except BrokenPipeError as error:
        if not _Program.launched:  # ppo.py --cfg job | head
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(program.UNREAD)
        _Program.status = say(error)
    except (Exception, KeyboardInterrupt) as error:
        _Program.status = say(error)
    finally:
        _Program.running = False
    if _Program.status:
        sys.exit(_Program.status)


def in_program(launch: Callable[P, None]) -> Callable[P, None]:
    """Let a launcher, which Hydra calls, report its errors itself: Hydra would print more lines about them.

    Of a sweep the other runs go on, and each error is said with the settings of its run. Outside of
    :func:`run_program` errors are raised as they are.
    """

    @functools.wraps(launch)
    def launched(*arguments: P.args, **options: P.kwargs) -> None:
        if not _Program.running or _Program.only_checks:
            launch(*arguments, **options)
            return
        begin_anew()
        _Program.launched = True
        try:
            launch(*arguments, **options)
        except Exception as error:
            _Program.status = max(_Program.status, say(error, _of_sweep()))

    return launched


def only_checks() -> bool:
    """Tell whether settings are looked at and nothing runs yet."""
    return _Program.only_checks


def say(error: BaseException, run: str = "") -> int:
    """Report an error of a run, with its ``run`` in front; returns the exit status."""
    if _Program.running:
        with contextlib.suppress(Exception):  # whatever else is wrong: the error itself matters
            error = explain(error, _Program.name, sys.argv[1:], _Program.conf)
    if isinstance(error, OSError) and error.filename is not None and _Program.running and not _Program.launched:
        error = ValueError(f"{error.strerror}: {error.filename}; type another folder: hydra.run.dir=runs/mine")
    if run:
        error.args = (f"{run}: {error}",)
    if not has_begun() and int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))):
        time.sleep(OTHERS_FIRST)
    with file_of_failed():
        return program.report(error, begun=has_begun(), expected=_EXPECTED)


def _of_sweep() -> str:
    if HydraConfig.get().mode != RunMode.MULTIRUN:
        return ""
    return " ".join(HydraConfig.get().overrides.task)


def _check_sweep(name: str, main: Callable[[], Any], conf: Path) -> None:
    """Check the settings of every run of a sweep before the first begins."""
    _Program.only_checks = True
    try:
        for typed, config in combinations(name, sys.argv[1:], conf):
            try:
                inspect.unwrap(main)(config)
            except (ValueError, OSError, ImportError) as error:
                raise ValueError(f"{' '.join(typed)}: {error}") from error
    finally:
        _Program.only_checks = False


@contextlib.contextmanager
def _hydra_raises() -> Iterator[None]:
    """Have Hydra raise its errors instead of printing them."""
    before = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = before
