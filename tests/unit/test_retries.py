"""Batch scripts whose jobs go back into the queue: bash runs them as SLURM does, with a scontrol that is none."""

import os
import subprocess

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from paths import CONF

from vla_algos.run import retries
from vla_algos.run.launcher_settings import check_job, launcher_types
from vla_common.settings import check_settings

SCONTROL = """#!/bin/sh
case $1 in
    show) echo "JobId=7 JobState=${STATE:-RUNNING} Reason=None" ;;
    requeue) [ -z "$REFUSED" ] || { echo "slurm_requeue error: $REFUSED" >&2; exit 1; }; echo "$2" >> "$REQUEUED" ;;
esac
"""
SAVES = "mkdir -p checkpoints/step_0000000$SLURM_RESTART_COUNT; "


@pytest.fixture
def job(tmp_path, monkeypatch):
    """Runs a job: its command in the folder of the run, again while it is requeued; what was said, and how often."""
    folder = tmp_path / "it's a run"
    folder.mkdir()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "scontrol").write_text(SCONTROL)
    (tmp_path / "bin" / "scontrol").chmod(0o755)
    requeued = tmp_path / "requeued"
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("REQUEUED", str(requeued))

    def run(command, limit=2, setup=(), **variables):
        folders = [tmp_path / "another", folder] if "SLURM_ARRAY_JOB_ID" in variables else [folder]
        lines = [*setup, *retries.batch_lines(limit, folders)]
        script, said = "\n".join([*lines, f"bash -c {command!r}"]), ""
        for attempt in range(1, 9):
            before = requeued.read_text() if requeued.exists() else ""
            environment = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": str(attempt), **variables}
            done = subprocess.run(
                ["bash", "-c", script], env=os.environ | environment, cwd=folder, capture_output=True, text=True
            )
            assert not done.stderr
            said += done.stdout
            if not requeued.exists() or requeued.read_text() == before:
                return said, requeued.read_text().split() if requeued.exists() else [], done.returncode
        raise AssertionError("it is requeued without end")

    return run


NOTHING_NEW = "is not started again: it has saved nothing new since it began\n"


def test_a_job_that_fails_again_and_again(job):
    said, requeued, status = job(SAVES + "exit 137")
    assert said.splitlines() == [
        "job 7 has failed with status 137; it is requeued and resumes, retry 1 of 2",
        "job 7 has failed with status 137; it is requeued and resumes, retry 2 of 2",
        "job 7 has failed with status 137 and is not started again: launcher.retries=2 are used up",
    ]
    assert (requeued, status) == (["7", "7"], 137)
    again, requeued, _ = job(SAVES.replace("step_", "step_1") + "exit 1", SLURM_JOB_ID="8")  # another one counts anew
    assert again.count("is requeued") == 2
    assert requeued == ["7", "7", "8", "8"]


def test_a_job_that_gets_no_further(job):
    assert job("mkdir -p checkpoints/.unfinished_step_00000001; exit 2")[:2] == (
        f"job 7 has failed with status 2 and {NOTHING_NEW}",
        [],
    )
    said, requeued, _ = job("mkdir -p checkpoints/step_00000005; exit 1")
    assert said.endswith(f"retry 1 of 2\njob 7 has failed with status 1 and {NOTHING_NEW}")
    assert requeued == ["7"]


def test_an_evaluation_gets_further_by_its_episodes(job):
    said, requeued, _ = job(
        '[ "$(cat *_rank1.jsonl 2>/dev/null | wc -l)" = 2 ] || echo {} >> episodes_rank1.jsonl; exit 1'
    )
    assert len(requeued) == 2
    assert said.endswith(f"job 7 has failed with status 1 and {NOTHING_NEW}")


@pytest.mark.parametrize(
    ("command", "variables", "said"),
    [
        (SAVES + "exit 0", {}, ""),
        (SAVES + "exit 143", {"STATE": "CANCELLED"}, ""),
        (SAVES + "exit 140", {"STATE": "PENDING"}, ""),  # has requeued itself
        (SAVES + "touch .stopped; exit 143", {}, "job 7 was stopped by a signal and is not started again\n"),
        (
            SAVES + "exit 1",
            {"REFUSED": "Job is not requeuable"},
            "job 7 has failed with status 1 and could not be requeued (slurm_requeue error: Job is not requeuable); "
            "submit it again, it resumes where it stopped\n",
        ),
    ],
)
def test_what_is_not_requeued(command, variables, said, job):
    found, requeued, status = job(command, **variables)
    assert (found, requeued) == (said, [])
    assert status == int(command.rpartition(" ")[2])


def test_a_signal_of_before_does_not_count(job):
    assert len(job("touch .stopped; exit 143")[1]) == 0
    assert len(job(SAVES + "exit 143", limit=1)[1]) == 1


def test_a_task_of_an_array_has_a_folder_of_its_own(job):
    of_array = {"SLURM_ARRAY_JOB_ID": "6", "SLURM_ARRAY_TASK_ID": "1"}
    said, requeued, _ = job(SAVES + "exit 1", limit=1, **of_array)
    assert requeued == ["6_1"]
    assert said.startswith("job 6_1 has failed with status 1; it is requeued")


def test_a_shell_that_ends_at_the_first_failure(job):
    assert len(job(SAVES + "exit 1", setup=["set -eu"])[1]) == 2


def test_a_folder_that_cannot_be_written(job, tmp_path):
    (tmp_path / "it's a run" / ".unfinished_retries.json").mkdir()
    said, requeued, status = job(SAVES + "exit 1")
    first, second = said.splitlines()
    assert first.startswith("whether to start job 7 again after a failure cannot be noted in ")
    assert second == "job 7 has failed with status 1 and is not started again: nothing says how far it was before"
    assert (requeued, status) == ([], 1)


def test_settings_that_do_not_go_together():
    settings = {"retries": 1, "setup": ["module load cuda", "trap 'rm -r $TMPDIR' EXIT"]}
    with pytest.raises(ValueError, match=r"launcher\.setup: \"trap .* leave out the trap, or type launcher\.retries=0"):
        check_job(settings, {})
    check_job({**settings, "retries": 0}, {})
    check_job({**settings, "setup": ["module load strap EXIT"]}, {})


@pytest.mark.parametrize("file", sorted(path.stem for path in (CONF / "launcher").glob("slurm*.yaml")))
def test_launch_files_are_whole_and_give_each_gpu_a_process(file):
    with initialize_config_dir(str(CONF), version_base=None):
        config = compose("ppo", overrides=[f"launcher={file}", "env.num_envs=64"])
    settings = OmegaConf.to_container(config.launcher)
    types = launcher_types(settings.pop("name"))
    assert settings.keys() == types.keys()
    check_settings("launcher", settings, types)
    check_job(settings, {"env.num_envs": 64})
    assert settings["gpus"] in (0, settings["tasks_per_node"])
    if file != "slurm":
        assert f"slurm_{settings['gpus']}gpus" == file
