"""Checkpoint folders to what OpenVLA policies are made of, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import nn

from vla_policies.checkpoint.parts import in_first
from vla_policies.checkpoint.weights import Entry, check_head, check_weights, load_head, load_weights
from vla_policies.checkpoint.writing import write_pickled
from vla_policies.nn.dino_siglip_config import VisionConfig, heads_of
from vla_policies.nn.llama import LlamaConfig
from vla_policies.openvla.film import Adapted, read_film, remove
from vla_policies.openvla.folder import VALUE_HEAD, OpenVLAFolder
from vla_policies.openvla.model import Prismatic, PrismaticConfig


def empty_model(checkpoint: OpenVLAFolder) -> tuple[Prismatic, dict[str, Entry], Adapted | None]:
    """Build a checkpoint's model on the meta device; returns it, the tensors to fill it with, and its FiLM's layout.

    Raises:
        FileNotFoundError, ValueError: weights that are missing or whose shapes make no such model.
    """
    entries, adapted = dict(checkpoint.weights), None
    if checkpoint.film is not None:
        film, adapted = read_film(checkpoint.film)
        entries |= film
    shapes = {key: entry.shape for key, entry in entries.items()}
    vision = VisionConfig.from_shapes(shapes, heads_of(checkpoint.config))
    language = LlamaConfig.from_dict(checkpoint.config.get("text_config", {}))
    padding = checkpoint.config.get("pad_to_multiple_of", PrismaticConfig.vocabulary_padding)
    with torch.device("meta"):
        return Prismatic(PrismaticConfig(vision, language, vocabulary_padding=padding)), entries, adapted


def unused_by(model: Prismatic) -> Callable[[str], bool]:
    """Return what tells of a tensor's name whether a checkpoint may have it although the model does not."""
    vision = model.config.vision
    return lambda key: vision.unused(key) or key.startswith(VALUE_HEAD) or key.endswith("rotary_emb.inv_freq")


def load_heads(checkpoint: OpenVLAFolder, heads: Mapping[str, nn.Module | None], value_head: nn.Module | None) -> None:
    """Fill the heads that a policy has. They are float32; a value head starts afresh where the checkpoint has none.

    Args:
        checkpoint: its folder.
        heads: by the names of their files, ``action_head`` and ``proprio_projector``.
        value_head: in the weights, or in a file of its own.

    Raises:
        FileNotFoundError: the checkpoint lacks one of ``heads``.
        ValueError: a file that does not fit.
    """
    _each_head(checkpoint, heads, value_head, load_head, load_weights)


def check_heads(checkpoint: OpenVLAFolder, heads: Mapping[str, nn.Module | None], value_head: nn.Module | None) -> None:
    """Raise what :func:`load_heads` would, which takes the same arguments, but for numbers that are none."""
    _each_head(checkpoint, heads, value_head, check_head, check_weights)


def _each_head(
    checkpoint: OpenVLAFolder,
    heads: Mapping[str, nn.Module | None],
    value_head: nn.Module | None,
    of_file: Callable[..., object],
    of_weights: Callable[..., object],
) -> None:
    for name, head in heads.items():
        if head is None:
            continue
        file: Path | None = getattr(checkpoint, name)
        if file is None:
            raise FileNotFoundError(
                f"{checkpoint.path} has no {name}--*.pt, which the policy needs; copy it from the original "
                "checkpoint, or set head='tokens' (action_head) or use_proprio=False (proprio_projector)"
            )
        of_file(head, file)
    if value_head is not None and checkpoint.value_head_in_weights:
        of_weights(value_head, checkpoint.weights, prefix=VALUE_HEAD)
    elif value_head is not None and checkpoint.value_head is not None:
        of_file(value_head, checkpoint.value_head, prefix=VALUE_HEAD)


def save_heads(folder: Path, heads: Mapping[str, nn.Module | None]) -> list[str]:
    """Write the heads that have files of their own, instead of those that are there; returns names of the files."""
    written = []
    for name, head in heads.items():
        if head is None:
            continue
        tensors = dict(head.state_dict())
        in_first(tensors.values(), partial(remove, folder, f"{name}--*"))
        written.append(f"{name}--latest_checkpoint.pt")
        write_pickled(folder / written[-1], tensors)
    return written
