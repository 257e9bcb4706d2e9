"""Errors that say what was wrong, what would be right and what to type."""

import difflib
from collections.abc import Iterable

_ALSO_CALLED = {  # what settings are called elsewhere in the field, by their names here
    "lr": "learning_rate",
    "minibatch_size": "batch_size",
    "num_envs": "n_envs num_environments",
    "clip_epsilon": "clip_range clip_coef",
    "lmbda": "gae_lambda lambda",
    "entropy_coeff": "ent_coef",
    "critic_coeff": "vf_coef",
    "reference_kl_coeff": "kl_coef",
    "epochs": "n_epochs",
    "decisions": "n_steps rollout_steps",
    "group_size": "num_generations",
    "max_episode_steps": "horizon ep_len step_lim",
    "step_lim": "horizon ep_len max_episode_steps",
    "minutes": "time hours",
    "memory_gb": "mem",
    "cpus": "cpus_per_task",
    "gpus": "gpus_per_node",
    "iterations": "total_timesteps max_steps max_epochs",
    "trials": "num_sequences",
    "id": "task_suite_name task env_name",
    "family": "type model_type",
    "image_size": "camera_heights",
}


def nearest_names(name: str, known: Iterable[str]) -> list[str]:
    """Return up to three of the ``known`` names that are spelt alike or that the field calls so, nearest first."""
    lowered = {candidate.lower(): candidate for candidate in known}
    section, dot, last = str(name).lower().rpartition(".")
    within = {candidate.removeprefix(section + dot): candidate for candidate in lowered}  # a section makes none alike
    near = [within[each] for each in difflib.get_close_matches(last, within, n=3, cutoff=0.55)]
    same = also_called(last, lowered)
    same.sort(key=lambda candidate: candidate.rpartition(".")[0] != section)
    return [lowered[match] for match in dict.fromkeys([*same, *near])][:3]


def also_called(name: str, known: Iterable[str]) -> list[str]:
    """Return those of the ``known`` names that are called ``name`` elsewhere in the field."""
    return [each for each in known if name in _ALSO_CALLED.get(each.rpartition(".")[2], "").split()]


def unknown_name(kind: str, name: str, known: Iterable[str], example: str | None = None) -> ValueError:
    """Make a ``ValueError`` for a misspelt name that offers the nearest known ones."""
    known = [*filter(None, known)]  # a task may be of no group
    message = f"unknown {kind} {name!r}"
    if near := nearest_names(name, known):
        return ValueError(f"{message}; did you mean {' or '.join(near)}?")
    shown = (", ".join(known[:12]) or "none") + (", ..." if len(known) > 12 else "")
    return ValueError(f"{message}; known are {shown}" + (f" (for example {example})" if example else ""))
