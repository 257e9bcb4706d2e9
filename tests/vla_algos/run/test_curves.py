"""The picture of a run's curves."""

import builtins
import json

import numpy as np
import pytest
from PIL import Image

from vla_algos.run import curves
from vla_algos.run.curves import _PANELS, _shown, draw, points, smooth

PPO = [
    {"step": 0, "eval/success_once": 0.25, "eval/num_episodes": 8.0, "eval/return": 0.5},
    *(
        {
            "step": step,
            "env/success_once": None if step == 2 else step / 100,
            "env/return": step / 50,
            "train/loss": 1 / step,
            "train/actor/kl_k3": 1e-3,
            "train/actor/lr": 1e-4,
            "train/critic/lr": 1e-3 / step,
            "train/critic/explained_variance": -50.0 if step == 1 else 0.5,
            "time/iteration": 2.0,
        }
        for step in range(1, 80)
    ),
]
SFT = [{"step": step, "train/loss": 1 / step, **({"heldout/loss": 2.0} if step == 3 else {})} for step in (1, 2, 3)]


def write(folder, lines):
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def titles(lines):
    return [panel.title.partition(",")[0] for panel in _PANELS if _shown(panel, lines)]


def test_each_run_has_the_panels_of_what_it_logs():
    assert titles(PPO) == [
        "success",
        "return of an episode",
        "loss",
        "KL of the update from the policy that acted",
        "explained variance of the critic (1: perfect)",
        "learning rate",
        "seconds of an iteration",
    ]
    assert titles(SFT) == ["loss"]
    constant = [{key: value for key, value in line.items() if key != "train/critic/lr"} for line in PPO]
    assert "learning rate" not in titles(constant), "there is nothing to see of it"


@pytest.mark.parametrize("lines", [PPO, SFT, PPO[:1], PPO[:2]])
def test_the_picture_is_small_and_not_empty(lines, tmp_path):
    picture = draw(write(tmp_path, lines), "ppo in toy/world", "iteration")
    assert picture == tmp_path / "curves.png"
    assert picture.stat().st_size < 100_000
    pixels = np.asarray(Image.open(picture).convert("RGB"))
    assert (pixels.reshape(-1, 3) == (31, 119, 180)).all(-1).any() or lines is not SFT, "training is blue"
    assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 10


def test_without_numbers_there_is_no_picture(tmp_path):
    assert draw(tmp_path, "", "iteration") is None
    assert draw(write(tmp_path, [{"step": 1, "frames": 3}]), "", "iteration") is None
    assert not (tmp_path / "curves.png").exists()


def test_points_leave_out_what_is_not_there():
    assert points(PPO, "env/success_once")[0][:3] == [1, 3, 4]
    assert points(PPO, "env/success_once", along="time/iteration")[0][:2] == [2.0, 2.0]
    assert smooth([0.0, 3.0, 6.0], 3) == [1.5, 3.0, 4.5]


def test_importing_it_does_not_import_matplotlib(tmp_path, monkeypatch):
    original = builtins.__import__

    def without(name, *arguments, **options):
        if name.startswith("matplotlib"):
            raise ModuleNotFoundError("No module named 'matplotlib'")
        return original(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ModuleNotFoundError):
        curves.draw(write(tmp_path, SFT), "", "step")
