"""Run mypy, and hold the list of modules that it may pass over to its promise: it only shrinks.

The list is the ``[[tool.mypy.overrides]]`` of pyproject.toml with ``ignore_errors``; none is an empty list. This script
runs mypy as if the list were empty and fails

- when a module that is not on the list has errors (mypy's own messages are printed),
- when a module on the list has none, or is gone: it is to be taken off,
- when a module is on the list that was not there in the commit this is compared with (``--base``, by default the one
  checked out, so that a local change cannot add one; CI gives the branch that a change is merged into).

``--shrink`` takes the clean ones off by itself::

    python scripts/check_types.py --shrink
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = ROOT / "pyproject.toml"


def listed(text: str) -> list[str]:
    """Return the modules on the list of a pyproject.toml; none where it has no list."""
    overrides = tomllib.loads(text).get("tool", {}).get("mypy", {}).get("overrides", [])
    return next((override["module"] for override in overrides if override.get("ignore_errors")), [])


def run_mypy(text: str) -> dict[str, list[str]]:
    """Run mypy with no module passed over.

    Returns:
        Its messages by module.

    Raises:
        RuntimeError: mypy itself failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        settings = Path(folder) / "pyproject.toml"
        settings.write_text(text.replace("ignore_errors = true", "ignore_errors = false"))
        command = [
            sys.executable,
            "-m",
            "mypy",
            "--config-file",
            str(settings),
            "--no-error-summary",
            "--no-color-output",
        ]
        command += ["--cache-dir", str(ROOT / ".mypy_cache" / "all")]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1) or done.stderr:
        raise RuntimeError(f"mypy failed:\n{done.stdout}{done.stderr}")
    messages: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        if match := re.match(r"(\S+)\.py:\d+: error: ", line):
            name = match[1].replace("/", ".").removesuffix(".__init__")
            messages.setdefault(name, []).append(line)
    return messages


def before(base: str) -> list[str] | None:
    """Return the list as it was in commit ``base``; None where git, the commit or mypy's settings are not there."""
    done = subprocess.run(
        ["git", "show", f"{base}:pyproject.toml"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return listed(done.stdout) if done.returncode == 0 and "[tool.mypy]" in done.stdout else None


def main() -> int:
    """Check the list and print what is wrong with it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="HEAD", help="commit whose list must hold all of today's (default: HEAD)")
    parser.add_argument("--shrink", action="store_true", help="take the clean modules off the list")
    arguments = parser.parse_args()

    text = SETTINGS.read_text()
    names, messages = listed(text), run_mypy(text)
    clean = [name for name in names if name not in messages]
    if arguments.shrink and clean:
        for name in clean:
            text = text.replace(f'    "{name}",\n', "")
        SETTINGS.write_text(text)
        print(f"taken off: {', '.join(clean)}")
        clean = []

    earlier = before(arguments.base)
    added = [name for name in names if earlier is not None and name not in earlier]
    for name in sorted(messages.keys() - set(names)):
        print("\n".join(messages[name]))
    if clean:
        print(f"clean, so type: python scripts/check_types.py --shrink   ({', '.join(clean)})")
    if added:
        print(f"the list in pyproject.toml only shrinks; mend the errors of {', '.join(added)} instead of adding it")
    waiting = {name: len(found) for name, found in messages.items() if name in names}
    print(f"mypy: {sum(waiting.values())} errors left in {len(waiting)} modules on the list")
    return 1 if clean or added or messages.keys() - set(names) else 0


if __name__ == "__main__":
    sys.exit(main())
