"""Where a recipe runs: in this process, or as a job on a SLURM cluster through submitit."""

import functools
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import submitit
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from submitit.core.utils import FailedJobError

from vla_algos import distributed
from vla_algos.files import remove_if_empty
from vla_algos.run.config import Types, read_config
from vla_algos.run.folder import check_folder, what_finished
from vla_algos.run.gpu import fit_gpu
from vla_algos.run.launcher_settings import SUBMITIT_NAMES, count_processes, launcher_types
from vla_algos.run.program import report, reports_errors
from vla_algos.run.provenance import record_submission
from vla_algos.run.report import report_at_end
from vla_algos.run.run import SIGNALS, Run
from vla_common.experiments import as_typed
from vla_policies.checkpoint.hub import is_hub_id, resolve

Train = Callable[[SimpleNamespace, Run], None]
Recipe = Callable[[DictConfig, Path], None]
Members = Callable[[DictConfig], tuple[int, ...] | None]


def run_recipe(train: Train, types: Types, conf: Path | None, config: DictConfig, folder: Path) -> None:
    """Run a recipe in this process, and write the page of the run; one that ends early says how it resumes."""
    settings, main = read_config(config, types), distributed.is_main()
    record = folder / "run.json"  # written when work begins
    before = record.stat().st_mtime_ns if record.exists() else None
    try:
        with Run(settings, folder) as run:
            if finished := distributed.broadcast_object(what_finished(settings, folder) if main else ""):
                print(finished)
            else:
                train(settings, run)
            if main:
                print(report_at_end(folder, conf))
    except BaseException as error:
        if record.exists() and record.stat().st_mtime_ns != before:
            error.add_note(f"in the run {folder}")  # by which vla_common.program.has_begun knows
            if main:
                print(f"\nrun          {folder}", flush=True)
                typed = shlex.quote(f"hydra.run.dir={as_typed(str(folder))}")
                print(f"to resume    type the same command with {typed}", flush=True)
        raise


class SlurmRun(submitit.helpers.Checkpointable):
    """What a job runs, again each time that it is requeued: the run itself finds out where it stopped."""

    def __init__(self, recipe: Recipe, config: DictConfig, folder: Path, members: Members | None = None):
        self.recipe, self.config, self.folder, self.members = recipe, config, folder, members

    def __call__(self) -> None:
        """Run the recipe in the processes of the job."""
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # by now submitit handles them; see _python
        try:
            with distributed.process_group(self.members(self.config) if self.members else None) as has_part:
                if has_part:
                    self.recipe(self.config, self.folder)
        except Exception as error:
            sys.exit(report(error))
        # Python takes its own handlers away before it ends; a warning of the time limit would then fail a finished run.
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)


