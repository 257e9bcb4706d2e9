"""A wheel in a fresh environment: recipes and their configuration are in it, and the command runs and copies them."""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from paths import CONF, RECIPES, ROOT

pytest.importorskip("metaworld", reason="Meta-World is not installed: pip install 'vla-torchrl[metaworld]'")
pytest.importorskip("setuptools", reason="setuptools, which builds the wheel, is not installed")
SOURCES = ["pyproject.toml", "setup.py", "README.md", "LICENSE", "recipes", "scripts"]
TOY = ["env.num_envs=2", "env.num_workers=1", "env.max_episode_steps=10", "env.image_size=32", "eval.trials=2"]
TOY += ["eval.videos=0", "demonstrations.episodes=2", "cloning.steps=3", "iterations=1", "collector.decisions=4"]
OFFLINE = ["--no-index", "--no-deps", "--no-build-isolation", "--quiet", "--disable-pip-version-check"]


def run(*command, cwd, **variables):
    """Run without this checkout on the path."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.run(
        list(map(str, command)), cwd=cwd, env={**environment, **variables}, capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """The files that a wheel is built from, copied: building leaves folders behind."""
    folder = tmp_path_factory.mktemp("source")
    for path in [*(ROOT / name for name in SOURCES), *ROOT.glob("vla_*/")]:
        if path.is_dir() and path.suffix != ".egg-info":
            shutil.copytree(path, folder / path.name, ignore=shutil.ignore_patterns("__pycache__"))
        elif path.is_file():
            shutil.copy(path, folder)
    return folder


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    built = run(sys.executable, "-m", "pip", "wheel", *OFFLINE, "--wheel-dir", folder, source, cwd=folder)
    assert built.returncode == 0, built.stderr
    (path,) = folder.glob("*.whl")
    return path


def fresh(folder, *what):
    """An environment with this one's packages, but for vla-torchrl, which is installed from ``what``.

    A line of a .pth file adds a folder to the path without reading the .pth files in it, so an editable installation
    there stays unseen.
    """
    made = run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    assert made.returncode == 0, made.stderr
    paths = sysconfig.get_paths(vars={"base": str(folder), "platbase": str(folder)})
    Path(paths["purelib"], "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    python = folder / "bin" / "python"
    done = run(sys.executable, "-m", "pip", "--python", python, "install", *OFFLINE, *what, cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "bin"


@pytest.fixture(scope="module")
def binaries(wheel, tmp_path_factory):
    return fresh(tmp_path_factory.mktemp("fresh") / "venv", wheel)


def test_a_wheel_has_every_module_every_configuration_and_what_types_need(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    files = [path for path in ROOT.glob("vla_*/**/*") if path.suffix in (".py", ".pyi", ".json", ".typed", ".jinja")]
    expected = {str(path.relative_to(ROOT)) for path in files}
    expected |= {f"vla_recipes/{path.relative_to(RECIPES)}" for path in RECIPES.glob("*.py")}
    expected |= {f"vla_recipes/{path.relative_to(RECIPES)}" for path in CONF.rglob("*.yaml")}
    assert expected <= names, sorted(expected - names)
    assert any(name.endswith("share/vla-torchrl/install_vulkan_driver.py") for name in names)
    assert not [name for name in names if name.startswith(("tests/", "recipes/", "examples/", "benchmarks/"))]


def test_a_copied_recipe_runs_in_a_fresh_environment(binaries, tmp_path):
    found = run(binaries / "python", "-c", "import vla_algos, vla_recipes; print(vla_algos.__file__)", cwd=tmp_path)
    assert found.stdout.startswith(str(binaries.parent)), found.stdout + found.stderr
    listed = run(binaries / "vla-recipe", "list", cwd=tmp_path)
    assert listed.returncode == 0, listed.stderr
    assert "metaworld_faucets_ppo_small" in listed.stdout, listed.stderr
    copied = run(binaries / "vla-recipe", "copy", "ppo", cwd=tmp_path)
    assert copied.returncode == 0, copied.stderr
    changed = tmp_path / "my_ppo" / "conf" / "ppo.yaml"
    changed.write_text(changed.read_text() + "\n# mine\n")
    done = run(binaries / "python", "ppo.py", *TOY, "hydra.run.dir=out", cwd=tmp_path / "my_ppo")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "my_ppo" / "out" / "policy" / "model.safetensors").is_file()
    again = run(binaries / "vla-recipe", "copy", "ppo", cwd=tmp_path)
    assert again.returncode == 2
    assert again.stderr.count("\n") == 1
    assert "--force" in again.stderr


def test_a_recipe_runs_from_any_folder(binaries, tmp_path):
    done = run(binaries / "vla-recipe", "run", "sft", *TOY[:-2], "hydra.run.dir=out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "policy" / "model.safetensors").is_file()
    refused = run(binaries / "vla-recipe", "run", "sft", "cloning.stepps=3", cwd=tmp_path)
    assert refused.returncode != 0
    assert "stepps" in refused.stderr
    assert {path.name for path in tmp_path.iterdir()} <= {"out", "latest"}


def test_an_editable_installation_has_the_command_too(source, tmp_path):
    binaries = fresh(tmp_path / "venv", "--editable", source)
    listed = run(binaries / "vla-recipe", "list", cwd=tmp_path)
    assert listed.returncode == 0, listed.stderr
    assert "metaworld_faucets_ppo_small" in listed.stdout, listed.stderr
    shown = run(binaries / "vla-recipe", "run", "ppo", "--cfg", "job", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert "metaworld/button-press-topdown-v3" in shown.stdout, shown.stderr
    where = "import vla_recipes, vla_envs; from importlib.metadata import version; print(vla_recipes.__file__); "
    where += "print(vla_envs.__version__); print(version('vla-torchrl'))"
    found = run(binaries / "python", "-c", where, cwd=tmp_path).stdout.splitlines()
    assert found[0] == str(source / "recipes" / "__init__.py")
    assert found[1] == found[2]
