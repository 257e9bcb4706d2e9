"""LeRobot loads what was saved here, and its actions are recorded: by hand, in two environments. No test.

    python tests/cross/lerobot_actions.py save FOLDER    # here: tiny checkpoints, trained a little, saved
    python tests/cross/lerobot_actions.py act FOLDER     # where LeRobot 0.6 is installed, in this checkout

The second one loads each folder with LeRobot's own policies and processors, compares every weight, has them act on the
recorded images, words, states and noise, and writes ``tests/cross/lerobot_actions.npz`` (tokens and actions) and
``tests/cross/lerobot_actions.json`` (digests of the files that were loaded, prompts, versions), and a LoRA adapter that
LeRobot has made for each, ``tests/cross/lerobot_lora_KIND``. Ordinary tests
(``tests/vla_policies/lerobot/test_loaded_by_lerobot.py``) save again, compare the digests and act the same. LeRobot's
sizes of pi0 are built in: those of the tiny ones, ``_golden`` of config.json, are put in their place.
"""

import contextlib
import hashlib
import io
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

TESTS = Path(__file__).parents[1]
RECORDED = Path(__file__).with_suffix(".npz")
KINDS = ("smolvla", "pi0", "pi05")
FOLDERS = {name: name.removesuffix("_old") for kind in KINDS for name in (kind, f"{kind}_old")}
PROMPTED = (  # instructions and normalised states
    ["  pick_up the\nred mug ", "open the drawer", "push"],
    [[-1.5, -1.0, -0.9999], [-0.0078125, 0.0, 0.0078125], [0.99999, 1.0, 7.0]],
)


def save(folder: Path) -> None:
    """Write a folder of each kind, as the tests do."""
    sys.path.insert(0, str(TESTS / "_support"))
    from lerobot_checkpoint import save_trained

    for name, kind in FOLDERS.items():
        save_trained(folder / name, kind, old=name != kind)
        print(f"saved {folder / name}")


def digests(folder: Path) -> dict[str, str]:
    """Return a digest of each file that LeRobot reads; of JSON that of its content."""
    found = {}
    for file in sorted(folder.rglob("*")):
        name = file.relative_to(folder).as_posix()
        if file.suffix in (".json", ".safetensors") and not name.startswith("vla_torchrl"):
            data = file.read_bytes()
            if file.suffix == ".json":
                data = json.dumps(json.loads(data), sort_keys=True).encode()
            found[name] = hashlib.sha256(data).hexdigest()
    return found


def act(folder: Path) -> None:
    """Load each folder with LeRobot, act, and record."""
    import numpy as np
    import torch
    import transformers

    arrays, said = {}, {"torch": torch.__version__, "transformers": transformers.__version__}
    for name, kind in FOLDERS.items():
        with np.load(TESTS / "golden" / f"lerobot_{kind}_tiny" / "golden_io.npz") as stored:
            recorded = {key: torch.from_numpy(stored[key]) for key in stored.files}
        texts = json.loads((TESTS / "golden" / f"lerobot_{kind}_tiny" / "golden.json").read_text())["instructions"]
        with tempfile.TemporaryDirectory() as place:
            copy = shutil.copytree(folder / name, Path(place) / kind)
            policy, before, after = load(copy, kind)
            batch = {
                "observation.images.image": recorded["image_u8"].permute(0, 3, 1, 2) / 255,
                "observation.images.image2": recorded["image2_u8"].permute(0, 3, 1, 2) / 255,
                "observation.state": recorded["state"],
                "task": texts,
            }
            batch = before(batch)
            with torch.no_grad():
                actions = after(policy.predict_action_chunk(batch, noise=recorded["noise"]))
                if name == kind:
                    adapted = adapt(policy, Path(__file__).with_name(f"lerobot_lora_{kind}"))
                    changed = after(adapted.predict_action_chunk(batch, noise=recorded["noise"]))
                    arrays[f"{kind}_lora_actions"] = changed.numpy()
        arrays[f"{name}_tokens"] = batch["observation.language.tokens"].numpy()
        arrays[f"{name}_actions"] = actions.numpy()
        said[name] = digests(folder / name)
        print(name, "loaded, every weight equal; first action", actions[0, 0].tolist())
    said["prompts"] = prompts()
    np.savez_compressed(RECORDED, **arrays)
    RECORDED.with_suffix(".json").write_text(json.dumps(said, indent=1) + "\n")


