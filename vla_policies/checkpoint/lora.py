"""Low-rank adapters on large policies through peft, in peft's own folder layout. Hu et al. 2021, arXiv 2106.09685."""

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import StringConstraints
from torch import nn

from vla_common.checksums import digest, verify_checksums, write_checksums
from vla_common.plain import read_json
from vla_common.settings import Positive, Width, check_settings
from vla_policies.checkpoint.parts import check_finite, in_first, write_safetensors
from vla_policies.checkpoint.weights import Entry, check_layout, fill, list_weights

if TYPE_CHECKING:
    from peft import LoraConfig

ADAPTER = "lora_adapter"  # folder in a checkpoint, and the option that says that its adapter is not merged
_NAME = "default"
_PREFIX = "base_model.model."  # of the names in peft's files
_Layers = Annotated[str, StringConstraints(pattern=r"^(\.\*)?[^*+{?(]*$")]  # peft's expressions, quick to match
# Of what peft reads: its configuration names modules to import and files too. Left out is dropout, which would give a
# decision another probability in each pass.
_FIELDS: dict[str, Any] = {
    "r": Width,
    "lora_alpha": Positive,
    "rank_pattern": dict[_Layers, Width],
    "alpha_pattern": dict[_Layers, Positive],
    "target_modules": list[str] | str,
    "modules_to_save": list[str],
    "base_model_name_or_path": str,
    "bias": Literal["none", "all", "lora_only"],
    **dict.fromkeys(("use_rslora", "fan_in_fan_out"), bool),
}
_OTHERS = (
    *("use_dora", "use_qalora", "use_bdlora", "lora_bias", "layer_replication", "target_parameters"),
    *("trainable_token_indices", "megatron_config", "alora_invocation_tokens"),
)
_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
Adaptable = Any  # a vla_policies.pretrained.PretrainedPolicy


def adapt(policy: Adaptable, rank: int | None, alpha: int | None = None, targets: Sequence[str] | None = None) -> None:
    """Train an adapter of this rank instead of the whole model, or continue with the checkpoint's; ``None`` adds none.

    ValueError: ``alpha`` or ``targets`` without ``rank``, or the checkpoint's adapter is another one.
    """
    if rank is None:
        if (alpha, targets) != (None, None):
            raise ValueError("policy.lora_alpha and policy.lora_targets need policy.lora_rank; 32 is usual")
        return
    if not has_lora(policy):
        add_lora(policy, rank, alpha, targets)
        return
    found = lora_config(policy)
    layers = {name.rpartition(".")[2] for name in found.target_modules or ()}
    if rank != found.r or alpha not in (None, found.lora_alpha) or (targets is not None and set(targets) != layers):
        raise ValueError(
            f"the checkpoint has a LoRA adapter already, of rank {found.r} and alpha {found.lora_alpha} on "
            f"{sorted(layers)}; leave policy.lora_* out to continue with it"
        )


def add_lora(policy: Adaptable, rank: int = 32, alpha: int | None = None, targets: Sequence[str] | None = None) -> None:
    """Freeze the model and put new float32 adapters on it, which change nothing yet; heads stay trainable.

    They are scaled by ``alpha / rank`` (``None``: 1), on layers whose names end in one of ``targets`` (``None``:
    ``policy.lora_targets``). ValueError: the policy has adapters already, or no layer has such a name.
    """
    from peft import LoraConfig

    targets = policy.lora_targets if targets is None else targets
    if not targets:
        raise ValueError(f"LoRA needs layers to adapt; it can have {sorted(policy.lora_targets)}")
    layers = {name.rpartition(".")[2] for name, _ in policy.model.named_modules()}
    if unknown := sorted(set(targets) - layers):
        raise ValueError(f"no layer is called {unknown}; LoRA can have {sorted(set(policy.lora_targets) & layers)}")
    config = LoraConfig(r=rank, lora_alpha=alpha or rank, init_lora_weights="gaussian")
    config.target_modules = policy.lora_layers(targets)
    _inject(policy, config)


