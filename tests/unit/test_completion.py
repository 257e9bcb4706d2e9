"""TAB in a real bash: names of groups, files and settings, by the script of ``vla-recipe completion``."""

import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from paths import CONF, RECIPES, ROOT

from vla_common.completion import answer_if_asked

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


def answers(recipe, line):
    """What a recipe answers to Hydra's question for bash."""
    command = [sys.executable, RECIPES / f"{recipe}.py", "-sc", "query=bash"]
    done = subprocess.run(command, capture_output=True, text=True, env={**ENVIRONMENT, "COMP_LINE": f"recipe {line}"})
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize("group", ["env", "experiment", "policy"])
def test_a_group_is_completed_by_the_names_of_its_files(group):
    files = {f"{group}={path.stem}" for path in (CONF / group).glob("*.yaml")}
    assert set(answers("ppo", f"{group}=")) == files
    first = min(files)
    assert first in answers("grpo", first[:-1])


def test_settings_are_those_of_the_groups_that_were_typed():
    assert answers("ppo", "optim.schedu") == ["optim.schedule="]
    assert answers("evaluate", "env=calvin env.rendere") == ["env.renderer="]
    assert answers("evaluate", "env=metaworld env.rendere") == []


def test_an_answer_needs_no_torch(tmp_path):
    """Importing it takes seconds, at each TAB."""
    (tmp_path / "torch.py").write_text("raise RuntimeError('imported')")
    path = f"{tmp_path}:{ROOT}"
    command = [sys.executable, RECIPES / "ppo.py", "-sc", "query=bash"]
    environment = {**ENVIRONMENT, "PYTHONPATH": path, "COMP_LINE": "recipe env=libe"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.stdout.split() == ["env=libero"], done.stderr


def test_nobody_else_is_answered(capsys):
    answer_if_asked([str(RECIPES / "ppo.py"), "seed=1"])
    answer_if_asked([str(RECIPES / "ppo.py"), "-sc", "install=bash"])
    answer_if_asked(["own.py", "-sc", "query=bash"])
    assert capsys.readouterr().out == ""


class Bash:
    """An interactive bash that has evaluated the script."""

    def __init__(self, folder):
        command = folder / "vla-recipe"  # the installed one is that of another checkout
        command.write_text(f'#!/bin/sh\nexec {sys.executable} -m recipes "$@"\n')
        command.chmod(0o755)
        script = subprocess.run([command, "completion"], capture_output=True, text=True, env=ENVIRONMENT, check=True)
        (folder / "rc").write_text(f"{script.stdout}\nPS1='ready> '\nbind 'set bell-style none'\n")
        environment = {**ENVIRONMENT, "PATH": f"{folder}:{ENVIRONMENT['PATH']}", "TERM": "dumb", "COLUMNS": "300"}
        self.process, self.terminal = pty.fork()
        if not self.process:
            os.chdir(ROOT)
            os.execvpe("bash", ["bash", "--rcfile", str(folder / "rc"), "--noprofile", "-i"], environment)
        self.read("ready> ")

    def read(self, until):
        """Read until something is on the screen; returns all that is."""
        seen, deadline = "", time.monotonic() + 60
        while until not in seen:
            assert time.monotonic() < deadline, seen
            if select.select([self.terminal], [], [], 1)[0]:
                seen += os.read(self.terminal, 4096).decode()
        return seen

    def type(self, text, until):
        """Type something, and see what becomes of it; the line is then given up."""
        os.write(self.terminal, text.encode())
        seen = self.read(until)
        os.write(self.terminal, b"\x15\n")  # Ctrl-U, and an empty line
        self.read("ready> ")
        return seen

    def close(self):
        os.kill(self.process, signal.SIGKILL)
        os.waitpid(self.process, 0)
        os.close(self.terminal)


@pytest.fixture
def bash(tmp_path):
    if shutil.which("bash") is None:
        pytest.skip("there is no bash")
    shell = Bash(tmp_path)
    yield shell
    shell.close()


def test_tab_completes_commands_recipes_and_settings(bash):
    bash.type("vla-recipe comple\t", "completion ")
    bash.type("vla-recipe run gr\t", "run grpo ")
    bash.type("vla-recipe run ppo env=metaworld_fau\t", "env=metaworld_faucets ")
    bash.type("python recipes/ppo.py seed=1 env=metaworld_fau\t", "env=metaworld_faucets ")
    bash.type("python recipes/evaluate.py policy.check\t", "policy.checkpoint=")
    seen = bash.type("python recipes/ppo.py experiment=libero_90\t", "libero_90_grpo_openvlaoft ")
    line = seen.rpartition("ready> ")[2]  # what was typed before the prompt came is echoed twice
    assert line.count("experiment=") == 1, "what stands before = is not typed again"


def test_python_completes_files_as_before(bash):
    bash.type("python recipes/ppo.p\t", "recipes/ppo.py ")
    bash.type("python -m recipes CHANGEL\t", "CHANGELOG.md ")
