"""``python -m vla_policies memory``: the table of what a policy takes on a GPU, in words."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from vla_policies.memory import Memory, Way, calculate, ways
from vla_policies.outline import PROMPT_LENGTH, Outline

GB = 1e9
LEFT_OUT = (
    "simulators, the batch that is learnt from (host memory), CUDA's own memory (about half a GB of each process), "
    "buffers of NCCL, what the allocator cannot use, a frozen copy of the policy (loss.reference_kl_coeff)"
)
_HEADINGS = ("weights", "gradients", "Adam", "gathered", "update", "rollout", "host")


def read_settings(texts: Sequence[str]) -> dict[str, Any]:
    """Read ``policy.NAME=VALUE`` as recipes take them.

    Raises:
        ValueError: something else; says what to type.
    """
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.startswith("policy.") or not value:
            raise ValueError(f"{text!r} is no setting of a policy; type it as recipes take it: policy.lora_rank=32")
        try:
            found[name.removeprefix("policy.")] = json.loads(value)
        except ValueError:
            found[name.removeprefix("policy.")] = value
    return found


def check_gpus(gpus: int, shards: int | None, gpu_memory: float, decisions: int, num_envs: int) -> int:
    """Return the number of shards, all GPUs if nobody says.

    Raises:
        ValueError: numbers that cannot be.
    """
    shards = gpus if shards is None else shards
    for name, number in (("gpus", gpus), ("shards", shards), ("micro-batch-size", decisions), ("num-envs", num_envs)):
        if number < 1:
            raise ValueError(f"--{name} {number}: must be at least 1")
    if gpus % shards:
        fitting = [number for number in range(2, gpus + 1) if gpus % number == 0]
        raise ValueError(f"--shards {shards}: must divide --gpus {gpus}; take {' or '.join(map(str, fitting)) or 1}")
    if not 0 < gpu_memory < float("inf"):
        raise ValueError(f"--gpu-memory {gpu_memory}: must be the GB of a GPU, such as 80")
    return shards


def describe(outline: Outline, *, gpus: int, shards: int, gpu_memory: float, decisions: int, num_envs: int) -> str:
    """Write the report.

    Args:
        outline: of the policy.
        gpus: of the run; each process has one.
        shards: that a model is cut into where it is.
        gpu_memory: of each GPU, in GB.
        decisions: of a backward pass, ``update.micro_batch_size``.
        num_envs: of a process, which decide together.
    """
    sizes = outline.sizes()
    lowers = sizes.gathered(compute=True) < sizes.weights
    chosen = ways(shards, lowers)
    lines = [f"{type(outline.module).__name__}, {outline.source}", *_parameters(outline), "", _heading()]
    lines += [f"{way!s:<42}{_row(way, calculate(sizes, way))}" for way in chosen]
    lines.append("gathered: at a time in an update / all for a rollout; host: host memory of each process")
    lines.append("settings: sharding.shards, sharding.compute=bf16, offload.optimizer=true, sharding.cpu_offload=true")
    if gpus > 1:
        copies = "each has all" if shards == 1 else f"{gpus // shards} x {shards} shards"
        lines.append(f"{gpus} GPUs: {copies}")
    if outline.stacks:
        lines += ["", *_activations(outline, lowers, decisions, num_envs)]
        lines += ["", *_fitting(outline, chosen, gpu_memory, decisions, num_envs)]
    else:
        lines.append("activations: not estimated for this family")
    lines += [*outline.remarks, f"left out: {LEFT_OUT}"]
    return "\n".join(lines)


def needed(outline: Outline, way: Way, *, checkpointing: bool, decisions: int, num_envs: int) -> tuple[float, float]:
    """Return the GB of a GPU in an update and in a rollout, activations included."""
    memory, kept = calculate(outline.sizes(), way), outline.activations(way.compute)
    of_a_decision = kept.recomputed if checkpointing else kept.kept
    update = memory.update + outline.kept_for_update + decisions * of_a_decision
    return 0.0 if way.acting else update / GB, (memory.rollout + num_envs * kept.rollout) / GB


def _parameters(outline: Outline) -> list[str]:
    counts: Counter[str] = Counter()
    for name, parameter in outline.module.named_parameters():
        kind = "adapters" if ".lora_" in name else name.partition(".")[0]
        state = "trained" if parameter.requires_grad else "frozen"
        counts[f"{kind}, {state}, {str(parameter.dtype).removeprefix('torch.')}"] += parameter.numel()
    return [f"{number / 1e6:>12,.1f} M  {key}" for key, number in counts.items()]


def _activations(outline: Outline, lowers: bool, decisions: int, num_envs: int) -> list[str]:
    title = f"GB of activations (estimate, prompts of {PROMPT_LENGTH} tokens)"
    lines = [f"{title:<58}{'a decision':>12}{'all':>8}"]
    for lowered in dict.fromkeys((False, lowers)):
        found, precision = outline.activations(lowered), ", bf16 compute" if lowered else ""
        for what, number, count in (
            (f"update of {decisions}, gradient_checkpointing=true", found.recomputed, decisions),
            (f"update of {decisions}, gradient_checkpointing=false", found.kept, decisions),
            (f"rollout of {num_envs}", found.rollout, num_envs),
        ):
            lines.append(f"{what + precision:<58}{number / GB:>12.2f}{number * count / GB:>8.1f}")
    return lines


def _fitting(outline: Outline, chosen: Sequence[Way], gpu_memory: float, decisions: int, num_envs: int) -> list[str]:
    lines = [
        f"GB with activations, {gpu_memory:g} a GPU: the larger of update (gradient_checkpointing=true) and rollout"
    ]
    for way in chosen:
        peak = max(needed(outline, way, checkpointing=True, decisions=decisions, num_envs=num_envs))
        lines.append(f"{way!s:<42}{peak:>8.1f}  {'fits' if peak <= gpu_memory else 'does not fit'}")
    return lines


def _heading() -> str:
    return f"{'GB per GPU, without activations':<42}" + "".join(f"{each:>10}" for each in _HEADINGS)


def _row(way: Way, memory: Memory) -> str:
    gathered = (
        f"{memory.gathered_in_update / GB:.1f}/{memory.gathered / GB:.1f}" if way.gathers and not way.acting else "-"
    )
    cells = [*(f"{number / GB:.1f}" for number in (memory.weights, memory.gradients, memory.adam)), gathered]
    update = "-" if way.acting else f"{memory.update / GB:.1f}"
    cells += [update, f"{memory.rollout / GB:.1f}", f"{memory.host / GB:.1f}" if memory.host else "-"]
    return "".join(f"{cell:>10}" for cell in cells)
