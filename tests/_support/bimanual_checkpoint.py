"""The tiny checkpoints for two arms: 14 states and actions where those of the golden data have 7 and 8."""

import json

import openvla_checkpoint
import pi0_checkpoint
import torch
from safetensors.torch import load_file, save_file

SIZE = 14


def make_openvla(folder):
    """OpenVLA-OFT: the golden statistics, repeated, and a projector of so many states."""
    openvla_checkpoint.make_checkpoint(folder, heads=True)
    next(folder.glob("action_head--*")).unlink()
    file = folder / "dataset_statistics.json"
    statistics = json.loads(file.read_text())
    for part in ("action", "proprio"):
        entries = statistics["golden_ds"][part]
        statistics["golden_ds"][part] = {name: (values * 2)[:SIZE] for name, values in entries.items()}
    file.write_text(json.dumps(statistics))
    projector = next(folder.glob("proprio_projector--*"))
    weights = torch.load(projector, weights_only=True)
    weights["module.fc1.weight"] = torch.cat([weights["module.fc1.weight"]] * 2, dim=1)[:, :SIZE]
    torch.save(weights, projector)
    return folder


def make_pi0(folder, name="pi0_tiny"):
    """pi0 or pi0.5 with room for 16 numbers, whose statistics are of 14."""
    pi0_checkpoint.make_checkpoint(folder, name, size=SIZE, horizon=50)
    weights = load_file(folder / "model.safetensors")
    for key in {"action_in_proj.weight", "state_proj.weight"} & weights.keys():
        weights[key] = torch.cat([weights[key]] * 2, dim=1) / 2
    for key in ("action_out_proj.weight", "action_out_proj.bias"):
        weights[key] = torch.cat([weights[key]] * 2)
    save_file(weights, folder / "model.safetensors")
    return folder
