"""A checkpoint folder of LeRobot (``pretrained_model/``, or a repository of the hub), read and written again.

Layout of lerobot 0.6: ``config.json`` with the policy's ``type``; ``model.safetensors``, whose names begin with
``model.``; ``policy_preprocessor.json`` and ``policy_postprocessor.json``, lists of steps, of which those that
normalise have their statistics in a file of their own; the tokenizer's folder. Ours are ``vla_torchrl.json`` and
``vla_torchrl_heads.safetensors``. A LoRA adapter of LeRobot is read with the weights that it adapts in the same
folder. Of LeRobot before 0.4 are names without ``model.``, and statistics among the weights. Nothing of a folder is
executed.
"""

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from vla_common.plain import read_json, read_small
from vla_policies.checkpoint.hub import resolve
from vla_policies.checkpoint.layout import CONFIG
from vla_policies.checkpoint.lora import ADAPTER, is_adapter, read_base
from vla_policies.checkpoint.settings import OPTIONS, read_options
from vla_policies.checkpoint.weights import Entry, has_weights, list_weights, load_file, write_folder
from vla_policies.lerobot.processors import (
    NORMALIZERS,
    PROCESSORS,
    RENAME,
    TOKENIZER,
    check_steps,
    find_step,
    make_processors,
)
from vla_policies.lerobot.statistics import FeatureStatistics, LeRobotStatistics

LEROBOT = "lerobot"  # in a benchmark's schema: how its policies act there
PREFIX = "model."  # of every tensor's name
STATE, ACTION = "observation.state", "action"
EMPTY_CAMERA = "observation.images.empty_camera_"
# Statistics of LeRobot before 0.4 are buffers among the weights.
_BUFFERS = ("normalize_inputs.buffer_", "normalize_targets.buffer_", "unnormalize_outputs.buffer_")
_PALIGEMMA = "google/paligemma-3b-pt-224"  # its tokenizer is pi0's
_FIXED = {  # entries of config.json that the networks have built in
    "n_obs_steps": 1,
    "min_period": 4e-3,
    "max_period": 4.0,
    "add_image_special_tokens": False,
    "adapt_to_pi_aloha": False,
    "use_delta_joint_actions_aloha": False,
    "use_visual_memory": False,
    "use_proprioceptive_memory": False,
}
LARGEST = 50_000_000  # bytes of a file of a tokenizer


