"""LeRobot's tiny checkpoints of SmolVLA, pi0 and pi0.5 in the golden data, as folders of their own."""

import json
import shutil

import numpy as np
import torch
from paths import GOLDEN
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

SMOLVLA, PI0, PI05 = (GOLDEN / f"lerobot_{kind}_tiny" for kind in ("smolvla", "pi0", "pi05"))
PATTERNS = ("config.json", "model.safetensors", "policy_*", "tokenizer", "smolvlm_like")


def golden(of=SMOLVLA):
    """Arrays of ``golden_io.npz`` as tensors."""
    with np.load(of / "golden_io.npz") as stored:
        return {key: torch.from_numpy(stored[key]) for key in stored.files}


def make_checkpoint(folder, of=SMOLVLA, **config):
    """Copy a tiny checkpoint into ``folder``; ``config`` are other entries of its config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    for pattern in PATTERNS:
        for path in of.glob(pattern):
            copy = shutil.copytree if path.is_dir() else shutil.copy
            copy(path, folder / path.name)
    change_json(folder / "config.json", **config)
    if of in (PI0, PI05):  # whose SigLIP has heads of another size than the published one's
        (folder / "vla_torchrl.json").write_text('{"vision_heads": 4}')
    return folder


def make_old(folder):
    """Make the folder one of LeRobot before 0.4: no processors, statistics among the weights, shorter names."""
    kept = {key.removeprefix("model."): w for key, w in load_file(folder / "model.safetensors").items()}
    for number, places in enumerate((("normalize_inputs",), ("normalize_targets", "unnormalize_outputs"))):
        processor = folder / f"policy_{('pre', 'post')[number]}processor.json"
        steps = json.loads(processor.read_text())["steps"]
        [state] = [folder / step["state_file"] for step in steps if "state_file" in step]
        feature = ("observation.state", "action")[number]
        for key, tensor in load_file(state).items():
            name, _, statistic = key.rpartition(".")
            if name == feature:
                old = name.replace(".", "_")
                kept |= {f"{place}.buffer_{old}.{statistic}": tensor.clone() for place in places}
        processor.unlink()
        state.unlink()
    save_file(kept, folder / "model.safetensors")
    return folder


def change_json(file, **entries):
    """Set entries of a JSON file; ``None`` removes one."""
    changed = {**json.loads(file.read_text()), **entries}
    file.write_text(json.dumps({key: value for key, value in changed.items() if value is not None}))


def prepare(images, side):
    """Reference: uint8 ``[N, H, W, 3]`` to float ``[N, 3, side, side]`` from -1 to 1, padded on the left and top."""
    pixels = images.permute(0, 3, 1, 2) / 255
    ratio = max(pixels.shape[2] / side, pixels.shape[3] / side)
    inner = [int(length / ratio) for length in pixels.shape[2:]]
    pixels = F.interpolate(pixels, inner, mode="bilinear", align_corners=False)
    return F.pad(pixels, (side - inner[1], 0, side - inner[0], 0)) * 2 - 1


def save_trained(folder, kind, old=False):
    """Save a tiny checkpoint of a kind, of before LeRobot 0.4 if ``old``, after a change of all weights."""
    from vla_policies.registry import find_policy_class

    source = make_checkpoint(folder.with_name(f"{folder.name}_published"), GOLDEN / f"lerobot_{kind}_tiny")
    change_json(source / "config.json", tokenizer_max_length=256)  # the stand-in for PaliGemma's tokenizer spells words
    processor = source / "policy_preprocessor.json"
    content = json.loads(processor.read_text())
    for step in content["steps"]:
        if step["registry_name"] == "tokenizer_processor":
            step["config"]["max_length"] = 256
    processor.write_text(json.dumps(content))
    if old:
        make_old(source)
    settings = {"num_action_chunks": 3, "num_steps": 4, "train_expert_only": False, "value_head": False}
    policy = find_policy_class(source).from_pretrained(source, benchmark="libero", method="flow_ode", **settings)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.01)
    policy.save_pretrained(folder)
    return policy
