"""Processes without the seconds that their imports take: a server imports everything, and forks them."""

import functools
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from multiprocessing import forkserver
from pathlib import Path

import pytest
import torch
from paths import RECIPES

from vla_algos import distributed


@functools.cache
def forks():
    """The context of :mod:`multiprocessing` whose processes begin with the imports of :mod:`warm`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["warm", "forked"])
    with pytest.MonkeyPatch.context() as patch:  # it does not see what pytest added to sys.path
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        patch.setenv("OMP_NUM_THREADS", "1")
        forkserver.ensure_running()
    return context


class Started:
    """``python FILE ARGUMENTS`` at work, as :class:`subprocess.Popen`; or ``processes`` of it, as torchrun starts them.

    ``file`` is the name of a recipe or a Python file.
    """

    def __init__(self, file, *arguments, cwd=None, processes=None, **environment):
        file = str(RECIPES / f"{file}.py") if (RECIPES / f"{file}.py").is_file() else str(file)
        self.args = [file, *map(str, arguments)]
        self._folder = tempfile.TemporaryDirectory()
        self._files = [Path(self._folder.name, name) for name in ("out", "err")]
        environments = [environment] if processes is None else [environment | rank for rank in ranks(processes)]
        self._processes = [
            forks().Process(target=_become, args=(self.args, str(cwd or Path.cwd()), os.environ | each, self._files))
            for each in environments
        ]
        for process in self._processes:
            process.start()
        self.pid = self._processes[0].pid

    @property
    def returncode(self):
        """As :mod:`subprocess` has it; of several processes that of the first that failed."""
        codes = [process.exitcode for process in self._processes]
        return None if None in codes else next(filter(None, codes), 0)

    def poll(self):
        return self.returncode

    def send_signal(self, number):
        for process in self._processes:
            if process.exitcode is None:
                os.kill(process.pid, number)

    def communicate(self, timeout=200):
        """What was printed, and on stderr; what runs longer than ``timeout`` seconds is killed."""
        for process in self._processes:
            process.join(timeout)
        for process in self._processes:
            process.kill()
            process.join()
        texts = [file.read_text() if file.exists() else "" for file in self._files]
        self._folder.cleanup()
        return texts


def run(file, *arguments, limit=60, **options):
    """What :func:`subprocess.run` gives for a program of :class:`Started`."""
    started = Started(file, *arguments, **options)
    out, err = started.communicate(limit)
    return subprocess.CompletedProcess(started.args, started.returncode, out, err)


def ranks(processes):
    """The environment variables by which torchrun tells processes who they are."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    each = [common | {"RANK": rank, "LOCAL_RANK": rank, "TORCHELASTIC_RUN_ID": "test"} for rank in range(processes)]
    return [{name: str(value) for name, value in environment.items()} for environment in each]


def together(work, folder, *arguments, processes=2, ends=(0, 0), patience=240):
    """The results of ``work(*arguments)`` in processes that know of each other, by rank."""
    running = [
        forks().Process(target=_work, args=(rank, environment, folder, work, arguments), daemon=True)
        for rank, environment in enumerate(ranks(processes))
    ]
    try:
        for process in running:
            process.start()
        for process in running:
            process.join(patience)
        assert [process.exitcode for process in running] == list(ends)
    finally:
        for process in running:
            process.kill()
    found = [folder / f"{rank}.pt" for rank in range(processes)]
    return [torch.load(path, weights_only=False) if path.exists() else None for path in found]


def _work(rank, environment, folder, work, arguments):
    os.environ |= environment
    with distributed.process_group():
        torch.save(work(*arguments), folder / f"{rank}.pt")


def _become(words, folder, environment, files):
    for file, number in zip(files, (1, 2), strict=True):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.chdir(folder)
    os.environ.clear()
    os.environ |= environment | {"OMP_NUM_THREADS": "1"}
    sys.argv = words
    sys.path.insert(0, os.path.dirname(words[0]))  # as Python does
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        runpy.run_path(words[0], run_name="__main__")
    except SystemExit:
        raise
    except BaseException:
        traceback.print_exc()
        sys.exit(1)
