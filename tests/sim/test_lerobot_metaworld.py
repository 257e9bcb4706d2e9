"""A data set of Meta-World's scripted experts in LeRobot's layout: it solves the task; recipes and LeRobot read it."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from hydra.core.global_hydra import GlobalHydra
from lerobot_writer import write_lerobot
from running import TOY, composed, main_of, metrics

from vla_algos.lerobot.dataset import LeRobotFolder
from vla_algos.lerobot.demonstrations import LeRobotDemonstrations
from vla_algos.lerobot.frames import FrameReader
from vla_common import keys
from vla_envs import Episode, make_spec
from vla_envs.experts import demonstrate
from vla_policies import load_policy

pytest.importorskip("metaworld", reason="Meta-World is not installed: pip install 'vla-torchrl[metaworld]'")
pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install 'vla-torchrl[lerobot]'")
pytest.importorskip("av", reason="av is not installed: pip install 'vla-torchrl[lerobot]'")

CAMERA = "observation.images.corner"
SPEC = make_spec("metaworld/button-press-topdown-v3", image_size=32, render_quality="minimal")
EPISODES = [Episode(0, trial, 7) for trial in range(3)]
# Another Python, in which LeRobot is installed: it asks for another torch than this library.
LEROBOT = os.environ.get("VLA_TORCHRL_LEROBOT_PYTHON") or (importlib.util.find_spec("lerobot") and sys.executable)


@pytest.fixture(scope="module")
def solved():
    """What the expert did: every frame and every action."""
    simulator, found = SPEC.make(), []
    for episode in EPISODES:
        done = demonstrate(simulator, episode, chunk_size=1, stride=1, noise=0.0, max_steps=120)
        images = {CAMERA: done[keys.IMAGES]}
        found.append(
            {
                "task": done[keys.TASK_DESCRIPTIONS],
                "states": done[keys.STATES],
                "actions": done[keys.ACTION][:, 0],
                "images": images,
            }
        )
    simulator.close()
    return found


@pytest.fixture(scope="module", params=[("v2.1", False), ("v3.0", True)], ids=["v2.1_images", "v3.0_video"])
def written(request, solved, tmp_path_factory):
    version, video = request.param
    return write_lerobot(tmp_path_factory.mktemp("set") / "button", solved, version=version, video=video)


def test_the_actions_of_the_data_set_solve_the_task(written):
    """In the simulator's units and sign, one by one, of the frame that they stand beside."""
    table = LeRobotFolder.read(written).table
    simulator = SPEC.make()
    for number, episode in enumerate(EPISODES):
        simulator.reset(episode)
        rows = np.flatnonzero(table.episode == number)
        assert np.allclose(table.states[rows[0]], simulator.observe().states, atol=1e-6)
        outcomes = [simulator.step(action) for action in table.actions[rows]]
        assert [outcome.success for outcome in outcomes] == [False] * (len(rows) - 1) + [True]
    simulator.close()


