"""What is in an OpenVLA or OpenVLA-OFT checkpoint folder, read once; and the same folder written again.

Layout: ``config.json``, ``preprocessor_config.json``, ``dataset_statistics.json`` (overrides ``norm_stats`` of
``config.json``), tokenizer files, safetensors; OpenVLA-OFT adds ``action_head--*``, ``proprio_projector--*`` and
``vision_backbone--*`` (FiLM); RLinf adds ``value_head.*`` to the weights. Our own ``vla_torchrl.json`` keeps what the
published layout has no place for: family, head, sequence layout, chunk and the like.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vla_common.plain import read_json
from vla_policies.checkpoint.parts import in_first, write_pickled
from vla_policies.checkpoint.settings import OPTIONS, read_options
from vla_policies.checkpoint.weights import Entry, list_weights, load_head, load_weights, write_folder
from vla_policies.nn.dino_siglip import VisionConfig, heads_of
from vla_policies.nn.llama import LlamaConfig
from vla_policies.openvla.film import read_film, remove
from vla_policies.openvla.model import BOS, PAD, VALUE_HEAD, Prismatic, PrismaticConfig
from vla_policies.processing.prompts import PromptTokens, read_tokenizer

FAMILIES = ("openvla", "openvla_oft")
SPACE = 29871  # token id of a blank in Llama-2
_TEMPLATE = "In: What action should the robot take to {instruction}?\nOut: "
_STATISTICS = "dataset_statistics.json"
_PARTS = {"action_head": "action_head--*", "proprio_projector": "proprio_projector--*", "film": "vision_backbone--*"}
_CARRIED = (
    *("preprocessor_config.json", "generation_config.json", "tokenizer.json", "tokenizer.model"),
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
)


@dataclass(frozen=True)
class OpenVLACheckpoint:
    """A checkpoint folder without its weights."""

    path: Path
    config: Mapping[str, Any]  # config.json; text_config has the sizes of the language model
    preprocessor: Mapping[str, Any]  # preprocessor_config.json
    statistics: Mapping[str, Mapping[str, Any]]  # per data set, see ActionStatistics.from_json
    options: Mapping[str, Any] = field(default_factory=dict)  # empty for a published checkpoint
    files: Mapping[str, bytes] = field(default_factory=dict, repr=False)  # small ones that are written again unchanged
    action_head: Path | None = None  # files of the parts, None where there is none
    proprio_projector: Path | None = None
    film: Path | None = None

    @classmethod
    def read(cls, path: Path, family: str | None = None) -> "OpenVLACheckpoint":
        """Read a local folder; ``family`` if it has to be this one.

        FileNotFoundError: files are missing. ValueError: files of another kind of model or family.
        """
        if not (path / "config.json").is_file():
            raise FileNotFoundError(f"{path} is not a checkpoint: it has no config.json; pass the folder that has it")
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
            options=read_options(path),
            files={name: (path / name).read_bytes() for name in _CARRIED if (path / name).is_file()},
            **{name: _part(path, pattern) for name, pattern in _PARTS.items()},
        )
        if family is not None and family != read.family and read.family_is_known:
            raise ValueError(f"{path} is a checkpoint of {read.family}, not of {family}; load it with that class")
        return read

    @property
    def family(self) -> str:
        """``openvla`` or ``openvla_oft``; published files without OFT's parts do not tell, and count as ``openvla``."""
        parts = (self.action_head, self.proprio_projector, self.film)
        return self.options.get("family", "openvla_oft" if any(parts) else self.config["model_type"])

    @property
    def family_is_known(self) -> bool:
        """Whether the folder says which family it is, rather than it being the default."""
        return self.family == "openvla_oft" or "family" in self.options

    @cached_property
    def weights(self) -> dict[str, Entry]:
        return list_weights(self.path)

    @property
    def value_head_in_weights(self) -> bool:
        return any(key.startswith(VALUE_HEAD) for key in self.weights)

    def empty_model(self) -> tuple[Prismatic, dict[str, Entry]]:
        entries = dict(self.weights)
        if self.film is not None:
            entries |= read_film(self.film)
        shapes = {key: entry.shape for key, entry in entries.items()}
        vision = VisionConfig.from_shapes(shapes, heads_of(self.config))
        language = LlamaConfig.from_dict(self.config.get("text_config", {}))
        width = shapes.get("language_model.model.embed_tokens.weight", (0,))[-1]
        if language.num_hidden_layers > len(entries) or language.hidden_size != width:
            said = f"{language.num_hidden_layers} layers of width {language.hidden_size}"
            raise ValueError(f"text_config of {self.path} has {said}, its weights have not")
        padding = self.config.get("pad_to_multiple_of", PrismaticConfig.vocabulary_padding)
        with torch.device("meta"):
            return Prismatic(PrismaticConfig(vision, language, vocabulary_padding=padding)), entries

    def load_heads(self, heads: Mapping[str, nn.Module]) -> None:
        """Fill the float32 heads that a policy has, by name; a value head keeps its numbers where there is none.

        FileNotFoundError: the checkpoint lacks another head; ValueError: a file that does not fit.
        """
        for name, head in heads.items():
            if name == "value_head":
                if self.value_head_in_weights:
                    load_weights(head, self.weights, prefix=VALUE_HEAD)
            elif (file := getattr(self, name)) is not None:
                load_head(head, file)
            else:
                raise FileNotFoundError(
                    f"{self.path} has no {name}--*.pt, which the policy needs; copy it from the original checkpoint, "
                    "or set head='tokens' (action_head) or use_proprio=False (proprio_projector)"
                )

    def write(self, folder: Path, *, weights: Mapping[str, Tensor], options: Mapping[str, Any]) -> list[str]:
        """Write configuration, statistics, tokenizer, ``options`` and all ``weights``; returns names of the files.

        Of sharded weights all processes must call it. The policy writes heads that have files of their own.
        """
        (dtype, _), *_ = Counter(tensor.dtype for tensor in weights.values()).most_common()
        config = {**self.config, "torch_dtype": str(dtype).removeprefix("torch.")}
        files = {**self.files, "config.json": config, _STATISTICS: self.statistics, OPTIONS: options}
        return write_folder(folder, weights, files, shards=True)


