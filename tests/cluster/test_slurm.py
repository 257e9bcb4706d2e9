"""The recipes on a real SLURM: two nodes on this machine, which end with the tests (slurm_cluster.sh)."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from running import RECIPES, TOY, TOY_OF, metrics

CLUSTER = Path(__file__).parent / "slurm_cluster.sh"
pytest.importorskip("metaworld", reason="Meta-World is not installed: make setup")
pytestmark = pytest.mark.timeout(900)
SETTINGS = [*TOY, *TOY_OF["ppo"], "demonstrations.episodes=2", "cloning.steps=3", "policy.chunk_size=3"]
SLURM = ["launcher=slurm", "launcher.cpus=1", "launcher.memory_gb=2", "launcher.minutes=10"]


@pytest.fixture(scope="module", autouse=True)
def cluster(tmp_path_factory):
    if os.geteuid() != 0:
        pytest.skip("a SLURM of its own needs root; nothing else does")
    missing = [
        name for name in ("slurmctld", "munged") if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None
    ]
    if missing:
        pytest.skip(f"{' and '.join(missing)} not installed: make test-cluster (as root) does it")
    folder = tmp_path_factory.mktemp("slurm") / "cluster"
    # It ends when its input does: at the end, and also when this process is ended.
    with (
        pytest.MonkeyPatch.context() as patch,
        subprocess.Popen(
            [CLUSTER, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as started,
    ):
        patch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
        said = started.stdout.readline()
        assert said.startswith("ready"), said + started.stdout.read()
        yield


def submit(folder, *overrides, check=True, recipe="ppo"):
    """Submit a toy PPO; returns the numbers of its jobs, and what was printed."""
    command = [sys.executable, RECIPES / f"{recipe}.py", *SETTINGS, *SLURM, *overrides, f"hydra.run.dir={folder}"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert not check or done.returncode == 0, done.stderr
    return re.findall(r"^job (\S+)", done.stdout, re.MULTILINE), done


def wait_for(condition, seconds, what):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.5)
    return found


def show(job):
    return subprocess.run(["scontrol", "show", "job", job], capture_output=True, text=True).stdout


def state(job):
    shown = show(job)
    return re.search(r"JobState=(\w+)", shown)[1], int(re.search(r"Restarts=(\d+)", shown)[1])


def finished(job, folder, seconds=240):
    def ended():
        name, restarts = state(job)
        assert name not in ("FAILED", "CANCELLED", "NODE_FAIL"), log(folder)
        return (name, restarts) if name == "COMPLETED" else None

    return wait_for(ended, seconds, f"job {job} to finish: {log(folder)}")


def log(folder):
    return "".join(path.read_text()[-2000:] for path in sorted((folder / "slurm").glob("*.err")))


def iterations(folder):
    path = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return sum("env/success_once" in line for line in lines)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The metrics of uninterrupted runs, by number of iterations, with one core as the jobs have."""

    def run(count):
        folder = tmp_path_factory.mktemp("whole") / "run"
        command = [sys.executable, RECIPES / "ppo.py", *SETTINGS, f"iterations={count}", f"hydra.run.dir={folder}"]
        variables = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=variables)
        assert done.returncode == 0, done.stderr
        return metrics(folder)

    return run


def test_submit_and_finish(tmp_path):
    folder = tmp_path / "run"
    (job,), done = submit(folder, "launcher.wait=true")
    for line in (f"scancel {job}", f"tail -F {folder}/slurm/{job}_0_log.out", "after PPO"):
        assert line in done.stdout
    assert finished(job, folder)[1] == 0
    assert (folder / "policy" / "model.safetensors").is_file()
    assert (folder / "config.yaml").read_text().count("name: slurm") == 1
    record = json.loads((folder / "run.json").read_text())
    assert record["submitted"]["code"] == record["processes"][0]["code"]
    assert record["processes"][0]["slurm_job"] == job


def test_slurm_knows_what_extra_says(tmp_path):
    (job,), _ = submit(tmp_path / "run", "launcher.extra={comment:hello,nice:17}")
    shown = show(job)
    assert "Comment=hello" in shown
    assert "Nice=17" in shown
    finished(job, tmp_path / "run")


