"""Saving and restoring the state of a run: its parts, the weights of its policy, and random numbers."""

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol, TypeVar

import torch.distributed as dist
from safetensors import SafetensorError
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from tqdm import tqdm

from vla_algos import distributed
from vla_algos.files import remove
from vla_algos.optim import places
from vla_algos.run import checkpoints
from vla_algos.run.checkpoints import BrokenCheckpoint, CheckpointError, SavedState, Snapshot
from vla_algos.run.seeds import random_state, set_random_state
from vla_common.checksums import ChecksumError
from vla_common.tensor_files import make_room
from vla_policies.sharding import trained_tensors

T = TypeVar("T")
_PATIENCE = timedelta(hours=2)  # until all have written their part


class Stateful(Protocol):
    """A part of a run, whose state a checkpoint has.

    One that is the same in all processes, but for what is sharded, says ``replicated = True``, and has ``places()``
    where that is: by the keys of its state, tensors that lie as those of the state are to lie. The others are each
    process's own. One that says ``optional = True`` begins as it is where the saved run had none.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return tensors and plain values."""

    def load_state_dict(self, state: dict[str, Any], /) -> Any:
        """Restore what :meth:`state_dict` returned."""


class Saver:
    """Writes checkpoints of a run into ``root``, and restores the last one that is whole.

    A state is copied into host memory at once; a thread writes it, and the next save waits for it. Several processes
    write together: each its part of what is sharded, with its own parts and random numbers. An ``elastic`` one also
    continues from a checkpoint of another number of processes: weights and optimizer are exact, all else begins again.
    """

    def __init__(self, root: Path, elastic: bool = False):
        self.root, self._elastic = root, elastic
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future | None = None
        self._group: dist.ProcessGroup | None = None  # of the threads that write

    def restore(self, parts: Mapping[str, Any]) -> dict[str, Any] | None:
        """Restore ``parts``, by name, of the last checkpoint that all processes can read, and say which are broken.

        Returns the ``progress`` of :meth:`save`; ``None`` if there never was a checkpoint. Of ``policy`` the trained
        weights are saved. CheckpointError: all are broken, or it is of another policy.
        """
        broken: list[str] = []
        for checkpoint in distributed.broadcast_object(checkpoints.by_preference(self.root)):
            found, problem = None, _all_ranks_ok(checkpoints.verify_checkpoint, checkpoint)[1]
            if problem is None:  # nothing is read that another process has found to be damaged
                found, problem = _all_ranks_ok(self._load, checkpoint, parts)
            if problem is None and found is not None:
                if broken and distributed.is_main():
                    tqdm.write(f"warning: {'; '.join(broken)}. Continuing from the checkpoint before it, {checkpoint}")
                if distributed.is_main():
                    checkpoints.remove_unfinished(self.root)
                return found
            broken.append(str(problem))
        if broken:
            raise CheckpointError(
                f"no checkpoint in {self.root} can be used: {'; '.join(broken)}. To begin again take another "
                "folder: hydra.run.dir=..."
            )
        return None

    def _load(self, checkpoint: Path, parts: Mapping[str, Any]) -> dict[str, Any]:
        saved = checkpoints.open_checkpoint(checkpoint, verified=True)
        processes = distributed.world_size()
        if saved.processes != processes and not self._elastic:
            raise CheckpointError(
                f"{saved.folder} is of {saved.processes} processes, this run has {processes}: resume with as many, or "
                "with resume=elastic (weights and optimizer continue, with fresh episodes), or start in a new folder "
                f"from one of the policies {self.root}/*/policy"
            )
        weights = trained_tensors(parts["policy"])
        own, there = ({name: each.shape for name, each in some.items()} for some in (weights, saved.state["weights"]))
        if wrong := [name for name in own.keys() | there.keys() if own.get(name) != there.get(name)]:
            raise CheckpointError(
                f"{saved.folder} has the weights of another policy: {len(wrong)} differ, such as {min(wrong)}; run "
                "with the policy settings of that run, or in a new folder"
            )
        replicated = _replicated(parts)
        states = {name: _room(part, saved, name) for name, part in replicated.items()}
        states = {name: state for name, state in states.items() if state is not None}
        saved.fill({"weights": weights, "parts": states})
        for name, state in states.items():
            replicated[name].load_state_dict(state)
        if saved.processes == processes:
            self._load_own(saved, _own(parts))
        elif distributed.is_main():
            tqdm.write(
                f"{saved.folder} is of {saved.processes} processes, this run has {processes}: weights and optimizer "
                "continue, episodes and random numbers begin again"
            )
        return saved.state["progress"]

    def _load_own(self, saved: SavedState, parts: Mapping[str, Any]) -> None:
        """Restore what this process had of its own, its random numbers among it."""
        own = saved.of_process(distributed.rank())
        missing = [name for name in parts if name not in own and not getattr(parts[name], "optional", False)]
        if any(distributed.all_gather_object(missing)):
            raise CheckpointError(
                f"{saved.folder} is of a run with other parts, without {', '.join(missing) or 'those of others'}: "
                "resume with the recipe and the placement of that run, or take another folder: hydra.run.dir=..."
            )
        for name, part in parts.items():
            if name in own:
                part.load_state_dict(own[name])

    def save(
        self,
        iteration: int,
        parts: Mapping[str, Any],
        progress: Mapping[str, Any],
        publish: Callable[[Path], object] | None,
    ) -> None:
        """Copy the state after an iteration, and begin to write it: ``parts``, random numbers, and ``progress`` beside.

        ``publish`` writes the policy's own files into a folder of the checkpoint, all processes together. OSError: this
        checkpoint, or the one before it, could not be written. CheckpointError: the weights are not finite; the last
        checkpoint is what it was.
        """
        self.wait()
        states = {name: part.state_dict() for name, part in _replicated(parts).items()}
        own = {name: part.state_dict() for name, part in _own(parts).items()}
        weights = trained_tensors(parts["policy"]) if states else {}  # the processes that learn write them
        replicated = {"progress": dict(progress), "weights": weights, "parts": states}
        snapshot = Snapshot.take(replicated, own)
        self._check_finite(snapshot, iteration)
        self._begin(iteration, publish)
        if distributed.world_size() > 1 and self._group is None:  # collectives of their own, beside those of training
            self._group = dist.new_group(backend="gloo", timeout=_PATIENCE)
        self._writing = self._writer.submit(checkpoints.save_checkpoint, self.root, iteration, snapshot, self._group)

    def wait(self) -> None:
        """Wait until the state that was saved last is on disk; OSError if it could not be written."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        try:
            writing.result()
        except OSError as error:
            raise OSError(
                f"{error}; make room, then type the same command: it resumes from the last checkpoint"
            ) from error

    def _begin(self, iteration: int, publish: Callable[[Path], object] | None) -> None:
        """Make the folder of a checkpoint, and write the policy's own files into it, all processes together."""
        begin = distributed.is_main()
        self._together(iteration, lambda: checkpoints.begin_checkpoint(self.root, iteration) if begin else None)
        if publish is None:
            return
        folder = checkpoints.unfinished(self.root, iteration)
        try:
            self._together(iteration, lambda: publish(folder / "policy"))
        except OSError:
            if begin:
                remove(folder)
            raise

    def _together(self, iteration: int, work: Callable[[], object]) -> None:
        problem, error = None, None
        try:
            work()
        except (OSError, RuntimeError, SafetensorError) as raised:  # of a full disk
            problem, error = str(raised) or type(raised).__name__, raised
        if (problem := next(filter(None, distributed.all_gather_object(problem)), None)) is not None:
            raise OSError(f"{self.root / f'step_{iteration:08d}'} could not be written: {problem}") from error

    def _check_finite(self, snapshot: Snapshot, iteration: int) -> None:
        """Refuse to save a run that has diverged over one that has not."""
        everywhere = distributed.all_gather_object(snapshot.not_finite)
        if found := list(dict.fromkeys(name for names in everywhere for name in names)):
            good = next(iter(checkpoints.by_preference(self.root)), None)
            raise CheckpointError(
                f"the weights after iteration {iteration} are not finite ({len(found)} tensors, such as "
                f"{found[0]}): the policy has diverged and is not saved; the last good checkpoint is {good or 'none'}; "
                "continue from it: type the same command with resume=force and a lower optim.lr (update.lr, cloning.lr)"
            )


