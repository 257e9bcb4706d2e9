"""What is in a checkpoint folder of pi0 or pi0.5, in openpi's PyTorch layout, and the same folder written again.

Layout: ``model.safetensors`` (the token embeddings are stored once, as ``paligemma.lm_head``),
``assets/<id>/norm_stats.json`` (``<id>/norm_stats.json`` in RLinf's checkpoints), ``config.json`` (optional),
PaliGemma's tokenizer as a sentencepiece file. Ours are ``vla_torchrl.json``, the settings, and
``vla_torchrl_heads.safetensors``, value head and noise network, which the official loader must not see; RLinf has them
among the weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vla_common.plain import read_json
from vla_policies.checkpoint.layout import unconverted
from vla_policies.checkpoint.report import NOT_SAID, describe_weights
from vla_policies.checkpoint.settings import OPTIONS, read_options
from vla_policies.checkpoint.weights import Entry, has_weights, list_weights, write_folder
from vla_policies.flow.heads import StoredHeads, is_head
from vla_policies.pi0.model import EXPERT, PREFIX, Pi0Model, Pi0ModelConfig
from vla_policies.processing.normalization import check_order, numbers, select_statistics

TOKENIZERS = ("paligemma_tokenizer.model", "tokenizer.model")
_TOKENIZER_URL = "https://storage.googleapis.com/big_vision/paligemma_tokenizer.model"  # where openpi has it from
EMBEDDINGS, LM_HEAD = f"{PREFIX}model.language_model.embed_tokens.weight", f"{PREFIX}lm_head.weight"
UNUSED = f"{EXPERT}lm_head."
_STATISTICS = "norm_stats.json"
_EPSILON = 1e-6


@dataclass(frozen=True)
class Pi0Statistics:
    """How states and actions of a data set are normalised, dimension by dimension."""

    key: str  # name of the data set (openpi's asset id)
    raw: Mapping[str, Mapping[str, Any]]  # norm_stats: mean, std, q01 and q99 of state and actions
    quantiles: bool  # pi0.5: percentiles 1 and 99 become -1 and 1; pi0: mean 0 and deviation 1

    def normalize(self, what: str, values: Tensor) -> Tensor:
        """Normalise ``state`` or ``actions`` ``[..., D]`` in physical units."""
        low, span = self._affine(what, values)
        return (values - low) / span * 2 - 1 if self.quantiles else (values - low) / span

    def unnormalize(self, what: str, values: Tensor) -> Tensor:
        low, span = self._affine(what, values)
        return (values + 1) / 2 * span + low if self.quantiles else values * span + low

    def _affine(self, what: str, values: Tensor) -> tuple[Tensor, Tensor]:
        size = values.shape[-1]
        first, second = (torch.tensor(self.raw[what][name], device=values.device)[:size].float() for name in self.names)
        return first, (second - first if self.quantiles else second) + _EPSILON

    @property
    def names(self) -> tuple[str, str]:
        """Which two of the statistics are used."""
        return ("q01", "q99") if self.quantiles else ("mean", "std")

    def check(self, state_dim: int, action_dim: int) -> None:
        """Refuse statistics of another robot: ValueError if they are fewer numbers than the benchmark's."""
        for what, size in (("state", state_dim), ("actions", action_dim)):
            entry = self.raw.get(what) if isinstance(self.raw, Mapping) else None
            if not isinstance(entry, Mapping) or not set(self.names) <= entry.keys():
                raise ValueError(f"norm_stats of {self.key!r} have no {' and '.join(self.names)} of {what}")
            of = f"norm_stats of {self.key!r}, {what}"
            first, second = (numbers(entry[name], f"{of}: {name}") for name in self.names)
            if self.quantiles:
                check_order(first[:size], second[:size], of, self.names)
            elif min(second[:size]) < 0 or not any(second[:size]):
                raise ValueError(f"{of}: std is {list(second[:size])}, must be above 0; copy the statistics again")
            if (shortest := min(len(first), len(second))) < size:
                raise ValueError(
                    f"norm_stats of {self.key!r} have {shortest} numbers of {what}, the benchmark has "
                    f"{size}; they may have more (padding), not fewer: take a checkpoint of this benchmark"
                )


