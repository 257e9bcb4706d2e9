"""The tiny pi0 and pi0.5 checkpoints of the golden data as folders in openpi's layout."""

import json
import shutil

import numpy as np
import torch
from paths import GOLDEN
from safetensors.torch import load_file, save_file

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


def make_bimanual(folder, name="pi0_tiny", statistics=None, horizon=50):
    """A tiny checkpoint with room for 32 numbers, as the published ones have, and statistics of 14."""
    make_checkpoint(folder, name, size=14, horizon=horizon)
    if statistics is not None:
        (folder / "assets" / "tiny" / "norm_stats.json").write_text(json.dumps({"norm_stats": statistics}))
    weights, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(6)
    for key, dim in (("action_in_proj.weight", 1), ("state_proj.weight", 1), ("action_out_proj.weight", 0)):
        if key in weights:
            shape = list(weights[key].shape)
            shape[dim] = 32
            weights[key] = 0.2 * torch.randn(shape, generator=generator)
    weights["action_out_proj.bias"] = torch.zeros(32)
    save_file(weights, folder / "model.safetensors")
    return folder


def add_rlinf_heads(folder, read, hidden, actions, widths=(20, 12, 6), noise_widths=(10, 7), bounds=(0.05, 0.3)):
    """Add a value head of ``read`` numbers and a noise head to a checkpoint, by RLinf's names; returns their tensors.

    Its ``ValueHead(read, widths, activation="relu", bias_last=True)`` and ``ExploreNoiseNet(hidden, actions,
    noise_widths, "tanh", bounds)`` have these in their ``state_dict()``.
    """
    generator = torch.Generator().manual_seed(5)
    found = {}
    value_sizes, noise_sizes = (read, *widths, 1), (hidden, *noise_widths, actions)
    layers = [(f"value_head.mlp.{2 * n}", value_sizes[n : n + 2]) for n in range(len(value_sizes) - 1)]
    layers += [
        (f"noise_head.mlp_logvar.moduleList.{n}.linear_1", noise_sizes[n : n + 2]) for n in range(len(noise_sizes) - 1)
    ]
    for name, (before, after) in layers:
        found[f"{name}.weight"] = torch.randn(after, before, generator=generator) / before**0.5
        found[f"{name}.bias"] = torch.randn(after, generator=generator)
    for name, bound in zip(("logvar_min", "logvar_max"), bounds, strict=True):
        found[f"noise_head.{name}"] = torch.tensor([bound**2]).log()
    save_file({**load_file(folder / "model.safetensors"), **found}, folder / "model.safetensors")
    return found
