"""What a job is checked for before it is submitted, and what sbatch gets; no SLURM is needed.

``sbatch`` is a script that keeps what it was called with; what submitit writes for it is submitit's.
"""

import re

import forked
import pytest

from vla_algos.run.launcher_settings import check_job
from vla_common.program import WRONG_USE

SBATCH = """#!/bin/sh
echo "$@" >> "$SUBMITTED"
echo "Submitted batch job 7"
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Programs beside an sbatch that keeps what it is called with, and the file of that."""
    folder = tmp_path_factory.mktemp("cluster")
    for name, script in (("sbatch", SBATCH), ("srun", SBATCH), ("squeue", SBATCH)):
        (folder / name).write_text(script)
        (folder / name).chmod(0o755)
    return folder


@pytest.fixture
def submit(cluster, tmp_path):
    """Submits a recipe; returns what was printed, and the batch script, ``None`` if nothing was submitted."""
    folder = cluster

    def run(typed, launcher="launcher=slurm"):
        name, *settings = typed.split() if isinstance(typed, str) else typed
        submitted = tmp_path / "submitted"
        path = f"{folder}:/usr/bin:/bin"
        place = tmp_path / "run"
        done = forked.run(
            name,
            launcher,
            *settings,
            f"hydra.run.dir={place}",
            cwd=tmp_path,
            PATH=path,
            SUBMITTED=str(submitted),
            HF_HUB_OFFLINE="1",
        )
        scripts = list((place / "slurm").glob("*.sh"))
        assert submitted.exists() == bool(scripts)
        return done, scripts[0].read_text() if scripts else None

    return run


WRONG = [  # what is typed, and the words of the line
    ("ppo optim.lr=abc", r"optim\.lr=abc: must be a valid number"),
    (
        "ppo launcher.tasks_per_node=8 env.num_envs=63",
        r"env\.num_envs=63 cannot be shared by 8 processes; try env\.num_envs=64",
    ),
]


@pytest.mark.parametrize(("typed", "message"), WRONG, ids=lambda text: text if text[0] in "pegs" else "")
def test_wrong_settings_are_refused_before_a_job_is_submitted(typed, message, submit, tmp_path):
    done, script = submit(typed)
    assert script is None, done.stdout
    assert done.returncode == WRONG_USE
    assert done.stderr.startswith("error: "), done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert re.search(message, done.stderr), done.stderr
    left = {path.name for path in (tmp_path / "run").glob("*")}
    assert left <= {f"{typed.split()[0]}.log"}, "nothing but Hydra's log is written"


def test_what_is_right_is_submitted(submit):
    done, script = submit("ppo seed=1 launcher.cpus=12")
    assert script, done.stderr
    assert done.returncode == 0
    assert "job 7" in done.stdout
    assert re.search(r"^srun .*--cpus-per-task=12 ", script, re.MULTILINE), "srun of SLURM 22.05 does not inherit it"


def test_a_folder_of_another_run_is_refused(submit, tmp_path):
    """Of what is in it already only another run counts: submitting the same again resumes."""
    checkpoint = tmp_path / "run" / "checkpoints" / "step_00000001"
    for seed in ("", "launcher.seeds=[3]"):
        place = tmp_path / "run" / ("seed3" if seed else "")
        (place / checkpoint.relative_to(tmp_path / "run")).mkdir(parents=True)
        (place / "config.yaml").write_text("recipe: ppo\nseed: 3\niterations: 7\n")
        done, script = submit(f"ppo {seed}")
        assert script is None
        assert re.search(rf"error: {re.escape(str(place))} has a run of other settings", done.stderr), done.stderr
        (place / "config.yaml").unlink()


def test_sbatch_is_told_what_extra_says(submit):
    extra = "launcher.extra={reservation:x,exclude:'node[7-9]',mail-type:END,exclusive:true,gres:'gpu:a100:4'}"
    done, script = submit(["ppo", "launcher.partition=gpu", extra])
    assert script, done.stderr
    lines = {line for line in script.splitlines() if line.startswith("#SBATCH")}
    expected = ["--reservation=x", "--exclude='node[7-9]'", "--mail-type=END", "--exclusive", "--gres=gpu:a100:4"]
    expected += ["--partition=gpu", "--requeue", "--mem=16GB", "--cpus-per-task=4"]
    assert {f"#SBATCH {option}" for option in expected} <= lines


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"--exclude": "node7"}, "type its long name without --"),
        ({"exclude": "node7\n#SBATCH --uid=0"}, "must be a text or a number"),
        ({"exclusive": False}, "or left out"),
    ],
    ids=lambda each: next(iter(each)) if isinstance(each, dict) else "",
)
def test_extra_writes_no_other_lines_into_the_script(extra, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        check_job({"nodes": 1, "tasks_per_node": 1, "gpus": 2, "memory_gb": 16, "extra": extra}, {})