@dataclass(frozen=True)
class LeRobotFolder:
    """A checkpoint folder without its weights."""

    path: Path  # of hf:NAME, its local copy
    config: Mapping[str, Any]  # config.json
    options: Mapping[str, Any]  # what the policy that was saved here was set to
    processors: Sequence[Mapping[str, Any]]  # before and after the network, as in PROCESSORS
    tensors: Sequence[Mapping[str, Tensor]]  # statistics of their steps that normalise
    tokenizer: Mapping[str, bytes] = field(repr=False)  # files by name
    weights: Mapping[str, Entry] = field(repr=False)  # every tensor by name; headers only

    @classmethod
    def read(cls, folder: str | Path, kinds: Mapping[str, str]) -> "LeRobotFolder":
        """Read a folder of one of ``kinds`` of policies, or download ``hf:NAME`` first.

        Each has a step of its preprocessor that no other policy has. FileNotFoundError: a part is missing. ValueError:
        a checkpoint of another policy, or unusable files.
        """
        path = resolve(folder)
        config = check_type(path, kinds)
        kind, own = config["type"], kinds[config["type"]]
        for name, value in _FIXED.items():
            if config.get(name, value) != value:
                said = json.dumps(config[name])
                raise ValueError(f"{path / CONFIG}: {name} is {said}, only {json.dumps(value)} is supported")
        options = read_options(path) | ({ADAPTER: True} if is_adapter(path) else {})
        if config.get("use_peft") and not is_adapter(path):
            raise FileNotFoundError(f"{path} has no adapter_config.json, which {CONFIG} asks for (use_peft); copy it")
        if is_adapter(path) and not has_weights(path):
            base = read_base(path)
            raise FileNotFoundError(
                f"{path} is a LoRA adapter without the weights that it adapts: copy the model.safetensors of {base!r} "
                "into it"
            )
        entries = list_weights(path)
        weights = {key: entry for key, entry in entries.items() if not key.startswith(_BUFFERS)}
        if len(weights) < len(entries) and not (path / PROCESSORS[0]).is_file():
            name = config.get("vlm_model_name", _PALIGEMMA)
            processors = make_processors(own, config, str(path / CONFIG), name)
            tensors = 2 * [_read_buffers(entries)]
        else:
            processors, tensors = _read_processors(path, kind, own)
        tokenizer = _read_tokenizer(path, find_step(processors[0], TOKENIZER) or {})
        return cls(path, config, options, processors, tensors, tokenizer, weights)

    @property
    def model_weights(self) -> dict[str, Entry]:
        """The tensors by the names of the module, those of our heads aside."""
        return {key.removeprefix(PREFIX): entry for key, entry in self.weights.items()}

    @property
    def max_prompt_length(self) -> int:
        """Tokens of the longest prompt."""
        step = find_step(self.processors[0], TOKENIZER) or {}
        return int(step.get("config", {}).get("max_length") or self.config.get("tokenizer_max_length", 48))

    def statistics(self) -> LeRobotStatistics:
        """Read the statistics of states and of what becomes actions; ValueError if there are none."""
        found = []
        for number, (feature, kind) in enumerate(((STATE, "STATE"), (ACTION, "ACTION"))):
            step = (find_step(self.processors[number], NORMALIZERS[number]) or {})["config"]
            mode, epsilon = step.get("norm_map", {}).get(kind, "IDENTITY"), step.get("eps", 1e-8)
            what = str(self.path / PROCESSORS[number])
            found.append(FeatureStatistics.read(self.tensors[number], feature, mode, epsilon, what))
        return LeRobotStatistics(*found)

    @property
    def cameras(self) -> list[str]:
        """Names of the cameras that the network looks at, those aside that the config has for none."""
        features = self.config.get("input_features") or {}
        visual = [name for name, feature in features.items() if feature.get("type") == "VISUAL"]
        return [name for name in visual if not name.startswith(EMPTY_CAMERA)]

    def order_cameras(self, names: Sequence[str], chosen: bool) -> list[int]:
        """Return which of the cameras ``names`` comes first, second, ... to the network: the order of the config.

        ``names`` are LeRobot's before they are renamed, or the config's own. ValueError: the config has no such camera,
        or others, without which it is ``chosen`` to act.
        """
        step = find_step(self.processors[0], RENAME) or {}
        renamed = step.get("config", {}).get("rename_map") or {}
        meant = [renamed.get(name, name) for name in names]
        real = self.cameras
        absent = [name for name in real if name not in meant]
        unknown = [name for name in meant if name not in real]
        if unknown or (absent and not chosen and len(absent) > self.config.get("empty_cameras", 0)):
            raise ValueError(
                f"cameras={list(names)}: {self.path} looks at {', '.join(real)}; set cameras to the names of the "
                f"third-person camera, then of the wrist cameras, such as cameras=[{','.join(real[: len(names)])}]"
            )
        return sorted(range(len(meant)), key=lambda index: real.index(meant[index]))

    def write(
        self,
        folder: str | Path,
        weights: Mapping[str, Tensor],
        options: Mapping[str, Any],
        config: Mapping[str, Any],
        others: Mapping[str, Any],
    ) -> list[str]:
        """Write a folder in this layout; returns names of the files. Of sharded weights all processes must call it.

        ``weights`` are named as the module's, the unused ones included; ``config`` are entries of ``config.json`` to
        set; ``others`` are files, see :func:`write_folder`.
        """
        place = _tokenizer_folder(find_step(self.processors[0], TOKENIZER) or {})
        states = [_state_file(find_step(*each) or {}) for each in zip(self.processors, NORMALIZERS, strict=True)]
        files = {
            CONFIG: {**self.config, **config},
            OPTIONS: options,
            **dict(zip(PROCESSORS, self.processors, strict=True)),
            **{state: tensors for state, tensors in zip(states, self.tensors, strict=True) if state is not None},
            **{f"{place}/{name}": content for name, content in self.tokenizer.items()},
            **others,
        }
        return write_folder(folder, {f"{PREFIX}{key}": tensor for key, tensor in weights.items()}, files)


