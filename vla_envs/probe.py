"""What a look at this machine finds, and trying out in a process of its own what may crash, prompt or hang."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass

SIMULATOR, RENDERING, ASSETS = "Simulator", "Rendering", "Assets"  # parts of the report
PROBE_TIMEOUT = 120.0  # seconds; a first import compiles byte code on what may be a slow network disk


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        status: ``"ok"``, ``"missing"`` (nothing there) or ``"broken"`` (there, but it does not work).
        name: what was looked at.
        detail: what was found.
        remedy: what to type; empty where nothing is wrong.
        part: of the report: :data:`SIMULATOR`, :data:`RENDERING` or :data:`ASSETS`.
        required: the benchmark cannot be used unless this is ok.
        without: what is left of the benchmark where this is not ok and not required, such as ``"its own tasks only"``.
    """

    status: str
    name: str
    detail: str
    remedy: str = ""
    part: str = SIMULATOR
    required: bool = False
    without: str = ""


def run_probe(
    code: str, environment: Mapping[str, str] | None = None, timeout: float = PROBE_TIMEOUT
) -> tuple[bool, str]:
    """Run Python code in a process of its own.

    Args:
        code: the program; what it prints last is the result.
        environment: variables added to this process's.
        timeout: seconds after which it counts as hung.

    Returns:
        Whether it ended well, and its last line of output, or else the error that came first.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            env={**os.environ, **(environment or {})},
        )
    except subprocess.TimeoutExpired:
        return False, f"no answer within {timeout:.0f} s"
    if done.returncode == 0:
        return True, (done.stdout.strip().splitlines() or [""])[-1]
    if done.returncode < 0:
        return False, f"crashed: {signal.Signals(-done.returncode).name}"
    # What is raised while a failed object is torn down comes last and says nothing.
    error = re.search(r"^[\w.]*(?:Error|Exception)\b.*", done.stderr, re.MULTILINE)
    lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
    return False, error.group() if error else lines[-1]