def _replicated(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts that are the same in all processes, but for what is sharded; the policy is saved by itself."""
    return {name: part for name, part in parts.items() if name != "policy" and _is_replicated(part)}


def _own(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of each process; its random numbers come last, since loading the others may draw some."""
    random = SimpleNamespace(state_dict=random_state, load_state_dict=set_random_state)
    return {name: part for name, part in parts.items() if not _is_replicated(part)} | {"random": random}


def _is_replicated(part: Any) -> bool:
    return isinstance(part, (nn.Module, Optimizer, LRScheduler)) or getattr(part, "replicated", False)


def _room(part: Any, saved: SavedState, name: str) -> dict[str, Any] | None:
    """Return a state to read a part's into; ``None`` where the saved run had none, CheckpointError if it needs one."""
    state = saved.state["parts"].get(name)
    if state is None:
        if getattr(part, "optional", False):
            return None
        raise CheckpointError(f"{saved.folder} has no {name}: it is of another recipe; take another folder")
    return make_room(state, places(part) if isinstance(part, Optimizer) else getattr(part, "places", dict)())


def _all_ranks_ok(read: Callable[..., T], *arguments: Any) -> tuple[T | None, str | None]:
    """Return what reading a checkpoint gave, and what is broken of it in any process."""
    result, problem = None, None
    try:
        result = read(*arguments)
    except (BrokenCheckpoint, ChecksumError, FileNotFoundError) as error:
        problem = str(error)
    return result, next(filter(None, distributed.all_gather_object(problem)), None)
