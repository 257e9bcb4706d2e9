"""What flow policies on a Vision-Language-Model share: a prefix computed once, an expert, heads beside the network."""

import warnings
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.nn import functional as F

from vla_common import keys
from vla_policies.checkpoint.report import Report
from vla_policies.checkpoint.weights import Entry, load_weights
from vla_policies.flow.config import VLMFlowConfig
from vla_policies.flow.memory import PREFIX_ROWS, decision_memory
from vla_policies.flow.policy import FlowPolicy
from vla_policies.flow.prefix import PrefixCache
from vla_policies.flow.steps import NOISE_WIDTHS, NoiseNetwork
from vla_policies.memory import DecisionMemory
from vla_policies.nn.blocks import make_value_layers
from vla_policies.pretrained import PretrainedPolicy
from vla_policies.processing.adapters import Adapter
from vla_policies.processing.model_images import CAMERAS, ModelImages
from vla_policies.processing.prompts import PromptTokens
from vla_policies.sharding import ShardGroup

_VALUE_WIDTHS = (512, 256, 128)  # of the value head's layers: RLinf's


@dataclass(frozen=True)
class Observed:
    """A batch as the action expert sees it."""

    prefix: PrefixCache
    state: Tensor  # normalised and padded
    pooled: Tensor | None  # what a value head reads of the prefix