def put_adapter(policy: Adaptable, folder: str | Path) -> dict[str, Entry]:
    """Put the layers of an adapter in peft's layout on a policy, on the meta device too, before it is sharded.

    Adapters on parts of the vision backbone that never affect the output are skipped; layers that were trained whole
    (``modules_to_save``) replace the base's. Returns what :func:`fill_adapter` fills the layers with.
    FileNotFoundError: the folder is no adapter; ValueError: it is of another kind or another model.
    """
    folder = Path(folder).expanduser()
    for file in (_CONFIG, _WEIGHTS):
        if not (folder / file).is_file():
            raise FileNotFoundError(f"{folder} is not a LoRA adapter: it has no {file}; pass the folder that has it")
    verify_checksums(folder)
    for own in folder.glob("policy_*.safetensors"):  # statistics, which LeRobot's adapters have of their own
        if not ((other := policy.folder.path / own.name).is_file() and digest(other) == digest(own)):
            raise ValueError(f"{own} is not the base's; copy the base's weights and tokenizer to it and load {folder}")
    config = _read_config(folder)
    known = {name for name, _ in policy.model.named_modules()}
    entries = {_own_name(key, known): entry for key, entry in list_weights(folder / _WEIGHTS).items()}
    entries = {key: entry for key, entry in entries.items() if not policy.unused(key)}
    saved = {name.rpartition(".")[2] for name in config.modules_to_save or ()}
    whole = {key for key in entries if key.rpartition(".")[0].rpartition(".")[2] in saved}
    layers = {key.partition(".lora_")[0] for key in entries.keys() - whole}
    unknown = sorted(layers - known)
    if unknown or not layers:
        raise ValueError(f"{folder} adapts layers that this model does not have: {unknown[:5]}; it is of another model")
    _check_ranks(folder, config, entries, {name: each.shape[1:] for name, each in policy.model.named_parameters()})
    config.target_modules, config.modules_to_save, config.inference_mode = sorted(layers), None, False
    for kind in ("rank_pattern", "alpha_pattern"):  # numbers of single layers, by their names
        setattr(config, kind, {_own_name(name, known): each for name, each in (getattr(config, kind) or {}).items()})
    _inject(policy, config)
    parameters = {name: each for name, each in policy.model.named_parameters() if ".lora_" in name or name in whole}
    expected = {_file_name(name): tuple(each.shape) for name, each in parameters.items()}
    found = {key: entry.shape for key, entry in entries.items()}
    check_layout(expected, found, unused=lambda key: key not in {*expected, *whole}, what=str(folder))
    return entries


def is_adapter(folder: Path) -> bool:
    """Tell whether a folder has an adapter in peft's layout."""
    return (folder / _CONFIG).is_file()


def stored_adapter(folder: Path, options: Mapping[str, Any]) -> Path | None:
    """Return the folder of the adapter that a checkpoint was saved with, if any; LeRobot's is beside the weights."""
    return (folder if is_adapter(folder) else folder / ADAPTER) if options.get(ADAPTER) else None


def read_rank(folder: Path) -> dict[str, Any]:
    """Read ``lora_rank`` and ``lora_targets`` of a saved adapter, of its weights the names alone."""
    names = (key.partition(".lora_") for key in list_weights(folder / _WEIGHTS))
    layers = {layer.rpartition(".")[2] for layer, adapted, _ in names if adapted}
    return {"lora_rank": _read_config(folder).r, "lora_targets": sorted(layers)}


def fill_adapter(policy: Adaptable, entries: Mapping[str, Entry]) -> None:
    """Fill the layers of :func:`put_adapter`, each process its part; ValueError for numbers that are not finite."""
    for name, _ in list(policy.model.named_parameters()):
        if (entry := entries.get(_file_name(name))) is not None:
            fill(policy.model, name, entry)


def save_adapter(policy: Adaptable, folder: Path) -> list[str]:
    """Write the adapter alone, as ``PeftModel.from_pretrained`` reads it; returns names of the files.

    Of a sharded policy all processes must call it. ValueError: no adapter, or numbers that are not finite.
    """
    config = copy.copy(lora_config(policy))
    config.target_modules = sorted(config.target_modules or ())  # peft has a set: its order differs between processes
    parameters = _adapter_parameters(policy.model)
    check_finite(parameters, "the adapter")
    in_first(parameters.values(), lambda: config.save_pretrained(str(folder)))
    tensors = {f"{_PREFIX}{key}": tensor for key, tensor in parameters.items()}
    write_safetensors(folder / _WEIGHTS, tensors, {"format": "pt"})
    in_first(parameters.values(), lambda: write_checksums(folder, (_CONFIG, _WEIGHTS)))
    return [_CONFIG, _WEIGHTS]


