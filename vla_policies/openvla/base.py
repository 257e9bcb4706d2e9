"""What the policies OpenVLA and OpenVLA-OFT share: everything but how a decision is decoded."""

import warnings
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.envs.utils import ExplorationType, exploration_type

from vla_common import keys
from vla_common.schema import EnvironmentShape
from vla_policies.checkpoint.settings import SettingError
from vla_policies.checkpoint.weights import Entry
from vla_policies.memory import DecisionMemory
from vla_policies.nn.blocks import ValueHead
from vla_policies.openvla.checkpoint import OpenVLACheckpoint, Prompts, family_of, save_heads
from vla_policies.openvla.config import OpenVLAConfig
from vla_policies.openvla.film import FILE as FILM_FILE
from vla_policies.openvla.film import find_adapted, write_film
from vla_policies.openvla.inspection import decision_memory, describe_checkpoint, make_meta_model
from vla_policies.openvla.model import VALUE_HEAD, Prismatic
from vla_policies.pretrained import PretrainedPolicy
from vla_policies.processing.action_tokens import ActionTokens, TokenDistribution, soft_cross_entropy
from vla_policies.processing.adapters import get_adapter, published_settings
from vla_policies.processing.images import ImagePreprocessor
from vla_policies.processing.model_images import ModelImages
from vla_policies.processing.normalization import ACTION, PROPRIO, ActionStatistics, summarise
from vla_policies.sharding import ShardGroup

_VISION = ("proj", "qkv", "fc1", "fc2")
_PROJECTOR = ("fc1", "fc2", "fc3")
_LANGUAGE = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head")