def test_frames_are_what_the_simulator_showed(written, solved):
    found = LeRobotDemonstrations.open(written, SPEC)
    images = np.concatenate([episode["images"][CAMERA] for episode in solved]).astype(int)
    frames = np.array([0, 5, len(images) // 2, len(images) - 1])
    read = FrameReader(found.folder).read(found.camera, frames)
    wrong = np.abs(read - images[frames]).mean((1, 2, 3))
    assert (wrong < (8 if found.camera.video else 1e-9)).all()  # the colours of a video are coarser than its pixels
    others = np.abs(read[2] - images).mean((1, 2, 3))
    assert abs(int(others.argmin()) - frames[2]) <= 1  # the frame itself; neighbours may look alike


SFT = [*TOY[:4], "env.render_quality=minimal", "cloning.steps=6", "cloning.batch_size=8", "heldout_every=3"]
SFT += ["eval.trials=1", "eval.videos=0", "demonstrations.heldout=0.34", "demonstrations.stride=2", "policy.dim=16"]


def test_sft_learns_from_it(written, tmp_path, capsys):
    run = tmp_path / "run"
    main_of("sft")(composed("sft", [*SFT, f"demonstrations.folder={written}"], run))
    GlobalHydra.instance().clear()
    said = capsys.readouterr().out
    assert re.search(
        r"button: a data set of LeRobot v\d\.\d, 3 episodes with \d+ frames, 80 a second; images are", said
    )
    assert "expert" not in said.partition("evaluation")[0]  # nothing was recorded
    logged = [line for lines in metrics(run).values() for line in lines]
    assert sum("heldout/loss" in line for line in logged) == 2
    kept = json.loads((run / "run.json").read_text())["demonstrations"]
    assert (kept["images"], kept["episodes"], kept["remarks"]) == (CAMERA, 3, [])
    policy = load_policy(run / "policy")
    learnt, _ = LeRobotDemonstrations.open(written, SPEC, stride=2).for_policy(policy).split(0.34)
    assert torch.allclose(policy.encoder.state_mean.cpu(), learnt[keys.STATES].mean(0), atol=1e-5)


LOAD = """
import json, sys
import numpy as np
from lerobot.datasets.lerobot_dataset import LeRobotDataset

data = LeRobotDataset("local/button", root=sys.argv[1], video_backend="pyav")
rows = [data[index] for index in range(len(data))]
np.savez(
    sys.argv[2],
    states=np.stack([row["observation.state"] for row in rows]),
    actions=np.stack([row["action"] for row in rows]),
    episode=np.array([int(row["episode_index"]) for row in rows]),
    images=np.stack([row[sys.argv[3]] for row in rows]),
    tasks=np.array([row["task"] for row in rows]),
)
"""


WRITE = """
import sys
import numpy as np
from lerobot.datasets.lerobot_dataset import LeRobotDataset

given, folder, camera, video = np.load(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4] == "video"
features = {
    "observation.state": {"dtype": "float32", "shape": (4,), "names": None},
    "action": {"dtype": "float32", "shape": (4,), "names": None},
    camera: {"dtype": "video" if video else "image", "shape": given["images"].shape[1:], "names": ["height", "width", "channels"]},
}
data = LeRobotDataset.create("local/button", 80, features, root=folder, use_videos=video)
for number in range(given["episode"].max() + 1):
    for row in np.flatnonzero(given["episode"] == number):
        frame = {"observation.state": given["states"][row], "action": given["actions"][row], camera: given["images"][row]}
        data.add_frame({**frame, "task": str(given["task"])})
    data.save_episode()
data.finalize()
"""  # noqa: E501

by_lerobot = pytest.mark.skipif(
    not LEROBOT,
    reason="LeRobot is not installed (it asks for another torch): VLA_TORCHRL_LEROBOT_PYTHON=/path/to/a/python/with/it",
)


def run_lerobot(code, *arguments):
    """Run a program in LeRobot's Python, which reaches no hub."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [LEROBOT, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env={**environment, "HF_HUB_OFFLINE": "1"})
    assert done.returncode == 0, done.stderr[-2000:]


@by_lerobot
@pytest.mark.timeout(1800)  # importing LeRobot takes its time
@pytest.mark.parametrize("video", [False, True], ids=["images", "video"])
def test_lerobots_own_loader_reads_the_same(solved, tmp_path, video):
    """v3, which LeRobot 0.4 reads."""
    folder = write_lerobot(tmp_path / "button", solved, video=video)
    run_lerobot(LOAD, folder, tmp_path / "read.npz", CAMERA)
    theirs = np.load(tmp_path / "read.npz")
    ours = LeRobotFolder.read(folder)
    assert np.array_equal(theirs["states"], ours.table.states)
    assert np.array_equal(theirs["actions"], ours.table.actions)
    assert theirs["episode"].tolist() == ours.table.episode.tolist()
    assert set(theirs["tasks"]) == set(ours.tasks.values())
    images = FrameReader(ours).read(ours.cameras[CAMERA], np.arange(ours.frames))
    pixels = np.rint(theirs["images"].transpose(0, 2, 3, 1) * 255)
    assert np.array_equal(pixels, images)


@by_lerobot
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["image", "video"])
def test_what_lerobot_writes_is_read(solved, tmp_path, kind):
    """v3 as a recording of LeRobot 0.4 is; its videos are AV1."""
    joined = {name: np.concatenate([episode[name] for episode in solved]) for name in ("states", "actions")}
    images = (
        np.concatenate([episode["images"][CAMERA] for episode in solved]).repeat(4, 1).repeat(4, 2)
    )  # AV1: 64 pixels
    episode = np.repeat(np.arange(len(solved)), [len(each["states"]) for each in solved])
    np.savez(tmp_path / "given.npz", **joined, images=images, episode=episode, task=solved[0]["task"])
    run_lerobot(WRITE, tmp_path / "given.npz", tmp_path / "button", CAMERA, kind)
    found = LeRobotDemonstrations.open(tmp_path / "button", replace(SPEC, image_shape=(128, 128)))
    table = found.folder.table
    assert found.folder.version == (3, 0)
    assert np.array_equal(table.states, joined["states"])
    assert np.array_equal(table.actions, joined["actions"])
    assert np.array_equal(table.episode, episode)
    rows = np.arange(0, len(episode), 7)
    wrong = np.abs(FrameReader(found.folder).read(found.camera, rows).astype(int) - images[rows]).mean((1, 2, 3))
    assert (wrong < (6 if kind == "video" else 1e-9)).all(), wrong