def save_heads(folder: Path, heads: Mapping[str, nn.Module]) -> list[str]:
    """Write the heads that have files of their own, instead of those that are there; returns names of the files."""
    files = {f"{name}--latest_checkpoint.pt": name for name in heads if name != "value_head"}
    for file, name in files.items():
        tensors = dict(heads[name].state_dict())
        in_first(tensors.values(), partial(remove, folder, _PARTS[name]))
        write_pickled(folder / file, tensors)
    return [*files]


def family_of(folder: Path) -> str | None:
    """Find the :attr:`~OpenVLACheckpoint.family` of a local folder; ``None`` if it is no OpenVLA checkpoint."""
    try:
        kind, options = read_json(folder / "config.json").get("model_type"), read_options(folder)
    except (OSError, ValueError):
        return None
    if kind not in FAMILIES:
        return None
    has_parts = any(any(folder.glob(pattern)) for pattern in _PARTS.values())
    return str(options.get("family", "openvla_oft" if has_parts else kind))


def _part(folder: Path, pattern: str) -> Path | None:
    files = sorted(file for file in folder.glob(pattern) if file.suffix in (".pt", ".safetensors"))
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise ValueError(f"{folder} has {len(files)} files for the same part: {names}; keep the one that you mean")
    return files[0] if files else None


class Prompts(PromptTokens):
    """Instructions to prompt tokens.

    ``folder`` has Llama-2's ``tokenizer.json``, else FileNotFoundError or ValueError; nothing in it is executed.
    ``max_length`` is ``L``, tokens of the longest prompt, ``<s>`` and the closing space included.
    """

    def __init__(self, folder: Path, max_length: int):
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise FileNotFoundError(f"{folder} has no tokenizer.json; copy that of the original checkpoint into it")
        self._tokenizer = read_tokenizer(file.read_bytes(), str(file))
        if self._tokenizer.token_to_id("▁") != SPACE or self._tokenizer.token_to_id("<s>") != BOS:
            raise ValueError(f"{file} is not Llama-2's tokenizer: '▁' must be token {SPACE} and <s> {BOS}")
        super().__init__(max_length, PAD)

    def tokenize(self, text: str, listed: bool = False) -> list[int]:
        """Return ``<s>``, the prompt and a final space (29871)."""
        ids = self._tokenizer.encode(_TEMPLATE.format(instruction=text.lower())).ids
        before, after = [BOS] if ids[0] != BOS else [], [SPACE] if ids[-1] != SPACE else []
        return [*before, *ids, *after]