class VLMFlowPolicy(ModelImages, FlowPolicy, PretrainedPolicy):
    """A flow policy of a published checkpoint, whose VLM reads images and prompt and may be frozen.

    Actions and states are padded with zeros to the network's size; probabilities are of the executed actions' real
    dimensions only. A family's network is a :class:`~vla_policies.flow.prefix.PrefixModel` with ``config``; its
    checkpoint has :class:`~vla_policies.flow.heads.StoredHeads`.

    Attributes:
        vlm_name: in messages.
        reads_state: the language model reads the state, after images and prompt.
    """

    vlm_name: ClassVar[str]
    reads_state: ClassVar[bool] = False
    head_names = ("value_head", "noise_network")
    lora_targets: ClassVar[tuple[str, ...]] = (
        *("q_proj", "k_proj", "v_proj", "o_proj", "out_proj"),
        *("gate_proj", "up_proj", "down_proj", "fc1", "fc2"),
    )

    model: Any
    config: Any
    folder: Any
    prompts: PromptTokens
    statistics: Any
    lists_states: bool = False  # prompts list the state behind the instruction (pi0.5)
    keeps_pooled: bool = False  # without a value head that reads the prefix too

    def __init__(self, model: Any, folder: Any, config: VLMFlowConfig, adapter: Adapter, *, horizon: int, images: int):
        sizes, stored, cameras = model.config, folder.heads, adapter.camera_keys(images)
        if adapter.action_dim > sizes.action_dim or adapter.state_dim > sizes.state_dim:
            room = min(sizes.action_dim, sizes.state_dim)
            raise ValueError(f"the checkpoint has room for {room} numbers, {adapter.benchmark} needs more")
        noise_sizes = stored.sizes("noise_network")
        super().__init__(
            config,
            chunk_size=config.num_action_chunks,
            horizon=horizon,
            model_action_dim=sizes.action_dim,
            trained_dims=adapter.action_dim,
            hidden_size=sizes.expert.width,
            noise_widths=NOISE_WIDTHS if noise_sizes is None else noise_sizes[1:-1],
        )
        if self.noise_network is not None:
            stored.check_noise_range(config.noise_std_range)
        self.config, self.folder, self.unused_tensors = config, folder, {}
        self.model, self.adapter, self.num_images = model, adapter, images
        self.action_dim, self.state_dim = adapter.action_dim, adapter.state_dim
        self.in_keys = [*cameras, keys.STATES, keys.TASK_DESCRIPTIONS]
        self.out_keys = [keys.MODEL_IMAGES, *self.out_keys]
        self.loss_keys = (keys.MODEL_IMAGES, keys.STATES, keys.PROMPT_TOKENS, *self.drawn_keys)
        model.set_gradient_checkpointing(config.gradient_checkpointing)
        self.freeze()
        if config.value_head:
            widths = sizes.language.width, sizes.expert.width
            stored.check_value_input(config.value_after_vlm, *widths, self.vlm_name)
        self.value_head = self._make_value_head()

    # ---- what a family says

    @abstractmethod
    def pixels(self, tensordict: TensorDictBase) -> Tensor:
        """Return the cameras as the network sees them: float32 ``[N, n, 3, h, w]`` from -1 to 1."""

    @abstractmethod
    def decision_sizes(self) -> tuple[int, int]:
        """Return how many images a decision has and tokens the expert reads, also of a policy without numbers."""

    @classmethod
    @abstractmethod
    def published_model(cls, **settings: Any) -> nn.Module:
        """Build a model of the published sizes; SettingError where the ``settings`` do not say which."""

    def value_widths(self) -> tuple[int, ...]:
        """Return the widths between, of the layers of a new value head."""
        return _VALUE_WIDTHS

    def decision_memory(self) -> DecisionMemory:
        images, tokens = self.decision_sizes()
        return decision_memory(self.model, self.config, self.prefix_is_frozen, images, tokens, state=self.reads_state)

    # ---- inspection

    @classmethod
    def describe(cls, folder: Path) -> Report:
        report = Report({"family": cls.family})
        try:
            checkpoint: Any = cls.read_checkpoint(folder)
            report.facts |= checkpoint.describe()
            checkpoint.check_statistics()
            model, entries = checkpoint.empty_model()
            unused = cast(Callable[[str], bool], cls.unused)  # which needs no policy
            load_weights(model, entries, unused=unused, what=str(folder), check=True)
        except (FileNotFoundError, ValueError) as error:
            report.missing.append(str(error))
        return report

    @classmethod
    def meta_model(cls, folder: Path | None, settings: Mapping[str, Any]) -> tuple[nn.Module, Any, dict[str, Any]]:
        if folder is not None:
            checkpoint: Any = cls.read_checkpoint(folder)
            said = {name: value for name, value in checkpoint.options.items() if value is not None}
            return checkpoint.empty_model()[0], checkpoint, {**checkpoint.settings, **said}
        with torch.device("meta"):
            return cls.published_model(**settings), None, {}

    # ---- heads, freezing, several GPUs

    def load_heads(self, entries: dict[str, Entry]) -> dict[str, Entry]:
        stored, heads = self.folder.heads, self.heads()
        stored.load(heads)
        taken = stored.keys_of(heads)  # heads that are not built are written again as they were
        return {key: entry for key, entry in entries.items() if key not in taken}

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
        stored = None if self.folder is None else self.folder.heads.sizes("value_head")
        width = (self.model.config.language if self.config.value_after_vlm else self.model.config.expert).width
        between = self.value_widths() if stored is None else stored[1:-1]
        return make_value_layers((width, *between, 1), nn.ReLU, bias_last=True)

    def freeze(self) -> None:
        if self.config.train_expert_only:
            self.model.vlm.requires_grad_(False)

    def lora_layers(self, targets: Sequence[str]) -> list[str]:
        names, expert = super().lora_layers(targets), f"{self.model.expert_path}."
        return [name for name in names if name.startswith(expert) or not self.config.train_expert_only]

    def shard_groups(self) -> list[ShardGroup]:
        # SigLIP's embeddings, final norms and all that actions, state and time pass outside the stacks are in the root.
        model = self.model
        groups = [*model.vision.encoder.layers, model.vision.post_layernorm, model.projector]
        groups += [model.language.embed_tokens, *model.language.layers, *model.expert.layers]
        return [ShardGroup(module) for module in groups]

    # ---- observations

    @property
    def model_image_size(self) -> tuple[int, int]:
        return (self.model.config.vision.image_size,) * 2

    def prompt_tokens(self, task_descriptions: Sequence[str], states: Tensor | None = None) -> Tensor:
        listed = None
        if self.lists_states:
            if states is None:
                name = getattr(self.config, "config_name", self.family)
                raise ValueError(f"prompts of {name} list the state; pass states")
            listed = self.statistics.normalize("state", self.adapter.joints.states(states))
        return self.prompts(task_descriptions, listed).to(self.device)

    def _prefix(self, tensordict: TensorDictBase) -> tuple[PrefixCache, Tensor | None]:
        """Return what :meth:`precompute` kept of images and prompt, or compute it; and what the value head reads."""
        if (stored := PrefixCache.from_entries(tensordict)) is not None:
            return stored, tensordict.get(keys.PREFIX_POOLED, None)
        tokens = tensordict.get(keys.PROMPT_TOKENS)
        valid = tokens != self.prompts.padding
        longest = int(valid.sum(1).max())
        read = self.keeps_pooled or bool(self.value_head is not None and self.config.value_after_vlm)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.prefix_is_frozen):
            inputs = self.pixels(tensordict), tokens[:, :longest], valid[:, :longest]
            prefix = self.model.prefix(*inputs, output=read)
        return prefix, prefix.mean() if read else None

    @property
    def vision_features(self) -> nn.Module | None:
        """What makes tokens of images, if it is trained."""
        return None if self.prefix_is_frozen else self.model.projector

    # ---- the prefix of a frozen VLM, kept during an update

    @property
    def prefix_is_frozen(self) -> bool:
        """Whether nothing of the VLM is trained."""
        return not any(p.requires_grad for p in self.model.vlm.parameters())

    def precompute(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Add what a frozen VLM makes of each decision, if ``prefix_cache_gb`` suffice."""
        if not self.prefix_is_frozen:
            return tensordict
        longest = int((tensordict.get(keys.PROMPT_TOKENS) != self.prompts.padding).sum(1).max())
        language, length = self.model.config.language, self.num_images * self.model.config.image_tokens + longest
        numbers = 2 * language.depth * language.kv_heads * language.head_dim * length
        needed = len(tensordict) * numbers * self.model.dtype.itemsize
        if needed > self.config.prefix_cache_gb * 1e9:
            warnings.warn(
                f"what {self.vlm_name} makes of {len(tensordict)} decisions takes {needed / 1e9:.1f} GB, more than "
                f"prefix_cache_gb={self.config.prefix_cache_gb}: it is computed again for each minibatch",
                stacklevel=2,
            )
            return tensordict
        read = tensordict.select(keys.MODEL_IMAGES, *CAMERAS, keys.PROMPT_TOKENS, strict=False)
        kept: dict[Any, Tensor] = {}
        for start, part in zip(range(0, len(read), PREFIX_ROWS), read.split(PREFIX_ROWS), strict=True):
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

    # ---- flow

    def observe(self, tensordict: TensorDictBase) -> Observed:
        states = self.statistics.normalize("state", self.adapter.states(tensordict))
        state = F.pad(states, (0, self.model.config.state_dim - self.state_dim))
        prefix, pooled = self._prefix(tensordict)
        return Observed(prefix, state, pooled)

    def velocity(self, observed: Observed, noisy: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
        return self.model.velocity(observed.prefix, noisy, time, observed.state)

    def repeat(self, observed: Observed, count: int) -> Observed:
        pooled = None if observed.pooled is None else observed.pooled.repeat_interleave(count, dim=0)
        return Observed(observed.prefix.repeat(count), observed.state.repeat_interleave(count, dim=0), pooled)

    def keep_features(self) -> int:
        self.keeps_pooled = True
        return self.model.config.language.width + self.model.config.state_dim

    def features(self, observed: Observed) -> Tensor:
        assert observed.pooled is not None  # since keep_features
        pooled = observed.pooled.float()
        return torch.cat([F.layer_norm(pooled, pooled.shape[1:]), observed.state.float()], dim=1)

    def value(self, observed: Observed, hidden: Tensor) -> Tensor | None:
        if self.value_head is None:
            return None
        features = observed.pooled if self.config.value_after_vlm else hidden.float().mean(1)
        assert features is not None  # pooled for the value head
        return self.value_head(features.detach() if self.config.detach_critic else features)
