"""What a policy was trained on: ``environment.json`` beside its files, so that it is evaluated as it was trained."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vla_common.settings import setting_types
from vla_envs import SimulatorSpec, make_env
from vla_envs.registry import find_benchmark

FILE = "environment.json"
EPISODES = ("trials", "repeats", "seed", "mean_of")  # settings of an evaluation that say which it has


def note_origin(
    folder: Path,
    recipe: str,
    env: Mapping[str, Any],
    spec: SimulatorSpec,
    chunk_size: int,
    evaluation: Mapping[str, Any],
    evaluated_on: str | None = None,
) -> None:
    """Write beside a policy's files what it was trained on.

    Args:
        folder: of the policy.
        recipe: that has trained it.
        env: the settings of the environment; what is of the machine or of the reward alone is left out.
        spec: made of them.
        chunk_size: primitive actions per decision.
        evaluation: the settings of the run's evaluations; which episodes these have is noted, of another suite than
            that of ``env`` the seed alone.
        evaluated_on: id of the suite of the run's evaluations; ``None`` for that of ``env``.
    """
    unseen = _unseen(env["id"]) - {"num_envs"}
    episodes = {name: evaluation[name] for name in EPISODES if name in evaluation}
    if evaluated_on not in (None, spec.id):
        episodes |= {"trials": None, "repeats": 1, "mean_of": []}
    known = {
        "recipe": recipe,
        "env": {name: value for name, value in env.items() if name not in unseen},
        "chunk_size": chunk_size,
        "evaluation": episodes,
        "evaluated_on": evaluated_on or spec.id,
        "protocol": spec.protocol,
        "protocol_deviations": list(spec.protocol_deviations),
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FILE).write_text(json.dumps(known, indent=2) + "\n")


def origin_of(folder: str | Path) -> dict[str, Any] | None:
    """Read all that a policy's folder says of what it was trained on.

    Returns:
        See :func:`note_origin`; ``None`` if the folder does not say, as folders of published checkpoints do not.

    Raises:
        ValueError: the file is broken.
    """
    file = Path(folder).expanduser() / FILE
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        try:
            found = json.loads(file.read_text())
            return {**found, "env": {"id": str(found["env"]["id"]), **found["env"]}}
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{file} is broken ({error}); remove it, and type env=NAME") from error
    return None


def env_of(folder: str | Path) -> dict[str, Any] | None:
    """Read the settings of the environment that the policy of a local folder was trained in; see :func:`origin_of`."""
    found = origin_of(folder)
    return None if found is None else dict(found["env"])


def differences(trained: Mapping[str, Any], env: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """List what a policy sees otherwise than in its training: ``{setting: (then, now)}``."""
    unseen = _unseen(trained["id"]) | _unseen(env["id"])
    names = [name for name in {**trained, **env} if name not in unseen]
    both = {name: (trained.get(name), env.get(name)) for name in names}
    return {name: (then, now) for name, (then, now) in both.items() if then != now}


def _unseen(suite: str) -> set[str]:
    """List settings of the machine or of the reward, which no policy sees, of the environments of a name."""
    try:
        own = find_benchmark(suite)[0].unseen
    except (ValueError, ImportError):  # of a package that is not installed here
        own = ()
    return set(setting_types(make_env)) - {"id"} | set(own)