@dataclass(frozen=True)
class Pi0Checkpoint:
    """A checkpoint folder without its weights."""

    path: Path
    config: Mapping[str, Any]  # config.json, empty if there is none
    options: Mapping[str, Any]  # what the policy that was saved here was set to
    statistics: Mapping[str, Mapping[str, Any]]  # norm_stats per data set
    tokenizer: bytes = field(repr=False)  # content of the sentencepiece file
    weights: Mapping[str, Entry] = field(repr=False)  # every tensor by name; headers only

    @classmethod
    def read(cls, path: Path) -> "Pi0Checkpoint":
        """Read a local folder.

        FileNotFoundError: weights, statistics or tokenizer are missing. ValueError: a JAX checkpoint, unusable files.
        """
        if not has_weights(path) and (why := unconverted(path)):
            raise ValueError(why)
        if not is_pi0(path):
            raise ValueError(f"{path} is not a checkpoint of pi0: it has no tensors {PREFIX}...")
        if not has_weights(path):
            raise ValueError(
                f"{path} has no model.safetensors: it is a JAX checkpoint, or half of one; convert it first with "
                "openpi's examples/convert_jax_model_to_pytorch.py and pass the folder that this writes"
            )
        statistics = _statistics(path)
        if not statistics:
            raise FileNotFoundError(f"{path} has no assets/<id>/{_STATISTICS}; copy it from the original checkpoint")
        tokenizer = next((path / name for name in TOKENIZERS if (path / name).is_file()), None)
        if tokenizer is None:
            raise FileNotFoundError(
                f"{path} has no tokenizer: PaliGemma's sentencepiece file has to be there; type: curl --location "
                f"--output {path / TOKENIZERS[0]} {_TOKENIZER_URL} (or see docs/checkpoints/pi05.md)"
            )
        return cls(
            path=path,
            config=read_options(path, "config.json"),
            options=read_options(path),
            statistics={key: entry.get("norm_stats", entry) for key, entry in statistics.items()},
            tokenizer=tokenizer.read_bytes(),
            weights=list_weights(path),
        )

    @cached_property
    def heads(self) -> StoredHeads:
        """Value head and noise network, ours or RLinf's; headers only."""
        return StoredHeads.read(self.path, self.weights)

    @property
    def settings(self) -> dict[str, Any]:
        """What the config says of a policy's settings."""
        return {"action_horizon": self.config.get("action_horizon")}

    def describe(self) -> dict[str, str]:
        """Return facts of it for a report."""
        options = self.options
        return {
            "family": "pi0 (pi0.5)" if "time_mlp_in.weight" in self.weights else "pi0",
            "benchmark": options.get("benchmark", f"{NOT_SAID}; set benchmark"),
            "variant": options.get("config_name", f"{NOT_SAID}; set config_name"),
            "horizon": str(options.get("action_horizon") or self.settings["action_horizon"] or "that of the variant"),
            "statistics": ", ".join(sorted(self.statistics)),
            "tokenizer": "yes",
            "LoRA adapter": "lora_adapter/" if options.get("lora_adapter") else "no",
            "weights": describe_weights(self.weights),
            "heads": self.heads.describe(),
        }

    def check_statistics(self) -> None:
        """Do nothing: there are some, or it could not be read."""

    def empty_model(self) -> tuple[Pi0Model, dict[str, Entry]]:
        entries = model_weights(self.weights)
        shapes = {key: entry.shape for key, entry in entries.items()}
        with torch.device("meta"):
            return Pi0Model(Pi0ModelConfig.from_shapes(shapes, self.config.get("vision_heads"))), entries

    def select_statistics(self, norm_stats_id: str | None, quantiles: bool) -> Pi0Statistics:
        key = select_statistics(self.statistics, norm_stats_id, "norm_stats_id")
        return Pi0Statistics(key, self.statistics[key], quantiles)

    def write(
        self, folder: Path, weights: Mapping[str, Tensor], options: Mapping[str, Any], config: Mapping[str, Any]
    ) -> list[str]:
        """Write a folder in this layout; returns names of the files. Of sharded weights all processes must call it.

        ``weights`` are named as the module's, the unused ones included; ``config`` are entries of ``config.json``.
        """
        statistics = {f"assets/{key}/{_STATISTICS}": {"norm_stats": entry} for key, entry in self.statistics.items()}
        settings = {"config.json": {**self.config, **config}, OPTIONS: options}
        stored = {LM_HEAD if key == EMBEDDINGS else key: tensor for key, tensor in weights.items()}
        return write_folder(folder, stored, {TOKENIZERS[0]: self.tokenizer, **settings, **statistics})


def _statistics(folder: Path) -> dict[str, Any]:
    """Read every ``norm_stats.json``: openpi has it in ``assets/<id>``, RLinf's checkpoints in ``<id>``."""
    assets = folder / "assets"
    found = {file.parent.relative_to(assets).as_posix(): read_json(file) for file in sorted(assets.rglob(_STATISTICS))}
    for file in (assets / _STATISTICS, folder / _STATISTICS):  # without an id
        if file.is_file():
            found["norm_stats"] = found.pop(".", None) or read_json(file)
    if not found:
        files = sorted([*folder.glob(f"*/{_STATISTICS}"), *folder.glob(f"*/*/{_STATISTICS}")])
        found = {file.parent.relative_to(folder).as_posix(): read_json(file) for file in files}
    return found


def is_pi0(folder: Path) -> bool:
    """Tell whether a local folder is a checkpoint of pi0, published or ours, PyTorch or JAX; reads headers only."""
    if has_weights(folder):
        try:
            lerobots = "type" in read_options(folder, "config.json")  # whose older ones have the same names
            return not lerobots and any(key.startswith(PREFIX) for key in list_weights(folder))
        except (FileNotFoundError, ValueError):  # missing or truncated: loading says which
            pass
    return (folder / "params").is_dir() or any((folder / "assets").rglob(_STATISTICS))


def is_unused(key: str) -> bool:
    """Tell whether the model reads no tensor of that name: the expert's ``lm_head``, RLinf's heads."""
    return key.startswith(UNUSED) or is_head(key)


def model_weights(weights: Mapping[str, Entry]) -> dict[str, Entry]:
    """Return weights by the names of the module: ``lm_head`` is its token embeddings. ValueError without."""
    weights = dict(weights)
    head = weights.pop(LM_HEAD, None)
    if EMBEDDINGS not in weights:
        if head is None:
            raise ValueError(f"the checkpoint has neither {EMBEDDINGS} nor {LM_HEAD}: it is not one of pi0 or pi0.5")
        weights[EMBEDDINGS] = head
    return weights
