"""Policies that start from a published checkpoint: how one is loaded, adapted and saved; a family adds its layout."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from pydantic import StringConstraints
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn

from vla_common.checksums import verify_checksums, write_checksums
from vla_common.schema import EnvironmentShape
from vla_common.settings import Count, Width, check_settings
from vla_policies.checkpoint import lora
from vla_policies.checkpoint.hub import check_links, resolve
from vla_policies.checkpoint.parts import check_finite, in_first
from vla_policies.checkpoint.settings import as_tuples, check_unchanged, defaults_of, saved_dtype
from vla_policies.checkpoint.weights import Entry, cast, load_weights, plain_names
from vla_policies.policy import Sharding, VLAPolicy
from vla_policies.sharding import place, storage_device

Device = Annotated[str, StringConstraints(pattern=r"^(cpu|cuda(:[0-9]+)?|mps)$")]


class PretrainedPolicy(VLAPolicy):
    """A policy that starts from a published checkpoint, whose layout it reads and writes.

    A class adds the abstract methods below, :meth:`recognises` and :meth:`describe`; its constructor takes ``(model,
    checkpoint, config)``. Its ``config_class`` has a field ``benchmark`` (:func:`vla_common.schema.get_schema`), whose
    cameras, states and actions it takes. Further:

    * ``checkpoint_settings``: settings that a checkpoint was trained with: another value is refused.
    * ``needed_settings``: settings without a default, each with an example.
    * ``lora_targets``: last parts of the names of the layers that get adapters.
    * ``head_names``: attributes trained besides the model, ``None`` where there is none.

    Attributes:
        model: the network that gets adapters; heads are always trained.
        unused_tensors: tensors of the checkpoint that nothing reads, to be written again.
    """

    shape_settings = ("benchmark",)
    needs_checkpoint = True
    checkpoint_settings: ClassVar[tuple[str, ...]] = ()
    needed_settings: ClassVar[Mapping[str, str]] = {"benchmark": "libero"}
    lora_targets: ClassVar[tuple[str, ...]]
    head_names: ClassVar[tuple[str, ...]] = ()

    model: nn.Module
    unused_tensors: dict[str, Tensor]

    # ---- what a family says

    @classmethod
    @abstractmethod
    def read_checkpoint(cls, path: Path) -> Any:
        """Read the small files of a local folder and the headers of its weights, or FileNotFoundError, ValueError.

        Returns what has ``options``, what the policy that was saved here was set to (empty for a published one), and
        ``empty_model()``, the model on the meta device and the tensors to fill it with.
        """

    @abstractmethod
    def write_checkpoint(self, folder: Path, weights: Mapping[str, Tensor], options: Mapping[str, Any]) -> list[str]:
        """Write the layout: ``weights`` of the model and ``options``, with the heads; returns names of the files."""

    def heads(self) -> dict[str, nn.Module]:
        """Return what is trained besides the model, by name."""
        return {name: head for name in self.head_names if (head := getattr(self, name)) is not None}

    @abstractmethod
    def load_heads(self, entries: dict[str, Entry]) -> dict[str, Entry]:
        """Fill the heads, as far as the checkpoint has them, or ValueError; returns the tensors that are not theirs."""

    @classmethod
    def infer_settings(cls, checkpoint: Any, settings: dict[str, Any], stored: bool) -> dict[str, Any]:
        """Add ``settings`` that can be seen in a checkpoint, or that all published ones of the benchmark have.

        ``stored``: whether any was saved with it; only then the class's defaults are what it was trained with.
        """
        return settings

    @staticmethod
    def needs_float32(name: str) -> bool:
        """Tell of a name in the model whether it is float32 whatever ``dtype`` is."""
        return False

    def unused(self, key: str) -> bool:
        """Tell whether nothing reads a tensor of that name; adapters are judged like the weights that they adapt."""
        return False

    def freeze(self) -> None:
        """Freeze what is never trained."""

    def lora_layers(self, targets: Sequence[str]) -> list[str]:
        """Return names of the layers of :attr:`model` whose last part is one of ``targets``."""
        return [name for name, _ in self.model.named_modules() if name.rpartition(".")[2] in targets]

    # ---- loading and saving

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        *,
        dtype: torch.dtype | str | None = None,
        device: torch.device | str = "cpu",
        lora_adapter: str | Path | None = None,
        shard: Sharding | None = None,
        **settings: Any,
    ) -> Self:
        """Load a checkpoint in its published layout. All is checked before a tensor of the model is read.

        Args:
            folder: local folder, or ``hf:NAME``.
            dtype: of the model, ``None`` for what it was saved with here, or float32; heads are float32.
            device: of the policy.
            lora_adapter: folder of a peft adapter to apply and continue training. One that :meth:`save_pretrained`
                wrote is applied by itself; one published with weights is merged into them already and is not.
            shard: called with the complete policy while its model is still on the meta device; heads have their initial
                numbers, the same in processes of the same seed. Each process then reads its own part of each tensor.
            **settings: fields of ``config_class``; what the checkpoint was saved with is the default.

        Raises:
            FileNotFoundError: no checkpoint, or a part of it is missing.
            ValueError: settings, statistics, tokenizer or weights that do not fit.
        """
        verify_checksums(path := check_links(resolve(folder)))
        checkpoint = cls.read_checkpoint(path)
        names = {entry.name for entry in fields(cls.config_class)}
        stored = {name: value for name, value in checkpoint.options.items() if name in names}
        check_unchanged(cls, path, stored, settings, cls.checkpoint_settings)
        merged = as_tuples({**stored, **settings})
        for name, example in cls.needed_settings.items():
            if name not in merged:
                raise ValueError(
                    f"{path} does not say its {name}; set {name}, such as {example!r} (recipes: policy={cls.family})"
                )
        config = cls.config_class(**cls.infer_settings(checkpoint, merged, bool(stored)))
        model, entries = checkpoint.empty_model()
        kept = checkpoint.options if dtype is None else {"dtype": str(dtype).removeprefix("torch.")}
        cast(model, saved_dtype(kept), float32=cls.needs_float32)
        policy = cls(model, checkpoint, config)
        own = lora.stored_adapter(path, checkpoint.options)
        if own and lora_adapter and Path(lora_adapter).resolve() != own.resolve():
            raise ValueError(
                f"{path} has an adapter; leave lora_adapter out, or merge its own: vla-recipe merge {path}"
            )
        lora_adapter = lora_adapter or own
        adapter = {} if lora_adapter is None else lora.put_adapter(policy, lora_adapter)
        if shard is not None:
            shard(policy)
        entries, kept_on = policy.load_heads(entries), storage_device(policy, device)
        policy.unused_tensors = load_weights(model, entries, device=kept_on, unused=policy.unused)
        place(policy, device)
        lora.fill_adapter(policy, adapter)
        return policy

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the checkpoint's layout, and settings into ``vla_torchrl.json``; weights must be finite (ValueError).

        A LoRA adapter goes into ``lora_adapter/``; :func:`vla_policies.checkpoint.lora.merge_adapter` merges it, for
        weights that any code can load. All processes that share a sharded policy must call it; the first one writes.
        """
        folder, adapted = Path(folder), lora.has_lora(self)
        check_finite(self.state_dict(), f"the policy {self.family!r}")
        dtype = str(self.model.dtype).removeprefix("torch.")
        options = {"family": self.family, **asdict(self.config), "dtype": dtype, lora.ADAPTER: adapted}
        weights = self.model.state_dict()
        plain = {own: weights[name] for own, name in plain_names(weights).items()}
        files = self.write_checkpoint(folder, {**plain, **self.unused_tensors}, options)
        if adapted:
            files += (f"{lora.ADAPTER}/{name}" for name in lora.save_adapter(self, folder / lora.ADAPTER))
        in_first(self.parameters(), lambda: write_checksums(folder, files))

    # ---- memory

    @classmethod
    def meta_model(cls, folder: Path | None, settings: Mapping[str, Any]) -> tuple[nn.Module, Any, dict[str, Any]]:
        """Build the model on the meta device; returns it, its checkpoint, and what that says of the settings."""
        raise ValueError(f"{cls.family} does not say what it takes; write {cls.__name__}.meta_model")

    def make_heads(self) -> None:
        """Make the heads that the settings of a :meth:`meta_policy` ask for."""

    @classmethod
    def meta_policy(cls, folder: Path | None = None, **settings: Any) -> Self:
        """See :meth:`VLAPolicy.meta_policy`; the networks are frozen and adapted as in training."""
        model, checkpoint, said = cls.meta_model(folder, settings)
        adapter = None if folder is None else lora.stored_adapter(folder, said)
        rank = {} if adapter is None else lora.read_rank(adapter)
        if other := settings.get("lora_adapter"):  # one from elsewhere may name layers that are not adapted here
            rank = {"lora_rank": lora.read_rank(Path(other).expanduser())["lora_rank"]}
        settings = {**defaults_of(cls), **said, **rank, **settings}
        policy = cls.__new__(cls)
        TensorDictModuleBase.__init__(policy)
        policy.model, policy.folder = model, checkpoint
        policy.config = object.__new__(cls.config_class)  # it may lack what the folder does not say
        vars(policy.config).update(settings)
        with torch.device("meta"):
            policy.make_heads()
        cast(model, getattr(torch, settings.get("dtype") or "float32"), float32=cls.needs_float32)
        policy.freeze()
        lora.adapt(policy, *(settings.get(f"lora_{name}") for name in ("rank", "alpha", "targets")))
        return policy.to("meta")  # adapters begin with numbers

    def stays_float32(self, name: str) -> bool:
        """See :meth:`VLAPolicy.stays_float32`: heads and adapters do."""
        return not name.startswith("model.") or ".lora_" in name or self.needs_float32(name.removeprefix("model."))

    # ---- making one for an environment

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
        """Load a checkpoint for an environment, whose benchmark it is loaded for; see :meth:`from_pretrained`.

        ``device=None`` takes :meth:`default_device`. ``lora_rank`` trains a new adapter instead of the whole model,
        scaled by ``lora_alpha / lora_rank`` (``None``: 1), on those of ``lora_targets`` (``None``: all that can).
        """
        if not checkpoint:
            raise ValueError(f"policy={cls.family} starts from a checkpoint; type policy.checkpoint=FOLDER, or hf:NAME")
        check_settings("", settings, cls.setting_types())

        def complete(policy: Any) -> None:
            lora.adapt(policy, lora_rank, lora_alpha, lora_targets)
            if shard is not None:
                shard(policy)

        return cls.from_pretrained(
            checkpoint,
            dtype=dtype,
            device=device or cls.default_device(),
            lora_adapter=lora_adapter,
            shard=complete,
            **{name: getattr(shape, name) for name in cls.shape_settings},
            **settings,
        )

    def check_environment(self, shape: EnvironmentShape) -> None:
        """Refuse an environment of another benchmark; see :meth:`VLAPolicy.check_environment`."""
        if self.config.benchmark != shape.benchmark:
            own, name = self.config.benchmark, shape.id
            raise ValueError(
                f"the policy acts in {own} and {name} is of {shape.benchmark}; take an environment of {own} (recipes: "
                f"env=...), or load the checkpoint with benchmark={shape.benchmark!r} (recipes: policy={self.family})"
            )
        super().check_environment(shape)
