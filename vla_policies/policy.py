"""What a policy offers: the one page to read before writing one.

Recipes, LoRA, loading and ``python -m vla_policies inspect`` know nothing of a policy but what stands here.

* A policy that is made new for an environment derives from :class:`VLAPolicy`. With a dataclass of settings as its
  ``config_class`` and a constructor ``__init__(self, config)`` it can be made, saved, loaded and inspected already; it
  adds what it is: :meth:`~VLAPolicy.forward` and :meth:`~VLAPolicy.get_dist`, with a critic
  :meth:`~VLAPolicy.evaluate_actions`, if it reads instructions :meth:`~VLAPolicy.prompt_tokens`, and
  :meth:`~VLAPolicy.imitation_loss` to learn from demonstrations. :class:`vla_policies.small.SmallVLA` is one.
* A policy that starts from a published checkpoint derives from :class:`PretrainedPolicy` and adds how that checkpoint
  is recognised, read, written and described. :class:`vla_policies.openvla.OpenVLA` is one.

Either is known to recipes by its ``family`` once its package declares an entry point::

    [project.entry-points."vla_torchrl.policies"]
    toy = "toy_package.policy:ToyPolicy"

or after :func:`vla_policies.register_policy`.
"""

from __future__ import annotations

import contextlib
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, fields
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, ClassVar, Literal, Self, cast, get_type_hints

import torch
from pydantic import StringConstraints
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn
from torch.distributions import Distribution

from vla_common.checksums import verify_checksums
from vla_common.keys import ACTION, ACTION_LOG_PROB, PROMPT_TOKENS, TASK_DESCRIPTIONS, WRIST_IMAGES
from vla_common.schema import EnvironmentShape
from vla_common.settings import Count, Width, check_settings, setting_types
from vla_policies.batch import any_batch, by_name
from vla_policies.checkpoint import layout
from vla_policies.checkpoint.hub import resolve
from vla_policies.checkpoint.lora import ADAPTER, adapt, read_rank
from vla_policies.checkpoint.report import Report, describe_weights
from vla_policies.checkpoint.settings import as_tuples, check_unchanged
from vla_policies.checkpoint.weights import list_weights
from vla_policies.nn.blocks import blocks_of
from vla_policies.outline import Outline
from vla_policies.sharding import ENTRY_POINTS, ShardGroup, compute_device, reshard
from vla_policies.values import ValueOperator

Sharding = Callable[["VLAPolicy"], object]  # shards a policy in place, such as by fully_shard on its blocks and itself
Device = Annotated[str, StringConstraints(pattern=r"^(cpu|cuda(:[0-9]+)?|mps)$")]


