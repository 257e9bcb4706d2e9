"""The packages of examples/ installed beside ours, as a stranger would, and programs that see them."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from paths import ROOT

Program = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the toy benchmark and the toy policy; entry points are found in whatever is on the path."""
    pytest.importorskip("setuptools", reason="setuptools, which builds the toy packages, is not installed")
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("installed")
    for name in ("add_benchmark", "add_policy", "huggingface_policy"):
        shutil.copytree(ROOT / "examples" / name, source / name)  # building leaves folders behind
    options = ["--no-index", "--no-deps", "--no-build-isolation", "--quiet", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "install", *options, "--target", target, *source.iterdir()]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return target


@pytest.fixture(scope="session")
def python(installed: Path) -> Program:
    """Run ``python ARGUMENTS`` in a process that has the toy packages."""

    def run(*arguments: object, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join([str(ROOT), str(installed)])
        return subprocess.run(
            [sys.executable, *map(str, arguments)],
            cwd=cwd,
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
        )

    return run


@pytest.fixture(scope="session")
def recipe(python: Program) -> Program:
    """Run a recipe on the toy benchmark for a moment, with its output in ``folder``."""
    tiny = ["env=toy", "env.num_envs=2", "env.num_workers=1", "env.max_episode_steps=12", "eval.trials=2"]
    tiny += ["eval.videos=0"]

    def run(name: str, folder: Path, *settings: str) -> subprocess.CompletedProcess[str]:
        return python(ROOT / "recipes" / f"{name}.py", *tiny, *settings, f"hydra.run.dir={folder}")

    return run
