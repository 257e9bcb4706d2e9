"""Where a recipe runs: in this process, or as a job on a SLURM cluster through submitit."""

from __future__ import annotations

import contextlib
import functools
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import submitit
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from submitit.core.utils import FailedJobError

from vla_algos import parallel
from vla_algos.heartbeat import FirstFailed
from vla_algos.parallel import ProcessLost, process_group
from vla_algos.run.command import Command, adopt, say_how_to_go_on, typed
from vla_algos.run.config import Types, read_config
from vla_algos.run.console import console_file
from vla_algos.run.folder import check_folder
from vla_algos.run.launcher_settings import SUBMITIT_NAMES, count_processes, launcher_types
from vla_algos.run.needs import Needs
from vla_algos.run.phase import has_begun
from vla_algos.run.program import OTHERS_FIRST, in_program, only_checks, say
from vla_algos.run.provenance import record_submission
from vla_algos.run.rehearsal import rehearse
from vla_algos.run.resume import SIGNALS
from vla_algos.run.retries import batch_lines, note_stopped
from vla_algos.run.roles import read_placement
from vla_algos.run.run import Run
from vla_common.program import WRONG_USE

Recipe = Callable[[DictConfig, Path], None]


def run_recipe(train: Callable[[SimpleNamespace, Run], None], types: Types, config: DictConfig, folder: Path) -> None:
    """Run a recipe in this process.

    Args:
        train: see :func:`launch`.
        types: see :func:`launch`.
        config: the composed configuration.
        folder: where everything goes.
    """
    settings = read_config(config, types)
    with Run(settings, folder) as run, console_file(folder), say_how_to_go_on(folder):
        if parallel.is_main():
            print(f"run          {folder}")
        train(settings, run)


class SlurmRun(submitit.helpers.Checkpointable):
    """What a job runs, again each time it was requeued: the run itself finds out where it stopped."""

    def __init__(self, recipe: Recipe, config: DictConfig, folder: Path, command: Command | None):
        self.recipe, self.config, self.folder, self.command = recipe, config, folder, command

    def __call__(self) -> None:
        """Run the recipe in the processes of the job."""
        adopt(getattr(self, "command", None))  # a job of an earlier version has none
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # by now submitit handles them; see _python
        try:
            with process_group(members(self.config)) as has_part, _first_says_it():
                if has_part:
                    self.recipe(self.config, self.folder)
        except SystemExit:  # of ResumableRun, when all have saved
            note_stopped(self.folder)
            raise
        except Exception as error:
            sys.exit(say(error))
        # Python takes its own handlers away before it ends; a warning of the time limit would then fail a finished run.
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)


@in_program
def launch(
    train: Callable[[SimpleNamespace, Run], None],
    config: DictConfig,
    types: Types,
    *,
    alone: bool = False,
) -> None:
    """Run ``train(config, run)`` of a recipe where ``config.launcher`` says.

    Args:
        train: what to run; see :class:`~vla_algos.run.run.Run`.
        config: the composed configuration.
        types: of the settings that the recipe reads, see :func:`~vla_algos.run.config.read_config`.
        alone: the recipe runs in one process.

    Raises:
        ValueError: a setting that nobody reads or that cannot be, or more processes than the recipe can use. Of a
            job, and of all runs of a sweep before the first begins, what the recipe itself would refuse
            (:mod:`vla_algos.run.rehearsal`).
        RuntimeError: there is no SLURM, or it refuses the job; says why.
    """
    checked = read_config(config, types)  # a job that waits in a queue is checked before it does
    if only_checks():
        if checked.launcher.get("check", True):
            _rehearse(train, checked, Path())
        return
    recipe = functools.partial(run_recipe, train, types)
    folder = Path(HydraConfig.get().runtime.output_dir).resolve()
    settings: Any = OmegaConf.to_container(config.launcher, resolve=True)
    launcher = settings["name"]
    processes = parallel.processes_started() * count_processes(settings)
    if processes > 1 and alone:
        raise ValueError(
            f"recipes/{HydraConfig.get().job.name}.py runs in one process, not in {processes}: leave out torchrun, or "
            "set launcher.nodes=1 launcher.tasks_per_node=1"
        )
    if parallel.processes_started() > 1 and HydraConfig.get().mode == RunMode.MULTIRUN:
        raise ValueError("-m runs one combination after the other in one process; under torchrun start each by itself")
    if launcher == "local":
        with process_group(members(config)) as has_part, _first_says_it():
            if has_part:
                recipe(config, _common_folder(folder))
        return
    if missing := launcher_types(launcher).keys() - settings.keys():
        raise ValueError(f"launcher.{min(missing)} is missing; type launcher={launcher}, which sets all of them")
    wait, seeds, retries, check = (settings.pop(name) for name in ("wait", "seeds", "retries", "check"))
    del settings["name"]
    if check:
        _rehearse(train, checked, folder)
    if shutil.which("sbatch") is None:
        raise RuntimeError(
            "no SLURM on this machine: sbatch is not on the PATH; log in to a node that submits jobs, or run here: "
            "launcher=local"
        )
    command = typed()
    runs = [SlurmRun(recipe, config, folder, command)]
    if seeds is not None:
        runs = [
            SlurmRun(
                recipe,
                cast(DictConfig, OmegaConf.merge(config, {"seed": seed})),
                folder / f"seed{seed}",
                command and command.having(f"seed={seed}", "launcher.seeds=null"),
            )
            for seed in seeds
        ]
    for run in runs if check else ():
        check_folder(read_config(run.config, types), run.folder)
    for run in runs:
        run.folder.mkdir(parents=True, exist_ok=True)
        record_submission(run.folder)
    if retries:
        settings["setup"] = [*(settings["setup"] or []), *batch_lines(retries, [run.folder for run in runs])]
    _report(_submit(runs, folder / "slurm", HydraConfig.get().job.name, settings), runs, wait)