def merge_adapter(policy: Adaptable) -> None:
    """Add the adapters to their weights and remove them; the whole model is trainable again. ValueError without one."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    lora_config(policy)  # raises where there is none
    for name, module in list(policy.model.named_modules()):
        if isinstance(module, BaseTunerLayer):
            module.merge()
            policy.model.set_submodule(name, module.get_base_layer())
    del policy.model.peft_config
    policy.model.requires_grad_(True)
    policy.freeze()


def has_lora(policy: Adaptable) -> bool:
    """Tell whether there are adapters that were not merged."""
    return hasattr(policy.model, "peft_config")


def lora_config(policy: Adaptable) -> "LoraConfig":
    """Return peft's configuration of the adapter; ValueError without one."""
    if not has_lora(policy):
        raise ValueError("the policy has no LoRA adapter; add_lora(policy) puts one on it")
    return policy.model.peft_config[_NAME]


def _read_config(folder: Path) -> "LoraConfig":
    from peft import LoraConfig

    file = folder / _CONFIG
    content = read_json(file)
    began = content.get("init_lora_weights", True)  # others than these have changed the weights that are adapted
    known = not isinstance(began, str) or began in ("gaussian", "eva", "orthogonal")
    if content.get("peft_type") != "LORA" or not known or any(content.get(name) for name in _OTHERS):
        raise ValueError(f"{folder} is not a plain LoRA adapter; DoRA, PiSSA and other kinds are refused")
    chosen = {name: content.get(name) for name in _FIELDS if name in ("r", "lora_alpha") or content.get(name)}
    try:
        check_settings("", chosen, _FIELDS)
        if content.get("init_lora_weights") == "gaussian":  # says how it began; others would compute or read files
            chosen["init_lora_weights"] = "gaussian"
        return LoraConfig(**chosen)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise ValueError(f"{file} is not a configuration that peft reads ({error}); copy it again") from error


def _check_ranks(folder: Path, config: "LoraConfig", entries: Mapping[str, Entry], widths: Mapping[str, Any]) -> None:
    downs = {key.partition(".lora_")[0]: entry.shape for key, entry in entries.items() if ".lora_A." in key}
    ranks = {down[0] if down[1:] == widths.get(f"{layer}.weight") else 0 for layer, down in downs.items()}
    known = {config.r, *(config.rank_pattern or {}).values()}
    if not known >= ranks or max(known) > max(ranks, default=0):
        raise ValueError(
            f"{folder / _CONFIG}: the rank is {sorted(known)}, that of the weights {sorted(ranks)}; copy both again"
        )


def _inject(policy: Adaptable, config: "LoraConfig") -> None:
    from peft import inject_adapter_in_model

    if has_lora(policy):
        raise ValueError("the policy has a LoRA adapter already; merge it first with merge_adapter(policy)")
    with _weights_without_memory(policy.model):
        inject_adapter_in_model(config, policy.model, _NAME)
    for parameter in _adapter_parameters(policy.model).values():
        parameter.data = parameter.data.float()


@contextlib.contextmanager
def _weights_without_memory(model: nn.Module) -> Iterator[None]:
    """Lend layers on the meta device weights on the CPU, of one number each.

    peft moves what it has drawn for a layer to where its weight is: on the meta device it would be lost.
    """
    weights = {layer: getattr(layer, "weight", None) for layer in model.modules()}
    empty = {layer: each for layer, each in weights.items() if isinstance(each, nn.Parameter) and each.is_meta}
    lent = {layer: nn.Parameter(each.new_empty(1, device="cpu").expand(each.shape)) for layer, each in empty.items()}
    for layer, weight in lent.items():
        layer.weight = weight.requires_grad_(empty[layer].requires_grad)
    yield
    for layer, weight in empty.items():
        layer.weight = weight.requires_grad_(lent[layer].requires_grad)


def _adapter_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return parameters by their names in peft's files, without the prefix."""
    return {_file_name(name): parameter for name, parameter in model.named_parameters() if ".lora_" in name}


def _own_name(key: str, layers: Set[str]) -> str:
    """Return the name here of a tensor in peft's file; LeRobot's policies have the network as their ``model``."""
    key = key.removeprefix(_PREFIX)
    inner = key.removeprefix("model.")
    return inner if {inner.partition(".lora_")[0], inner.rpartition(".")[0]} & layers else key


def _file_name(name: str) -> str:
    return name.replace(f".{_NAME}.", ".")
