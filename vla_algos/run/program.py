"""A recipe as a program: a mistake is one line ``error: ...`` on stderr and the exit status, without a traceback.

Importing this module imports no torch.
"""

import functools
import inspect
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec

from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf.errors import OmegaConfBaseException

from vla_algos.files import remove_if_empty
from vla_algos.run.arguments import check_arguments, check_names, for_hydra
from vla_common import program
from vla_common.errors import unknown_name

P = ParamSpec("P")
_OTHERS_FIRST = 10.0  # seconds; rank 0 says a mistake that all ranks see, and its end ends the others
_statuses: list[int] | None = None  # of runs of this program that failed; None outside of one


def check_typed() -> None:
    """End the program, which is a recipe, if a name that was typed is unknown: to see that takes no torch."""
    recipe = Path(sys.modules["__main__"].__file__ or "")
    try:
        check_arguments(sys.argv[1:], recipe.parent / "conf")
        if (recipe.parent / "__main__.py").is_file():  # a copy may read settings that its files do not have
            check_names(recipe.stem, sys.argv[1:], recipe.parent / "conf")
    except Exception as error:  # Hydra's too
        sys.exit(report(error))


def run_program(name: str, main: Callable[[], Any]) -> None:
    """Run a recipe: the last line of its file.

    ``name`` and ``main`` are those of ``@hydra.main(config_name=name)``. Ends the process with status 2 after what was
    wrong before work began, 1 after a failure, 130 after Ctrl-C. ``VLA_TRACEBACK=1`` shows tracebacks too.
    """
    global _statuses
    conf = Path(inspect.getfile(inspect.unwrap(main))).resolve().parent / "conf"
    program.end_imports()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises its errors and does not end the process
    _statuses = []
    try:
        typed = sys.argv[1:]
        if any(each.startswith("--experimental-rerun") for each in typed):
            raise ValueError("--experimental-rerun reads a pickle, which may run any code; type the settings again")
        if name == "evaluate":
            from vla_algos.run.training_env import evaluation_defaults  # it imports torch

            typed = evaluation_defaults(typed, conf)
        completed = {"-sc", "--shell-completion"} & {*typed}  # whose words are no settings
        sys.argv[1:] = typed if completed else [for_hydra(each, conf) for each in typed]
        main()
        sys.stdout.flush()
    except (Exception, KeyboardInterrupt) as error:
        _statuses.append(report(error))
    if status := max(_statuses, default=0):
        sys.exit(status)


def reports_errors(launch: Callable[P, None]) -> Callable[P, None]:
    """Let a launcher report its errors itself within :func:`run_program`: of a sweep the other runs continue."""

    @functools.wraps(launch)
    def launched(*arguments: P.args, **options: P.kwargs) -> None:
        try:
            launch(*arguments, **options)
        except Exception as error:
            if _statuses is None:
                raise
            if not program.has_begun(error):
                remove_if_empty(Path(HydraConfig.get().runtime.output_dir))
            if HydraConfig.get().mode == RunMode.MULTIRUN:
                typed = " ".join(each.lstrip("+") for each in HydraConfig.get().overrides.task)
                error.args = (f"{typed}: {error}",)
            _statuses.append(report(error))

    return launched


def report(error: BaseException) -> int:
    """Report an error of a run; returns the exit status."""
    if isinstance(error, (HydraException, OmegaConfBaseException)):
        said = ValueError(": ".join([str(error), *str(error.__cause__ or "").splitlines()[:1]]))
        if isinstance(error, MissingConfigException) and error.options and error.missing_cfg_file:
            group, _, name = error.missing_cfg_file.rpartition("/")
            said = unknown_name(group, name, [each for each in error.options if each != "base"])
        error = said.with_traceback(error.__traceback__)
    if not program.has_begun(error) and int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))):
        time.sleep(_OTHERS_FIRST)
    return program.report(error)
