"""What is in an OpenVLA or OpenVLA-OFT checkpoint folder, read once; and the same folder written again.

Layout: ``config.json``, ``preprocessor_config.json``, ``dataset_statistics.json`` (overrides ``norm_stats`` of
``config.json``), tokenizer files, safetensors; OpenVLA-OFT adds ``action_head--*``, ``proprio_projector--*`` and
``vision_backbone--*`` (FiLM); RLinf adds ``value_head.*`` to the weights. Our own ``vla_torchrl.json`` keeps what the
published layout has no place for: family, head, sequence layout, chunk and the like.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from vla_policies.checkpoint.hub import read_json, resolve
from vla_policies.checkpoint.lora import ADAPTER
from vla_policies.checkpoint.parts import in_first
from vla_policies.checkpoint.weights import MAX_SHARD_SIZE, Entry, has_weights, list_weights, save_weights

FAMILIES = ("openvla", "openvla_oft")
OPTIONS = "vla_torchrl.json"
VALUE_HEAD = "value_head."  # prefix of its names
_STATISTICS = "dataset_statistics.json"
_FILM = "vision_backbone--*"
_CARRIED = (
    "preprocessor_config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)


@dataclass(frozen=True)
class OpenVLAFolder:
    """A checkpoint folder without its weights.

    Attributes:
        path: the folder; of a hub id, its local copy.
        config: ``config.json``; ``text_config`` has the sizes of the language model.
        preprocessor: ``preprocessor_config.json``.
        statistics: per data set, see :meth:`vla_policies.processing.normalization.ActionStatistics.from_json`.
        options: ``vla_torchrl.json``: what the policy that was saved here was set to; empty for a published checkpoint.
        files: the small files that are written again as they were, by name.
        action_head, proprio_projector, film, value_head: files of these parts, ``None`` where there is none.
        lora_adapter: a peft adapter, ``None`` where there is none. OpenVLA-OFT publishes one next to weights that it
            has already been merged into, so it is applied only where there are no weights or the user asks for it.
    """

    path: Path
    config: Mapping[str, Any]
    preprocessor: Mapping[str, Any]
    statistics: Mapping[str, Mapping[str, Any]]
    options: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    action_head: Path | None = None
    proprio_projector: Path | None = None
    film: Path | None = None
    value_head: Path | None = None
    lora_adapter: Path | None = None

    @classmethod
    def read(cls, folder: str | Path, family: str | None = None) -> OpenVLAFolder:
        """Read a folder, or download a hub id such as ``openvla/openvla-7b`` first.

        Args:
            folder: local folder or hub id.
            family: ``openvla`` or ``openvla_oft`` if it has to be this one.

        Raises:
            FileNotFoundError: no such folder, no ``config.json``, no ``preprocessor_config.json``.
            ValueError: a file that is not JSON, a checkpoint of another kind of model, or of the other family.
        """
        path = resolve(folder)
        if not (path / "config.json").is_file():
            raise FileNotFoundError(
                f"{path} is not a checkpoint: it has no config.json; pass a folder in the layout of openvla/openvla-7b"
            )
        config = read_json(path / "config.json")
        kind = config.get("model_type")
        if kind not in FAMILIES:
            kind = kind or config.get("policy")
            raise ValueError(f"{path} is a checkpoint of {kind!r}, not of {' or '.join(FAMILIES)}")
        if not (path / "preprocessor_config.json").is_file():
            raise FileNotFoundError(f"{path} has no preprocessor_config.json; copy that of the original checkpoint")
        statistics = read_json(path / _STATISTICS) if (path / _STATISTICS).is_file() else config.get("norm_stats") or {}
        read = cls(
            path=path,
            config=config,
            preprocessor=read_json(path / "preprocessor_config.json"),
            statistics=statistics,
            options=read_json(path / OPTIONS) if (path / OPTIONS).is_file() else {},
            files={name: (path / name).read_bytes() for name in _CARRIED if (path / name).is_file()},
            action_head=_part(path, "action_head--*"),
            proprio_projector=_part(path, "proprio_projector--*"),
            film=_part(path, _FILM),
            value_head=_part(path, "*value_head.*"),
            lora_adapter=path / ADAPTER if (path / ADAPTER / "adapter_config.json").is_file() else None,
        )
        if family is not None and family != read.family and read.family_is_known:
            raise ValueError(f"{path} is a checkpoint of {read.family}, not of {family}; load it with that class")
        return read

    @property
    def family(self) -> str:
        """``openvla`` or ``openvla_oft``; published files without OFT's parts do not tell, and count as ``openvla``."""
        if "family" in self.options:
            return self.options["family"]
        parts = (self.action_head, self.proprio_projector, self.film)
        return "openvla_oft" if any(parts) else self.config["model_type"]

    @property
    def family_is_known(self) -> bool:
        """Whether the folder says which family it is, rather than it being the default."""
        return self.family == "openvla_oft" or "family" in self.options

    @cached_property
    def weights(self) -> dict[str, Entry]:
        """Every tensor of the weights by name; headers only."""
        return list_weights(self.path)

    @property
    def has_weights(self) -> bool:
        """Whether there are weights, and not an adapter alone."""
        return has_weights(self.path)

    @property
    def value_head_in_weights(self) -> bool:
        """Whether the weights have a value head among them, as those of RLinf."""
        return any(key.startswith(VALUE_HEAD) for key in self.weights)

    def write(
        self,
        folder: str | Path,
        *,
        weights: Mapping[str, Tensor],
        options: Mapping[str, Any],
        max_shard_size: int = MAX_SHARD_SIZE,
    ) -> list[str]:
        """Write a folder in this layout: configuration, statistics, tokenizer, options and weights.

        Of sharded weights all processes must call it. Heads in files of their own (``action_head--*``) are written by
        the policy that has them.

        Args:
            folder: where to.
            weights: every tensor by its name in the layout, those included that
                :func:`~vla_policies.checkpoint.weights.load_weights` returned as unused.
            options: for ``vla_torchrl.json``.
            max_shard_size: in bytes.

        Returns:
            Names of the files.
        """
        folder = Path(folder)
        (dtype, _), *_ = Counter(tensor.dtype for tensor in weights.values()).most_common()
        config = {**self.config, "torch_dtype": str(dtype).removeprefix("torch.")}

        def write() -> None:
            folder.mkdir(parents=True, exist_ok=True)
            for name, content in self.files.items():
                (folder / name).write_bytes(content)
            for name, entries in (("config.json", config), (_STATISTICS, self.statistics), (OPTIONS, options)):
                (folder / name).write_text(json.dumps(entries, indent=2) + "\n")

        in_first(weights.values(), write)
        return [
            *self.files,
            "config.json",
            _STATISTICS,
            OPTIONS,
            *save_weights(weights, folder, max_shard_size=max_shard_size),
        ]


def family_of(folder: Path) -> str | None:
    """Find the family of a local folder, ``None`` if it is no OpenVLA checkpoint; see :attr:`OpenVLAFolder.family`."""
    try:
        kind = read_json(folder / "config.json").get("model_type")
        options = read_json(folder / OPTIONS) if (folder / OPTIONS).is_file() else {}
    except (OSError, ValueError):
        return None
    if kind not in FAMILIES:
        return None
    has_parts = any(any(folder.glob(pattern)) for pattern in ("action_head--*", "proprio_projector--*", _FILM))
    family: str = options.get("family", "openvla_oft" if has_parts else kind)
    return family


def _part(folder: Path, pattern: str) -> Path | None:
    files = sorted(file for file in folder.glob(pattern) if file.suffix in (".pt", ".safetensors"))
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise ValueError(f"{folder} has {len(files)} files for the same part: {names}; keep the one that you mean")
    return files[0] if files else None
