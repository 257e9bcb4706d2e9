"""What a policy offers: the one page to read before writing one.

* A policy that is made new for an environment derives from :class:`VLAPolicy`. With a dataclass of settings as its
  ``config_class`` and a constructor ``__init__(self, config)`` it can be made, saved, loaded and inspected; it adds
  :meth:`~VLAPolicy.forward` and :meth:`~VLAPolicy.get_dist`, with a critic :meth:`~VLAPolicy.evaluate_actions`, if it
  reads instructions :meth:`~VLAPolicy.prompt_tokens`, and :meth:`~VLAPolicy.imitation_loss` to learn from
  demonstrations. :class:`vla_policies.small.SmallVLA` is one.
* A policy that starts from a published checkpoint derives from :class:`vla_policies.PretrainedPolicy` and adds how that
  checkpoint is recognised, read, written and described. :class:`vla_policies.openvla.OpenVLA` is one.

Recipes find either by its ``family`` after :func:`vla_policies.register_policy`, or by an entry point
(:mod:`vla_common.registry`).
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, fields
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self, get_type_hints

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn
from torch.distributions import Distribution

from vla_common.checksums import verify_checksums
from vla_common.keys import ACTION, ACTION_LOG_PROB, PROMPT_TOKENS, TASK_DESCRIPTIONS, WRIST_IMAGES
from vla_common.schema import EnvironmentShape
from vla_common.settings import check_settings, setting_types
from vla_policies.batch import any_batch, by_name
from vla_policies.checkpoint import layout
from vla_policies.checkpoint.hub import check_links, resolve
from vla_policies.checkpoint.report import Report, describe_weights
from vla_policies.checkpoint.settings import as_tuples, check_unchanged, defaults_of
from vla_policies.checkpoint.weights import list_weights
from vla_policies.memory import DecisionMemory
from vla_policies.nn.blocks import blocks_of
from vla_policies.reference import ReferenceWeights
from vla_policies.sharding import ENTRY_POINTS, ShardGroup, compute_device
from vla_policies.values import ValueOperator

Sharding = Callable[["VLAPolicy"], object]  # shards a policy in place, such as by fully_shard on its blocks and itself


class VLAPolicy(ReferenceWeights, TensorDictModuleBase):
    """A policy that turns camera images, proprioception and an instruction into a chunk of actions.

    It owns everything that belongs to its checkpoint: prompt, image preprocessing, normalisation statistics and action
    layout. ``N`` is the batch, ``C`` the chunk length, ``A`` the action dimension. A subclass writes its methods for
    ``[N]``; callers may pass any batch ``[*B]`` (:mod:`vla_policies.batch`), and observations by name.

    It composes as any TensorDictModule: ``TensorDictSequential(preprocess, policy)`` acts in collectors, evaluations;
    a loss is of the policy itself, whose ``evaluate_actions`` reads what it has read and written.

    A class says:

    * ``family``: its name in recipes, in the registry and in ``config.json`` of what it saves.
    * ``config_class``: dataclass of its settings: plain numbers, texts, tuples and ``None``; annotations check
      ``policy.<setting>=...`` (:mod:`vla_common.settings`).
    * ``shape_settings``: those that the environment gives, by their names in
      :class:`~vla_common.schema.EnvironmentShape`.
    * ``sampling_settings``: those that no weight depends on: beside a checkpoint another value is taken, not refused.
    * ``needs_checkpoint``: that it cannot be made without one.
    * ``entry_points``: methods other than :meth:`forward` that losses call and that run the network; a sharded policy
      gathers its weights for them.

    Attributes:
        config: its settings, an instance of ``config_class``.
        chunk_size, action_dim: ``C`` and ``A``.
        state_dim: length of ``states``.
        loaded_from: the folder that :func:`~vla_policies.load_policy` has read, or ``None``.
        num_values: values per decision in ``state_value``: 1, ``C`` for one per primitive action, or 0 without a head.
        in_keys: the observations that it looks at.
        out_keys: what :meth:`forward` writes.
        sample_key: the entry that was sampled, over which the distribution of :meth:`get_dist` is: ``action`` itself,
            or what it came of. For TorchRL's losses: ``loss.set_keys(action=policy.sample_key,
            sample_log_prob="action_log_prob", value="state_value")``.
        loss_keys: the entries of a rollout that losses read, which a collector must keep. By default the observations
            that are tensors, the tokens of the instructions and ``sample_key``.
    """

    family: ClassVar[str]
    config_class: ClassVar[type[Any]]
    shape_settings: ClassVar[tuple[str, ...]] = ("action_low", "action_high", "state_dim")
    sampling_settings: ClassVar[tuple[str, ...]] = ()
    needs_checkpoint: ClassVar[bool] = False
    entry_points: ClassVar[tuple[str, ...]] = ENTRY_POINTS

    config: Any
    chunk_size: int
    action_dim: int
    state_dim: int
    loaded_from: Path | None = None
    num_values: int = 0
    sample_key: str = ACTION
    in_keys: Sequence[str]
    out_keys: Sequence[str]

    @cached_property
    def loss_keys(self) -> Sequence[str]:
        """See the class."""
        seen = [key for key in self.in_keys if key != TASK_DESCRIPTIONS]
        return (*seen, *(key for key in (PROMPT_TOKENS, self.sample_key) if key in self.out_keys))

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        needed = ["forward"]
        if ACTION_LOG_PROB in getattr(self, "out_keys", ()):  # of a class that says so before its constructor
            needed += ["get_dist", "evaluate_actions"] if self.num_values else ["get_dist"]
        if missing := [name for name in needed if getattr(type(self), name) is getattr(VLAPolicy, name)]:
            raise TypeError(f"{type(self).__name__} lacks {' and '.join(missing)}; VLAPolicy.{missing[0]} says how")

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        for name in ("forward", "get_dist", "evaluate_actions", "imitation_loss"):
            method = cls.__dict__.get(name)
            if method is not None and not hasattr(method, "__isabstractmethod__"):
                setattr(cls, name, by_name(any_batch(method)) if name == "forward" else any_batch(method))

    # ---- acting

    @abstractmethod
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Act. Samples under ``ExplorationType.RANDOM``, is greedy under ``DETERMINISTIC``.

        Writes ``action`` float32 ``[N, C, A]`` in the simulator's units, ``action_log_prob`` ``[N, C, A]``,
        ``state_value`` ``[N, 1]`` or ``[N, C]`` if there is a value head, and the entries of :attr:`loss_keys` that are
        not observations. Instructions are ``vla_common.texts.to_strings(tensordict)``.
        """

    def prompt_tokens(self, task_descriptions: Sequence[str], states: Tensor | None = None) -> Tensor:
        """Return tokens int64 ``[N, L]`` of ``N`` instructions; some prompts list the ``states`` ``[N, S]`` too.

        A policy that reads no instructions has none, ``[N, 0]``. ValueError: an instruction that it cannot take.
        """
        if TASK_DESCRIPTIONS in self.in_keys:
            raise NotImplementedError(f"{type(self).__name__} reads instructions and has no prompt_tokens; write it")
        return torch.zeros(len(task_descriptions), 0, dtype=torch.int64, device=self.device)

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return compute_device(next(self.parameters()))

    # ---- learning

    def get_dist(self, tensordict: TensorDictBase) -> Distribution:
        """Return the distribution of what was sampled, :attr:`sample_key`, with ``log_prob`` of shape ``[N, C, A]``.

        Its ``log_prob`` of the stored sample is the stored ``action_log_prob`` until the policy changes.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no get_dist, so its actions have no log-probability; write it for PPO and GRPO"
        )

    def evaluate_actions(self, tensordict: TensorDictBase) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return log-probability and entropy ``[N, C, A]`` and value of stored actions, in one backbone pass.

        A policy without critic need not write it: :meth:`get_dist` says both.
        """
        if self.num_values:
            raise NotImplementedError(
                f"{type(self).__name__} has a critic and no evaluate_actions; write it: log-probability, entropy, value"
            )
        dist = self.get_dist(tensordict)
        return dist.log_prob(tensordict.get(self.sample_key)), dist.entropy(), None

    def get_value_operator(self) -> ValueOperator:
        """Return the critic as a module that shares the parameters, for ``ClipPPOLoss`` and value estimators."""
        return ValueOperator(self)

    @property
    def vision_features(self) -> nn.Module | None:
        """The module whose output ``[N, F]``, or ``[.., F]`` of tokens row by row, is not of states; ``None`` for none.

        It sees images, and the instruction or not, runs once in :meth:`imitation_loss`, and is trained. Behaviour
        cloning may train it to predict future states as well.
        """
        return None

    def imitation_loss(self, tensordict: TensorDictBase, sigma: float) -> Tensor:
        """Return the loss ``[N, C]`` against demonstrated ``action`` ``[N, C, A]``, for behaviour cloning.

        ``tensordict`` has observations, ``prompt_tokens`` and ``action`` in the simulator's units. ``sigma`` is the
        width of soft labels, for policies that have them, as a fraction of half the range.
        """
        raise NotImplementedError(f"{type(self).__name__} has no imitation_loss")

    def set_statistics(self, state_mean: Tensor, state_std: Tensor) -> None:
        """Set the normalisation of ``states``, two tensors ``[S]``, before a new policy learns from demonstrations.

        All cloning calls it; nothing is done where they are a checkpoint's, or of what the policy has learnt before.
        """

    def take_statistics(self, name: str, actions: Tensor, states: Tensor, step_mask: Tensor) -> None:
        """Normalise by the statistics of demonstrations ``name`` from now on, not by the checkpoint's; they are saved.

        ``actions`` are float32 ``[K, C, A]`` in the simulator's units, of which bool ``step_mask`` ``[K, C]`` count,
        and ``states`` ``[K, S]``. Nothing is done by default.
        """

    def critic_parameters(self) -> Iterator[nn.Parameter]:
        """Return the critic's parameters, which have a learning rate and a warm-up of their own: ``value_head``'s."""
        return (parameter for name, parameter in self.named_parameters() if "value_head" in name)

    def shrink_images(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Replace the cameras of observations, in place, by what is kept of them for learning.

        Called with demonstrations; :class:`vla_policies.processing.model_images.ModelImages` does it in rollouts too.
        """
        return tensordict

    def precompute(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Add what does not change during an update, such as a frozen part's output, to its decisions ``[D]``."""
        return tensordict

    # ---- several GPUs

    def shard_groups(self) -> Sequence[ShardGroup]:
        """Return the modules whose weights a sharded policy gathers one after the other, in the order that they run.

        What is in none is gathered during the whole pass: heads, and what is read without a module's ``forward``.
        Trained parameters of a group have the same dtype. By default each member of an ``nn.ModuleList`` is one group;
        without any, the policy is one, which saves the memory of optimizer and gradients only.
        """
        return [ShardGroup(block, returns_float32=True) for _, block in blocks_of(self)]

    # ---- making, saving and loading

    @classmethod
    def make(
        cls,
        shape: EnvironmentShape,
        checkpoint: str | Path | None = None,
        *,
        shard: Sharding | None = None,
        **settings: Any,
    ) -> Self:
        """Make a policy for an environment: a new one, or that of a checkpoint.

        Args:
            shape: of the environment, such as a :class:`vla_envs.SimulatorSpec`.
            checkpoint: folder, or ``hf:NAME``.
            shard: see :meth:`from_pretrained`.
            **settings: fields of ``config_class``, but for ``shape_settings``; what is left out has its default.
        """
        if checkpoint is not None:
            return cls.from_pretrained(checkpoint, device=cls.default_device(), **given_shard(shard), **settings)
        check_settings("", settings, cls.setting_types())
        given = {name: getattr(shape, name) for name in cls.shape_settings}
        policy = cls(cls.config_class(**given, **as_tuples(settings)))
        if shard is not None:
            shard(policy)
        return policy

    @classmethod
    def default_device(cls) -> str:
        """Return where recipes put the policy by default; a small one is as fast on the CPU."""
        return "cpu"

    @classmethod
    def setting_types(cls) -> dict[str, Any]:
        """Annotate every setting that :meth:`make` takes."""
        hints = get_type_hints(cls.config_class, include_extras=True)
        found = {field.name: hints[field.name] for field in fields(cls.config_class)}
        own = setting_types(cls.make, without=("shape", "checkpoint", "shard"))
        return {**own, **{name: hint for name, hint in found.items() if name not in cls.shape_settings}}

    def check_environment(self, shape: EnvironmentShape) -> None:
        """Refuse (ValueError) an environment of other actions, states or cameras, or unreadable instructions."""
        name, action_dim = shape.id, len(shape.action_low)
        if (self.action_dim, self.state_dim) != (action_dim, shape.state_dim):
            raise ValueError(
                f"the policy has {self.action_dim} action and {self.state_dim} state dimensions, {name} has "
                f"{action_dim} and {shape.state_dim}; use it where it was trained (recipes: env=...)"
            )
        if WRIST_IMAGES in self.in_keys and shape.wrist_image_shape is None:
            raise ValueError(f"the policy looks at wrist cameras and {name} has none; use another checkpoint")
        # A pattern is read as well: it stands in for the instruction of a simulator that is not used yet.
        instructions = [text for task in shape.tasks for text in (task.instruction, *getattr(task, "instructions", ()))]
        if instructions:
            # Large states have the longest numbers, for prompts that list them.
            self.prompt_tokens(instructions, torch.full((len(instructions), shape.state_dim), 1e6))

    def save_pretrained(self, folder: str | Path) -> None:
        """Write what :meth:`from_pretrained` reads; all processes that share a sharded policy must call it."""
        layout.save(folder, self.family, asdict(self.config), self.state_dict())

    @classmethod
    def from_pretrained(
        cls, folder: str | Path, *, device: torch.device | str = "cpu", shard: Sharding | None = None, **settings: Any
    ) -> Self:
        """Load what :meth:`save_pretrained` wrote.

        Args:
            folder: local folder, or ``hf:NAME``; FileNotFoundError if it is not a policy.
            device: of the policy.
            shard: shards it over processes, each of which loads all of it first: policies that are made new are small.
            **settings: fields of ``config_class`` that the checkpoint must have; ``sampling_settings`` replace its own.

        Raises:
            ValueError: another family, other settings, a truncated file, or weights that do not fit the configuration.
        """
        verify_checksums(path := check_links(resolve(folder)))
        family, stored = layout.read(path)
        if family != cls.family:
            raise ValueError(f"{path} is a checkpoint of {family!r}, not of {cls.family}")
        policy = cls._restore(path, cls._merge(path, stored, settings), device)
        if shard is not None:
            shard(policy)
        return policy

    @classmethod
    def _merge(cls, path: Path, stored: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
        stored = stored | {name: settings[name] for name in settings.keys() & set(cls.sampling_settings)}
        check_unchanged(cls, path, {**defaults_of(cls), **stored}, settings)
        return as_tuples(stored)

    @classmethod
    def _restore(cls, path: Path, settings: dict[str, Any], device: torch.device | str) -> Self:
        try:
            policy = cls(cls.config_class(**settings))
        except TypeError as error:
            raise ValueError(f"{path / layout.CONFIG} does not fit the policy {cls.family!r}: {error}") from error
        layout.load(policy, path)
        return policy.to(device)

    @classmethod
    def recognises(cls, folder: Path) -> bool:
        """Tell whether :func:`vla_policies.load_policy` loads a local folder with this class. Raises nothing."""
        return layout.family_of(folder) == cls.family

    @classmethod
    def describe(cls, folder: Path) -> Report:
        """Describe a folder that the class recognises, and list what it lacks, without reading a tensor."""
        stored = layout.read(folder)[1]
        facts = {"family": cls.family, "chunk": str(stored.get("chunk_size")), "statistics": "part of the weights"}
        return Report({**facts, "weights": describe_weights(list_weights(folder))})

    @classmethod
    def meta_policy(cls, folder: Path | None = None, **settings: Any) -> Self:
        """Make the networks of a policy on the meta device, which allocates nothing; headers are read only.

        ``folder`` is one that the class recognises, or ``None`` for the published sizes. ``settings`` are those of
        :meth:`make`, and say which of the heads, adapters and frozen parts there are.
        """
        if folder is None:
            raise ValueError(
                f"{cls.family} has no published size, it is made for an environment; pass a folder that a run wrote"
            )
        _, stored = layout.read(folder)
        with torch.device("meta"):
            return cls(cls.config_class(**cls._merge(folder, stored, settings)))

    def decision_memory(self) -> DecisionMemory | None:
        """Return what a decision takes of a GPU; ``None`` where the family does not estimate it."""
        return None

    def stays_float32(self, name: str) -> bool:
        """Tell of a parameter's name whether it is computed with in float32, whatever the others are in."""
        return False


def given_shard(shard: Sharding | None) -> dict[str, Any]:
    """Return the argument for a ``from_pretrained`` that need not know of sharding unless it is asked for."""
    return {} if shard is None else {"shard": shard}
