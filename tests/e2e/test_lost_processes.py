"""A process that is lost while the others exchange weights with it: each says in one line who, and ends."""

import os
import re
import signal
import subprocess
import sys
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from decisions import decisions
from tiny_policies import clipped, small
from together import together

from vla_algos import parallel
from vla_algos.learner import clip_gradient
from vla_policies.sharding import gathered, shard

pytestmark = pytest.mark.timeout(300)
PLACES = ["acting", "forward", "backward", "clipping", "saving"]
ENDED = r"process 1 of 2 \(.*\) has ended without a word: it was killed"


def work_until(place, end, folder):
    """Work with weights that two processes have; ``end`` comes over the second before a ``place``."""
    torch.manual_seed(0)
    policy = small(folder)
    batch, found = decisions(policy, 4), {}
    shard(policy, parallel.device_mesh(2))
    parameters = list(policy.parameters())

    def act():
        with gathered(policy):
            decisions(policy, 2)

    steps = {
        "acting": act,
        "forward": lambda: found.update(loss=clipped(policy, batch, batch)),
        "backward": lambda: found["loss"].backward(),
        "clipping": lambda: clip_gradient(parameters, 1.0),
        "saving": lambda: policy.save_pretrained(folder / "policy"),
    }
    assert list(steps) == PLACES
    parallel.barrier()
    for name, step in steps.items():
        if name == place and parallel.rank() == 1:
            END[end]()
        step()
    parallel.barrier()


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def fail():
    raise ArithmeticError("enough")


def come_late():
    time.sleep(20)


END = {"killed": kill, "fails": fail, "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP), "late": come_late}


@pytest.mark.parametrize("place", PLACES)
def test_a_process_that_is_killed(place, tmp_path, capfd):
    together(work_until, tmp_path, place, "killed", tmp_path, ends=(1, -signal.SIGKILL))
    assert re.search(rf"^vla_algos.heartbeat.ProcessLost: {ENDED}", capfd.readouterr().err, re.MULTILINE)


def test_an_error_of_its_own_stays_what_it_is(tmp_path, capfd):
    together(work_until, tmp_path, "backward", "fails", tmp_path, ends=(1, 1))
    said = capfd.readouterr().err
    assert re.search("^ArithmeticError: enough", said, re.MULTILINE)
    assert re.search(r"process 1 of 2 \(.*\) has failed: ArithmeticError: enough", said)


def timeout_of(group):
    return group._get_backend(torch.device("cpu")).options._timeout


def wait_too_long(folder):
    assert timeout_of(parallel._control) == timedelta(hours=2)
    for group in (dist.group.WORLD, *parallel.device_mesh(1).get_all_groups()):
        assert timeout_of(group) == timedelta(minutes=10)
    parallel._DATA_TIMEOUT = timedelta(seconds=4)
    work_until("forward", "late", folder)


def test_processes_that_are_alive_are_not_waited_for_forever(tmp_path, capfd):
    together(wait_too_long, tmp_path, tmp_path, ends=(1, 1))
    said = (
        "process 0 of 2, in an exchange of weights (forward of losses.py), has waited for the others, which are alive"
    )
    assert f"ProcessLost: {said}" in capfd.readouterr().err


def ask_about_errors():
    """With a heartbeat; what came of a loss that is known already, wrapped by somebody, and an own mistake."""
    lost = parallel.ProcessLost("process 7 is gone")
    wrapped = OSError("could not be written")
    wrapped.__cause__ = lost
    return [str(parallel.lost_behind(error)) for error in (wrapped, lost, RuntimeError("a mistake"), ValueError("one"))]


def test_errors_of_other_kinds(tmp_path):
    assert together(ask_about_errors, tmp_path) == [["process 7 is gone", "None", "None", "None"]] * 2


def test_errors_of_a_process_that_is_alone():
    assert parallel.lost_behind(RuntimeError("[gloo/transport/tcp/pair.cc:1] Connection closed by peer")) is None
    assert parallel.lost_behind(ValueError("a mistake")) is None


SCRIPT = """
import sys
from pathlib import Path
from test_lost_processes import work_until
from vla_algos import parallel
from vla_common.program import run_main

def main():
    with parallel.process_group():
        (Path(sys.argv[2]) / str(parallel.rank())).touch()
        work_until(sys.argv[1], "stopped", Path(sys.argv[2]))
    return 0

run_main(main)
"""


def test_a_process_that_is_stopped_under_torchrun(tmp_path):
    script = tmp_path / "work.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {"VLA_HEARTBEAT_TIMEOUT": "3", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [*command, script, "backward", tmp_path],
        capture_output=True,
        text=True,
        env=os.environ | environment,
        timeout=120,
    )
    assert done.returncode == 1
    said = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(said) == 1, done.stderr
    assert re.match(r"error: process 1 of 2 \(.*\) has given no sign of life for 3 s: it was stopped", said[0])
    assert time.time() - (tmp_path / "0").stat().st_mtime < 60  # torchrun gives the one that is stopped 30 seconds


def test_a_process_that_is_alone_shards_too():
    """It has a group of one while it works, and none before and afterwards."""
    for _ in range(2):
        with parallel.process_group():
            assert not dist.is_initialized()
            mesh = parallel.device_mesh(1)
            assert mesh.shape == (1, 1)
            assert (parallel.rank(), parallel.world_size(), parallel.is_main()) == (0, 1, True)
            assert parallel.all_gather_object("mine") == ["mine"]
            torch.manual_seed(0)
            policy = small(None)
            batch = decisions(policy, 4)
            wanted = clipped(policy, batch, batch)
            shard(policy, mesh)
            assert torch.equal(clipped(policy, batch, batch), wanted)
        assert not dist.is_initialized()
    with pytest.raises(ValueError, match="shards=2 does not divide"), parallel.process_group():
        parallel.device_mesh(parallel.device_mesh(1).size() + 1)
    assert not dist.is_initialized()
