"""What a run says of its suite, its policy and its iterations."""

import math
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from vla_algos.run.logging import entries
from vla_envs import SimulatorSpec
from vla_policies import VLAPolicy


def describe_spec(spec: SimulatorSpec) -> str:
    """Name a suite, its protocol and what differs from the benchmark's own one, for printing."""
    protocol = [f"  protocol: {spec.protocol}"] if spec.protocol else []
    return "\n".join([spec.id, *protocol, *(f"  not the benchmark's: {text}" for text in spec.protocol_deviations)])


def facts_of(spec: SimulatorSpec) -> dict[str, Any]:
    """Return what ``run.json`` says of where a result was measured."""
    protocol = {"protocol": spec.protocol} if spec.protocol else {}
    return {"evaluated_on": spec.id, **protocol, "protocol_deviations": spec.protocol_deviations}


def as_evaluated(spec: SimulatorSpec, trials: int | None) -> SimulatorSpec:
    """Add to the deviations from the protocol that it has more initial states of each task than ``trials``."""
    if spec.initial_states is None or trials is None or trials >= spec.trials:
        return spec
    fewer = f"{trials} of its {spec.trials} initial states of each task (eval.trials=null has all)"
    return replace(spec, protocol_deviations=(*spec.protocol_deviations, fewer))


def describe_policy(policy: VLAPolicy) -> str:
    """Say how large a policy is and how much of it learns, for printing."""
    total = sum(parameter.numel() for parameter in policy.parameters())
    trained = sum(parameter.numel() for parameter in policy.parameters() if parameter.requires_grad)
    if not total:
        return "policy without weights here"
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


def never_trained(folder: Path) -> list[str]:
    """Say, where that is so, that the policy of a run never had a learning rate above 0."""
    lines = [line for line in entries(folder / "metrics.jsonl") if line.get("train/actor/lr") is not None]
    if not lines or any(line["train/actor/lr"] for line in lines):
        return []
    steps = sum(int(line.get("train/steps") or 0) for line in lines)
    return [
        f"the policy is as it was: in all {steps} optimizer steps of this run only the critic learnt; type more "
        "iterations, or a smaller update.critic_warmup_steps (0 for none)"
    ]
