"""A checkpoint folder of LeRobot (``pretrained_model/``, or a repository of the hub), read and written again.

Layout of lerobot 0.6: ``config.json`` with the policy's ``type``; ``model.safetensors``, whose names begin with
``model.``; ``policy_preprocessor.json`` and ``policy_postprocessor.json``, lists of steps, of which those that
normalise have their statistics in a file of their own; the tokenizer's folder. Ours are ``vla_torchrl.json`` and
``vla_torchrl_heads.safetensors``. A LoRA adapter of LeRobot is read with the weights that it adapts in the same
folder. Of LeRobot before 0.4 are names without ``model.``, and statistics among the weights. Nothing is executed.
"""

import copy
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

from torch import Tensor

from vla_common.plain import read_json
from vla_policies.checkpoint.layout import CONFIG
from vla_policies.checkpoint.lora import ADAPTER, is_adapter
from vla_policies.checkpoint.report import NOT_SAID, describe_weights
from vla_policies.checkpoint.settings import OPTIONS, read_options
from vla_policies.checkpoint.weights import Entry, has_weights, list_weights, write_folder
from vla_policies.flow.heads import StoredHeads
from vla_policies.lerobot import processors as steps
from vla_policies.lerobot.statistics import FeatureStatistics, LeRobotStatistics, to_tensors

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