def test_what_would_fail_is_not_submitted(tmp_path):
    jobs, done = submit(tmp_path / "run", "policy.checkpoint=/nope", check=False)
    assert not jobs
    assert done.returncode == 2
    assert done.stderr.startswith("error: no folder /nope")
    assert not (tmp_path / "run").exists()


def test_an_array_of_seeds(tmp_path):
    jobs, _ = submit(tmp_path / "run", "launcher.seeds=[3,4]")
    assert len(jobs) == 2
    assert {job.partition("_")[0] for job in jobs} == {jobs[0].partition("_")[0]}
    for job, seed in zip(jobs, (3, 4), strict=True):
        finished(job, tmp_path / "run")
        assert f"seed: {seed}\n" in (tmp_path / "run" / f"seed{seed}" / "config.yaml").read_text()
    assert metrics(tmp_path / "run" / "seed3") != metrics(tmp_path / "run" / "seed4")


def test_a_sweep_submits_a_job_for_each_combination(tmp_path):
    command = [sys.executable, RECIPES / "ppo.py", "-m", *SETTINGS, *SLURM, "seed=3,4", f"hydra.sweep.dir={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True)
    jobs = re.findall(r"^job (\S+)", done.stdout, re.MULTILINE)
    assert len(jobs) == 2, done.stderr
    for job, number, seed in zip(jobs, (0, 1), (3, 4), strict=True):
        finished(job, tmp_path / str(number))
        assert f"seed: {seed}\n" in (tmp_path / str(number) / "config.yaml").read_text()


def test_preempted_by_a_higher_partition(tmp_path, whole):
    folder = tmp_path / "run"
    (job,), _ = submit(folder, "iterations=40")
    wait_for(lambda: iterations(folder) >= 3, 120, "the run to begin")
    urgent = subprocess.run(
        ["sbatch", "--parsable", "-p", "high", "-N", "2", "-c", "4", "--wrap", "sleep 8", "-o", "/dev/null"],
        capture_output=True,
        text=True,
    ).stdout.strip()
    wait_for(lambda: state(job)[1] == 1, 120, "the run to be requeued")
    assert 0 < iterations(folder) < 40
    assert finished(job, folder)[1] == 1
    assert state(urgent)[0] == "COMPLETED"
    assert metrics(folder) == whole(40)


def test_the_time_limit_hit_twice(tmp_path, whole):
    """A limit of a minute and 20 seconds to save in; SLURM looks every 30, so a run is warned after 10 to 40."""
    folder = tmp_path / "run"
    count = 450
    (job,), _ = submit(folder, f"iterations={count}", "launcher.minutes=1", "launcher.signal_delay_s=20")
    expected = whole(count)  # meanwhile
    _, restarts = finished(job, folder, 600)
    assert restarts >= 2
    assert metrics(folder) == expected


def test_processes_on_one_node_and_on_two(tmp_path):
    """Two processes compute the same on one node and on two, and stop together when they are warned."""
    settings = ["env.num_envs=4", "iterations=3"]
    found = []
    for name, nodes, tasks in (("one", 1, 2), ("two", 2, 1)):
        folder = tmp_path / name
        (job,), _ = submit(folder, *settings, f"launcher.nodes={nodes}", f"launcher.tasks_per_node={tasks}")
        finished(job, folder)
        assert "NumNodes=2" in show(job) if nodes == 2 else "NumNodes=1" in show(job)
        found.append(metrics(folder))
    assert found[0] == found[1]

    folder = tmp_path / "stopped"
    (job,), _ = submit(folder, "env.num_envs=4", "iterations=60", "launcher.nodes=2")
    wait_for(lambda: iterations(folder) >= 3, 120, "the run to begin")
    subprocess.run(["scancel", "--signal=USR2", job], check=True)
    wait_for(lambda: state(job)[1] == 1, 60, "the job to be requeued")
    done = iterations(folder)
    assert 3 <= done < 60
    wait_for(lambda: iterations(folder) > done, 120, "the run to continue")
    subprocess.run(["scancel", job], check=True)


def test_a_process_that_fails_ends_the_job(tmp_path):
    folder = tmp_path / "run"
    (job,), _ = submit(folder, "env.num_envs=4", "iterations=500", "launcher.nodes=2")
    wait_for(lambda: iterations(folder) >= 2, 120, "the run to begin")
    os.kill(process_of(job, rank=1), signal.SIGKILL)
    wait_for(lambda: state(job)[0] == "FAILED", 60, "the job to end")


def said(folder):
    return "".join(path.read_text() for path in (folder / "slurm").glob("*.out"))


@pytest.mark.parametrize("by", [["scancel"], ["scancel", "--signal=TERM"]], ids=["cancelled", "told to stop"])
def test_a_job_that_is_to_stop_is_not_requeued(by, tmp_path):
    folder = tmp_path / "run"
    (job,), _ = submit(folder, "env.num_envs=4", "iterations=500", "launcher.nodes=2")
    wait_for(lambda: iterations(folder) >= 2, 120, "the run to begin")
    subprocess.run([*by, job], check=True)
    wait_for(lambda: state(job)[0] in ("CANCELLED", "FAILED"), 60, "the job to end")
    time.sleep(3)
    assert state(job) == ("CANCELLED" if len(by) == 1 else "FAILED", 0)
    assert "stopped by SIGTERM" in said(folder)
    assert "requeued" not in said(folder)


def process_of(job, rank):
    """The process of this machine that SLURM started as a rank of a job."""
    found = processes_of(job, rank)
    assert found, f"no process of job {job}"
    return found[0]


def processes_of(job, rank):
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            variables = (folder / "environ").read_bytes().split(b"\0")
            command = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        wanted = {f"SLURM_JOB_ID={job}".encode(), f"SLURM_PROCID={rank}".encode(), b"SLURM_STEP_NUM_TASKS=2"}
        if wanted <= set(variables) and b"submitit.core._submit" in command:
            found.append(int(folder.name))
    return found


def test_cancelling_leaves_a_checkpoint(tmp_path):
    folder = tmp_path / "run"
    (job,), _ = submit(folder, "iterations=100")
    wait_for(lambda: iterations(folder) >= 2, 120, "the run to begin")
    subprocess.run(["scancel", job], check=True)
    wait_for(lambda: state(job)[0] == "CANCELLED", 60, "the job to end")
    done = iterations(folder)
    assert (folder / "checkpoints" / "latest" / "training.json").is_file()
    (again,), _ = submit(folder, "iterations=100", "resume=auto")
    wait_for(lambda: iterations(folder) > done, 120, "the run to continue")
    subprocess.run(["scancel", again], check=True)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            "launcher.partition=gpus",
            "SLURM refuses the job: .*Invalid partition.*sinfo lists partitions.*set launcher.partition",
        ),
        ("launcher.gpus=9", "SLURM refuses the job: .*configuration is not available.*sinfo lists.*launcher.gpus"),
        ("+launcher.partitio=main", "unknown setting 'launcher.partitio'; did you mean launcher.partition"),
    ],
)
def test_wrong_settings(setting, message, tmp_path):
    _, done = submit(tmp_path / "run", setting, check=False)
    assert done.returncode, done.stderr
    assert re.search(message, done.stderr, re.DOTALL), done.stderr


def test_no_slurm_on_the_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    _, done = submit(tmp_path / "run", check=False)
    assert done.returncode
    assert "no SLURM on this machine" in done.stderr
    assert "launcher=local" in done.stderr


def test_roles_on_two_nodes(tmp_path):
    """Who learns is on the second node, and others of the job have no part: the numbers are those of one process."""
    settings = ["iterations=3", "sync.lag=1"]
    command = [sys.executable, RECIPES / "ppo_async.py", *SETTINGS, *settings, f"hydra.run.dir={tmp_path / 'one'}"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    for tasks, actor, rollout in ((1, 1, 0), (2, 3, 1)):
        folder = tmp_path / f"tasks{tasks}"
        roles = [f"placement.actor={actor}", f"placement.rollout={rollout}"]
        (job,), _ = submit(
            folder, *settings, *roles, "launcher.nodes=2", f"launcher.tasks_per_node={tasks}", recipe="ppo_async"
        )
        finished(job, folder)
        assert without_transfers(metrics(folder)) == metrics(tmp_path / "one")


def without_transfers(log):
    return {
        key: [{name: value for name, value in line.items() if not name.startswith("sync/")} for line in lines]
        for key, lines in log.items()
    }
