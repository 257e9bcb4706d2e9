"""A run that resumes where it stopped: checkpoints between iterations, and signals that ask it to stop."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.tensor import DTensor
from tqdm import tqdm

from vla_algos import parallel
from vla_algos.heartbeat import ProcessLost
from vla_algos.run.background import Background
from vla_algos.run.checkpoints import (
    BrokenCheckpoint,
    CheckpointError,
    Exchange,
    SavedState,
    Snapshot,
    alone,
    begin_checkpoint,
    by_preference,
    open_checkpoint,
    random_state,
    remove_unfinished,
    save_checkpoint,
    set_random_state,
    unfinished,
    verify_checkpoint,
)
from vla_algos.run.files import remove
from vla_algos.run.retries import requeue
from vla_algos.run.seeds import seed_after
from vla_algos.weight_sync import trained_tensors
from vla_common.tensor_files import make_room, not_finite
from vla_policies import VLAPolicy

T = TypeVar("T")
SIGNALS = (signal.SIGTERM, signal.SIGUSR2)  # SLURM's: at a preemption, and before the time limit
_FAILURES = 3  # saves in a row that may fail
_PATIENCE = timedelta(hours=2)  # until all have written their part; who is lost the heartbeat tells
_SAME = 1.0  # seconds: torchrun passes a Ctrl-C on to processes that have just got it from the terminal


class Interrupted(BaseException):
    """A signal asks the run to stop; not an ``Exception``, so that nothing on the way takes it for a failure."""


class Stateful(Protocol):
    """What a part of a run offers.

    Two more methods are asked for where a part has them: ``begin_anew(states)``, what each of another number of
    processes had, for what it keeps of that (``resume=elastic``), which random numbers are fresh for; of the learner
    ``empty_state(saved)``, a state like ``saved`` with room for its tensors, sharded if the learner's are. A part that
    is ``optional`` begins anew, of no states, where the run had none.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return tensors and plain values."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""


