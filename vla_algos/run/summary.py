"""What a run says: beside its progress bar, and when it is over."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tqdm import tqdm

from vla_algos.run.command import to_evaluate
from vla_algos.run.loggers.table import entries
from vla_envs import SimulatorSpec
from vla_policies import VLAPolicy


def describe_spec(spec: SimulatorSpec) -> str:
    """Name a suite, its protocol and what differs from the benchmark's own one, for printing beside a result."""
    protocol = [f"  protocol: {spec.protocol}"] if spec.protocol else []
    return "\n".join([spec.id, *protocol, *(f"  not the benchmark's: {text}" for text in spec.protocol_deviations)])


def as_evaluated(spec: SimulatorSpec, trials: int | None) -> SimulatorSpec:
    """Add to what differs from the benchmark's protocol that it has more initial states of each task than ``trials``.

    Of benchmarks that draw their initial states any number will do, and nothing is added.
    """
    if spec.initial_states is None or trials is None or trials >= spec.trials:
        return spec
    fewer = f"{trials} of its {spec.trials} initial states of each task (eval=benchmark has all)"
    return replace(spec, protocol_deviations=(*spec.protocol_deviations, fewer))


def describe_policy(policy: VLAPolicy) -> str:
    """Say how large a policy is and how much of it learns, for printing."""
    total = sum(parameter.numel() for parameter in policy.parameters())
    trained = sum(parameter.numel() for parameter in policy.parameters() if parameter.requires_grad)
    return f"policy of {total:,} parameters" + (f", {trained:,} of them trained" if trained < total else "")


def show_iteration(bar: tqdm, iteration: int, metrics: Mapping[str, float]) -> None:
    """Show success and speed beside the progress bar, and as a line in the log of a SLURM job."""
    success = metrics.get("env/success_once", float("nan"))  # not a number where none has ended
    how = "no episode ended" if math.isnan(success) else f"success {100 * success:.0f}%"
    if not math.isnan(subtasks := metrics.get("env/avg_num_subtasks", float("nan"))):
        how += f", {subtasks:.2f} subtasks"
    text = f"{how}, {metrics['env_steps_per_s']:.0f} env steps/s"
    bar.set_postfix_str(text)
    if "SLURM_JOB_ID" in os.environ:
        print(f"iteration {iteration} of {bar.total}: {text}", flush=True)


def never_trained(folder: Path) -> str | None:
    """Say that a run was too short to train its policy at all; ``None`` where it did, or was not to.

    Args:
        folder: of the run, with its ``metrics.jsonl``.
    """
    lines = [line for line in entries(folder / "metrics.jsonl") if line.get("train/actor/lr") is not None]
    if not lines or any(line["train/actor/lr"] for line in lines):
        return None
    steps = sum(int(line.get("train/steps") or 0) for line in lines)
    return (
        f"the policy is as it was: in all {steps} optimizer steps of this run only the critic learnt; type more "
        "iterations, or a smaller update.critic_warmup_steps (0 for none)"
    )


def summarise(
    title: str,
    folder: Path,
    setting: str,
    evaluations: Sequence[tuple[str, Mapping[str, float]]],
    compared: Sequence[str],
    speed: float | None,
    seconds: float,
    curves: Sequence[str] = (),
    elsewhere: Sequence[str] = (),
) -> None:
    """Print what a training run did and where everything is.

    Args:
        title: of what was trained with.
        folder: of the run.
        setting: see :func:`describe_spec`.
        evaluations: tables and metrics; the first and the last are shown, as before and after.
        compared: tables of :func:`~vla_algos.run.comparing.before_and_after`.
        speed: environment steps per second in training; ``None`` where there were none.
        seconds: the run took.
        curves: the picture of them, and how one looks at what each logger has.
        elsewhere: settings with which ``recipes/evaluate.py`` repeats evaluations of another suite than training's.
    """
    print(f"\n{setting}")
    shown = {f"after {title}": evaluations[-1]}
    if len(evaluations) > 1:
        shown = {f"before {title}": evaluations[0], **shown}
    for when, (table, metrics) in shown.items():
        print(f"\n{when}\n{table}")
        if "eval_sampled/success_once" in metrics:
            print(f"sampled: {100 * metrics['eval_sampled/success_once']:.1f}%")
    for table in compared:
        print(f"\n{table}")
    median = "" if speed is None else f", {speed:.0f} env steps/s in training (median)"
    rows = {
        "run": folder,
        "time": f"{seconds / 60:.1f} minutes{median}",
        "policy": folder / "policy",
        "checkpoints": folder / "checkpoints",
        "curves": f"\n{' ' * 13}".join([*curves, str(folder / "metrics.jsonl")]),
        "videos": folder / "videos",
        "evaluate": to_evaluate(folder / "policy", elsewhere),
    }
    if not (folder / "videos").is_dir():
        del rows["videos"]
    print()
    for name, value in rows.items():
        print(f"{name:<12} {value}")
