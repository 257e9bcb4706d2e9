"""Errors that say what was wrong, what would be right and what to type."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_ALSO_CALLED: dict[str, tuple[str, ...]] = {  # elsewhere in the field, and here
    "learning_rate": ("lr",),
    "batch_size": ("minibatch_size",),
    "n_envs": ("num_envs",),
    "num_environments": ("num_envs",),
    "clip_range": ("clip_epsilon",),
    "clip_coef": ("clip_epsilon",),
    "gae_lambda": ("lmbda",),
    "lambda": ("lmbda",),
    "ent_coef": ("entropy_coeff",),
    "vf_coef": ("critic_coeff",),
    "kl_coef": ("reference_kl_coeff",),
    "n_epochs": ("epochs",),
    "n_steps": ("decisions",),
    "rollout_steps": ("decisions",),
    "num_generations": ("group_size",),
    "horizon": ("max_episode_steps", "step_lim"),
    "time": ("minutes",),
    "mem": ("memory_gb",),
    "cpus_per_task": ("cpus",),
    "gpus_per_node": ("gpus",),
    "total_timesteps": ("iterations",),
    "max_steps": ("iterations",),
    "max_epochs": ("iterations",),
    "ep_len": ("max_episode_steps", "step_lim"),
    "max_episode_steps": ("step_lim",),
    "step_lim": ("max_episode_steps",),
    "num_sequences": ("trials",),
    "task_suite_name": ("id",),
    "camera_heights": ("image_size",),
}


def nearest_names(name: str, known: Iterable[str]) -> list[str]:
    """Up to three of the ``known`` names that are spelt like ``name`` or are what the field calls so, nearest first."""
    lowered = {candidate.lower(): candidate for candidate in known}
    near = difflib.get_close_matches(str(name).lower(), lowered, n=3, cutoff=0.5)
    section, _, last = str(name).lower().rpartition(".")
    same = [candidate for candidate in lowered if candidate.rpartition(".")[2] in _ALSO_CALLED.get(last, ())]
    same.sort(key=lambda candidate: candidate.rpartition(".")[0] != section)
    return [lowered[match] for match in dict.fromkeys([*same, *near])][:3]


def unknown_name(kind: str, name: str, known: Iterable[str], example: str | None = None) -> ValueError:
    """Make a ``ValueError`` for a misspelt name that offers the nearest known ones."""
    known = list(known)
    near = nearest_names(name, known)
    message = f"unknown {kind} {name!r}"
    if near:
        message += f"; did you mean {' or '.join(near)}?"
    else:
        shown = ", ".join(known[:12]) + (", ..." if len(known) > 12 else "")
        message += f"; known are {shown}"
    return ValueError(message + (f" (for example {example})" if example and not near else ""))
