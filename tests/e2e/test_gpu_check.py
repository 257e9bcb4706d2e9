"""``make gpu-check`` on the CPU: its parts run, and what is wrong, late or missing is said and fails."""

import json
import subprocess
import sys

import pytest
from paths import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import gpu_check


def check(*arguments):
    command = [sys.executable, ROOT / "benchmarks" / "gpu_check.py", *arguments]
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=400)


@pytest.mark.timeout(450)
def test_every_part_runs(tmp_path):
    done = check("--tiny", "--output", tmp_path / "gpu.json", "--parts", "machine,golden,sharding,card,maniskill,nccl")
    assert done.returncode == 0, done.stdout + done.stderr
    parts = json.loads((tmp_path / "gpu.json").read_text())
    assert all(part["rows"] and "failed" not in part for part in parts.values())
    assert parts["maniskill"]["rows"] == [["skipped", "needs CUDA, mani_skill and its assets", None]]
    families = {what.partition(",")[0] for what, _, _ in parts["golden"]["rows"]} - {"images"}
    assert families == set(gpu_check.FAMILIES)
    assert done.stdout.endswith("all right\n")


def test_a_part_that_takes_too_long_is_ended_and_said():
    done = check("--tiny", "--parts", "nccl", "--limit", "0.5")
    assert done.returncode == 1
    assert "FAILED  no end within 0.5 s" in done.stdout


def test_what_is_above_its_limit_is_wrong(capsys):
    good = {"rows": [["apart", 0.1, 0.1], ["speed", 5.0, None], ["GPU", "H200", None]], "seconds": 1}
    assert gpu_check.show("part", good)
    for value in (0.2, float("nan")):
        assert not gpu_check.show("part", {**good, "rows": [*good["rows"], ["far", value, 0.1]]})
    assert capsys.readouterr().out.count("WRONG") == 2
    assert not gpu_check.show("part", {**good, "failed": ["1", "Error"]})


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--parts", "golden,speed"], "there is no speed; there are machine, golden"),
        ([], "torch sees no GPU here: type --tiny"),
    ],
)
def test_wrong_use_is_one_line(arguments, said):
    done = check(*arguments)
    assert done.returncode == 2
    assert said in done.stderr
