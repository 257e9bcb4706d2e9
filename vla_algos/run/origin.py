"""What a policy was trained on: ``environment.json`` beside its files, so that it is evaluated as it was trained."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vla_common.settings import setting_types
from vla_envs import SimulatorSpec, make_env

FILE = "environment.json"
_UNSEEN = frozenset(setting_types(make_env)) - {"id"}  # of the machine or of the reward, which no policy sees


def note_origin(folder: Path, recipe: str, env: Mapping[str, Any], spec: SimulatorSpec, chunk_size: int) -> None:
    """Write beside a policy's files what it was trained on.

    Args:
        folder: of the policy.
        recipe: that has trained it.
        env: the settings of the environment; what is of the machine alone is left out.
        spec: made of them.
        chunk_size: primitive actions per decision.
    """
    known = {
        "recipe": recipe,
        "env": {name: value for name, value in env.items() if name not in _UNSEEN or name == "num_envs"},
        "chunk_size": chunk_size,
        "protocol": spec.protocol,
        "protocol_deviations": list(spec.protocol_deviations),
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FILE).write_text(json.dumps(known, indent=2) + "\n")


def env_of(folder: str | Path) -> dict[str, Any] | None:
    """Read the settings of the environment that the policy of a local folder was trained in.

    Returns:
        Those of ``env``; ``None`` if the folder does not say, as folders of published checkpoints do not.

    Raises:
        ValueError: the file is broken.
    """
    file = Path(folder) / FILE
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        try:
            env = json.loads(file.read_text())["env"]
            return {"id": str(env["id"]), **env}
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{file} is broken ({error}); remove it, and type env=NAME") from error
    return None


def differences(trained: Mapping[str, Any], env: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """List what a policy sees otherwise than in its training: ``{setting: (then, now)}``."""
    names = [name for name in {**trained, **env} if name not in _UNSEEN]
    both = {name: (trained.get(name), env.get(name)) for name in names}
    return {name: (then, now) for name, (then, now) in both.items() if then != now}
