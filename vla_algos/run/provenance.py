"""``run.json``: with what code, versions and machine a run was made, and what came of it."""

import contextlib
import functools
import hashlib
import json
import os
import platform
import secrets
import subprocess
import sys
import warnings
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from vla_algos.files import write_atomically
from vla_common.plain import read_json

_PACKAGES = (
    *("torch", "torchrl", "tensordict", "gymnasium", "numpy"),
    *("mujoco", "metaworld", "hf-libero", "robosuite", "mani_skill", "sapien"),
)
_PYTHON = platform.python_version()
_CODE = Path(__file__).resolve().parent.parent


def record_submission(folder: Path) -> None:
    """Note in ``run.json`` what a job is to run, before it waits in a queue."""
    _write(folder, {**_read(folder), "submitted": {"at": _now(), "command": sys.orig_argv, "code": code()}})


def differences(folder: Path) -> list[str]:
    """Say what of code and versions is not what the last process of a run had: it may compute other roundings."""
    record = _read(folder)
    then = record["processes"][-1] if record.get("processes") else {}
    found = []
    if "code" in then and then["code"] != code():
        found.append(f"{_shown(code())} now, {_shown(then['code'])} then")
    before, now = {"python": then.get("python"), **then.get("versions", {})}, {"python": _PYTHON, **versions()}
    for name in sorted(before.keys() | now.keys()) if then else ():
        if before.get(name) != now.get(name):
            found.append(f"{name} {now.get(name) or 'not there'} now, {before.get(name) or 'not there'} then")
    return found


def record_start(folder: Path, facts: Mapping[str, Any]) -> None:
    """Add a process, and ``facts``, to ``run.json``; warns of other code than that of :func:`record_submission`."""
    record = {**_read(folder), **facts}
    for name in ("finished", "ended"):  # it begins, or continues
        record.pop(name, None)
    now, then = code(), record.get("submitted", {}).get("code", {})
    if "SLURM_JOB_ID" in os.environ and then and now != then:
        warnings.warn(
            f"this job runs other code than was there when it was submitted: {_shown(now)} now, {_shown(then)} then; "
            "submit from a checkout that stays as it is",
            stacklevel=2,
        )
    process = {
        "started": _now(),
        "command": sys.orig_argv,
        "host": platform.node(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "slurm_job": os.environ.get("SLURM_JOB_ID"),
        "python": _PYTHON,
        "versions": versions(),
        "code": now,
    }
    _write(folder, {**record, "processes": [*record.get("processes", []), process]})


def run_id(folder: Path, service: str, *, new: bool) -> str:
    """Return the id of a run in a service that collects runs; ``run.json`` keeps it, unless a ``new`` one is wanted."""
    record, name = _read(folder), f"{service}_id"
    if new or not (len(kept := str(record.get(name))) == 8 and kept.isalnum()):  # it gets into names and commands
        record[name] = secrets.token_hex(4)
        record.pop(f"{service}_sent", None)
        _write(folder, record)
    return str(record[name])


def last_sent(folder: Path, service: str, logged: Mapping[str, int]) -> dict[str, int]:
    """Return the last iteration of each kind of metrics that a service has: of those that are ``logged``, or later.

    ``run.json`` keeps them: of a run that is interrupted twice ``metrics.jsonl`` has lost the latest.
    """
    record, name = _read(folder), f"{service}_sent"
    kept = record.get(name)
    before = {kind: last for kind, last in kept.items() if isinstance(last, int)} if isinstance(kept, dict) else {}
    last = {kind: max(logged.get(kind, -1), before.get(kind, -1)) for kind in {**before, **logged}}
    if last != before:
        _write(folder, {**record, name: last})
    return last


def record_result(folder: Path, result: Mapping[str, Any]) -> None:
    """Add what came of the run to ``run.json``."""
    _write(folder, {**_read(folder), "finished": _now(), **result})


def versions() -> dict[str, str]:
    """Installed versions of what decides results."""
    found = {}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


@functools.cache  # a process runs what it has imported, whatever is written to the files meanwhile
def code() -> dict[str, Any]:
    """Commit of this library's checkout, and a fingerprint of the changes to its files; empty outside of one."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", _CODE, *arguments], capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""

    try:
        commit, changes = git("rev-parse", "HEAD"), git("diff", "HEAD")
    except OSError:  # no git
        return {}
    found = {"commit": commit, "changes": hashlib.sha1(changes.encode()).hexdigest()[:9] if changes else None}
    return found if commit else {}


def _shown(found: Any) -> str:
    if not isinstance(found, dict) or "commit" not in found:
        return "no checkout"
    return f"commit {found['commit'][:9]}" + (f" with changes {found['changes']}" if found.get("changes") else "")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def read_record(folder: Path) -> dict[str, Any]:
    """Read ``run.json``, which may be a stranger's; nothing where it is missing, or none of ours."""
    try:
        record: dict[str, Any] = read_json(folder / "run.json")
    except (OSError, ValueError):
        return {}
    processes = record.get("processes", [])
    ours = isinstance(processes, list) and all(map(_is_process, [record.get("submitted", {}), *processes]))
    return record if ours else {}


def _read(folder: Path) -> dict[str, Any]:
    """Read ``run.json``; what is not one of ours is put aside."""
    path = folder / "run.json"
    if (record := read_record(folder)) or not path.exists():
        return record
    aside = path.with_name("run.json.broken")
    path.replace(aside)
    tqdm.write(f"{path} could not be read; it is {aside.name} now, and a new one begins")
    return {}


def _is_process(found: Any) -> bool:
    parts = [found, *(found.get(name, {}) for name in ("code", "versions"))] if isinstance(found, dict) else [found]
    return all(isinstance(part, dict) for part in parts) and isinstance(parts[1].get("commit", ""), str)


def _write(folder: Path, record: dict[str, Any]) -> None:
    write_atomically(folder / "run.json", json.dumps(record, indent=2) + "\n")
