"""Programs without the seconds that their imports take: one process imports everything, and forks for each command.

``python forked.py`` reads a command per line as JSON and answers each with status, stdout and stderr.
"""

import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

from hydra import compose, initialize_config_dir
from paths import CONF, RECIPES, ROOT

_LIMIT = 60  # seconds of one command, unless it is given others


class ForkedPrograms:
    """Runs recipes and commands as ``python FILE ARGUMENTS`` would, each in a fork of one process."""

    def __init__(self):
        path = os.pathsep.join([str(ROOT), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._server = subprocess.Popen(command, env=environment, **pipes)

    def run(self, file, *arguments, cwd=None, limit=_LIMIT, **environment):
        """What ``subprocess.run`` gives; ``file`` is the name of a recipe or a Python file, ``limit`` in seconds."""
        file = str(RECIPES / f"{file}.py") if (RECIPES / f"{file}.py").is_file() else str(file)
        asked = {
            "file": file,
            "arguments": list(map(str, arguments)),
            "cwd": str(cwd or Path.cwd()),
            "env": environment,
            "limit": limit,
        }
        print(json.dumps(asked), file=self._server.stdin, flush=True)
        status, out, err = json.loads(self._server.stdout.readline())
        return subprocess.CompletedProcess([file, *arguments], status, out, err)

    def close(self):
        """End the process."""
        self._server.stdin.close()
        self._server.wait()


def _serve():
    for recipe in ("ppo", "grpo", "sft", "evaluate"):
        runpy.run_path(str(RECIPES / f"{recipe}.py"), run_name="imported")
        with initialize_config_dir(str(CONF), version_base=None):  # its grammar and plugins are kept
            compose(recipe, ["seed=1", "launcher=slurm"])
    for line in sys.stdin:
        asked = json.loads(line)
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            child = os.fork()
            if not child:
                _become(asked, out.fileno(), err.fileno())
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            texts = []
            for file in (out, err):
                file.seek(0)
                texts.append(file.read())
        print(json.dumps([status, *texts]), flush=True)
    os._exit(0)  # there is nothing to tidy up


def _become(asked, out, err):
    for file, number in ((out, 1), (err, 2)):
        os.dup2(file, number)
    os.close(0)
    signal.alarm(asked["limit"])
    os.chdir(asked["cwd"])
    os.environ |= asked["env"]
    sys.argv = [asked["file"], *asked["arguments"]]
    status = 0
    try:
        runpy.run_path(asked["file"], run_name="__main__")
    except SystemExit as end:
        status = end.code or 0
        if isinstance(status, str):
            print(status, file=sys.stderr)
            status = 1
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    _serve()
