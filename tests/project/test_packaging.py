"""What other machines install by: ``make wheelhouse`` and the Dockerfile, against what set-up does. Nothing is fetched.

Neither docker nor a network is here; the commands are looked at, which continuous integration runs.
"""

import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from itertools import pairwise

import pytest
from paths import ROOT

LINKED = runpy.run_path(str(ROOT / "scripts" / "install_vulkan_driver.py"))["LINKED"]


def make(*arguments):
    """The commands that make would run, as lists of words."""
    done = subprocess.run(["make", "-n", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return [shlex.split(line) for line in done.stdout.replace("\\\n", " ").splitlines() if "echo" not in line]


def packages(commands):
    """What pip is asked for, in its order, by the commands that install or gather."""
    found = []
    for words in commands:
        if "pip" in words[:4] and "show" not in words:
            rest = words[words.index("pip") + 1 :]
            options = {"--wheel-dir", "--find-links", "-c", "-e", "--extra-index-url"}
            named = [word for before, word in zip(["", *rest], rest, strict=False) if before not in options - {"-e"}]
            found.append(
                [word for word in named[1:] if not word.startswith("-")] + ["--no-deps"] * ("hf-libero" in rest)
            )
    return found


def test_a_wheelhouse_has_what_set_up_installs():
    """In its order: torch alone first, LIBERO last and by itself; and what builds the project."""
    gathered = packages(make("wheelhouse", "PYTHON=python3"))
    installed = packages(make("-B", "setup", "VENV=/nowhere", "PYTHON=python3"))
    assert len(gathered) == len(installed) == 3
    assert gathered[0] == installed[0] == ["torch"]
    assert gathered[1] == [*installed[1], "pip", "setuptools", "wheel"]
    assert gathered[2] == installed[2] == ["hf-libero", "--no-deps"]


def test_set_up_that_was_killed_while_python_made_the_environment_works_again(tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path], check=True)  # killed before pip came
    (tmp_path / "mine").touch()
    (words,) = (words for words in make("-B", "setup", f"VENV={tmp_path}") if "venv" in words)
    subprocess.run(["bash", "-c", " ".join(words)], check=True)
    subprocess.run([tmp_path / "bin" / "python", "-m", "pip", "--version"], check=True)
    assert (tmp_path / "mine").exists()


def test_extras_python_and_folder_of_a_wheelhouse_are_chosen():
    commands = make("wheelhouse", "PYTHON=3.12", "EXTRAS=metaworld", "WHEELHOUSE=/there")
    assert ["python3.12", "-m", "venv", "--clear", "/there/.venv"] in commands
    assert packages(commands) == [["torch"], [".[metaworld]", "pip", "setuptools", "wheel"]]
    gather = next(words for words in commands if ".[metaworld]" in words)
    for pair in (("--wheel-dir", "/there"), ("--find-links", "/there"), ("-c", "/there/constraints.txt")):
        assert pair in pairwise(gather)


@pytest.mark.parametrize(("chosen", "version"), [("", ""), ("cpu", "+cpu"), ("cu130", "+cu130")])
def test_the_build_of_torch_is_fixed_in_the_constraints(chosen, version, tmp_path):
    commands = make("wheelhouse", f"CUDA={chosen}", f"WHEELHOUSE={tmp_path}", "PYTHON=python3")
    (edit,) = (words for words in commands if words[0] == "sed")
    subprocess.run(shlex.join(edit).replace("'>'", ">"), shell=True, cwd=ROOT, check=True)
    before, after = ((path / "constraints.txt").read_text() for path in (ROOT, tmp_path))
    torch = re.search(r"^torch==.*$", before, re.MULTILINE)[0]
    assert after == before.replace(f"{torch}\n", f"{torch}{version}\n")
    first = next(words for words in commands if words[-1] == "torch")
    index = "https://download.pytorch.org/whl/" + chosen
    assert (index in first) == ("--no-deps" in first) == bool(chosen)


def dockerfile():
    """Instructions of the Dockerfile with their arguments."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [tuple(line.split(maxsplit=1)) for line in text.splitlines() if line]


def test_the_container_copies_what_set_up_needs():
    copied = [shlex.split(rest)[:-1] for name, rest in dockerfile() if name == "COPY"]
    names = {name for each in copied for name in each}
    assert all((ROOT / name).exists() for name in names)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed = {"Makefile", "pyproject.toml", "constraints.txt", "setup.py", project["project"]["readme"]}
    needed |= {*project["project"]["license-files"], "recipes", "scripts"}
    needed |= {path.name for path in ROOT.glob("vla_*") if path.suffix in ("", ".py")}
    assert needed == names
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert not names & set(ignored)


def test_the_container_has_the_libraries_of_the_documentation():
    (installed,) = (rest for name, rest in dockerfile() if name == "RUN" and "apt-get install" in rest)
    words = shlex.split(installed.partition("install")[2].partition("&&")[0])
    packages = {word for word in words if not word.startswith("-")}
    documented = re.search(r"apt-get install -y (.*)", (ROOT / "docs" / "install.md").read_text())[1].split()
    assert packages == {*documented, *LINKED.values(), "git", "make"}
    (system,) = re.findall(r"^SYSTEM_PACKAGES := (.*)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert system.split() == documented


def test_the_container_is_not_root_and_installs_as_set_up_does():
    instructions = dockerfile()
    names = [name for name, _ in instructions]
    assert instructions[0][1].startswith("python:3.11-"), "the version of constraints.txt"
    user = names.index("USER")
    assert instructions[user][1] != "root"
    assert "RUN" not in names[user:]
    (set_up,) = (rest for name, rest in instructions if name == "RUN" and "make setup" in rest)
    assert 'EXTRAS="$EXTRAS"' in set_up
    (environment,) = (rest for name, rest in instructions if name == "ENV")
    for variable in ("HF_HOME=/cache", "NUMBA_CACHE_DIR=/cache", "VLA_TORCHRL_ASSETS=/assets"):
        assert variable in environment
    folders = re.search(r"mkdir -m 1777 (.*)", set_up)[1].split()
    assert folders == ["/cache", "/assets", "/work"]


@pytest.mark.parametrize("installed", [False, True])
def test_continuous_integration_says_what_it_does_not_build(tmp_path, installed):
    """``.ci/run`` goes on without docker, and with one whose daemon does not answer; on hosted runners there is one."""
    script = (ROOT / ".ci" / "run").read_text()
    said = script[script.index("if docker info") :]
    if installed:
        (tmp_path / "docker").write_text("#!/bin/sh\necho 'Cannot connect to the Docker daemon' >&2\nexit 1\n")
        (tmp_path / "docker").chmod(0o755)
    done = subprocess.run(["/bin/bash", "-euc", said], env={"PATH": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("skipped: make container, because no docker daemon answers on this machine")
    assert "make container" in (ROOT / ".github" / "workflows" / "ci.yml").read_text()


def test_mypy_passes_over_no_module():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]
    assert not [each["module"] for each in settings["overrides"] if "ignore_errors" in each]
