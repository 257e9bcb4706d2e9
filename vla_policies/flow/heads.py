"""Value head and noise network of a flow policy on a VLM: in a file that the official loader does not see, or RLinf's.

RLinf has them among the weights: ``value_head.mlp.<n>.*``, linear layers with ReLU between, all with a bias, and
``noise_head.mlp_logvar.moduleList.<n>.linear_1.*``, the same with tanh, and ``noise_head.logvar_min`` and
``logvar_max``, the logarithms of the smallest and largest variance. Ours compute the same by other names.
"""

import itertools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor, nn

from vla_policies.checkpoint.parts import write_safetensors
from vla_policies.checkpoint.settings import SettingError
from vla_policies.checkpoint.weights import Entry, list_weights, load_weights

HEADS = "vla_torchrl_heads.safetensors"
_RLINF_VALUE = re.compile(r"value_head\.mlp\.(\d+)\.(weight|bias)")
_RLINF_NOISE = re.compile(r"noise_head\.mlp_logvar\.moduleList\.(\d+)\.linear_1\.(weight|bias)")
_RLINF_LOG_VARIANCES = ("noise_head.logvar_min", "noise_head.logvar_max")
_BFLOAT16 = 0.02  # relative; what bfloat16 logarithms leave of a standard deviation


@dataclass(frozen=True)
class StoredHeads:
    """The heads of a folder, by the names of our modules; of its tensors only the headers."""

    path: Path
    layers: Mapping[str, Mapping[str, Entry]] = field(repr=False)  # of "value_head" and "noise_network", if any
    log_variances: tuple[Entry, ...] = field(default=(), repr=False)  # RLinf's bounds of the noise, smaller one first

    @classmethod
    def read(cls, path: Path, weights: Mapping[str, Entry]) -> "StoredHeads":
        """Find the heads in our file and, those that it lacks, among the ``weights``."""
        own = list_weights(path / HEADS) if (path / HEADS).is_file() else {}
        layers: dict[str, dict[str, Entry]] = {}
        for key, entry in own.items():
            head, _, name = key.partition(".")
            if name:
                layers.setdefault(head, {})[name] = entry
        rlinf: dict[str, dict[str, Entry]] = {}
        for key, entry in weights.items():
            if found := _RLINF_VALUE.fullmatch(key):
                rlinf.setdefault("value_head", {})[f"{found[1]}.{found[2]}"] = entry
            elif found := _RLINF_NOISE.fullmatch(key):
                rlinf.setdefault("noise_network", {})[f"mlp.{2 * int(found[1])}.{found[2]}"] = entry
        bounds: tuple[Entry, ...] = ()
        if "noise_network" in rlinf.keys() - layers.keys():
            bounds = tuple(weights[key] for key in _RLINF_LOG_VARIANCES if key in weights)
        return cls(path, {**rlinf, **layers}, bounds)

    def sizes(self, head: str) -> tuple[int, ...] | None:
        """Return a head's input and output sizes, ``(1024, 512, 256, 128, 1)``; ``None`` without."""
        numbers = {int(key.split(".")[-2]): key for key in self.layers.get(head, {}) if key.endswith(".weight")}
        shapes = [self.layers[head][numbers[number]].shape for number in sorted(numbers)]
        if any(len(s) != 2 or 0 in s for s in shapes) or any(a[0] != b[1] for a, b in itertools.pairwise(shapes)):
            raise ValueError(f"the {head} of {self.path} has weights of shapes {shapes}, must be matrices of one chain")
        return (shapes[0][1], *(shape[0] for shape in shapes)) if shapes else None

    def keys_of(self, heads: Mapping[str, nn.Module]) -> set[str]:
        """Return the names, in their files, of the tensors that :meth:`load` fills these heads with."""
        names = {entry.key for head in heads for entry in self.layers.get(head, {}).values()}
        return names | ({entry.key for entry in self.log_variances} if "noise_network" in heads else set())

    def check_value_input(self, value_after_vlm: str | None, language: int, expert: int, vlm: str) -> None:
        """Refuse (SettingError) a value head of another input width than ``value_after_vlm`` gives.

        ``language`` and ``expert`` are the widths, ``vlm`` is the name of what has the first one.
        """
        sizes = self.sizes("value_head")
        if sizes is not None and sizes[0] != (language if value_after_vlm else expert):
            advice = {
                expert: "the action expert's; set value_after_vlm=null",
                language: f"{vlm}'s; set value_after_vlm=mean",
            }
            other = f"{vlm} has {language} and the action expert {expert}: it is of another model; take its own"
            raise SettingError(
                f"value_after_vlm={value_after_vlm or 'null'}: the value head of {self.path} reads {sizes[0]} numbers, "
                f"{advice.get(sizes[0], other)}"
            )

    def check_noise_range(self, noise_std_range: tuple[float, float]) -> None:
        """Refuse bounds of the noise that RLinf's noise head was not trained with (SettingError), or that it lacks."""
        rlinf = any(entry.file.name != HEADS for entry in self.layers.get("noise_network", {}).values())
        if rlinf and len(self.log_variances) < len(_RLINF_LOG_VARIANCES):
            raise ValueError(
                f"the noise head of {self.path} lacks {' or '.join(_RLINF_LOG_VARIANCES)}, its bounds; copy or convert "
                "the checkpoint again"
            )
        trained = [(entry.read().double().mean() / 2).exp().item() for entry in self.log_variances]
        pairs = zip(trained, noise_std_range, strict=False)
        if any(abs(one - other) > _BFLOAT16 * one for one, other in pairs):
            raise SettingError(
                f"noise_std_range={list(noise_std_range)}: the noise head of {self.path} was trained with others; "
                f"set noise_std_range=[{','.join(f'{bound:.2g}' for bound in trained)}]"
            )

    def load(self, heads: Mapping[str, nn.Module]) -> None:
        """Fill the heads that a policy has, by name, as far as the folder has them; ValueError if they do not fit."""
        for head, module in heads.items():
            if entries := self.layers.get(head):
                load_weights(module, entries, what=f"the {head} of {self.path}")

    def describe(self) -> str:
        if not self.layers:
            return "no: new ones are initialised"
        own = any(entry.file.name == HEADS for layers in self.layers.values() for entry in layers.values())
        return f"{', '.join(sorted(self.layers))} in {HEADS if own else 'the weights, by the names of RLinf'}"


def is_head(key: str) -> bool:
    """Tell whether a tensor of that name among the weights is of one of RLinf's heads."""
    return bool(_RLINF_VALUE.fullmatch(key) or _RLINF_NOISE.fullmatch(key)) or key in _RLINF_LOG_VARIANCES


def save_heads(folder: Path, heads: Mapping[str, nn.Module], among: Iterable[Tensor] = ()) -> str:
    """Write the heads that a policy has; returns the name of the file.

    Of a sharded policy all processes must call it; ``among`` are its parameters, as it may have no heads.
    """
    tensors = {f"{name}.{key}": each for name, head in heads.items() for key, each in head.state_dict().items()}
    write_safetensors(folder / HEADS, tensors, among=among)
    return HEADS