def adapt(policy, folder: Path):
    """Return the policy with a LoRA adapter on the layers that LeRobot chooses, which is saved as LeRobot does."""
    import torch

    torch.manual_seed(0)
    policy.config.pretrained_path, policy.config.load_vlm_weights = "lerobot/tiny_base", True  # no complaint
    adapted = policy.wrap_with_peft(peft_cli_overrides={"r": 2})
    for name, parameter in adapted.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter, std=0.05)
    adapted.save_pretrained(str(folder))
    (folder / "README.md").unlink()
    return adapted


def prompts() -> list[str]:
    """Return the prompts of pi0.5 for PROMPTED."""
    import torch
    from lerobot.lerobot_types import TransitionKey
    from lerobot.policies.pi05.processor_pi05 import Pi05PrepareStateTokenizerProcessorStep

    texts, states = PROMPTED
    transition = {
        TransitionKey.OBSERVATION: {"observation.state": torch.tensor(states)},
        TransitionKey.COMPLEMENTARY_DATA: {"task": list(texts)},
    }
    return Pi05PrepareStateTokenizerProcessorStep()(transition)[TransitionKey.COMPLEMENTARY_DATA]["task"]


def load(folder: Path, kind: str):
    """Return LeRobot's policy of a folder, and its processors."""
    import importlib

    from lerobot.configs import PreTrainedConfig
    from lerobot.policies.factory import get_policy_class, make_pre_post_processors
    from safetensors.torch import load_file

    content = json.loads((folder / "config.json").read_text())
    if sizes := content.pop("_golden", None):
        shrink(importlib.import_module(f"lerobot.policies.{kind}.modeling_{kind}"), sizes)
        (folder / "config.json").write_text(json.dumps(content))
    if kind == "smolvla":  # the tiny VLM, a folder in this one, has no processor of images; LeRobot asks it for tokens
        vlm = importlib.import_module("lerobot.policies.smolvla.smolvlm_with_expert")
        words = SimpleNamespace(fake_image_token_id=0, global_image_token_id=0)
        vlm.AutoProcessor = SimpleNamespace(from_pretrained=lambda name: SimpleNamespace(tokenizer=words))
        os.chdir(folder)
    config = PreTrainedConfig.from_pretrained(str(folder))
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        policy = get_policy_class(kind).from_pretrained(str(folder), config=config)
    if "Could not load" in printed.getvalue() or "issing keys" in printed.getvalue():
        raise SystemExit(printed.getvalue())
    weights, stored = policy.state_dict(), load_file(folder / "model.safetensors")
    differ = [key for key, tensor in stored.items() if not weights[key].float().equal(tensor.float())]
    if differ or weights.keys() != stored.keys():
        raise SystemExit(f"{folder}: other weights: {differ or sorted(weights.keys() ^ stored.keys())}")
    return policy, *make_pre_post_processors(config, str(folder))


def shrink(module, sizes) -> None:
    """Have LeRobot's pi0 build the sizes of a tiny checkpoint."""
    parts = {"gemma_2b": sizes["paligemma"], "gemma_300m": sizes["action_expert"]}
    module.get_gemma_config = lambda variant: module.GemmaConfig(**parts[variant])
    vlm, expert = module.PaliGemmaForConditionalGenerationWithPiGemma, module.PiGemmaForCausalLM

    def small_vlm(config):
        for name, value in sizes["vision"].items():
            setattr(config.vision_config, name, value)
        config.text_config.vocab_size = sizes["vocab_size"]
        return vlm(config=config)

    def small_expert(config):
        config.vocab_size = sizes["vocab_size"]
        return expert(config=config)

    module.PaliGemmaForConditionalGenerationWithPiGemma, module.PiGemmaForCausalLM = small_vlm, small_expert


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in ("save", "act"):
        raise SystemExit(__doc__)
    {"save": save, "act": act}[sys.argv[1]](Path(sys.argv[2]).resolve())
