"""``vla-recipe merge FOLDER --to NEW``: a policy with its adapter added to the weights, in the published layout."""

from __future__ import annotations

import shutil
from pathlib import Path

from vla_algos.evaluation import TRAINING_ENV
from vla_algos.files import write_folder_atomically
from vla_algos.run.folder import policy_folder
from vla_common.checksums import add_checksum
from vla_common.plain import read_json
from vla_policies import load_policy
from vla_policies.checkpoint.lora import ADAPTER, merge_adapter
from vla_policies.pretrained import PretrainedPolicy

_OPTIONS = "vla_torchrl.json"


def merge_folder(folder: Path, to: Path) -> list[str]:
    """Write a policy once more, with its adapter merged into the weights; needs the memory of one copy of them.

    Args:
        folder: of a run, or of a policy that a recipe or ``save_pretrained`` wrote with an adapter.
        to: a folder that is not there yet, or is empty.

    Returns:
        Lines that say what was written.

    Raises:
        FileNotFoundError: ``folder`` is not there.
        FileExistsError: ``to`` has something in it.
        ValueError: the policy has no adapter that is not merged already.
    """
    folder = policy_folder(folder)
    options = read_json(folder / _OPTIONS) if (folder / _OPTIONS).is_file() else {}
    if not options.get(ADAPTER):
        raise ValueError(f"{folder} has no adapter to merge; type the folder of a policy trained with policy.lora_rank")
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise FileExistsError(f"{to} is there already; type another folder: --to NEW")
    policy = load_policy(folder)
    assert isinstance(policy, PretrainedPolicy)
    merge_adapter(policy)

    def write(place: Path) -> None:
        policy.save_pretrained(place)
        if (folder / TRAINING_ENV).is_file():
            shutil.copyfile(folder / TRAINING_ENV, place / TRAINING_ENV)
            add_checksum(place, TRAINING_ENV)

    to.parent.mkdir(parents=True, exist_ok=True)
    write_folder_atomically(to, write)
    return [
        f"merged the adapter of {folder} into {to}: {policy.family}, {options.get('dtype', 'float32')}",
        f"now type: vla-recipe run evaluate policy.checkpoint={to}",
    ]