class ResumableRun:
    """Saves the state of a run after iterations, and resumes from the last one that was saved.

    The state is that between two iterations: trained weights, all parts, random states and :attr:`run_state`. A run
    that was interrupted at any time and resumed computes bit for bit what it would have computed otherwise: an
    iteration that was not finished is run again.

    Used as a context manager it handles SIGTERM, SIGUSR2 and SIGINT (Ctrl-C). Inside of :meth:`interruptible` they stop
    the run at once, at :meth:`stop_if_asked` if nothing is lost by it, elsewhere after the iteration; the state is
    saved, and after SIGUSR2 a SLURM job is put back into the queue. A second Ctrl-C ends the process at once.

    Training waits until the state is copied into host memory; a thread writes it. The next save, a signal and the end
    wait for the thread, and what went wrong in it is said or raised there, or after the iteration in which it ended.

    An exception is raised further after the state before its iteration is saved, if it is still there: an update that
    has changed weights is not undone. Of several processes none saves then, as others may be dead already.

    Several processes write together: each its part of what is sharded, with its parts and random states. They stop
    together, at the end of an :meth:`interruptible` or of an iteration, whichever of them was told to.

    Args:
        folder: of the run; checkpoints are in ``checkpoints``.
        policy: its trained parameters and buffers are saved.
        parts: by name, what else changes: learner, collector. The learner is the same in all processes but for what is
            sharded, the others are each process's own.
        every: iterations between two checkpoints.
        before_save: called before each save, to flush what the run has said about its iterations.
        save_policy: writes the policy's own files into a folder, all processes together; its ``save_pretrained`` if
            ``None``.
        elastic_seed: go on from a checkpoint of another number of processes, with random numbers of this seed, of the
            process and of the iteration; ``None`` to refuse it.

    Attributes:
        run_state: plain values that a run keeps over an interruption.
        seconds: that earlier processes spent on this run.
    """

    def __init__(
        self,
        folder: Path,
        policy: VLAPolicy,
        parts: Mapping[str, Stateful],
        every: int,
        before_save: Callable[[], object] = lambda: None,
        save_policy: Callable[[Path], object] | None = None,
        elastic_seed: int | None = None,
    ):
        if every < 1:
            raise ValueError(f"checkpoint_every is {every}, must be at least 1")
        self.folder, self.policy, self.parts, self.every = folder, policy, dict(parts), every
        self.run_state: dict[str, Any] = {}
        self.seconds = 0.0
        self._before_save, self._elastic_seed = before_save, elastic_seed
        self._save_policy = save_policy
        self._started = time.perf_counter()
        self._between: dict[str, Any] | None = None  # of this process; weights and learner change in the update only
        self._unchanged: Any = None  # what tells whether they have
        self._noted = ""  # run_state then
        self._interrupted: float | None = None  # when the first Ctrl-C came
        self._iteration = self._saved = self._written = -1  # saved as soon as it is begun, written when it is on disk
        self._writing: Background | None = None
        self._group: dist.ProcessGroup | None = None  # of the threads that write
        self._signal: int | None = None
        self._may_stop = False
        self._failures = 0
        self._handlers: dict[int, Any] = {}

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.folder / "checkpoints"

    def resume(self) -> int | None:
        """Restore the last checkpoint that is whole; returns its iteration, ``None`` if there never was any.

        Raises:
            CheckpointError: all are broken, or it is of another policy.
        """
        found = self._latest()
        if found is None:
            return None
        saved, state = found
        if (own := self._own(saved)) is not None:
            self._go_on(own, state)
        else:
            self._begin_anew(saved, state)
        self.run_state, self.seconds = saved.state["run_state"], saved.state["seconds"]
        self._iteration = self._saved = self._written = saved.state["iteration"]
        if self._iteration:
            self.policy.start_iteration(self._iteration)  # what is annealed follows the settings of this process
        self._remember()
        if parallel.is_main():
            with contextlib.suppress(OSError):
                remove_unfinished(self.checkpoints)
        return self._iteration

    def finish(self, iteration: int, publish: bool = False) -> None:
        """Say that an iteration is over: the place to save, and to stop.

        Args:
            iteration: its number.
            publish: save now, and the policy as a folder of its own, for evaluation and publishing.

        Raises:
            Interrupted: a signal came during the iteration.
        """
        self._iteration = iteration
        self._remember()
        done = self._writing is None or self._writing.done
        everybodys = parallel.all_gather_object((self._signal or 0, done))
        stopping = max(number for number, _ in everybodys)
        if all(there for _, there in everybodys):
            self.wait()  # hears what went wrong
        if publish or iteration % self.every == 0 or stopping:
            self._save(publish)
        self._stop(stopping)

    def interruptible(self, work: Callable[[], T]) -> T:
        """Do work that changes neither weights nor learner, which a signal may break off; returns its result.

        Nothing in it may wait for another process.

        Raises:
            Interrupted: a signal came, here or to another process.
        """
        result = self._attempt(work, may_stop=True)
        self._stop(parallel.all_reduce_max(self._signal or 0))
        return cast(T, result)  # whoever has none does not get here

    def apart(self, work: Callable[[], T], interruptible: bool = False) -> T:
        """Do this process's part of what those of different roles do at once, and come together; returns its result.

        A signal breaks it off if the state before it was saved, otherwise it stops the run after the iteration.

        Args:
            work: only processes of the same role may wait for each other in it.
            interruptible: nobody waits in it, a signal may break it off anywhere; else at :meth:`stop_if_asked`.

        Raises:
            Interrupted: a signal came, here or to another process.
        """
        saved = self._saved == self._iteration
        result = self._attempt(work, may_stop=saved and interruptible)
        number = parallel.all_reduce_max(self._signal or 0)
        if number and saved:
            self.wait()
            if self._saved != self._iteration:  # it could not be written, and what was broken off cannot be saved
                self._between = None
            self._stop(number)
        return cast(T, result)  # whoever has none does not get here

    def _attempt(self, work: Callable[[], T], may_stop: bool) -> T | None:
        """Return what came of work, ``None`` if a signal broke it off: anywhere if it may, else where it asks."""
        result = None
        try:
            self._may_stop = may_stop
            if may_stop and self._signal is not None:
                raise Interrupted
            result = work()
            self._may_stop = False
        except Interrupted:
            pass
        finally:
            self._may_stop = False
        return result

    def stop_if_asked(self) -> None:
        """Stop within an update if a signal came and the state before the update is on disk already.

        Raises:
            Interrupted: a signal came, here or to another process.
        """
        if self._saved == self._iteration and (number := parallel.all_reduce_max(self._signal or 0)):
            self.wait()
            if self._saved == self._iteration:  # it could be written
                self._stop(number)

    def wait(self) -> None:
        """Wait until the state that was saved last is on disk; says so if it could not be written.

        Raises:
            OSError: it is the third in a row.
        """
        if self._writing is None:
            return
        writing, self._writing = self._writing, None
        try:
            writing.wait()
        except OSError as error:  # a full disk: what was saved before is still there
            failed, self._saved = self._saved, self._written
            self._fail(failed, error)
        else:
            self._written, self._failures = self._saved, 0

    def __enter__(self) -> ResumableRun:
        handled = (*SIGNALS, signal.SIGINT)
        self._handlers = {number: signal.signal(number, self._on_signal) for number in handled}
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, _: Any) -> None:
        if kind is not None:
            for stopping in SIGNALS:
                signal.signal(stopping, signal.SIG_IGN)  # a second one must not break off the save
        try:
            if kind is Interrupted:
                assert self._signal is not None  # only a signal interrupts
                self._leave(self._signal)
            elif isinstance(error, Exception):
                self._leave_after(error)
            elif kind is None or parallel.world_size() == 1:
                self.wait()
        finally:
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
        if kind is Interrupted:
            raise SystemExit(128 + (self._signal or 0))

    def _leave(self, number: int) -> None:
        self.wait()
        if self._between is not None and self._saved != self._iteration:
            self._save()
            self.wait()
        if parallel.is_main():
            self._say(f"stopped by {signal.Signals(number).name}")
            if number == signal.SIGUSR2:  # SIGTERM also comes from scancel; who preempts requeues by itself
                self._requeue()
        parallel.barrier()  # whoever ends first may have the others killed

    def _requeue(self) -> None:
        if "SLURM_JOB_ID" in os.environ and (problem := requeue()):
            print(f"the job could not be requeued ({problem}); submit it again, it resumes where it stopped")

    def _leave_after(self, error: Exception) -> None:
        """Save what is whole after an exception; whatever goes wrong here must not hide it."""
        if self._between is None:
            return
        error = parallel.lost_behind(error) or error
        alone = parallel.world_size() == 1
        try:
            if not isinstance(error, ProcessLost):  # else nobody may come to an end
                self.wait()
            same = alone and self._unchanged == self._fingerprint() and self._noted == repr(self.run_state)
            if self._saved != self._iteration and same and self._failures < _FAILURES:
                self._save()
                self.wait()
        except Exception as another:
            if str(another) != str(error):
                tqdm.write(f"the last checkpoint could not be saved: {another}")
        if parallel.is_main():
            self._say(f"stopped by {type(error).__name__}")

    def _say(self, why: str) -> None:
        done = "before its first iteration"
        if self._between is not None:
            done = f"after {self._iteration} iterations"
            if 0 <= self._written < self._iteration:
                done += f", of which {self._written} are saved"
        print(f"\n{why} {done}")

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT:
            now = time.monotonic()
            if self._interrupted is None:
                self._interrupted = now
                os.write(2, b"\nstopping, and saving what is done; another Ctrl-C ends it at once\n")
            elif now - self._interrupted > _SAME:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
        self._signal = number
        if self._may_stop:
            self._may_stop = False
            raise Interrupted

    def _stop(self, number: int) -> None:
        """Stop because of a signal that some process got; 0 for none."""
        if number:
            self._signal = number
            raise Interrupted

    def _latest(self) -> tuple[SavedState, dict[str, Any]] | None:
        """Load the last checkpoint that all processes can read; of each that is broken a line is said.

        Returns:
            It, its weights loaded, and the state of the learner.
        """
        broken: list[str] = []
        process = (parallel.rank(), parallel.world_size())
        for checkpoint in parallel.broadcast_object(by_preference(self.checkpoints)):
            found, problem = None, _agreed(verify_checkpoint, checkpoint, process)[1]
            if problem is None:  # nobody reads what another has found to be damaged
                found, problem = _agreed(self._opened, checkpoint)
            if problem is None:
                if broken and parallel.is_main():
                    tqdm.write(f"warning: {'; '.join(broken)}. Going on from the checkpoint before it, {checkpoint}")
                return found
            broken.append(problem)
        if broken:
            raise CheckpointError(
                f"no checkpoint in {self.checkpoints} can be used: {'; '.join(broken)}. To begin anew take another "
                "folder: hydra.run.dir=..."
            )
        return None

    def _opened(self, checkpoint: Path) -> tuple[SavedState, dict[str, Any]]:
        saved = open_checkpoint(checkpoint, verified=True)
        return saved, self._load(saved)

    def _load(self, saved: SavedState) -> dict[str, Any]:
        """Load the weights into the policy, and return the state of the learner.

        Raises:
            BrokenCheckpoint: it cannot be read.
            CheckpointError: it is of another policy, or of another number of processes.
        """
        processes = parallel.world_size()
        if saved.processes != processes and self._elastic_seed is None:
            raise CheckpointError(
                f"{saved.folder} is of {saved.processes} processes, this run has {processes}: resume with as many, or "
                "with resume=elastic (weights and optimizer go on, with fresh episodes), or start in a new folder from "
                f"one of the policies {self.checkpoints}/*/policy"
            )
        weights = trained_tensors(self.policy)
        check_trained(weights, saved)
        if (learner := self.parts.get("learner")) is None:  # a process that does not learn
            saved.fill({"weights": weights})
            return {}
        state = getattr(learner, "empty_state", make_room)(saved.state["learner"])
        saved.fill({"weights": weights, "learner": state})
        return state

    def _own(self, saved: SavedState) -> dict[str, Any] | None:
        """Load what this process had; ``None`` where there were others, or with other roles.

        Raises:
            CheckpointError: with other roles, unless it may begin anew.
        """
        if saved.processes != parallel.world_size():
            return None
        own = saved.of_process(parallel.rank())
        needed = {name for name, part in self.parts.items() if not getattr(part, "optional", False)} - {"learner"}
        if all(parallel.all_gather_object(needed <= own["parts"].keys())):
            return own
        if self._elastic_seed is None:
            raise CheckpointError(
                f"{saved.folder} is of processes with other roles: resume with the placement of that run, or with "
                "resume=elastic (weights and optimizer go on, with fresh episodes)"
            )
        return None

    def _go_on(self, own: dict[str, Any], state: dict[str, Any]) -> None:
        """Restore what this process had."""
        for name, part in self.parts.items():
            if name == "learner":
                part.load_state_dict(state)
            elif name in own["parts"]:
                part.load_state_dict(own["parts"][name])
            else:
                cast(Any, part).begin_anew([])
        set_random_state(own["random"])

    def _begin_anew(self, saved: SavedState, state: dict[str, Any]) -> None:
        """Restore the learner alone, where other processes have stopped."""
        assert self._elastic_seed is not None  # else it is refused
        everybodys = [saved.of_process(rank)["parts"] for rank in range(saved.processes)]
        seed_after(self._elastic_seed, saved.step)
        for name, part in self.parts.items():
            if name == "learner":
                part.load_state_dict(state)
            elif hasattr(part, "begin_anew"):
                part.begin_anew([parts[name] for parts in everybodys if name in parts])
        if parallel.is_main():
            others = f"of {saved.processes} processes, this run has {parallel.world_size()}"
            others = others if saved.processes != parallel.world_size() else "of processes with other roles"
            tqdm.write(
                f"{saved.folder} is {others}: weights and optimizer go on, with fresh episodes and random numbers"
            )

    def _remember(self) -> None:
        parts = {name: part.state_dict() for name, part in self.parts.items() if name != "learner"}
        self._between = {"parts": parts, "random": random_state()}
        self._unchanged, self._noted = self._fingerprint(), repr(self.run_state)

    def _fingerprint(self) -> list[Any]:
        """Return what differs as soon as weights or learner are written to: a version for each tensor, and numbers."""
        weights = [parameter for parameter in self.policy.parameters() if parameter.requires_grad]
        with torch.no_grad():  # or parts of DTensors were views, with versions of their own
            return _versions([weights, self._learner_state()])

    def _learner_state(self) -> dict[str, Any]:
        """Return the state of the learner; of a process that has none, nothing."""
        return self.parts["learner"].state_dict() if "learner" in self.parts else {}

    def _save(self, publish: bool = False) -> None:
        """Copy the state, and begin to write it."""
        assert self._between is not None  # after the first iteration, or what comes before it
        self._before_save()
        self.wait()
        state = {
            "iteration": self._iteration,
            "run_state": self.run_state,
            "seconds": self.seconds + time.perf_counter() - self._started,
            "weights": trained_tensors(self.policy) if "learner" in self.parts else {},  # who learns writes them
            "learner": self._learner_state(),
        }
        process = (parallel.rank(), parallel.world_size())
        snapshot = Snapshot.take(state, self._between, process, self._check_finite)
        try:
            self._begin(publish)
        except OSError as error:
            self._fail(self._iteration, error)
            return
        root, iteration, exchange = self.checkpoints, self._iteration, self._exchange()
        self._saved = iteration
        self._writing = Background(
            lambda: save_checkpoint(root, iteration, snapshot, exchange=exchange), f"checkpoint {iteration}"
        )

    def _begin(self, publish: bool) -> None:
        """Make the folder of a checkpoint, and write the policy's own files into it, all processes together.

        Raises:
            OSError: in all of them, if one could not.
        """
        if parallel.is_main():
            self._together(lambda: begin_checkpoint(self.checkpoints, self._iteration))
        else:
            self._together(lambda: None)
        if not publish:
            return
        folder = unfinished(self.checkpoints, self._iteration)
        try:
            save = self._save_policy or self.policy.save_pretrained
            self._together(lambda: save(folder / "policy"))  # each process gives its part
        except OSError:
            if parallel.is_main():
                remove(folder)
            raise

    def _together(self, work: Callable[[], object]) -> None:
        problem, error = None, None
        try:
            work()
        except (OSError, RuntimeError, SafetensorError) as raised:  # of a full disk
            problem, error = str(raised), raised
        problem = next(filter(None, parallel.all_gather_object(problem)), None)
        if problem is not None:
            folder = self.checkpoints / f"step_{self._iteration:08d}"
            raise OSError(f"{folder} could not be written: {problem}") from error

    def _exchange(self) -> Exchange:
        """Return what gathers objects of the threads that write: collectives of their own, beside those of training."""
        if parallel.world_size() == 1:
            return alone
        if self._group is None:
            self._group = dist.new_group(backend="gloo", timeout=_PATIENCE)
        group = self._group

        def gather(mine: Any) -> list[Any]:
            everybodys: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(everybodys, mine, group=group)
            return everybodys

        return gather

    def _fail(self, iteration: int, error: OSError) -> None:
        """Say that the checkpoint after an iteration could not be written; raise after several in a row."""
        self._failures += 1
        if parallel.is_main():
            tqdm.write(f"the checkpoint after iteration {iteration} could not be saved: {error}")
        if self._failures == _FAILURES:
            raise OSError(
                f"{_FAILURES} checkpoints in a row could not be saved in {self.checkpoints} ({error}); make room, "
                "then type the command above: it resumes from the last one"
            ) from error

    def _check_finite(self, parts: dict[str, Tensor]) -> None:
        """Refuse to save a run that has diverged over one that has not."""
        everybodys = parallel.all_gather_object(not_finite(parts))
        if found := list(dict.fromkeys(name for names in everybodys for name in names)):
            good = next(iter(by_preference(self.checkpoints)), None)
            raise CheckpointError(
                f"the weights after iteration {self._iteration} are not finite ({len(found)} tensors, such as "
                f"{found[0]}): the policy has diverged and is not saved; the last good checkpoint is {good or 'none'}; "
                "go on from it with a lower learning rate: type the command above, with resume=force optim.lr=..."
            )


