"""The scripts of docs/how-to/success-is-zero.md run as they are written, in the environment of the training."""

import re
from pathlib import Path

import imageio.v3 as iio
import pytest
import torch
from paths import ROOT

from vla_algos.run.training_env import save_training_env
from vla_envs import make_spec
from vla_policies import SmallVLA

pytest.importorskip("metaworld", reason="Meta-World is not installed: pip install 'vla-torchrl[metaworld]'")

PAGE = (ROOT / "docs" / "how-to" / "success-is-zero.md").read_text()
SCRIPTS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
TRAINED = {
    "id": "metaworld/button-press-topdown-v3",
    "image_size": 48,
    "render_quality": "minimal",
    "camera": {"lookat": [0.0, 0.68, 0.12], "distance": 0.95, "azimuth": 270, "elevation": -50},
}
SMALL = {"chunk_size": 3, "num_bins": 8, "dim": 8, "heads": 2, "layers": 1, "channels": (4, 4, 4), "keypoints": 4}


def test_the_actions_are_looked_at_in_the_environment_of_the_training(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    folder, options = Path("runs/ppo/latest/policy"), {key: value for key, value in TRAINED.items() if key != "id"}
    spec = make_spec(TRAINED["id"], **options)
    torch.manual_seed(0)
    SmallVLA.make(spec, **SMALL).save_pretrained(folder)
    save_training_env(folder, "ppo", TRAINED | {"num_envs": 16}, spec, chunk_size=3, evaluation={})
    names = {}
    for script in SCRIPTS:
        exec(compile(script, "success-is-zero.md", "exec"), names)
    made = names["env"].simulator_spec
    assert made.protocol_deviations == spec.protocol_deviations
    assert any("camera" in text for text in made.protocol_deviations)
    assert names["rollout"]["images"].shape[:3] == (1, 20, 48)
    assert iio.imread("first.png").shape == (48, 48, 3)
    assert "at a bound" in capsys.readouterr().out
