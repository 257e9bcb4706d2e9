"""Metrics files and videos."""

import json
import math

import imageio
import numpy as np
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from vla_algos.run.loggers import open_loggers
from vla_algos.run.logging import RunLogger
from vla_algos.run.videos import write_video


def test_metrics_go_to_both_files_and_survive_a_resume(tmp_path):
    logger = RunLogger(tmp_path, None, open_loggers({"tensorboard": {}}, tmp_path))
    logger.log({"env/success_once": 0.25, "train/critic/explained_variance": math.nan}, step=1)
    line = json.loads((tmp_path / "metrics.jsonl").read_text())  # on disk before close
    assert line == {"step": 1, "env/success_once": 0.25, "train/critic/explained_variance": None}
    logger.close()
    logger = RunLogger(tmp_path, 1, open_loggers({"tensorboard": {}}, tmp_path, 1))
    logger.log({"env/success_once": torch.tensor(0.5)}, step=2)
    logger.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["env/success_once"] for line in lines] == [0.25, 0.5]
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("env/success_once")
    assert [(event.step, event.value) for event in events] == [(1, 0.25), (2, 0.5)]


def test_video(tmp_path):
    frames = np.zeros((6, 33, 48, 3), np.uint8)  # an odd side, which H.264 does not take by itself
    frames[3:] = 255
    path = write_video(tmp_path / "videos" / "episode.mp4", frames, fps=8)
    read = imageio.mimread(path)
    assert len(read) == 6
    assert read[0].shape == (34, 48, 3)
    assert read[0].mean() < 20
    assert read[5].mean() > 235
