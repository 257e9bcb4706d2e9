"""``vla-recipe merge`` and ``export``: a policy once more, its adapter added to the weights, or in another layout."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vla_algos.evaluation import TRAINING_ENV
from vla_algos.files import write_folder_atomically
from vla_algos.run.folder import policy_folder
from vla_common.checksums import add_checksum
from vla_policies import load_policy
from vla_policies.checkpoint.lora import ADAPTER, has_lora, merge_adapter
from vla_policies.checkpoint.settings import read_options
from vla_policies.pi0.conversion import check_layout, convert
from vla_policies.pretrained import PretrainedPolicy
from vla_policies.registry import find_policy_class


def merge_folder(folder: Path, to: Path) -> list[str]:
    """Write a policy once more, with its adapter merged into the weights; needs the memory of one copy of them.

    ``folder`` is of a run, or of a policy that was saved with an adapter (else ValueError); ``to`` must be new or
    empty (FileExistsError). Returns lines that say what was written.
    """
    folder = policy_folder(folder)
    options = read_options(folder)
    if not options.get(ADAPTER):
        raise ValueError(f"{folder} has no adapter to merge; type the folder of a policy trained with policy.lora_rank")
    check_free(to)
    policy = load_policy(folder)
    assert isinstance(policy, PretrainedPolicy)
    merge_adapter(policy)
    _write(policy, folder, to)
    return [
        f"merged the adapter of {folder} into {to}: {policy.family}, {options.get('dtype', 'float32')}",
        f"now type: vla-recipe run evaluate policy.checkpoint={to}",
    ]


def export_folder(
    folder: Path, layout: str, to: Path | None, tokenizer: Path | None, settings: Mapping[str, Any]
) -> list[str]:
    """Write pi0 or pi0.5 in the other of its layouts, an adapter merged; arguments and errors as of merging.

    ``to`` is beside ``folder`` unless given; ``tokenizer`` has its files in that ``layout``, else ``folder``;
    ``settings`` are what a published checkpoint does not say, such as ``benchmark``.
    """
    folder = policy_folder(folder)
    to = to or folder.with_name(f"{folder.resolve().name}-{layout}")
    check_layout(find_policy_class(folder), layout)
    check_free(to)
    policy = load_policy(folder, **settings)
    assert isinstance(policy, PretrainedPolicy)
    if has_lora(policy):
        merge_adapter(policy)
    other, lines = convert(policy, layout, tokenizer or folder)
    _write(other, folder, to)
    return [f"exported {folder} into {to}, of the family {other.family}", *lines]


def check_free(to: Path) -> None:
    """Refuse (FileExistsError) to write where something is."""
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise FileExistsError(f"{to} is there already; type another folder: --to NEW")


def _write(policy: PretrainedPolicy, folder: Path, to: Path) -> None:
    """Save a policy and, where ``folder`` has it, what it was trained on."""

    def write(place: Path) -> None:
        policy.save_pretrained(place)
        if (folder / TRAINING_ENV).is_file():
            shutil.copyfile(folder / TRAINING_ENV, place / TRAINING_ENV)
            add_checksum(place, TRAINING_ENV)

    to.parent.mkdir(parents=True, exist_ok=True)
    write_folder_atomically(to, write)