class VLAPolicy(TensorDictModuleBase):
    """A policy that turns camera images, proprioception and an instruction into a chunk of actions.

    It owns everything that belongs to its checkpoint: prompt, image preprocessing, normalisation statistics and action
    layout. ``N`` is the batch, ``C`` the chunk length, ``A`` the action dimension.

    A subclass writes :meth:`forward`, :meth:`get_dist`, :meth:`evaluate_actions` and :meth:`imitation_loss` for
    ``[N]``; whoever calls them may give any batch ``[*B]`` (:mod:`vla_policies.batch`), and observations by name:
    ``policy(images=..., states=..., task_descriptions=[...])`` returns what ``out_keys`` names.

    A class says:

    * ``family``: its name in recipes, in the registry and in ``config.json`` of what it saves.
    * ``config_class``: dataclass of its settings, plain numbers, texts, tuples and ``None``. The annotations say what
      each may be (:mod:`vla_common.settings`), and ``policy.<setting>=...`` is checked by them.
    * ``shape_settings``: which of those the environment gives, by the names that they have in
      :class:`~vla_common.schema.EnvironmentShape`; nobody types them.
    * ``needs_checkpoint``: that it cannot be made without one.
    * ``entry_points``: methods beside :meth:`forward` that losses call and that run the network; a sharded policy
      gathers its weights for them.

    Attributes:
        config: its settings, an instance of ``config_class``.
        chunk_size: ``C``.
        action_dim: ``A``.
        state_dim: length of ``states``.
        num_values: values per decision in ``state_value``: 1, ``C`` for one per primitive action, or 0 without a head.
        in_keys: the observations that it looks at.
        out_keys: what :meth:`forward` writes.
        sample_key: the entry that was sampled, over which the distribution of :meth:`get_dist` is: ``action`` itself,
            or what it came of. TorchRL's losses are told by ``loss.set_keys(action=policy.sample_key,
            sample_log_prob="action_log_prob", value="state_value")``.
        loss_keys: the entries of a rollout that losses read, which a collector must keep: those of
            :meth:`evaluate_actions`, and ``sample_key``. By default the observations that are tensors, the tokens of
            the instructions and ``sample_key``.
    """

    family: ClassVar[str]
    config_class: ClassVar[type[Any]]
    shape_settings: ClassVar[tuple[str, ...]] = ("action_low", "action_high", "state_dim")
    needs_checkpoint: ClassVar[bool] = False
    entry_points: ClassVar[tuple[str, ...]] = ENTRY_POINTS

    config: Any
    chunk_size: int
    action_dim: int
    state_dim: int
    num_values: int = 0
    sample_key: str = ACTION

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
        missing = [name for name in needed if getattr(type(self), name) is getattr(VLAPolicy, name)]
        if missing:
            raise TypeError(
                f"{type(self).__name__} lacks {' and '.join(missing)}; write it as VLAPolicy.{missing[0]} says"
            )

    def __init_subclass__(cls, **arguments: Any) -> None:
        """Take methods by the names of version 0.1's first contract, and let those for ``[N]`` take any batch."""
        super().__init_subclass__(**arguments)
        old, new = "prepare", "precompute"
        if old in cls.__dict__ and new not in cls.__dict__:
            warnings.warn(f"{cls.__name__}.{old} is called {new} now", DeprecationWarning, stacklevel=2)
            setattr(cls, new, cls.__dict__[old])
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

        A policy that reads no instructions has no tokens, ``[N, 0]``.

        Raises:
            ValueError: an instruction that the policy cannot take.
        """
        if TASK_DESCRIPTIONS in self.in_keys:
            raise NotImplementedError(f"{type(self).__name__} reads instructions and has no prompt_tokens; write it")
        return torch.zeros(len(task_descriptions), 0, dtype=torch.int64, device=self.device)

    @property
    def device(self) -> torch.device:
        """Of the parameters."""
        return compute_device(next(self.parameters()))

    # ---- learning

    def get_dist(self, tensordict: TensorDictBase) -> Distribution:
        """Return the distribution of what was sampled, :attr:`sample_key`, with ``log_prob`` of shape ``[N, C, A]``.

        Its ``log_prob`` of the stored sample is the stored ``action_log_prob`` until the policy changes.

        Raises:
            NotImplementedError: the policy has no distribution.
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
    def sight(self) -> nn.Module | None:
        """What says what the policy has made of images and instruction, without the states; ``None`` if nothing does.

        A module whose output, ``[N, F]``, depends on those alone, and which a pass of :meth:`imitation_loss` runs once.
        Whoever clones may have it learn to predict where the states will go
        (:class:`~vla_algos.imitation.BehaviourCloning`, ``auxiliary``).
        """
        return None

    def imitation_loss(self, tensordict: TensorDictBase, sigma: float) -> Tensor:
        """Return the loss ``[N, C]`` against demonstrated ``action`` ``[N, C, A]``, for behaviour cloning.

        Args:
            tensordict: observations, ``prompt_tokens`` and ``action`` in the simulator's units.
            sigma: width of soft labels, for policies that have them, as a fraction of half the range.

        Raises:
            NotImplementedError: the policy cannot learn from demonstrations.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no imitation_loss, which behaviour cloning needs; set "
            "demonstrations.episodes=0, or start from policy.checkpoint"
        )

    def set_statistics(self, state_mean: Tensor, state_std: Tensor) -> None:
        """Set the normalisation of ``states``, two tensors ``[S]``, before a new policy learns from demonstrations.

        Nothing is done where the statistics are the checkpoint's.
        """

    def take_statistics(self, name: str, actions: Tensor, states: Tensor, step_mask: Tensor) -> None:
        """Normalise actions and states by what is in demonstrations from here on, instead of by the checkpoint's.

        For a checkpoint that is trained on another data set than it comes from; what is saved has the statistics too.
        Nothing is done by a policy that is made new: its actions are scaled by the bounds of the environment, and
        :meth:`set_statistics` is called for its states.

        Args:
            name: of the data set.
            actions: float32 ``[K, C, A]``, in the simulator's units.
            states: float32 ``[K, S]``.
            step_mask: bool ``[K, C]``, which of the actions count.
        """

    def critic_parameters(self) -> Iterator[nn.Parameter]:
        """Return the critic's parameters, which have a learning rate and a warm-up of their own: ``value_head``'s."""
        return (parameter for name, parameter in self.named_parameters() if "value_head" in name)

    def shrink_images(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Replace the cameras of observations, in place, by what is kept of them for learning.

        Called with demonstrations; :meth:`forward` writes the same for a rollout. Cameras stay as they are unless a
        policy that resizes overrides it (:class:`vla_policies.processing.model_images.ModelImages`).
        """
        return tensordict

    def precompute(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Add what does not change during an update, such as the output of a frozen part.

        Called by the learner with all decisions ``[D]`` of an update, before its first epoch.
        """
        return tensordict

    def start_iteration(self, iteration: int) -> None:
        """Set what the policy schedules; called by the recipes before each collection, counted from 1."""

    def trained_weights(self) -> dict[str, Tensor]:
        """Return copies of the parameters that are trained, by name; of a sharded policy those of its parts."""
        reshard(self)
        trained = ((name, parameter) for name, parameter in self.named_parameters() if parameter.requires_grad)
        return {name: parameter.detach().clone() for name, parameter in trained}

    @contextlib.contextmanager
    def reference_weights(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        """Be the policy with earlier :meth:`trained_weights`, which hold its own meanwhile; nothing is learnt there.

        The rest, frozen weights and what is scheduled, is the policy's own: with adapters a reference takes no more
        memory than these. A sharded policy is gathered within, not around it.
        """
        modes = [(module, module.training) for module in self.modules()]
        self._exchange(weights)
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        try:
            self.eval().requires_grad_(False)  # torch computes otherwise, in the last bit, where it is True
            with torch.no_grad():
                yield
        finally:
            for module, mode in modes:
                module.training = mode
            self._exchange(weights)
            for parameter in trained:
                parameter.requires_grad_(True)

    def _exchange(self, weights: Mapping[str, Tensor]) -> None:
        """Swap parameters and ``weights`` in place, unseen by autograd and by who counts versions of tensors."""
        reshard(self)
        parameters = dict(self.named_parameters())
        for name, other in weights.items():
            own = parameters[name].data
            kept = own.clone()
            own.copy_(other)
            other.data.copy_(kept)

    # ---- several GPUs

    def shard_groups(self) -> Sequence[ShardGroup]:
        """Return the modules whose weights a sharded policy gathers one after the other, in the order that they run.

        What is in none of them is the root, gathered during the whole pass: heads, and what is read without a module's
        ``forward``. Trained parameters of a group have the same dtype.

        By default the blocks of the network are groups: what is in its lists (``nn.ModuleList``). Without any the
        policy is one group, which saves the memory of optimizer and gradients only.
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
            checkpoint: folder or hub id.
            shard: shards it, see :meth:`from_pretrained`.
            **settings: fields of ``config_class``, but for ``shape_settings``; what is left out has its default.

        Raises:
            FileNotFoundError: no such checkpoint.
            ValueError: settings that do not fit it, or each other.
        """
        if checkpoint is not None:
            return cls.from_pretrained(checkpoint, device=cls.default_device(), **_given(shard), **settings)
        check_settings("", settings, cls.setting_types())
        given = {name: getattr(shape, name) for name in cls.shape_settings}
        policy = cls(cls.config_class(**given, **as_tuples(settings)))
        if shard is not None:
            shard(policy)
        return policy

    @classmethod
    def default_device(cls) -> str:
        """Return where recipes put the policy if nobody says; a small one is as fast on the CPU, beside simulators."""
        return "cpu"

    @classmethod
    def setting_types(cls) -> dict[str, Any]:
        """Annotate every setting that :meth:`make` takes."""
        hints = get_type_hints(cls.config_class, include_extras=True)
        found = {field.name: hints[field.name] for field in fields(cls.config_class)}
        own = setting_types(cls.make, without=("shape", "checkpoint", "shard"))
        return {**own, **{name: hint for name, hint in found.items() if name not in cls.shape_settings}}

    def check_environment(self, shape: EnvironmentShape) -> None:
        """Refuse an environment that the policy cannot act in.

        Raises:
            ValueError: it has other actions, states or cameras, or an instruction that the policy cannot take.
        """
        name = shape.id
        action_dim = len(shape.action_low)
        if (self.action_dim, self.state_dim) != (action_dim, shape.state_dim):
            raise ValueError(
                f"the policy has {self.action_dim} action and {self.state_dim} state dimensions, {name} has "
                f"{action_dim} and {shape.state_dim}; use it where it was trained (recipes: env=...)"
            )
        if WRIST_IMAGES in self.in_keys and shape.wrist_image_shape is None:
            raise ValueError(
                f"the policy looks at wrist cameras and {name} has none; use a checkpoint that was trained with one "
                "image"
            )
        # A pattern is read as well: it stands in for the instruction of a simulator that is not used yet.
        instructions = [text for task in shape.tasks for text in (task.instruction, *getattr(task, "instructions", ()))]
        if instructions:
            # Large states have the longest numbers, for prompts that list them.
            self.prompt_tokens(instructions, torch.full((len(instructions), shape.state_dim), 1e6))

    def save_pretrained(self, folder: str | Path) -> None:
        """Write weights, normalisation statistics and configuration, so that :meth:`from_pretrained` reads them.

        All processes that share a sharded policy must call it; the first one writes.
        """
        layout.save(folder, self.family, asdict(self.config), self.state_dict())

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        *,
        device: torch.device | str = "cpu",
        shard: Sharding | None = None,
        **settings: Any,
    ) -> Self:
        """Load what :meth:`save_pretrained` wrote.

        Args:
            folder: local folder or hub id.
            device: of the policy.
            shard: shards it over processes, each of which loads all of it first: policies that are made new are small.
            **settings: fields of ``config_class`` that the checkpoint must have, to be sure of them.

        Raises:
            FileNotFoundError: the folder is not a policy.
            ValueError: another family, other settings, a truncated file, or weights that do not fit the configuration.
        """
        verify_checksums(path := resolve(folder))
        family, stored = layout.read(path)
        if family != cls.family:
            raise ValueError(f"{path} is a checkpoint of {family!r}, not of {cls.family}")
        cls._check_unchanged(settings, stored, path)
        try:
            policy = cls(cls.config_class(**as_tuples(stored)))
        except TypeError as error:
            raise ValueError(f"{path / layout.CONFIG} does not fit the policy {family!r}: {error}") from error
        layout.load(policy, path)
        policy.to(device)
        if shard is not None:
            shard(policy)
        return policy

    @classmethod
    def recognises(cls, folder: Path) -> bool:
        """Tell whether :func:`vla_policies.load_policy` loads a local folder with this class. Raises nothing."""
        return layout.family_of(folder) == cls.family

    @classmethod
    def describe(cls, folder: Path) -> Report:
        """Describe a folder that the class recognises, and list what it lacks, without reading a tensor."""
        family, stored = layout.read(folder)
        facts = {"family": str(family), "chunk": str(stored.get("chunk_size")), "statistics": "part of the weights"}
        return Report({**facts, "weights": describe_weights(list_weights(folder))})

    @classmethod
    def outline(cls, folder: Path | None = None, **settings: Any) -> Outline:
        """Say what the policy is made of, for ``python -m vla_policies memory``; allocates nothing, reads headers only.

        Args:
            folder: that the class recognises; ``None`` for the published sizes, if there are any.
            **settings: what :meth:`make` takes; it says which of the heads, adapters and frozen parts there are.

        Raises:
            FileNotFoundError, ValueError: the folder is incomplete, or there are no published sizes.
        """
        if folder is None:
            raise ValueError(
                f"{cls.family} has no published size, it is made for an environment; pass a folder that a recipe "
                "wrote, such as runs/ppo/latest/policy"
            )
        _, stored = layout.read(folder)
        cls._check_unchanged(settings, stored, folder)
        with torch.device("meta"):
            return Outline(f"config.json of {folder}", cls(cls.config_class(**as_tuples(stored))), ())

    @classmethod
    def _check_unchanged(cls, settings: Mapping[str, Any], stored: Mapping[str, Any], path: Path) -> None:
        """Refuse settings that a checkpoint has otherwise; one of before there was a setting has its default."""
        known = fields(cls.config_class)
        defaults = {field.name: field.default for field in known if field.default is not MISSING}
        check_unchanged(settings, {**defaults, **stored}, [field.name for field in known], cls.__name__, path)


class PretrainedPolicy(VLAPolicy):
    """A policy that starts from a published checkpoint, whose layout it reads and writes.

    A class has to say, beside what :class:`VLAPolicy` wants, how a checkpoint is read and written:
    :meth:`from_pretrained`, :meth:`save_pretrained`, :meth:`recognises` and :meth:`describe`. Its ``config_class`` has
    a field ``benchmark``, in whose cameras, states and actions the policy acts; :func:`vla_common.schema.get_schema`
    knows these. Further:

    * ``checkpoint_settings``: settings that a checkpoint was trained with: another value is refused.
    * ``renamed_settings``: new names by old ones; checkpoints that were saved before keep loading.
    * ``lora_targets``: last parts of the names of the layers that get adapters.

    Attributes:
        model: the network that gets adapters; heads beside it are always trained.
        unused_tensors: tensors of the checkpoint that nothing reads, to be written again.
    """

    shape_settings = ("benchmark",)
    needs_checkpoint = True
    checkpoint_settings: ClassVar[tuple[str, ...]] = ()
    renamed_settings: ClassVar[Mapping[str, str]] = {}
    lora_targets: ClassVar[tuple[str, ...]]

    model: nn.Module
    unused_tensors: dict[str, Tensor]

    @classmethod
    @abstractmethod
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
        """Load a checkpoint. Everything is checked before a tensor is read.

        Args:
            folder: local folder, or hub id.
            dtype: of the model, ``None`` for what it was saved with here, or float32; heads are float32.
            device: of the policy.
            lora_adapter: folder of a peft adapter to apply and continue training.
            shard: called with the policy when it is complete, adapters and dtypes included, and its model still on the
                meta device; heads have their initial numbers, the same in processes of the same seed. Each process then
                reads its own part of each tensor, and no process ever has the whole model.
            **settings: fields of ``config_class``; what the checkpoint was saved with is the default.

        Raises:
            FileNotFoundError: no checkpoint, or a part of it is missing.
            ValueError: settings, statistics, tokenizer or weights that do not fit.
        """

    @abstractmethod
    def save_pretrained(self, folder: str | Path) -> None:
        """Write the checkpoint's layout; a LoRA adapter that was not merged goes into ``lora_adapter/``.

        All processes that share a sharded policy must call it; the first one writes, what the others send it piece by
        piece.
        """

    @classmethod
    @abstractmethod
    def recognises(cls, folder: Path) -> bool:
        """Tell whether :func:`vla_policies.load_policy` loads a local folder with this class. Raises nothing."""

    @classmethod
    @abstractmethod
    def describe(cls, folder: Path) -> Report:
        """Describe a folder that the class recognises, and list what it lacks, without reading a tensor."""

    @classmethod
    def outline(cls, folder: Path | None = None, **settings: Any) -> Outline:
        """See :meth:`VLAPolicy.outline`; a class makes its networks with the help of :meth:`outlined`."""
        raise ValueError(f"{cls.family} does not say what it takes; write {cls.__name__}.outline as VLAPolicy's says")

    @classmethod
    def outlined(
        cls,
        model: nn.Module,
        heads: Mapping[str, nn.Module],
        settings: Mapping[str, Any],
        float32: Callable[[str], bool] = lambda name: False,
    ) -> Self:
        """Return an instance that has its networks, frozen and adapted as settings ask, and nothing else of a policy.

        Args:
            model: on the meta device.
            heads: beside it, float32, by attribute.
            settings: fields of ``config_class``, ``dtype`` and ``lora_*``.
            float32: tells of names in ``model`` whether they are float32 whatever ``dtype`` is.
        """
        policy = cls.__new__(cls)
        TensorDictModuleBase.__init__(policy)
        policy.config, policy.model = SimpleNamespace(**settings), model
        for name, head in heads.items():
            setattr(policy, name, head)
        dtype = getattr(torch, settings.get("dtype") or "float32")
        for name, parameter in model.named_parameters():
            parameter.data = parameter.data.to(torch.float32 if float32(name) else dtype)
        policy.freeze()
        adapt(policy, *(settings.get(f"lora_{name}") for name in ("rank", "alpha", "targets")))
        return policy.to("meta")  # adapters begin with numbers

    @classmethod
    def complete_settings(
        cls, folder: Path | None, said: Mapping[str, Any], settings: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Put what is asked for over what a checkpoint says over the class's defaults, its adapter's rank included."""
        defaults = {field.name: field.default for field in fields(cls.config_class) if field.default is not MISSING}
        rank = {} if folder is None or not said.get(ADAPTER) else read_rank(folder / ADAPTER)
        return {**defaults, **said, **rank, **settings}

    def unused(self, key: str) -> bool:
        """Tell whether nothing reads a tensor of that name; adapters are judged like the weights that they adapt."""
        return False

    def freeze(self) -> None:
        """Freeze what is never trained."""

    def lora_layers(self, targets: Sequence[str]) -> list[str]:
        """Return names of the layers of :attr:`model` whose last part is one of ``targets``."""
        return [name for name, _ in self.model.named_modules() if name.rpartition(".")[2] in targets]

    @classmethod
    def default_device(cls) -> str:
        """Return the GPU if there is one."""
        return "cuda" if torch.cuda.is_available() else "cpu"

    @classmethod
    def make(
        cls,
        shape: EnvironmentShape,
        checkpoint: str | Path | None = None,
        *,
        dtype: Literal["float32", "bfloat16"] | None = None,
        device: Device | None = None,
        lora_adapter: str | None = None,
        lora_rank: Width | None = None,
        lora_alpha: Count | None = None,
        lora_targets: Sequence[str] | None = None,
        shard: Sharding | None = None,
        **settings: Any,
    ) -> Self:
        """Load a checkpoint for an environment, with adapters if asked for.

        Args:
            shape: of the environment; its benchmark is what the policy is loaded for.
            checkpoint: folder or hub id.
            dtype: of the model, ``None`` for what it was saved with here, or float32.
            device: of the policy, ``None`` for :meth:`default_device`.
            lora_adapter: folder of a published adapter to apply and continue training.
            lora_rank: train a new adapter of this rank instead of the whole model.
            lora_alpha: it is scaled by ``lora_alpha / lora_rank``; ``None`` for ``lora_rank``.
            lora_targets: names of layers that get adapters; ``None`` for all that can.
            shard: shards it with its adapters, see :meth:`from_pretrained`.
            **settings: fields of ``config_class``; what the checkpoint was saved with is the default.

        Raises:
            FileNotFoundError: no such checkpoint.
            ValueError: no checkpoint was named, or the settings do not fit it.
        """
        if not checkpoint:
            raise ValueError(
                f"policy={cls.family} starts from a checkpoint; type policy.checkpoint=FOLDER: a folder in the "
                "published layout, or a hub id"
            )
        check_settings("", settings, cls.setting_types())

        def complete(policy: VLAPolicy) -> None:
            adapt(cast(PretrainedPolicy, policy), lora_rank, lora_alpha, lora_targets)
            if shard is not None:
                shard(policy)

        policy = cls.from_pretrained(
            checkpoint,
            dtype=getattr(torch, dtype) if isinstance(dtype, str) else dtype,
            device=device or cls.default_device(),
            lora_adapter=lora_adapter,
            **_given(complete if shard is not None else None),
            **{name: getattr(shape, name) for name in cls.shape_settings},
            **settings,
        )
        if shard is None:
            complete(policy)
        return policy

    def check_environment(self, shape: EnvironmentShape) -> None:
        """Refuse an environment of another benchmark; see :meth:`VLAPolicy.check_environment`."""
        if self.config.benchmark != shape.benchmark:
            own, name = self.config.benchmark, shape.id
            raise ValueError(
                f"the policy acts in {own} and {name} is of {shape.benchmark}; take an environment of {own} (recipes: "
                f"env=...), or load the checkpoint with benchmark={shape.benchmark!r} (recipes: policy={self.family})"
            )
        super().check_environment(shape)


def _given(shard: Sharding | None) -> dict[str, Any]:
    """Return the argument for a ``from_pretrained`` that need not know of sharding unless it is asked for."""
    return {} if shard is None else {"shard": shard}