def check_type(path: Path, kinds: Iterable[str]) -> dict[str, Any]:
    """Read ``config.json`` of a policy of these kinds; FileNotFoundError without, ValueError for another kind."""
    if not (path / CONFIG).is_file():
        raise FileNotFoundError(f"{path} has no {CONFIG}; pass LeRobot's pretrained_model folder")
    config: dict[str, Any] = read_json(path / CONFIG)
    if config.get("type") not in (known := list(kinds)):
        found = f"of {config['type']!r}" if "type" in config else "no policy of LeRobot"
        must, others = " or ".join(map(repr, known)), " or ".join(known)
        raise ValueError(f"{path} is {found}, {CONFIG} must be of {must}; pass a checkpoint of {others}")
    return config


def inside(name: Any) -> str:
    """Return the last part of a path that a stranger's file has; ValueError for one that would lead out."""
    last = Path(str(name)).name
    if last in ("", ".."):
        raise ValueError(f"{name!r} is no name of a file or folder of the checkpoint; copy it again")
    return last


def _read_processors(path: Path, kind: str, own: str) -> tuple[list[Any], list[dict[str, Tensor]]]:
    if missing := [name for name in PROCESSORS if not (path / name).is_file()]:
        raise FileNotFoundError(f"{path} has no {' and no '.join(missing)}; copy the whole checkpoint")
    processors = [read_json(path / name) for name in PROCESSORS]
    for name, content in zip(PROCESSORS, processors, strict=True):
        check_steps(path / name, content, kind, own)
    if find_step(processors[0], own) is None:
        raise ValueError(f"{path / PROCESSORS[0]} has no step {own}: it is not of {kind}; copy its own")
    tensors = [
        _read_tensors(path, path / name, find_step(content, step), step)
        for name, content, step in zip(PROCESSORS, processors, NORMALIZERS, strict=True)
    ]
    return processors, tensors


def _read_buffers(entries: Mapping[str, Entry]) -> dict[str, Tensor]:
    """Read statistics of states and actions, whose names have no dots, by the names of today's files."""
    found = {}
    for feature, prefix in ((STATE, _BUFFERS[0]), (ACTION, _BUFFERS[1]), (ACTION, _BUFFERS[2])):
        old = f"{prefix}{feature.replace('.', '_')}."
        for key in (key for key in entries if key.startswith(old)):
            found[f"{feature}.{key.removeprefix(old)}"] = entries[key].check_finite(entries[key].read())
    return found


def _state_file(step: Mapping[str, Any]) -> str | None:
    name = step.get("state_file")
    return None if name is None else inside(name)


def _read_tensors(path: Path, file: Path, step: Mapping[str, Any] | None, name: str) -> dict[str, Tensor]:
    if step is None or not isinstance(step.get("config"), dict):
        raise ValueError(f"{file} has no step {name}, so no statistics; copy it from the original checkpoint")
    state = _state_file(step)
    if state is None:
        return {}
    if not (path / state).is_file():
        raise FileNotFoundError(f"{path} has no {state}, the statistics; copy it from the original checkpoint")
    return load_file(path / state)


def _tokenizer_folder(step: Mapping[str, Any]) -> str:
    return inside(step.get("artifacts", {}).get("tokenizer_name", "tokenizer"))


def _read_tokenizer(path: Path, step: Mapping[str, Any]) -> dict[str, bytes]:
    place = path / _tokenizer_folder(step)
    if not (place / "tokenizer.json").is_file():
        name, to = (shlex.quote(str(each)) for each in (step.get("config", {}).get("tokenizer_name", "NAME"), place))
        raise FileNotFoundError(
            f"{path} has no tokenizer; where there is a network type: hf download {name} tokenizer.json "
            f"tokenizer_config.json --local-dir {to}"
        )
    return {file.name: read_small(file, LARGEST) for file in sorted(place.iterdir()) if file.is_file()}