def _rehearse(train: Callable[[SimpleNamespace, Run], None], config: SimpleNamespace, folder: Path) -> None:
    """Run the recipe up to where work would begin; of a job, say what it takes.

    Raises:
        ValueError: what the recipe refuses, and how to submit it as it is.
    """
    job = config.launcher["name"] == "slurm"
    try:
        run = rehearse(train, config, folder)
    except (ValueError, OSError, ImportError) as error:
        named = [each for each in (*config.policy.values(), *getattr(config, "demonstrations", {}).values()) if each]
        paths = [path for path in (*named, config.env.get("path")) if isinstance(path, str) and "/" in path]
        if not job or not (isinstance(error, OSError) or any(path.rstrip("/") in str(error) for path in paths)):
            raise
        around = "if the nodes see another than this machine, type launcher.check=false"
        raise ValueError(f"{error}; {around}") from error
    if job and not only_checks():
        print("\n".join(Needs.of(run).describe(config.launcher)))


def members(config: DictConfig) -> tuple[int, ...] | None:
    """Return which of the processes that were started have a part, in the order of the numbers they get.

    Raises:
        ValueError: ``placement`` does not fit them.
    """
    if "placement" not in config:
        return None
    placement = read_placement(cast("dict[str, Any]", OmegaConf.to_container(config.placement, resolve=True)))
    return None if placement.members == tuple(range(placement.processes)) else placement.members


@contextlib.contextmanager
def _first_says_it() -> Iterator[None]:
    """Let the first process say a mistake that all of them see before work begins; the others end without a word."""
    try:
        yield
    except FirstFailed:  # before this process has seen it
        if not has_begun():
            sys.exit(WRONG_USE)
        raise
    except ProcessLost:
        raise
    except Exception:
        if parallel.rank() and not has_begun():
            try:
                time.sleep(OTHERS_FIRST)
            except ProcessLost:  # of the same mistake, a moment later
                sys.exit(WRONG_USE)
        raise


def _common_folder(folder: Path) -> Path:
    """Take the folder of the first process: its name has the time in it, and others may have come a second later."""
    common = parallel.broadcast_object(folder)
    if folder != common:
        with contextlib.suppress(FileNotFoundError):  # several may have the same one
            if {path.name for path in folder.iterdir()} <= {f"{HydraConfig.get().job.name}.log"}:
                shutil.rmtree(folder, ignore_errors=True)
    return common


def _submit(runs: list[SlurmRun], logs: Path, name: str, settings: dict) -> list[submitit.Job]:
    # Submitit counts warnings that come before the run listens to them itself, and would end the job at the fourth.
    executor = submitit.AutoExecutor(
        folder=logs, cluster="slurm", slurm_python=_python(), slurm_max_num_timeout=1_000_000
    )
    extra = {name.replace("-", "_"): value for name, value in (settings.pop("extra") or {}).items()}
    given = {SUBMITIT_NAMES[key]: value for key, value in settings.items() if value not in (None, [], 0)}
    executor.update_parameters(name=name, **given)
    executor.update_parameters(slurm_additional_parameters={**extra, "requeue": True})
    executor.update_parameters(slurm_srun_args=["--kill-on-bad-exit=1"])  # a process that fails ends the others
    try:
        if len(runs) == 1:
            return [executor.submit(runs[0])]
        with executor.batch():  # one array
            return [executor.submit(run) for run in runs]
    except (FailedJobError, subprocess.CalledProcessError) as error:
        said = str(getattr(error, "stderr", "") or error).strip().splitlines()
        listing = ["sinfo", "-h", "-o", "%R (%c CPUs, %m MB and %G per node)"]
        partitions = sorted(set(subprocess.run(listing, capture_output=True, text=True).stdout.splitlines()))
        raise RuntimeError(
            f"SLURM refuses the job: {said[-1] if said else error}. Partitions here: "
            f"{', '.join(partitions) or 'none'}; set launcher.partition, launcher.gpus, launcher.cpus and "
            "launcher.memory_gb to what they have"
        ) from error


def _python() -> str:
    """Return the interpreter of a job, in which SLURM's warning waits until somebody can understand it.

    Importing takes seconds; in them the signal would end the process, and the job would have failed.
    """
    blocking = ["env", "--block-signal=USR2"]
    known = subprocess.run([*blocking, "true"], capture_output=True).returncode == 0  # coreutils of 2019 and later
    return shlex.join([*blocking, sys.executable] if known else [sys.executable])


def _report(jobs: list[submitit.Job], runs: list[SlurmRun], wait: bool) -> None:
    for job, run in zip(jobs, runs, strict=True):
        print(f"job {job.job_id}\n  run     {run.folder}\n  follow  tail -F {job.paths.stdout}")
        print(f"  errors  {job.paths.stderr}\n  cancel  scancel {job.job_id}")
    if wait:
        for job in jobs:
            _print_log(job)


def _print_log(job: submitit.Job) -> None:
    """Print the log of a job while it grows, until the job is gone from the queue."""
    seen = 0
    while True:
        queued = subprocess.run(["squeue", "-h", "-j", job.job_id], capture_output=True, text=True).stdout.strip()
        if job.paths.stdout.exists():
            with open(job.paths.stdout) as log:
                log.seek(seen)
                print(log.read(), end="", flush=True)
                seen = log.tell()
        if not queued:
            return
        time.sleep(2)