@reports_errors
def launch(
    train: Train, config: DictConfig, types: Types, *, single: bool = False, members: Members | None = None
) -> None:
    """Run ``train(config, run)`` of a recipe where ``config.launcher`` says.

    Args:
        train: what to run; see :class:`~vla_algos.run.run.Run`.
        config: the composed configuration.
        types: of the settings that the recipe reads, see :func:`~vla_algos.run.config.read_config`.
        single: the recipe runs in one process.
        members: returns the ranks, as their launcher counts, of the processes that have a part; ``None`` for all.

    Raises:
        ValueError: an unknown setting or a wrong value, also of a job before it is submitted; or more processes than
            the recipe can use.
        OSError: no folder of the policy's checkpoint; or there is no SLURM, or it refuses the job; says why.
    """
    found = read_config(config, types)
    checkpoint = found.policy.get("checkpoint")
    if checkpoint and not is_hub_id(checkpoint):
        place = resolve(checkpoint)  # it is there, before a job waits for its turn
        if place.resolve() != place.absolute():  # a link may lead elsewhere when the run is resumed
            OmegaConf.update(config, "policy.checkpoint", str(place.resolve()))
    hydra = HydraConfig.get()
    paths = (source.path for source in hydra.runtime.config_sources if source.provider == "main")
    conf = next((Path(path) for path in paths if Path(path).is_dir()), None)
    recipe = functools.partial(run_recipe, train, types, conf)
    folder = Path(hydra.runtime.output_dir).resolve()
    settings: Any = OmegaConf.to_container(config.launcher, resolve=True)
    processes = distributed.processes_started() * count_processes(settings)
    if processes > 1 and single:
        raise ValueError(
            f"the recipe {hydra.job.name} runs in one process, not in {processes}: leave out torchrun, or "
            "set launcher.nodes=1 launcher.tasks_per_node=1"
        )
    typed = {each.lstrip("+").partition("=")[0] for each in hydra.overrides.task}
    for name, value in fit_gpu(found, processes, typed).items():
        OmegaConf.update(config, name, value, force_add=True)
    if distributed.processes_started() > 1 and hydra.mode == RunMode.MULTIRUN:
        raise ValueError("-m runs one combination after the other in one process; under torchrun start each by itself")
    if settings["name"] == "local":
        with distributed.process_group(members(config) if members else None) as has_part:
            if has_part:
                # Of rank 0: its name has the time in it, and others may have come a second later.
                common = distributed.broadcast_object(folder)
                if folder != common:
                    remove_if_empty(folder)
                recipe(config, common)
        return
    runs = [SlurmRun(recipe, config, folder, members)]
    if (seeds := settings.pop("seeds", None)) is not None:
        merged = [cast(DictConfig, OmegaConf.merge(config, {"seed": seed})) for seed in seeds]
        runs = [SlurmRun(recipe, each, folder / f"seed{each.seed}", members) for each in merged]
    for run in runs:
        check_folder(read_config(run.config, types), run.folder)
    if missing := launcher_types("slurm").keys() - settings.keys() - {"seeds"}:
        raise ValueError(f"launcher.{min(missing)} is missing; type launcher=slurm, which sets all of them")
    if shutil.which("sbatch") is None:
        raise FileNotFoundError(
            "no SLURM on this machine: sbatch is not on the PATH; log in to a node that submits jobs, or run here: "
            "launcher=local"
        )
    wait, _ = settings.pop("wait"), settings.pop("name")
    for run in runs:
        run.folder.mkdir(parents=True, exist_ok=True)
        record_submission(run.folder)
    jobs = _submit(runs, folder / "slurm", HydraConfig.get().job.name, settings)
    for job, run in zip(jobs, runs, strict=True):
        print(f"job {job.job_id}\n  run     {run.folder}\n  follow  tail -F {job.paths.stdout}")
        print(f"  errors  {job.paths.stderr}\n  cancel  scancel {job.job_id}")
    for job in jobs if wait else ():
        _print_log(job)


def _submit(runs: list[SlurmRun], logs: Path, name: str, settings: dict) -> list[submitit.Job]:
    # Submitit counts warnings that come before the run listens to them itself, and would end the job at the fourth.
    executor = submitit.AutoExecutor(
        folder=logs, cluster="slurm", slurm_python=_python(), slurm_max_num_timeout=1_000_000
    )
    extra = {name.replace("-", "_"): value for name, value in (settings.pop("extra") or {}).items()}
    given = {SUBMITIT_NAMES[key]: value for key, value in settings.items() if value not in (None, [], 0)}
    executor.update_parameters(name=name, **given, slurm_additional_parameters={**extra, "requeue": True})
    cpus = [f"--cpus-per-task={given['cpus_per_task']}"] if "cpus_per_task" in given else []  # not inherited by 22.05
    executor.update_parameters(slurm_srun_args=["--kill-on-bad-exit=1", *cpus])  # a process that fails ends the others
    try:
        if len(runs) == 1:
            return [executor.submit(runs[0])]
        with executor.batch():  # one array
            return [executor.submit(run) for run in runs]
    except (FailedJobError, subprocess.CalledProcessError) as error:
        said = str(getattr(error, "stderr", "") or error).strip().splitlines()
        raise OSError(
            f"SLURM refuses the job: {said[-1] if said else error}; sinfo lists partitions and what they have: set "
            "launcher.partition, launcher.gpus, launcher.cpus and launcher.memory_gb to that"
        ) from error


def _python() -> str:
    """Return the interpreter of a job, in which SLURM's warning waits while it imports: it would end the process."""
    blocking = ["env", "--block-signal=USR2"]
    known = subprocess.run([*blocking, "true"], capture_output=True).returncode == 0  # coreutils of 2019 and later
    return shlex.join([*blocking, sys.executable] if known else [sys.executable])


def _print_log(job: submitit.Job) -> None:
    """Print the log of a job while it grows, until the job is gone from the queue."""
    seen = 0
    while True:  # job.done() needs accounting (sacct), which not every cluster has
        queued = subprocess.run(["squeue", "-h", "-j", job.job_id], capture_output=True, text=True).stdout.strip()
        text = job.stdout() or ""
        print(text[seen:], end="", flush=True)
        seen = len(text)
        if not queued:
            return
        time.sleep(2)
