"""What the policies OpenVLA and OpenVLA-OFT share: everything but how a decision is decoded."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torchrl.envs.utils import ExplorationType, exploration_type

from vla_common import keys
from vla_common.checksums import verify_checksums, write_checksums
from vla_common.schema import EnvironmentShape
from vla_common.texts import to_strings
from vla_policies.checkpoint.hub import resolve
from vla_policies.checkpoint.lora import (
    ADAPTER,
    fill_adapter,
    has_lora,
    plain_weights,
    put_stored_adapter,
    save_adapter,
)
from vla_policies.checkpoint.parts import check_finite, in_first
from vla_policies.checkpoint.report import Report
from vla_policies.checkpoint.settings import SettingError, dtype_name, merge_settings, saved_dtype
from vla_policies.checkpoint.weights import cast, check_weights, load_weights
from vla_policies.nn.value_head import ValueHead
from vla_policies.openvla.config import OpenVLAConfig
from vla_policies.openvla.describe import describe
from vla_policies.openvla.film import FILE as FILM_FILE
from vla_policies.openvla.film import Adapted, write_film
from vla_policies.openvla.folder import VALUE_HEAD, OpenVLAFolder, family_of
from vla_policies.openvla.loading import check_heads, empty_model, load_heads, save_heads, unused_by
from vla_policies.openvla.model import Prismatic
from vla_policies.openvla.outline import cache_bytes, find_model, make_heads, stacks_of
from vla_policies.openvla.prompts import Prompts
from vla_policies.outline import Outline
from vla_policies.policy import PretrainedPolicy, Sharding
from vla_policies.processing.action_tokens import ActionTokens
from vla_policies.processing.adapters import get_adapter, published_settings
from vla_policies.processing.images import ImagePreprocessor
from vla_policies.processing.model_images import ModelImages
from vla_policies.processing.normalization import ACTION, PROPRIO, ActionStatistics, summarise
from vla_policies.processing.sampling import TokenDistribution, action_distribution, check_sampling
from vla_policies.sharding import ShardGroup, compute_device, place, storage_device

_VISION = ("proj", "qkv", "fc1", "fc2")
_PROJECTOR = ("fc1", "fc2", "fc3")
_LANGUAGE = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head")


class PrismaticPolicy(ModelImages, PretrainedPolicy):
    """Prompt, images, statistics, sampling and checkpoints of the two OpenVLA policies.

    Action tokens are relative, 0 to 255, of all dimensions that the model predicts; ``action`` has those of the
    simulator. Tokens are drawn under ``ExplorationType.RANDOM`` and outside of any ``set_exploration_type``; any other
    type takes the likeliest ones.

    Args:
        model: its parameters may still be on the meta device.
        folder: the checkpoint's configuration, statistics and tokenizer.
        config: settings.
        chunk_size, num_images: of a decision.
        num_values: of the value head, if there is one.
        reads_states: whether proprioception is an input.

    Raises:
        ValueError: settings that do not fit the checkpoint or the benchmark.
    """

    config_class: ClassVar[type[OpenVLAConfig]] = OpenVLAConfig
    checkpoint_settings: ClassVar[tuple[str, ...]] = ("statistics",)
    sample_key = keys.ACTION_TOKENS
    lora_targets: ClassVar[tuple[str, ...]] = tuple(dict.fromkeys(_VISION + _PROJECTOR + _LANGUAGE))

    model: Prismatic
    config: OpenVLAConfig

    def __init__(
        self,
        model: Prismatic,
        folder: OpenVLAFolder,
        config: OpenVLAConfig,
        *,
        chunk_size: int = 1,
        num_values: int = 1,
        num_images: int = 1,
        reads_states: bool = False,
    ):
        super().__init__()
        self.tokens = ActionTokens()
        check_sampling(config.temperature, config.top_k, self.tokens.num_tokens)
        self.adapter = get_adapter(config.benchmark, "openvla")
        self.config, self.folder = config, folder
        self.unused_tensors: dict[str, Tensor] = {}
        self.film: Adapted | None = None  # of a checkpoint with FiLM: how its file is written again
        self.statistics = ActionStatistics.from_json(folder.statistics, config.unnorm_key, config.statistics)
        self.token_dim = len(self.statistics.action)
        if config.action_dim not in (None, self.token_dim):
            raise ValueError(
                f"action_dim is {config.action_dim}, but the statistics {self.statistics.key!r} of the checkpoint have "
                f"{self.token_dim} dimensions; leave action_dim out or choose another unnorm_key"
            )
        self.adapter.check_statistics(self.statistics)
        if num_images > self.adapter.max_images:
            raise ValueError(
                f"num_images_in_input is {num_images} and {config.benchmark} has {self.adapter.max_images} cameras; "
                "set it as the checkpoint was trained, and choose a benchmark that has them"
            )
        cameras = (keys.IMAGES, keys.WRIST_IMAGES)[: min(num_images, 2)]
        self.in_keys = [*cameras, *([keys.STATES] if reads_states else []), keys.TASK_DESCRIPTIONS]
        self.out_keys = [keys.MODEL_IMAGES, keys.PROMPT_TOKENS, keys.ACTION_TOKENS, keys.ACTION, keys.ACTION_LOG_PROB]
        self.out_keys += [keys.STATE_VALUE] if config.value_head else []
        states = (keys.STATES,) if reads_states else ()
        self.loss_keys = (keys.MODEL_IMAGES, *states, keys.PROMPT_TOKENS, keys.ACTION_TOKENS)
        self.chunk_size, self.num_images = chunk_size, num_images
        self.action_dim, self.state_dim = self.adapter.action_dim, self.adapter.state_dim
        self.preprocessor = ImagePreprocessor.from_config(
            folder.preprocessor,
            resize_method=config.image_resize,
            fast=config.fast_resize,
            crop=config.center_crop,
        )
        self.prompts = Prompts(folder.path, config.max_prompt_length)
        self.model = model
        model.set_gradient_checkpointing(config.gradient_checkpointing)
        self.num_values = num_values if config.value_head else 0
        hidden_size = model.config.language.hidden_size
        self.value_head = ValueHead(hidden_size, num_values) if config.value_head else None

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        lora_adapter: str | Path | None = None,
        shard: Sharding | None = None,
        **settings: Any,
    ) -> Self:
        """Load a checkpoint in the published layout. Everything is checked before a tensor is read.

        Args:
            folder: local folder, or hub id, in the layout of :mod:`vla_policies.openvla.folder`.
            dtype: of the model, ``None`` for what it was saved with here, or float32; the heads are float32.
            device: of the policy.
            lora_adapter: folder of a peft adapter to apply and continue training. One that :meth:`save_pretrained`
                wrote is applied by itself; one that is published beside weights is not: it is merged into them already.
            shard: see :meth:`PretrainedPolicy.from_pretrained`.
            **settings: fields of :attr:`config_class`; what the checkpoint was saved with is the default.

        Raises:
            FileNotFoundError: no checkpoint, or a part of it is missing.
            ValueError: settings, statistics, tokenizer or weights that do not fit.
        """
        verify_checksums(folder := resolve(folder))
        checkpoint = OpenVLAFolder.read(folder, cls.family)
        merged, stored = merge_settings(cls, checkpoint.path, checkpoint.options, settings)
        if "benchmark" not in merged:
            raise ValueError(
                f"{checkpoint.path} does not say which benchmark it acts in; set benchmark, such as 'libero'; recipes "
                "do so with policy=openvla or policy=openvla_oft"
            )
        config = cls.config_class(**cls.infer_settings(checkpoint, merged, stored))
        model, entries, film = empty_model(checkpoint)
        cast(model, saved_dtype(checkpoint.options) if dtype is None else dtype)
        policy = cls(model, checkpoint, config)
        adapter = put_stored_adapter(policy, checkpoint.path, checkpoint.options, lora_adapter)
        check_weights(model, entries, unused=unused_by(model))
        check_heads(checkpoint, policy.heads(), policy.value_head)
        if shard is not None:
            shard(policy)
        unused = load_weights(model, entries, device=storage_device(policy, device), unused=unused_by(model))
        policy.film = film
        policy.unused_tensors = {key: tensor for key, tensor in unused.items() if not key.startswith(VALUE_HEAD)}
        load_heads(checkpoint, policy.heads(), policy.value_head)
        place(policy, device)
        fill_adapter(policy, adapter)
        return policy

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the checkpoint's layout, and settings into ``vla_torchrl.json``.

        A LoRA adapter goes into ``lora_adapter/``; merge it first
        (:func:`vla_policies.checkpoint.lora.merge_adapter`) for weights that any OpenVLA code can load.

        Raises:
            ValueError: weights that are not finite.
        """
        folder, lora = Path(folder), has_lora(self)
        check_finite(self.state_dict(), f"the policy {self.family!r}")
        weights = {**plain_weights(self.model), **self.unused_tensors}
        if self.value_head is not None:
            weights |= {f"{VALUE_HEAD}{key}": tensor for key, tensor in self.value_head.state_dict().items()}
        dtype = dtype_name(self.model.language_model.model.norm.weight.dtype)
        options = {"family": self.family, **asdict(self.config), "dtype": dtype, ADAPTER: lora}
        files = []
        if self.film is not None:
            weights = write_film(folder, weights, self.film)
            files.append(FILM_FILE)
        files += self.folder.write(folder, weights=weights, options=options)
        files += save_heads(folder, self.heads())
        if lora:
            files += (f"{ADAPTER}/{name}" for name in save_adapter(self, folder / ADAPTER))
        in_first(self.parameters(), lambda: write_checksums(folder, files))

    def shard_groups(self) -> list[ShardGroup]:
        """Return embeddings, blocks of the vision backbone, projector, and layers of the language model.

        ``lm_head`` is in the root, because only some of its rows are read; what the last layer returns goes through
        the final norm, which is there too.
        """
        vision, language = self.model.vision_backbone, self.model.language_model.model
        *layers, last = language.layers
        groups = [language.embed_tokens, *vision.featurizer.blocks, *vision.fused_featurizer.blocks]
        groups += [self.model.projector, *layers]
        return [*(ShardGroup(module) for module in groups), ShardGroup(last, returns_float32=True)]

    def heads(self) -> dict[str, nn.Module | None]:
        """Return heads that have files of their own, by the names of these."""
        return {}

    @classmethod
    def recognises(cls, folder: Path) -> bool:
        """Tell whether a folder is of this family; published ones without OFT's parts count as OpenVLA's."""
        return family_of(folder) == cls.family

    @classmethod
    def describe(cls, folder: Path) -> Report:
        """Describe a folder and what it lacks; reads its small files and the headers of its weights."""
        return describe(OpenVLAFolder.read(folder))

    @classmethod
    def outline(cls, folder: Path | None = None, **settings: Any) -> Outline:
        """See :meth:`~vla_policies.policy.VLAPolicy.outline`."""
        model, said, source = find_model(folder, settings)
        settings = cls.complete_settings(folder, said, settings)
        policy = cls.outlined(model, make_heads(model.config.language.hidden_size, settings), settings)
        parallel = "num_action_chunks" in settings
        return Outline(
            source,
            policy,
            stacks_of(model, settings, causal=not parallel),
            stays=lambda name: not name.startswith("model.") or ".lora_" in name,
            cache=0 if parallel else cache_bytes(model, settings),
        )

    @classmethod
    def infer_settings(cls, checkpoint: OpenVLAFolder, settings: dict[str, Any], stored: bool) -> dict[str, Any]:
        """Add the settings that can be seen in a checkpoint, and those that all published ones of the benchmark have.

        Args:
            checkpoint: its folder.
            settings: what the user asks for over what was stored.
            stored: whether anything was; only then the class's defaults are what it was trained with.
        """
        if not stored:
            known = {entry.name for entry in fields(cls.config_class)}
            for name, value in published_settings(settings["benchmark"], "openvla").items():
                if name in known:
                    settings.setdefault(name, value)
        return settings

    def check_environment(self, shape: EnvironmentShape) -> None:
        """Refuse an environment that the policy cannot act in, such as one that crops what it crops itself."""
        super().check_environment(shape)
        cropped: bool | None = getattr(shape, "center_crop", None)
        if cropped and self.config.center_crop:
            raise SettingError(
                f"center_crop=true: the images of {shape.id} are cropped already (env.center_crop=true); type "
                "policy.center_crop=false"
            )
        if cropped is False and not self.config.center_crop:
            warnings.warn(
                f"nobody crops the images of {shape.id}, and published checkpoints see the middle 0.9 of their area: "
                "type env.center_crop=true for those",
                stacklevel=2,
            )

    @abstractmethod
    def action_states(self, tensordict: TensorDictBase, action_tokens: Tensor) -> Tensor:
        """Return the hidden states ``[N, C * A, hidden]`` that predict ``action_tokens`` ``[N, C, A]``, in one pass."""

    @abstractmethod
    def sample_actions(self, tensordict: TensorDictBase, greedy: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Return action tokens ``[N, C, A]``, their log-probability, and the state ``[N, hidden]`` for the value."""

    @torch.no_grad()
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        inputs = self.prepare_inputs(tensordict)
        greedy = exploration_type() not in (None, ExplorationType.RANDOM)
        tokens, log_prob, state = self.sample_actions(inputs, greedy)
        tensordict.set(keys.ACTION_TOKENS, tokens)
        tensordict.set(keys.ACTION_LOG_PROB, log_prob)
        tensordict.set(keys.ACTION, self.to_simulator(self.tokens.decode(tokens)))
        return self.write_value(tensordict, state)

    def prepare_inputs(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write ``model_images`` and ``prompt_tokens``; returns what the model reads, on its device."""
        inputs = self.shrink_images(tensordict.select(*self.in_keys[:-1], strict=False).to(self.device))
        inputs.set(keys.PROMPT_TOKENS, self.prompt_tokens(to_strings(tensordict)))
        for key in (keys.MODEL_IMAGES, keys.PROMPT_TOKENS):
            tensordict.set(key, inputs.get(key))
        return inputs

    @property
    def model_image_size(self) -> tuple[int, int]:
        return self.preprocessor.size

    def cameras(self, tensordict: TensorDictBase) -> list[Tensor]:
        return self.adapter.cameras(tensordict, self.num_images)

    def resize_cameras(self, cameras: Sequence[Tensor]) -> Tensor:
        return self.preprocessor.resize(cameras)

    def get_dist(self, tensordict: TensorDictBase) -> TokenDistribution:
        tokens = tensordict.get(keys.ACTION_TOKENS)
        return self.distribution(self._logits(self.action_states(tensordict, tokens)), tokens)

    def evaluate_actions(self, tensordict: TensorDictBase) -> tuple[Tensor, Tensor, Tensor | None]:
        tokens = tensordict.get(keys.ACTION_TOKENS)
        states = self.action_states(tensordict, tokens)
        dist = self.distribution(self._logits(states), tokens)
        return dist.log_prob(tokens), dist.entropy(), self.value(states[:, 0])

    def imitation_loss(self, tensordict: TensorDictBase, sigma: float) -> Tensor:
        """Return the cross-entropy ``[N, C]`` against demonstrated ``action`` ``[N, C, A]``, mean over dimensions.

        Args:
            tensordict: observations, ``prompt_tokens`` and ``action`` in the simulator's units.
            sigma: width of a soft label around the demonstrated token, as a fraction of half the range; 0 for the
                token alone, as the published models were trained.
        """
        tokens = self.tokens.encode(self.to_model(tensordict.get(keys.ACTION)))
        states = self.action_states(tensordict, tokens)
        log_prob = self._logits(states).log_softmax(-1)
        if not sigma:
            return -log_prob.gather(-1, tokens.unsqueeze(-1)).squeeze(-1).mean(-1)
        distance = torch.arange(self.tokens.num_tokens, device=tokens.device) - tokens.unsqueeze(-1)
        label = (-0.5 * (distance / (sigma * (self.tokens.num_tokens - 1) / 2)) ** 2).softmax(-1)
        return -(label * log_prob).sum(-1).mean(-1)

    def unused(self, key: str) -> bool:
        """Tell whether nothing reads a tensor of that name; adapters are judged like the weights that they adapt."""
        return self.model.config.vision.unused(key)

    def prompt_tokens(self, task_descriptions: Sequence[str], states: Tensor | None = None) -> Tensor:
        """Return tokens int64 ``[N, L]`` of ``N`` instructions."""
        return self.prompts(task_descriptions).to(self.device)

    @property
    def device(self) -> torch.device:
        """Of the parameters."""
        return compute_device(self.model.language_model.model.norm.weight)

    def distribution(self, logits: Tensor, chosen: Tensor | None = None) -> TokenDistribution:
        """Return the distribution of tokens of logits ``[..., 256]``; ``chosen`` ``[...]`` were drawn earlier."""
        return action_distribution(logits, self.config.temperature, self.config.top_k, chosen)

    def value(self, state: Tensor) -> Tensor | None:
        """Return values ``[N, num_values]`` of hidden states ``[N, hidden]`` of the last prompt token."""
        return None if self.value_head is None else self.value_head(state)

    def write_value(self, tensordict: TensorDictBase, state: Tensor) -> TensorDictBase:
        """Write ``state_value`` if there is a value head."""
        value = self.value(state)
        return tensordict if value is None else tensordict.set(keys.STATE_VALUE, value)

    def to_simulator(self, actions: Tensor) -> Tensor:
        """Convert normalised actions ``[N, C, A]`` of the model to actions of the simulator."""
        return self.adapter.to_simulator(self.statistics.unnormalize(actions))

    def to_model(self, actions: Tensor) -> Tensor:
        """Invert :meth:`to_simulator`."""
        return self.statistics.normalize(self.adapter.to_model(actions))

    def take_statistics(self, name: str, actions: Tensor, states: Tensor, step_mask: Tensor) -> None:
        """See :meth:`~vla_policies.policy.VLAPolicy.take_statistics`: ``name`` is the ``unnorm_key`` from here on.

        A gripper that is converted is either closed or open, and is not normalised.
        """
        gripper = None if self.adapter.gripper is None else self.adapter.gripper.dimension
        mask = [number != gripper for number in range(self.token_dim)]
        entry = {
            ACTION: {**summarise(self.adapter.to_model(actions)[step_mask]), "mask": mask},
            PROPRIO: summarise(self.adapter.joints.states(states)),
        }
        self.folder = replace(self.folder, statistics={**self.folder.statistics, name: entry})
        self.config = replace(self.config, unnorm_key=name)
        self.statistics = ActionStatistics.from_json(self.folder.statistics, name, self.config.statistics)

    def _prefix(
        self, tensordict: TensorDictBase, extra: Tensor | None = None, *, stop: bool = False
    ) -> tuple[Tensor, Tensor]:
        pixels = self.preprocessor.normalize(self.model_images(tensordict))
        return self.model.prefix(pixels, tensordict.get(keys.PROMPT_TOKENS), extra, stop=stop)

    def _logits(self, states: Tensor) -> Tensor:
        """Return logits ``[N, C, A, 256]`` of hidden states ``[N, C * A, hidden]``."""
        return self.model.action_logits(states).unflatten(1, (-1, self.token_dim))
