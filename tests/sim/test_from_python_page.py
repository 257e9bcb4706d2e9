"""The scripts of docs/how-to/from-python.md run as they are written, on a tiny policy and a tiny data set."""

import re

import numpy as np
import pytest
import torch
from lerobot_writer import write_lerobot
from paths import ROOT

from vla_algos import EvaluationResult
from vla_envs import make_spec
from vla_policies import SmallVLA, load_policy

pytest.importorskip("metaworld", reason="Meta-World is not installed: pip install 'vla-torchrl[metaworld]'")
pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install 'vla-torchrl[lerobot]'")

PAGE = ROOT / "docs" / "how-to" / "from-python.md"
SCRIPTS = re.findall(r"^## (.*?)$.*?^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
SPEC = make_spec("metaworld/reach-v3+push-v3", image_size=64)
SMALL = {"chunk_size": 5, "num_bins": 8, "dim": 8, "heads": 2, "layers": 1, "channels": (4, 4, 4), "keypoints": 4}


def write_data_set(folder):
    """Four demonstrations of each task, of what comes to mind."""
    random = np.random.default_rng(0)
    episodes = []
    for number in range(8):
        states, actions = random.uniform(-1, 1, (2, 6, 4)).astype(np.float32)
        images = random.integers(0, 255, (6, 64, 64, 3), dtype=np.uint8)
        task = SPEC.tasks[number % 2].instruction
        episodes.append(
            {"task": task, "states": states, "actions": actions, "images": {"observation.images.top": images}}
        )
    write_lerobot(folder, episodes)


def test_the_scripts_run_as_they_are_written(tmp_path, monkeypatch, capsys):
    assert [title for title, _ in SCRIPTS] == [
        "Evaluate a checkpoint",
        "Compare two evaluations",
        "GRPO",
        "Clone a data set of LeRobot",
    ]
    assert PAGE.read_text().count("```python") == len(SCRIPTS)
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    SmallVLA.make(SPEC, **SMALL).save_pretrained("checkpoints/mine")
    write_data_set(tmp_path / "data" / "mine")
    said = []
    for title, script in SCRIPTS:
        exec(compile(script, f"from-python.md, {title}", "exec"), {"__name__": "__main__"})
        said.append(capsys.readouterr().out)
    evaluated, compared, trained, cloned = said
    for name in ("greedy", "sampled"):
        result = EvaluationResult.load(f"results/{name}")
        assert [episode.name for episode in result.episodes] == [
            f"{task} trial {trial} seed 9" for trial in (0, 1) for task in ("reach-v3", "push-v3")
        ]
        assert "not the benchmark's: " in result.table()
        assert result.table() in evaluated
    assert "sampled - greedy: " in compared
    assert "over 4 episodes" in compared
    assert re.findall(r"iteration (\d): success \d+%, KL \S+", trained) == ["0", "1"]
    before, after = (load_policy(f"checkpoints/{name}").state_dict() for name in ("mine", "mine-grpo"))
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert re.findall(r"step (\d): loss \d", cloned) == ["0", "1", "2", "3"]
    assert "8 episodes with 48 frames" in cloned
    assert load_policy("checkpoints/cloned").chunk_size == 5