@dataclass(frozen=True)
class LeRobotCheckpoint:
    """A checkpoint folder without its weights; a family adds ``empty_model``.

    ``kinds``: LeRobot's ``type`` of it, each with a step of its preprocessor that no other policy has; ``steps_entry``:
    where its config says how many steps lead to an action.
    """

    kinds: ClassVar[Mapping[str, str]]
    steps_entry: ClassVar[str] = "num_steps"

    path: Path
    config: Mapping[str, Any]  # config.json
    options: Mapping[str, Any]  # what the policy that was saved here was set to
    processors: Sequence[Mapping[str, Any]]  # before and after the network, as in steps.PROCESSORS
    tensors: Sequence[Mapping[str, Tensor]]  # statistics of their steps that normalise
    tokenizer: Mapping[str, bytes] = field(repr=False)  # files by name
    weights: Mapping[str, Entry] = field(repr=False)  # every tensor by name; headers only

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a local folder.

        FileNotFoundError: a part is missing. ValueError: a checkpoint of another policy, or unusable files.
        """
        config = check_type(path, cls.kinds)
        kind, own = config["type"], cls.kinds[config["type"]]
        for name, value in _FIXED.items():
            if config.get(name, value) != value:
                said = json.dumps(config[name])
                raise ValueError(f"{path / CONFIG}: {name} is {said}, only {json.dumps(value)} is supported")
        options = read_options(path) | ({ADAPTER: True} if is_adapter(path) else {})
        if config.get("use_peft") and not is_adapter(path):
            raise FileNotFoundError(f"{path} has no adapter_config.json, which {CONFIG} asks for (use_peft); copy it")
        if is_adapter(path) and not has_weights(path):
            base = str(read_json(path / "adapter_config.json").get("base_model_name_or_path"))  # shown, never opened
            raise FileNotFoundError(
                f"{path} is a LoRA adapter without the weights that it adapts: copy the model.safetensors of {base!r} "
                "into it"
            )
        entries = list_weights(path)
        weights = {key: entry for key, entry in entries.items() if not key.startswith(_BUFFERS)}
        if len(weights) < len(entries) and not (path / steps.PROCESSORS[0]).is_file():
            name = config.get("vlm_model_name", _PALIGEMMA)
            processors = steps.make_processors(own, config, str(path / CONFIG), name)
            tensors = 2 * [_read_buffers(entries)]
        else:
            processors, tensors = steps.read_processors(path, kind, own)
        tokenizer = steps.read_tokenizer_files(path, steps.find_step(processors[0], steps.TOKENIZER))
        return cls(path, config, options, processors, tensors, tokenizer, weights)

    @property
    def model_weights(self) -> dict[str, Entry]:
        """The tensors by the names of the module, those of our heads aside."""
        return {key.removeprefix(PREFIX): entry for key, entry in self.weights.items()}

    @property
    def max_prompt_length(self) -> int:
        """Tokens of the longest prompt."""
        step = steps.find_step(self.processors[0], steps.TOKENIZER)
        return int(step.get("config", {}).get("max_length") or self.config.get("tokenizer_max_length", 48))

    def statistics(self) -> LeRobotStatistics:
        """Read the statistics of states and of what becomes actions; ValueError if there are none."""
        found = []
        for number, (feature, kind) in enumerate(((STATE, "STATE"), (ACTION, "ACTION"))):
            step = steps.find_step(self.processors[number], steps.NORMALIZERS[number])["config"]
            modes, what = step.get("norm_map", {}), str(self.path / steps.PROCESSORS[number])
            if modes.get("VISUAL", "IDENTITY") != "IDENTITY":
                raise ValueError(f"{what} normalises images by statistics, which is not supported; train without")
            mode, epsilon = modes.get(kind, "IDENTITY"), step.get("eps", 1e-8)
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
        renamed = steps.find_step(self.processors[0], steps.RENAME).get("config", {}).get("rename_map") or {}
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

    @property
    def horizon(self) -> int:
        """Actions that are denoised together."""
        return int(self.config.get("chunk_size", 50))

    @property
    def settings(self) -> dict[str, Any]:
        """What the config says of a policy's settings: how many actions are executed, and steps to make them."""
        return {name: self.config[entry] for name, entry in self._entries.items() if entry in self.config}

    @property
    def _entries(self) -> dict[str, str]:
        return {"num_action_chunks": "n_action_steps", "num_steps": self.steps_entry}

    @property
    def other_files(self) -> dict[str, Any]:
        """What else belongs to it, by name."""
        return {}

    @cached_property
    def heads(self) -> StoredHeads:
        """Value head and noise network; headers only."""
        return StoredHeads.read(self.path, {})

    def describe(self) -> dict[str, str]:
        """Return facts of it for a report."""
        return {
            "type": self.config["type"],
            "benchmark": self.options.get("benchmark", f"{NOT_SAID}; set benchmark"),
            "cameras": ", ".join(self.cameras),
            "chunk": f"{self.horizon} actions, of which {self.config.get('n_action_steps')} are executed",
            "tokenizer": "yes",
            "LoRA adapter": "yes" if self.options.get("lora_adapter") else "no",
            "weights": describe_weights(self.weights),
            "heads": self.heads.describe(),
        }

    def check_statistics(self) -> None:
        """Refuse (ValueError) a folder without statistics, which another robot does not need."""
        self.statistics()

    def with_statistics(self, actions: Mapping[str, Any], state: Mapping[str, Any]) -> Self:
        """Return it with other statistics, by name and dimension."""
        tensors = {**to_tensors(ACTION, actions), **to_tensors(STATE, state)}
        config, processors = copy.deepcopy((dict(self.config), self.processors))
        for processor, name in zip(processors, steps.NORMALIZERS, strict=True):
            step: Any = steps.find_step(processor, name)  # which names no file where there were no statistics
            step["state_file"] = steps.state_file(step) or f"policy_{name}.safetensors"
        for part, name in (("output_features", ACTION), ("input_features", STATE)):
            config[part][name]["shape"] = list(tensors[f"{name}.mean"].shape)  # which LeRobot cuts actions by
        return replace(self, config=config, processors=processors, tensors=(tensors, tensors))

    def write(self, folder: Path, weights: Mapping[str, Tensor], options: Mapping[str, Any]) -> list[str]:
        """Write a folder in this layout; returns names of the files. Of sharded weights all processes must call it.

        ``weights`` are named as the module's, the unused ones included.
        """
        config = {entry: options[name] for name, entry in self._entries.items() if name in options}
        if "use_peft" in self.config:  # LeRobot would look for an adapter beside whole weights
            config["use_peft"] = False
        place = steps.tokenizer_folder(steps.find_step(self.processors[0], steps.TOKENIZER))
        normalizers = map(steps.find_step, self.processors, steps.NORMALIZERS)
        states = [steps.state_file(step) for step in normalizers]
        files = {
            CONFIG: {**self.config, **config},
            OPTIONS: options,
            **dict(zip(steps.PROCESSORS, self.processors, strict=True)),
            **{state: tensors for state, tensors in zip(states, self.tensors, strict=True) if state is not None},
            **{f"{place}/{name}": content for name, content in self.tokenizer.items()},
            **self.other_files,
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


def _read_buffers(entries: Mapping[str, Entry]) -> dict[str, Tensor]:
    """Read statistics of states and actions, whose names have no dots, by the names of today's files."""
    found = {}
    for feature, prefix in ((STATE, _BUFFERS[0]), (ACTION, _BUFFERS[1]), (ACTION, _BUFFERS[2])):
        old = f"{prefix}{feature.replace('.', '_')}."
        for key in (key for key in entries if key.startswith(old)):
            found[f"{feature}.{key.removeprefix(old)}"] = entries[key].check_finite(entries[key].read())
    return found
