"""Checkpoints in a local folder, which needs no network, or in a repository of the hub: ``hf:NAME``."""

import os
from pathlib import Path

# Data only, no code. The heads of OpenVLA-OFT are published as .pt, which are read with weights_only=True.
_PATTERNS = ["*.json", "*.safetensors", "*tokenizer.model"]  # in folders too
_PATTERNS += ["action_head--*.pt", "proprio_projector--*.pt", "vision_backbone--*.pt"]
HUB = "hf:"  # in front of a repository's name; anything else is a path


def is_hub_id(folder_or_id: str | Path) -> bool:
    """Tell whether it is a repository of the hub, ``hf:NAME``, and not a path."""
    return str(folder_or_id).startswith(HUB)


def find_cached(hub_id: str) -> Path | None:
    """Return the local copy of ``hf:NAME``, which may lack files, or ``None``. Downloads nothing."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(hub_id.removeprefix(HUB), allow_patterns=_PATTERNS, local_files_only=True))
    except (OSError, ValueError):
        return None


def resolve(folder_or_id: str | Path) -> Path:
    """Return a local folder as it is, or the local copy of ``hf:NAME``, downloaded if need be, or FileNotFoundError."""
    if not is_hub_id(folder_or_id):
        folder = Path(folder_or_id).expanduser()
        if folder.is_dir():
            return folder
        if folder.exists():
            raise FileNotFoundError(f"{folder} is a file; pass the checkpoint folder that it is in")
        raise FileNotFoundError(f"no folder {folder}; pass a checkpoint folder, or a repository of the hub as hf:NAME")
    from huggingface_hub import snapshot_download

    name = str(folder_or_id).removeprefix(HUB)
    try:
        return Path(snapshot_download(name, allow_patterns=_PATTERNS))
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise FileNotFoundError(
            f"{HUB}{name} cannot be downloaded ({type(error).__name__}: {reason}); where there is a network type: hf "
            f"download {name} --local-dir CHECKPOINT; pass that folder"
        ) from error


def check_links(folder: Path) -> Path:
    """Refuse (ValueError) links out of a checkpoint but those of weights: what they name would be saved as its part."""
    for path in filter(Path.is_symlink, folder.rglob("*")):
        there, weights = Path(os.path.realpath(path)), path.parent == folder and path.suffix in (".safetensors", ".pt")
        if not (weights or there.is_relative_to(folder.resolve()) or there.parent.name == "blobs"):  # the hub's cache
            raise ValueError(f"{path} is a link out of the checkpoint, to {path.readlink()}; copy the file into it")
    return folder
