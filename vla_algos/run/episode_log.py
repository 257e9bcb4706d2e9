"""``episodes.jsonl``: what an evaluation has found so far, a line per episode; a broken one goes on there."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from vla_algos import parallel
from vla_algos.results import IDENTITY, NAME, EpisodeResult, as_lines, files_of, parts_of, result_of
from vla_algos.run.files import Appended, attempt, remove, write_atomically
from vla_common import keys
from vla_envs import Episode


class EpisodeLog:
    """Writes each result at once; of several processes each has a file, which the first one joins at the end.

    Args:
        path: of the first process, ending in ``.jsonl``; the others have ``..._rank1.jsonl`` beside it.
        keep: go on in the files that are there; without it they are begun anew.
    """

    def __init__(self, path: Path, *, keep: bool):
        self.path = path
        own = path if parallel.is_main() else path.with_name(f"{path.stem}_rank{parallel.rank()}{path.suffix}")
        self._file = Appended(own)
        if not keep:
            remove(own)
        elif own.exists() and not own.read_bytes().endswith(b"\n"):  # torn by a process that died while writing
            self._file.append(b"\n")

    def add(self, result: EpisodeResult) -> None:
        """Write a result."""
        self._file.append(as_lines([result]).encode())

    def close(self) -> None:
        """Write what a full disk has refused, if there is room now."""
        self._file.close()

    @staticmethod
    def join(path: Path, results: Iterable[EpisodeResult]) -> None:
        """Write all results in the order of the episodes, in place of the files of all processes; in the first one."""
        if not parallel.is_main():
            return
        content = as_lines(results)
        if attempt(str(path), lambda: write_atomically(path, content), "it has what was written as it came"):
            for part in parts_of(path):
                part.unlink()


def finished_episodes(path: Path, episodes: Sequence[Episode], chain_length: int = 1) -> dict[int, EpisodeResult]:
    """Read the results of an evaluation of ``episodes`` that was broken off, by index; crashed episodes have none.

    Of chains of tasks a line without the number of those that were solved is no result.
    """
    found = {}
    for part in files_of(path):
        for line in part.read_text(encoding="utf-8", errors="replace").splitlines():
            result = _read(line, episodes, chain_length)
            if result is not None and not result.crashed:
                found[result.index] = result
    return found


def ablated(folder: Path) -> dict[str, Path]:
    """List the files of an evaluation's ablations by their names; see :func:`ablated_name`."""
    pattern = re.compile(rf"{Path(NAME).stem}_(?!rank\d)(\w+?)(_rank\d+)?\.jsonl")
    names = [match[1] for path in sorted(folder.iterdir()) if (match := pattern.fullmatch(path.name))]
    return {name: folder / ablated_name(name) for name in names}


def ablated_name(ablation: str) -> str:
    """Return the name of the file with the results of an ablation: ``episodes_blank_images.jsonl``."""
    return f"{Path(NAME).stem}_{ablation}.jsonl"


def check_policy(folder: Path, policy: nn.Module) -> None:
    """Refuse to go on in a folder with results of another policy; note the policy where there are none.

    Raises:
        ValueError: its weights are others.
    """
    weights = fingerprint(policy)
    before = _policy_of(folder)
    parallel.barrier()  # all have read what is written now
    if before not in (None, weights):
        raise ValueError(
            f"{folder} has results of a policy with other weights than this one. {_WAY_OUT.format(folder / NAME)}"
        )
    if parallel.is_main():
        write_atomically(folder / IDENTITY, json.dumps({"policy": weights}) + "\n")


_WAY_OUT = "Take another folder (hydra.run.dir=...), or remove {} to begin anew"


def fingerprint(policy: nn.Module) -> str:
    """Tell weights apart: a hash of the names, shapes and sums of the bits of all of them; reads each once."""
    found = hashlib.sha256()
    for name, tensor in sorted(policy.state_dict().items()):
        if not isinstance(tensor, torch.Tensor):  # extra state
            found.update(f"{name} {tensor!r}".encode())
            continue
        flat = tensor.detach().contiguous().view(-1)
        bits = flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(flat.element_size(), torch.int64))
        found.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {int(bits.sum(dtype=torch.int64))}".encode())
    return found.hexdigest()


def _policy_of(folder: Path) -> str | None:
    """Read whose results the folder has; ``None`` where it has no results."""
    path = folder / NAME
    if not files_of(path):
        return None
    try:
        return str(json.loads((folder / IDENTITY).read_text())["policy"])
    except (OSError, ValueError, KeyError, TypeError):
        raise ValueError(
            f"{path} is there, but no readable {IDENTITY} says of which policy. {_WAY_OUT.format(path)}"
        ) from None


def _read(line: str, episodes: Sequence[Episode], chain_length: int) -> EpisodeResult | None:
    """Read a line; ``None`` of one that is torn or of no episode of these."""
    try:
        entry = json.loads(line)
        subtasks = entry[keys.SUBTASKS] if chain_length > 1 else None
        if subtasks is not None and subtasks not in range(chain_length + 1):
            return None
        episode = episodes[entry["index"]]
        if (entry[keys.TASK_ID], entry[keys.TRIAL_ID], entry["seed"]) != (
            episode.task_id,
            episode.trial_id,
            episode.seed,
        ):
            return None
        return replace(result_of(entry), episode=episode, subtasks=subtasks)
    except (ValueError, KeyError, TypeError, IndexError):
        return None
