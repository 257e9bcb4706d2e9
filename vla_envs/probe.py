"""Findings about this machine, and trying out in a process of its own what may crash, prompt or hang."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass

SIMULATOR, RENDERING, ASSETS = "Simulator", "Rendering", "Assets"  # parts of the report
PROBE_TIMEOUT = 120.0  # seconds; a first import compiles byte code on what may be a slow network disk
_SILENT, _AGAIN = "no answer within", "python -m vla_envs, again, once the machine is less busy"


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's report.

    Attributes:
        status: ``"ok"``, ``"missing"`` (nothing there) or ``"broken"`` (there, but it does not work).
        name, detail: what was looked at, and what was found.
        remedy: what to type; empty where nothing is wrong.
        part: of the report: :data:`SIMULATOR`, :data:`RENDERING` or :data:`ASSETS`.
        required: whether the benchmark is of no use unless this is ok.
        without: what works where it is not ok, for example ``"its own tasks"``.
    """

    status: str
    name: str
    detail: str
    remedy: str = ""
    part: str = SIMULATOR
    required: bool = False
    without: str = ""


def remedy_for(ok: bool, detail: str, remedy: str) -> str:
    """Return what to type about the outcome of :func:`run_probe`: what gave no answer may be there all the same."""
    return "" if ok else _AGAIN if detail.startswith(_SILENT) else remedy


def import_path() -> str:
    """``PYTHONPATH`` with which ``python -P`` finds what this process finds.

    The current folder, if it is there, comes last, so that a ``random.py`` in it does not replace Python's.
    """
    return os.pathsep.join([*filter(None, map(str, sys.path)), *([os.getcwd()] if "" in sys.path else [])])


def run_probe(
    code: str, environment: Mapping[str, str] | None = None, timeout: float = PROBE_TIMEOUT
) -> tuple[bool, str]:
    """Run Python code in a process of its own, with some more variables, for at most ``timeout`` seconds.

    Returns:
        Whether it ended well, and its last line of output, or else the error that came first.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", code],  # nothing of the current folder is imported
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            env={**os.environ, **(environment or {})},
        )
    except subprocess.TimeoutExpired:
        return False, f"{_SILENT} {timeout:.0f} s"
    if done.returncode == 0:
        return True, (done.stdout.strip().splitlines() or [""])[-1]
    if done.returncode < 0:
        return False, f"crashed: {signal.Signals(-done.returncode).name}"
    # What is raised while a failed object is torn down comes last and says nothing.
    error = re.search(r"^[\w.]*(?:Error|Exception)\b.*", done.stderr, re.MULTILINE)
    lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
    return False, error.group() if error else lines[-1]
