"""Even minibatches: each process works off as many decisions as any other, wherever they were collected."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from tensordict import TensorDictBase
from torch import Tensor

from vla_algos import parallel
from vla_common.keys import NEXT, STEP_MASK


def assign_rows(owners: Tensor, processes: int) -> Tensor:
    """Return which process works off each row ``[R]``: its owner ``[R]``, but for the surplus of those that have most.

    Shares differ by one row at most; the larger ones are those of the processes that own most: as few rows move as can.
    """
    counts = torch.bincount(owners, minlength=processes)
    shares = torch.full_like(counts, len(owners) // processes)
    shares[counts.argsort(descending=True, stable=True)[: len(owners) % processes]] += 1
    surplus = torch.cat([(owners == rank).nonzero().flatten()[int(shares[rank]) :] for rank in range(processes)])
    workers = owners.clone()
    workers[surplus] = torch.arange(processes).repeat_interleave((shares - counts).clamp(min=0))
    return workers


class BalancedMinibatches:
    """Rows of a batch that lies in several processes, in passes: as many in each, for every minibatch.

    Only the surplus of a minibatch moves, with all its entries, over the CPU. A process that has rows for fewer passes
    than others fills up with passes that are to count nothing. All processes ask for the same minibatches; a
    ``ValueError`` if their rows do not fit together.

    Args:
        samples: this process's rows ``[D]``, or ``None``; rows are read when their pass comes.
        counts: rows of each process.
        device: where passes are wanted.
        computed: entries that the policy has added. One that some process lacks is left out, and one that is longer in
            some process, such as that of the longest prompt, is filled up with zeros elsewhere.
    """

    def __init__(
        self,
        samples: TensorDictBase | None,
        counts: Sequence[int],
        device: torch.device,
        computed: Collection[Any] = (),
    ):
        self._device, self._rank, self._processes = device, parallel.rank(), len(counts)
        self._first = sum(counts[: self._rank])
        self._owners = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
        self._samples = samples if counts[self._rank] else None
        if len(counts) > 1:
            self._samples = _alike(self._samples, computed)
            self._filling = self._any_row(counts)
        self._decisions = self._moved = self._busiest = 0  # rows of minibatches; of each, of the process with most

    def metrics(self) -> dict[str, float]:
        """Return ``train/imbalance`` and ``train/moved`` of the minibatches so far; nothing of one process."""
        if self._processes == 1 or not self._decisions:
            return {}
        return {
            "train/imbalance": self._busiest * self._processes / self._decisions,
            "train/moved": self._moved / self._decisions,
        }

    def passes(self, rows: Tensor, size: int | None) -> Iterator[tuple[TensorDictBase, bool, bool]]:
        """Yield this process's parts of a minibatch, each with whether it counts, and whether it is the last.

        ``rows``, int64 ``[R]``, are of the batches of all processes, joined; parts have at most ``size``, if given.
        """
        owners = self._owners[rows]
        workers = assign_rows(owners, self._processes)
        busiest = int(torch.bincount(workers, minlength=self._processes).max())
        self._decisions += len(rows)
        self._moved += int((owners != workers).sum())
        self._busiest += busiest
        own = rows[(owners == self._rank) & (workers == self._rank)] - self._first
        arrived = self._exchange(rows, owners, workers)
        size = size or busiest
        for start in range(0, busiest, size):
            parts = [] if self._samples is None else [self._samples[own[start : start + size]]]
            if arrived is not None:
                come = slice(max(0, start - len(own)), max(0, start + size - len(own)))
                parts.append(arrived[come])
            parts = [part.to(self._device) for part in parts if len(part)]
            part = torch.cat(parts) if len(parts) > 1 else parts[0] if parts else self._filling.to(self._device)
            yield part, bool(parts), start + size >= busiest

    def _exchange(self, rows: Tensor, owners: Tensor, workers: Tensor) -> TensorDictBase | None:
        """Send the surplus, and return what has come, in the order of the processes."""
        if torch.equal(owners, workers):
            return None
        sent: list[TensorDictBase | None] = [None] * self._processes
        for other in set(workers.tolist()) - {self._rank}:
            leaving = rows[(owners == self._rank) & (workers == other)] - self._first
            if len(leaving):
                assert self._samples is not None  # it owns these rows
                sent[other] = self._samples[leaving].cpu()
        come = [part for part in parallel.all_to_all(sent) if part is not None]
        return torch.cat(come) if come else None

    def _any_row(self, counts: Sequence[int]) -> TensorDictBase:
        """Return a row, for passes that count nothing: an own one, or where there is none the first of all."""
        own = None if self._samples is None else self._samples[torch.tensor([0])]
        if not all(counts):
            giver = next(rank for rank, count in enumerate(counts) if count)
            given = parallel.broadcast_object(own if own is None else own.cpu(), giver)
            own = given if own is None else own
        assert own is not None  # some process has rows
        return own


def masked(part: TensorDictBase) -> TensorDictBase:
    """Return rows of which nothing was executed: a loss that reads ``step_mask`` gets exactly 0 from them."""
    part = part.copy()
    part[NEXT, STEP_MASK] = torch.zeros_like(part[NEXT, STEP_MASK])
    return part


def _alike(samples: TensorDictBase | None, computed: Collection[Any]) -> TensorDictBase | None:
    """Give the rows of all processes the same entries of the same shapes; all must call it."""
    # One row says it: others may lie on a disk.
    entries = () if samples is None else samples[torch.tensor([0])].items(True, True)
    own = {key: (entry.dtype, tuple(entry.shape[1:])) for key, entry in entries}
    shapes = [each for each in parallel.all_gather_object(own) if each]
    if samples is None:
        return None
    shared = set(own).intersection(*shapes)
    changed = samples.exclude(*(set(own) - shared))
    for key in sorted(shared, key=str):
        kinds = list(dict.fromkeys(each[key] for each in shapes))
        if len(kinds) == 1:
            continue
        if len({(dtype, len(shape)) for dtype, shape in kinds}) > 1 or key not in computed:
            first, other, *_ = (f"{dtype} {list(shape)}" for dtype, shape in kinds)
            raise ValueError(
                f"{key!r} of a decision is {first} in one process and {other} in another: environment and policy must "
                "have the same settings in all of them"
            )
        changed[key] = _filled_up(changed[key], [shape for _, shape in kinds])
    return changed


def _filled_up(entry: Tensor, shapes: Sequence[Sequence[int]]) -> Tensor:
    """Fill an entry ``[D, ...]`` up to the largest of ``shapes`` of a row."""
    missing = [max(sizes) - has for *sizes, has in zip(*shapes, entry.shape[1:], strict=True)]
    return F.pad(entry, [side for count in reversed(missing) for side in (0, count)])