def _agreed(read: Callable[..., T], *arguments: Any) -> tuple[T | None, str | None]:
    """Return what came of reading a checkpoint, and what is broken of it, in whichever process."""
    result, problem = None, None
    try:
        result = read(*arguments)
    except BrokenCheckpoint as error:
        problem = str(error)
    return result, next(filter(None, parallel.all_gather_object(problem)), None)


def check_trained(weights: Mapping[str, Tensor], saved: SavedState) -> None:
    """Compare names and shapes of :func:`~vla_algos.weight_sync.trained_tensors` with those of a checkpoint.

    Raises:
        CheckpointError: they are those of another policy.
    """
    there = saved.state["weights"]
    wrong = [name for name in weights.keys() | there.keys() if _shape(weights, name) != _shape(there, name)]
    if wrong:
        raise CheckpointError(
            f"{saved.folder} has the weights of another policy: {len(wrong)} differ, such as {min(wrong)}; run with "
            "the policy settings of that run, or in a new folder"
        )


def _shape(weights: Mapping[str, Tensor], name: str) -> torch.Size | None:
    return weights[name].shape if name in weights else None


def _versions(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [item for key, part in value.items() for item in (key, *_versions(part))]
    if isinstance(value, (list, tuple)):
        return [len(value), *(item for part in value for item in _versions(part))]
    if isinstance(value, DTensor):
        value = value.to_local()
    return [value.data_ptr(), value._version] if isinstance(value, Tensor) else [repr(value)]
