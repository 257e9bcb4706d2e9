"""pi0 and pi0.5: flow-matching Vision-Language-Action policies that load openpi's PyTorch checkpoints."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.nn import functional as F

from vla_common import keys
from vla_policies.checkpoint.weights import Entry
from vla_policies.flow.heads import save_heads
from vla_policies.flow.policy import FlowPolicy
from vla_policies.flow.steps import NOISE_WIDTHS, NoiseNetwork
from vla_policies.memory import DecisionMemory
from vla_policies.nn.value_head import make_value_layers
from vla_policies.pi0.checkpoint import Pi0Checkpoint, is_pi0, is_unused
from vla_policies.pi0.config import Pi0Config
from vla_policies.pi0.inspection import decision_memory, describe_checkpoint, make_meta_model
from vla_policies.pi0.model import EXPERT, Pi0Model, PrefixCache, stays_float32
from vla_policies.pi0.presets import FAMILY, get_adapter, get_preset
from vla_policies.pi0.prompts import PAD, Pi0Prompts
from vla_policies.pretrained import PretrainedPolicy
from vla_policies.processing.images import resize_with_pad
from vla_policies.processing.model_images import CAMERAS, ModelImages
from vla_policies.processing.normalization import summarise
from vla_policies.sharding import ShardGroup, compute_device

_VALUE_WIDTHS = (512, 256, 128)  # of the value head's layers: RLinf's
_ROWS = 32  # decisions per pass of a frozen PaliGemma


@dataclass(frozen=True)
class _Observed:
    """A batch as the action expert sees it."""

    prefix: PrefixCache
    state: Tensor
    pooled: Tensor | None


class Pi0(ModelImages, FlowPolicy, PretrainedPolicy):
    """Both variants; the checkpoint tells which one it is.

    Actions and states are padded with zeros to the network's size; probabilities are of the executed actions' real
    dimensions only.

    Example:
        >>> policy = Pi0.from_pretrained("checkpoints/pi05-libero", benchmark="libero", config_name="pi05_libero")
    """

    family: ClassVar[str] = FAMILY
    config_class: ClassVar[type[Pi0Config]] = Pi0Config
    checkpoint_settings: ClassVar[tuple[str, ...]] = (
        *("config_name", "adapt_to_pi", "num_images_in_input", "action_horizon"),
    )
    head_names = ("value_head", "noise_network")
    needed_settings: ClassVar[Mapping[str, str]] = {"benchmark": "libero", "config_name": "pi05_libero"}
    lora_targets: ClassVar[tuple[str, ...]] = (
        *("q_proj", "k_proj", "v_proj", "o_proj", "out_proj"),
        *("gate_proj", "up_proj", "down_proj", "fc1", "fc2"),
    )

    model: Pi0Model
    config: Pi0Config

    def __init__(self, model: Pi0Model, folder: Pi0Checkpoint, config: Pi0Config):
        preset = get_preset(config.config_name)
        if preset.pi05 != model.config.pi05:
            kind = "pi0.5" if model.config.pi05 else "pi0"
            raise ValueError(f"the checkpoint is of {kind}, config_name is {config.config_name!r}; set its own")
        if preset.benchmark != config.benchmark:
            raise ValueError(f"{config.config_name} is for {preset.benchmark}, not for {config.benchmark!r}")
        adapter, size = get_adapter(config.config_name, config.adapt_to_pi), model.config.action_dim
        cameras = adapter.camera_keys(config.num_images_in_input)
        if max(adapter.action_dim, adapter.state_dim) > size:
            raise ValueError(f"the checkpoint has room for {size} numbers, {config.benchmark} needs more")
        horizon = config.action_horizon
        if horizon is None:
            horizon = folder.config.get("action_horizon", preset.horizon)
        width, stored = model.config.expert.width, folder.heads
        noise_sizes = stored.sizes("noise_network")
        super().__init__(
            config,
            chunk_size=config.num_action_chunks,
            horizon=horizon,
            model_action_dim=size,
            trained_dims=adapter.action_dim,
            hidden_size=width,
            noise_widths=NOISE_WIDTHS if noise_sizes is None else noise_sizes[1:-1],
        )
        if self.noise_network is not None:
            stored.check_noise_range(config.noise_std_range)
        self.preset, self.adapter = preset, adapter
        self.action_dim, self.state_dim = adapter.action_dim, adapter.state_dim
        self.config, self.folder, self.unused_tensors = config, folder, {}
        self.statistics = folder.select_statistics(config.norm_stats_id, quantiles=preset.pi05)
        self.statistics.check(self.state_dim, self.action_dim)
        longest = (200 if preset.pi05 else 48) if config.max_prompt_length is None else config.max_prompt_length
        self.prompts = Pi0Prompts(folder.tokenizer, longest)
        self.in_keys = [*cameras, keys.STATES, keys.TASK_DESCRIPTIONS]
        self.out_keys = [keys.MODEL_IMAGES, *self.out_keys]
        self.loss_keys = (keys.MODEL_IMAGES, keys.STATES, keys.PROMPT_TOKENS, *self.drawn_keys)
        self.model = model
        model.set_gradient_checkpointing(config.gradient_checkpointing)
        self.freeze()
        self.num_values = 1 if config.value_head else 0
        if config.value_head:
            stored.check_value_input(config.value_after_vlm, model.config.language.width, width, "PaliGemma")
        self.value_head = self._make_value_head()

    def shard_groups(self) -> list[ShardGroup]:
        # SigLIP's embeddings, final norms and all that actions, state and time pass outside the stacks are in the root.
        model = self.model
        groups = [*model.vision.encoder.layers, model.vision.post_layernorm, model.projector]
        groups += [model.language.embed_tokens, *model.language.layers, *model.expert.layers]
        return [ShardGroup(module) for module in groups]

    recognises = staticmethod(is_pi0)
    describe = staticmethod(describe_checkpoint)
    read_checkpoint = staticmethod(Pi0Checkpoint.read)
    meta_model = staticmethod(make_meta_model)
    unused = staticmethod(is_unused)
    needs_float32 = staticmethod(stays_float32)

    def write_checkpoint(self, folder: Path, weights: Mapping[str, Tensor], options: Mapping[str, Any]) -> list[str]:
        entries = {"action_horizon": self.horizon, "vision_heads": self.model.config.vision.heads}
        files = self.folder.write(folder, weights, options, {**entries, "model_type": self.family})
        return [*files, save_heads(folder, self.heads(), self.noise_level, self.parameters())]

    def check_heads(self, entries: dict[str, Entry]) -> dict[str, Entry]:
        self.folder.heads.load(self.heads(), check=True)
        taken = self.folder.heads.keys_of(self.heads())  # of heads that are not built: written again as they were
        return {key: entry for key, entry in entries.items() if key not in taken}

    def load_heads(self, entries: Mapping[str, Entry], settings: Mapping[str, Any]) -> None:
        self.folder.heads.load(self.heads())
        level = self.folder.heads.noise_level
        if level is not None and not settings.keys() & {"noise_level", "noise_anneal"}:
            self.noise_level.copy_(level.read())

    def make_heads(self) -> None:
        widths = None if self.folder is None else self.folder.heads.sizes("noise_network")
        self.noise_network = None
        if self.config.method == "flow_noise":
            sizes, bounds = self.model.config, self.config.noise_std_range
            inner = NOISE_WIDTHS if widths is None else widths[1:-1]
            self.noise_network = NoiseNetwork(sizes.expert.width, sizes.action_dim, bounds, inner)
        self.value_head = self._make_value_head()

    def _make_value_head(self) -> nn.Module | None:
        if not self.config.value_head:
            return None
        name, stored = getattr(self.config, "config_name", None), None
        if self.folder is not None:
            stored = self.folder.heads.sizes("value_head")
        between = (get_preset(name).value_head if name else None) or _VALUE_WIDTHS
        width = (self.model.config.language if self.config.value_after_vlm else self.model.config.expert).width
        return make_value_layers((width, *(between if stored is None else stored[1:-1]), 1), nn.ReLU, bias_last=True)

    def decision_memory(self) -> DecisionMemory:
        return decision_memory(self.model, self.config, self.prefix_is_frozen)

    def freeze(self) -> None:
        if self.config.train_expert_only:
            self.model.paligemma.requires_grad_(False)

    @property
    def device(self) -> torch.device:
        return compute_device(self.model.action_in_proj.weight)

    def lora_layers(self, targets: Sequence[str]) -> list[str]:
        names = [name for name, _ in self.model.named_modules() if name.rpartition(".")[2] in targets]
        return [name for name in names if name.startswith(EXPERT) or not self.config.train_expert_only]

    # ---- observations

    def prompt_tokens(self, task_descriptions: Sequence[str], states: Tensor | None = None) -> Tensor:
        if not self.preset.state_in_prompt:
            return self.prompts(task_descriptions).to(self.device)
        if states is None:
            raise ValueError(f"prompts of {self.config.config_name} list the state; pass states")
        states = self.adapter.joints.states(states)
        return self.prompts(task_descriptions, self.statistics.normalize("state", states)).to(self.device)

    def observe(self, tensordict: TensorDictBase) -> _Observed:
        states = self.statistics.normalize("state", self.adapter.states(tensordict))
        state = F.pad(states, (0, self.model_action_dim - self.state_dim))
        if (stored := PrefixCache.from_entries(tensordict)) is not None:
            return _Observed(stored, state, tensordict.get(keys.PREFIX_POOLED, None))
        prefix, pooled = self._prefix(tensordict)
        return _Observed(prefix, state, pooled)

    def _prefix(self, tensordict: TensorDictBase) -> tuple[PrefixCache, Tensor | None]:
        tokens = tensordict.get(keys.PROMPT_TOKENS)
        valid = tokens != PAD
        longest = int(valid.sum(1).max())
        tokens, valid = tokens[:, :longest], valid[:, :longest]
        images = self.model_images(tensordict).permute(0, 1, 4, 2, 3).float() / 127.5 - 1.0
        read = self.config.value_after_vlm if self.value_head is not None else None
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.prefix_is_frozen):
            prefix = self.model.prefix(images, None, tokens, valid, output=read is not None)
        return prefix, None if read is None else prefix.pool(read)

    @property
    def model_image_size(self) -> tuple[int, int]:
        return (self.model.config.vision.image_size,) * 2

    def cameras(self, tensordict: TensorDictBase) -> list[Tensor]:
        return self.adapter.cameras(tensordict, self.config.num_images_in_input)

    def resize_cameras(self, cameras: Sequence[Tensor]) -> Tensor:
        return torch.stack([resize_with_pad(camera, self.model_image_size) for camera in cameras], dim=1)

    # ---- the prefix of a frozen PaliGemma, kept during an update

    @property
    def prefix_is_frozen(self) -> bool:
        """Whether nothing of PaliGemma is trained."""
        return not any(p.requires_grad for p in self.model.paligemma.parameters())

    def precompute(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Add what a frozen PaliGemma makes of each decision, if ``prefix_cache_gb`` suffice."""
        if not self.prefix_is_frozen:
            return tensordict
        longest = int((tensordict.get(keys.PROMPT_TOKENS) != PAD).sum(1).max())
        needed = self.prefix_bytes(len(tensordict), longest)
        if needed > self.config.prefix_cache_gb * 1e9:
            warnings.warn(
                f"what PaliGemma makes of {len(tensordict)} decisions takes {needed / 1e9:.1f} GB, more than "
                f"prefix_cache_gb={self.config.prefix_cache_gb}: it is computed again for each minibatch",
                stacklevel=2,
            )
            return tensordict
        length = self.config.num_images_in_input * self.model.config.vision.num_patches + longest
        read = tensordict.select(keys.MODEL_IMAGES, *CAMERAS, keys.PROMPT_TOKENS, strict=False)
        kept: dict[Any, Tensor] = {}
        for start, part in zip(range(0, len(read), _ROWS), read.split(_ROWS), strict=True):
            with torch.no_grad():
                prefix, pooled = self._prefix(part.to(self.device))
            entries = prefix.to_entries(length) | ({} if pooled is None else {keys.PREFIX_POOLED: pooled})
            for key, entry in entries.items():
                if key not in kept:  # room for all, so that they are never held twice
                    kept[key] = entry.new_empty(len(read), *entry.shape[1:])
                kept[key][start : start + len(part)] = entry
        for key, entry in kept.items():
            tensordict.set(key, entry)
        return tensordict

    def prefix_bytes(self, decisions: int, prompt_length: int) -> int:
        """Return bytes of keys and values that :meth:`precompute` keeps."""
        language = self.model.config.language
        tokens = self.config.num_images_in_input * self.model.config.vision.num_patches + prompt_length
        numbers = 2 * language.depth * language.kv_heads * language.head_dim * tokens
        return decisions * numbers * self.model.dtype.itemsize

    # ---- flow

    def repeat(self, observed: _Observed, count: int) -> _Observed:
        pooled = None if observed.pooled is None else observed.pooled.repeat_interleave(count, dim=0)
        return _Observed(observed.prefix.repeat(count), observed.state.repeat_interleave(count, dim=0), pooled)

    def velocity(self, observed: _Observed, noisy: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
        return self.model.velocity(observed.prefix, noisy, time, observed.state)

    def value(self, observed: _Observed, hidden: Tensor | None) -> Tensor | None:
        if self.value_head is None:
            return None
        features = observed.pooled
        if features is None:
            assert hidden is not None  # a value head that does not read the prefix reads the expert
            read = hidden[:, : self.chunk_size] if self.config.chunk_critic_input else hidden
            features = read.float().mean(1)
        return self.value_head(features.detach() if self.config.detach_critic else features)

    def to_simulator(self, actions: Tensor, states: Tensor) -> Tensor:
        actions = self.statistics.unnormalize("actions", actions)
        return self.adapter.to_simulator(actions + self._offset(states))

    def to_model(self, actions: Tensor, states: Tensor) -> Tensor:
        return self.statistics.normalize("actions", self.adapter.to_model(actions) - self._offset(states))

    def take_statistics(self, name: str, actions: Tensor, states: Tensor, step_mask: Tensor) -> None:
        """``name`` becomes the ``norm_stats_id``; as openpi's, statistics are of relative actions."""
        relative = self.adapter.to_model(actions) - self._offset(states)
        entry = {"actions": summarise(relative[step_mask]), "state": summarise(self.adapter.joints.states(states))}
        self.folder = replace(self.folder, statistics={**self.folder.statistics, name: entry})
        self.config = replace(self.config, norm_stats_id=name)
        self.statistics = self.folder.select_statistics(name, quantiles=self.preset.pi05)
        self.statistics.check(self.state_dim, self.action_dim)

    def _offset(self, states: Tensor) -> Tensor:
        """Return what relative actions are relative to, ``[N, 1, A]``: the model's states, as openpi adapts them."""
        offset = states.new_zeros(len(states), 1, self.action_dim)
        relative = list(self.preset.relative)
        offset[:, 0, relative] = self.adapter.joints.states(states)[:, relative]
        return offset
