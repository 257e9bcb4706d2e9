"""Checkpoints by local folder or by hub id. A local folder needs no network."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

# Data only: neither code nor whole-model pickles. The heads of OpenVLA-OFT are published as .pt, which are read with
# weights_only=True.
_PATTERNS = [
    "*.json",
    "*.safetensors",
    "tokenizer.model",
    "paligemma_tokenizer.model",
    "action_head--*.pt",
    "proprio_projector--*.pt",
    "vision_backbone--*.pt",
]
_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        ValueError: the file is something else.
    """
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON ({error}); copy it again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} must be a JSON object; copy it again")
    return content


def is_hub_id(folder_or_id: str | Path) -> bool:
    """Tell whether it is written like a hub id, and no folder of that name is here."""
    return not Path(folder_or_id).expanduser().exists() and _ID.fullmatch(str(folder_or_id)) is not None


def find_cached(hub_id: str) -> Path | None:
    """Return the local copy of a hub repository, which may lack files; ``None`` if there is none. Downloads nothing."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(hub_id, allow_patterns=_PATTERNS, local_files_only=True))
    except (OSError, ValueError):
        return None


def resolve(folder_or_id: str | Path) -> Path:
    """Find a local folder as it is, or the local copy of a hub repository, downloaded if need be.

    Args:
        folder_or_id: a folder, or an id such as ``openvla/openvla-7b``.

    Raises:
        FileNotFoundError: no such folder, and no hub that has such a repository can be reached.
    """
    folder = Path(folder_or_id).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise FileNotFoundError(f"{folder} is a file; pass the checkpoint folder that it is in")
    name = str(folder_or_id)
    if not is_hub_id(name):
        raise FileNotFoundError(f"no folder {folder}; pass a checkpoint folder or a hub id (openvla/openvla-7b)")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=_PATTERNS))
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise FileNotFoundError(
            f"{name} is neither a folder here nor a repository that can be downloaded ({type(error).__name__}: "
            f"{reason}); where there is a network type: hf download {name} --local-dir CHECKPOINT; pass that folder"
        ) from error
