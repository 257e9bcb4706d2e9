"""The tiny pi0 and pi0.5 checkpoints of the golden data as folders in openpi's layout."""

import json
import shutil

import numpy as np
import torch
from paths import GOLDEN

TOKENIZER = GOLDEN / "tokenizer_paligemma_like" / "tiny.model"


def golden(name):
    """Arrays of ``golden_io.npz`` as tensors."""
    with np.load(GOLDEN / name / "golden_io.npz") as stored:
        return {key: torch.from_numpy(stored[key]) for key in stored.files}


def statistics(size):
    """``norm_stats`` of ``size`` numbers."""
    entry = {"mean": [0.1] * size, "std": [0.5] * size, "q01": [-0.9] * size, "q99": [1.1] * size}
    return {"state": entry, "actions": entry}


def make_checkpoint(folder, name="pi0_tiny", size=8, horizon=6):
    """Copy a tiny checkpoint into ``folder``, with statistics and tokenizer."""
    (folder / "assets" / "tiny").mkdir(parents=True, exist_ok=True)
    shutil.copy(GOLDEN / name / "model.safetensors", folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"action_horizon": horizon, "vision_heads": 4}))
    (folder / "assets" / "tiny" / "norm_stats.json").write_text(json.dumps({"norm_stats": statistics(size)}))
    shutil.copy(TOKENIZER, folder / "paligemma_tokenizer.model")
    return folder
