"""Rows of demonstrations to learn from, and which of them are held out."""

import math
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from vla_common import keys

CAMERAS = (keys.IMAGES, keys.WRIST_IMAGES)


class Samples:
    """Rows of demonstrations to learn from: some of a TensorDict, which is not copied.

    ``samples[index]``, with a tensor, is the TensorDict of these rows; ``samples[key]`` is an entry for all of them;
    ``len(samples)`` counts them. Images that are mapped from disk are read when a batch asks for them.

    Args:
        data: TensorDict ``[K]``, see :func:`for_policy`.
        rows: int64, which of them; all if ``None``.
    """

    def __init__(self, data: TensorDict, rows: Tensor | None = None):
        self.data, self.rows = data, rows

    def __len__(self) -> int:
        return len(self.data if self.rows is None else self.rows)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, str):
            return self.data[index] if self.rows is None else self.data.select(index)[self.rows][index]
        return self.data[index if self.rows is None else self.rows[index]]

    def __contains__(self, key: str) -> bool:
        return key in self.data

    def select(self, *names: str) -> "Samples":
        """Return the rows with some of the entries only."""
        return Samples(self.data.select(*names), self.rows)

    def choose(self, chosen: Tensor) -> "Samples":
        """Return the rows where ``chosen``, bool ``[len]``, is true."""
        return Samples(self.data, (torch.arange(len(self)) if self.rows is None else self.rows)[chosen])

    @property
    def episodes(self) -> int:
        """How many demonstrations the rows are of."""
        return len(self[keys.EPISODE].unique())

    def split(self, heldout: float) -> "tuple[Samples, Samples]":
        """Keep whole demonstrations out of learning, for a loss on what was not learnt.

        Which ones, a demonstration's trial decides alone: of each task the same share, and the same trials whatever
        else was recorded or solved. With ``heldout=1/16`` those are trials 15, 31, 47 and so on. Returns what is learnt
        from, and what is held out; with 0 all of it, and nothing. A ``ValueError`` if nothing is held out, or left.
        """
        if not heldout:
            return self, self.choose(torch.zeros(len(self), dtype=torch.bool))
        out = is_held_out(self[keys.TRIAL_ID], heldout)
        _check_split(heldout, out)
        return self.choose(~out), self.choose(out)


def check_heldout(heldout: float, trials: int) -> None:
    """Refuse (``ValueError``) to hold out nothing, or all, of so many trials of each task."""
    if heldout:
        _check_split(heldout, is_held_out(torch.arange(trials), heldout))


def _check_split(heldout: float, out: Tensor) -> None:
    if out.any() and not out.all():
        return
    what = "no demonstration is left to learn from" if out.any() else "no demonstration is held out"
    first = ", ".join(str(math.ceil(number / heldout - 1e-9) - 1) for number in (1, 2, 3))
    raise ValueError(
        f"heldout={heldout:g}: {what}, of each task trials {first}, ... are; take more demonstrations, or "
        "heldout=0 to learn from all (recipes: demonstrations.episodes, demonstrations.heldout)"
    )


def is_held_out(trials: Tensor, share: float) -> Tensor:
    """Tell which trials, int64 ``[K]``, a share of them holds out: evenly spread over the numbers from 0."""
    counted = trials.double() * share + 1e-9
    return (counted + share).floor() > counted.floor()