class PrismaticPolicy(ModelImages, PretrainedPolicy):
    """Prompt, images, statistics, sampling and checkpoints of the two OpenVLA policies.

    Action tokens are relative, 0 to 255, of all dimensions that the model predicts; ``action`` has those of the
    simulator. Tokens are drawn under ``ExplorationType.RANDOM`` and outside of any ``set_exploration_type``; any other
    type takes the likeliest ones.

    The model's parameters may still be on the meta device. ValueError: ``config`` does not fit checkpoint or benchmark.
    """

    config_class: ClassVar[type[OpenVLAConfig]] = OpenVLAConfig
    checkpoint_settings: ClassVar[tuple[str, ...]] = ("statistics",)
    sample_key = keys.ACTION_TOKENS
    head_names: ClassVar[tuple[str, ...]] = ("value_head",)
    lora_targets: ClassVar[tuple[str, ...]] = tuple(dict.fromkeys(_VISION + _PROJECTOR + _LANGUAGE))

    model: Prismatic
    config: OpenVLAConfig

    def __init__(self, model: Prismatic, folder: OpenVLACheckpoint, config: OpenVLAConfig):
        super().__init__()
        self.tokens = ActionTokens()
        self.adapter = get_adapter(config.benchmark, "openvla")
        self.config, self.folder = config, folder
        self.unused_tensors: dict[str, Tensor] = {}
        self.film: dict[str, int] | None = None  # of a checkpoint with FiLM: how its file is written again
        self.statistics = ActionStatistics.from_json(folder.statistics, config.unnorm_key, config.statistics)
        self.token_dim = len(self.statistics.action)
        if config.action_dim not in (None, self.token_dim):
            raise ValueError(
                f"action_dim is {config.action_dim}, but the statistics {self.statistics.key!r} of the checkpoint have "
                f"{self.token_dim} dimensions; leave action_dim out or choose another unnorm_key"
            )
        self.adapter.check_statistics(self.statistics)
        num_images, states = config.num_images_in_input, (keys.STATES,) if config.use_proprio else ()
        self.in_keys = [*self.adapter.camera_keys(num_images), *states, keys.TASK_DESCRIPTIONS]
        self.out_keys = [keys.MODEL_IMAGES, keys.PROMPT_TOKENS, keys.ACTION_TOKENS, keys.ACTION, keys.ACTION_LOG_PROB]
        self.out_keys += [keys.STATE_VALUE] if config.value_head else []
        self.loss_keys = (keys.MODEL_IMAGES, *states, keys.PROMPT_TOKENS, keys.ACTION_TOKENS)
        self.chunk_size, self.num_images = config.num_action_chunks, num_images
        self.action_dim, self.state_dim = self.adapter.action_dim, self.adapter.state_dim
        self.preprocessor = ImagePreprocessor.from_config(
            folder.preprocessor, resize_method=config.image_resize, crop=config.center_crop
        )
        if self.preprocessor.size != (size := (model.config.vision.image_size,) * 2):
            raise ValueError(
                f"{folder.path} makes images {self.preprocessor.size}, its model takes {size}; copy it again"
            )
        self.prompts = Prompts(folder.path, config.max_prompt_length)
        self.model = model
        model.set_gradient_checkpointing(config.gradient_checkpointing)
        self.make_heads()

    def shard_groups(self) -> list[ShardGroup]:
        """``lm_head``, of which only some rows are read, and the final norm are in the root."""
        vision, language = self.model.vision_backbone, self.model.language_model.model
        *layers, last = language.layers
        groups = [language.embed_tokens, *vision.featurizer.blocks, *vision.fused_featurizer.blocks]
        groups += [self.model.projector, *layers]
        return [*(ShardGroup(module) for module in groups), ShardGroup(last, returns_float32=True)]

    @classmethod
    def recognises(cls, folder: Path) -> bool:
        return family_of(folder) == cls.family

    describe = staticmethod(describe_checkpoint)
    meta_model = staticmethod(make_meta_model)

    @classmethod
    def read_checkpoint(cls, path: Path) -> OpenVLACheckpoint:
        return OpenVLACheckpoint.read(path, cls.family)

    def write_checkpoint(self, folder: Path, weights: Mapping[str, Tensor], options: Mapping[str, Any]) -> list[str]:
        weights, files = dict(weights), []
        if self.value_head is not None:
            weights |= {f"{VALUE_HEAD}{key}": tensor for key, tensor in self.value_head.state_dict().items()}
        if self.film is not None:
            weights = write_film(folder, weights, self.film)
            files.append(FILM_FILE)
        return [*files, *self.folder.write(folder, weights=weights, options=options), *save_heads(folder, self.heads())]

    def make_heads(self) -> None:
        config, hidden_size = self.config, self.model.config.language.hidden_size
        self.num_values = (config.num_action_chunks if config.value_per_action else 1) if config.value_head else 0
        self.value_head = ValueHead(hidden_size, self.num_values) if config.value_head else None

    def load_heads(self, entries: dict[str, Entry]) -> dict[str, Entry]:
        self.folder.load_heads(self.heads())
        self.film = find_adapted(entries)
        if self.value_head is None:  # its numbers are kept
            return entries
        return {key: entry for key, entry in entries.items() if not key.startswith(VALUE_HEAD)}

    def decision_memory(self) -> DecisionMemory:
        said = self.config.action_dim  # by a folder, of which nothing else was read
        return decision_memory(self.model, self.config, getattr(self, "token_dim", said) or 0)

    @classmethod
    def infer_settings(cls, checkpoint: OpenVLACheckpoint, settings: dict[str, Any], stored: bool) -> dict[str, Any]:
        if not stored:
            known = {entry.name for entry in fields(cls.config_class)}
            for name, value in published_settings(settings["benchmark"], "openvla").items():
                if name in known:
                    settings.setdefault(name, value)
        return settings

    def check_environment(self, shape: EnvironmentShape) -> None:
        super().check_environment(shape)
        cropped: bool | None = getattr(shape, "center_crop", None)
        if cropped and self.config.center_crop:
            raise SettingError(
                f"center_crop=true: the images of {shape.id} are cropped already (env): type policy.center_crop=false"
            )
        if cropped is False and not self.config.center_crop:
            warnings.warn(
                f"the images of {shape.id} are not cropped, and published checkpoints see the middle 0.9 of their "
                "area: type env.center_crop=true for those",
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
        inputs = self.write_prompt(tensordict)
        greedy = exploration_type() not in (None, ExplorationType.RANDOM)
        tokens, log_prob, state = self.sample_actions(inputs, greedy)
        tensordict.set(keys.ACTION_TOKENS, tokens)
        tensordict.set(keys.ACTION_LOG_PROB, log_prob)
        tensordict.set(keys.ACTION, self.to_simulator(self.tokens.decode(tokens)))
        return self.write_value(tensordict, state)

    @property
    def model_image_size(self) -> tuple[int, int]:
        return self.preprocessor.size

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
        """Return the cross-entropy ``[N, C]``, mean over dimensions; ``sigma=0``: of the token alone."""
        tokens = self.tokens.encode(self.to_model(tensordict.get(keys.ACTION)))
        states = self.action_states(tensordict, tokens)
        log_prob = self._logits(states).log_softmax(-1)
        if not sigma:
            return -log_prob.gather(-1, tokens.unsqueeze(-1)).squeeze(-1).mean(-1)
        return soft_cross_entropy(log_prob, tokens, sigma).mean(-1)

    def unused(self, key: str) -> bool:
        return self.model.unused(key)

    def prompt_tokens(self, task_descriptions: Sequence[str], states: Tensor | None = None) -> Tensor:
        return self.prompts(task_descriptions).to(self.device)

    def distribution(self, logits: Tensor, chosen: Tensor | None = None) -> TokenDistribution:
        """Return the distribution of tokens of logits ``[..., 256]``; ``chosen`` ``[...]`` were drawn earlier."""
        return TokenDistribution.of(logits, self.config.temperature, self.config.top_k, chosen)

    def value(self, state: Tensor) -> Tensor | None:
        """Return values ``[N, num_values]`` of hidden states ``[N, hidden]`` of the last prompt token."""
        return None if self.value_head is None else self.value_head(state)

    def write_value(self, tensordict: TensorDictBase, state: Tensor) -> TensorDictBase:
        value = self.value(state)
        return tensordict if value is None else tensordict.set(keys.STATE_VALUE, value)

    def to_simulator(self, actions: Tensor) -> Tensor:
        """Convert normalised actions ``[N, C, A]`` of the model to actions of the simulator."""
        return self.adapter.to_simulator(self.statistics.action.unnormalize(actions))

    def to_model(self, actions: Tensor) -> Tensor:
        """Invert :meth:`to_simulator`."""
        return self.statistics.action.normalize(self.adapter.to_model(actions))

    def take_statistics(self, name: str, actions: Tensor, states: Tensor, step_mask: Tensor) -> None:
        """``name`` becomes the ``unnorm_key``. A gripper that is converted, closed or open, is not normalised."""
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
