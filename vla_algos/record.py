"""``run.json``: with what code, versions and machine a run was made, and what came of it."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

_PACKAGES = (
    *("torch", "torchrl", "tensordict", "gymnasium", "numpy"),
    *("mujoco", "metaworld", "hf-libero", "robosuite", "mani_skill", "sapien"),
)
_CODE = Path(__file__).resolve().parent.parent


def record_start(folder: Path) -> None:
    """Add a process to ``run.json``; a run that was resumed has several."""
    record = _read(folder)
    record.setdefault("processes", []).append(
        {
            "started": _now(),
            "command": [sys.executable, *sys.argv],
            "host": platform.node(),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
            "slurm_job": os.environ.get("SLURM_JOB_ID"),
            "python": platform.python_version(),
            "versions": versions(),
            "code": code(),
        }
    )
    _write(folder, record)


def record_result(folder: Path, result: Mapping[str, Any]) -> None:
    """Add what came of the run to ``run.json``."""
    _write(folder, {**_read(folder), "finished": _now(), **result})


def versions() -> dict[str, str]:
    """Installed versions of what decides results."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def code() -> dict[str, Any]:
    """Commit of this library's checkout, and whether files in it were changed; empty outside of one."""
    def git(*arguments: str) -> str | None:
        done = subprocess.run(["git", "-C", _CODE, *arguments], capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else None

    try:
        commit = git("rev-parse", "HEAD")
    except OSError:  # no git
        return {}
    return {} if commit is None else {"commit": commit, "changed": bool(git("status", "--porcelain"))}


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _read(folder: Path) -> dict[str, Any]:
    path = folder / "run.json"
    return json.loads(path.read_text()) if path.exists() else {}


def _write(folder: Path, record: dict[str, Any]) -> None:
    unfinished = folder / ".run.json"
    unfinished.write_text(json.dumps(record, indent=2) + "\n")
    unfinished.replace(folder / "run.json")
