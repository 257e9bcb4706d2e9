"""A run that resumes where it stopped: checkpoints between iterations, and signals that ask it to stop."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, TypeVar, cast

import torch
from tqdm import tqdm

from vla_algos import parallel
from vla_algos.run.checkpoints import (
    BrokenCheckpoint,
    CheckpointError,
    by_preference,
    load_training_state,
    random_state,
    save_checkpoint,
    set_random_state,
)
from vla_algos.run.retries import requeue
from vla_common.tensor_files import add_dimensions, not_finite
from vla_policies import VLAPolicy

T = TypeVar("T")
SIGNALS = (signal.SIGTERM, signal.SIGUSR2)  # SLURM's: at a preemption, and before the time limit
_FAILURES = 3  # saves in a row that may fail
_SAME = 1.0  # seconds: torchrun passes a Ctrl-C on to processes that have just got it from the terminal


class Interrupted(BaseException):
    """A signal asks the run to stop; not an ``Exception``, so that nothing on the way takes it for a failure."""


class Stateful(Protocol):
    """What a part of a run offers."""

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

    An exception is raised further after the state before its iteration is saved, if it is still there: an update that
    has changed weights is not undone. Of several processes none saves then, as others may be dead already.

    Of several processes the first one writes, with the parts and random states of all. They stop together, at the end
    of an :meth:`interruptible` or of an iteration, whichever of them was told to.

    Args:
        folder: of the run; checkpoints are in ``checkpoints``.
        policy: its trained parameters and buffers are saved.
        parts: by name, what else changes: learner, collector.
        every: iterations between two checkpoints.
        before_save: called before each save, to flush what the run has said about its iterations.

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
    ):
        if every < 1:
            raise ValueError(f"checkpoint_every is {every}, must be at least 1")
        self.folder, self.policy, self.parts, self.every = folder, policy, dict(parts), every
        self.run_state: dict[str, Any] = {}
        self.seconds = 0.0
        self._before_save = before_save
        self._started = time.perf_counter()
        self._between: dict[str, Any] | None = None  # of this process; weights and learner change in the update only
        self._unchanged: Any = None  # what tells whether they have
        self._noted = ""  # run_state then
        self._interrupted: float | None = None  # when the first Ctrl-C came
        self._iteration = self._saved = -1
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
        checkpoint, state = found
        processes = state["processes"]
        if len(processes) != parallel.world_size():
            raise CheckpointError(
                f"{checkpoint} is of {len(processes)} processes, this run has {parallel.world_size()}: resume with "
                f"as many, or start in a new folder from one of the policies {self.checkpoints}/*/policy"
            )
        own = processes[parallel.rank()]
        load_trained(self.policy, state["weights"], checkpoint)
        for name, part in self.parts.items():
            part.load_state_dict(state["learner"] if name == "learner" else own["parts"][name])
        self.run_state, self.seconds = state["run_state"], state["seconds"]
        set_random_state(own["random"])
        self._iteration = self._saved = state["iteration"]
        if self._iteration:
            self.policy.start_iteration(self._iteration)  # what is annealed follows the settings of this process
        self._remember()
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
        stopping = parallel.all_reduce_max(self._signal or 0)
        if publish or iteration % self.every == 0 or stopping:
            self._save(publish)
        self._stop(stopping)

    def interruptible(self, work: Callable[[], T]) -> T:
        """Do work that changes neither weights nor learner, which a signal may break off; returns its result.

        Nothing in it may wait for another process.

        Raises:
            Interrupted: a signal came, here or to another process.
        """
        result = None
        try:
            self._may_stop = True
            if self._signal is not None:
                raise Interrupted
            result = work()
            self._may_stop = False
        except Interrupted:
            pass
        finally:
            self._may_stop = False
        self._stop(parallel.all_reduce_max(self._signal or 0))
        return cast(T, result)  # whoever has none does not get here

    def stop_if_asked(self) -> None:
        """Stop within an update if a signal came and the state before the update is on disk already.

        Raises:
            Interrupted: a signal came, here or to another process.
        """
        if self._saved == self._iteration:
            self._stop(parallel.all_reduce_max(self._signal or 0))

    def __enter__(self) -> ResumableRun:
        handled = (*SIGNALS, signal.SIGINT)
        self._handlers = {number: signal.signal(number, self._on_signal) for number in handled}
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, _: Any) -> None:
        if kind is not None:
            for stopping in SIGNALS:
                signal.signal(stopping, signal.SIG_IGN)  # a second one must not break off the save
        if kind is Interrupted:
            assert self._signal is not None  # only a signal interrupts
            self._leave(self._signal)
        elif isinstance(error, Exception):
            self._leave_after(error)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        if kind is Interrupted:
            raise SystemExit(128 + (self._signal or 0))

    def _leave(self, number: int) -> None:
        if self._between is not None and self._saved != self._iteration:
            self._save()
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
        if self._between is None or not parallel.is_main():
            return
        same = self._unchanged == self._fingerprint() and self._noted == repr(self.run_state)
        alone = parallel.world_size() == 1
        if self._saved != self._iteration and same and alone and self._failures < _FAILURES:
            with contextlib.suppress(Exception):
                self._save()
        self._say(f"stopped by {type(error).__name__}")

    def _say(self, why: str) -> None:
        done = "before its first iteration"
        if self._between is not None:
            done = f"after {self._iteration} iterations"
            if 0 <= self._saved < self._iteration:
                done += f", of which {self._saved} are saved"
        print(f"\n{why} {done}; the same command with hydra.run.dir={self.folder} resumes it")

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

    def _latest(self) -> tuple[Path, dict[str, Any]] | None:
        """Load the last checkpoint that all processes can read; of each that is broken a line is said."""
        broken: list[str] = []
        for checkpoint in parallel.broadcast_object(by_preference(self.checkpoints)):
            state, problem = {}, None
            try:
                state = load_training_state(checkpoint)
            except BrokenCheckpoint as error:
                problem = str(error)
            problem = next(filter(None, parallel.all_gather_object(problem)), None)
            if problem is None:
                if broken and parallel.is_main():
                    tqdm.write(f"warning: {'; '.join(broken)}. Going on from the checkpoint before it, {checkpoint}")
                return checkpoint, state
            broken.append(problem)
        if broken:
            raise CheckpointError(
                f"no checkpoint in {self.checkpoints} can be used: {'; '.join(broken)}. To begin anew take another "
                "folder: hydra.run.dir=..."
            )
        return None

    def _remember(self) -> None:
        parts = {name: part.state_dict() for name, part in self.parts.items() if name != "learner"}
        self._between = {"parts": parts, "random": random_state()}
        self._unchanged, self._noted = self._fingerprint(), repr(self.run_state)

    def _fingerprint(self) -> list[Any]:
        """Return what differs as soon as weights or learner are written to: a version for each tensor, and numbers."""
        weights = [parameter for parameter in self.policy.parameters() if parameter.requires_grad]
        return _versions([weights, self.parts["learner"].state_dict()])

    def _save(self, publish: bool = False) -> None:
        self._before_save()
        processes = parallel.all_gather_object(self._between)
        if parallel.broadcast_object(parallel.is_main() and self._write(processes, publish)):
            self._saved = self._iteration

    def _write(self, processes: list[dict[str, Any] | None], publish: bool) -> bool:
        state = {
            "iteration": self._iteration,
            "run_state": self.run_state,
            "seconds": self.seconds + time.perf_counter() - self._started,
            "weights": trained(self.policy),
            "learner": self.parts["learner"].state_dict(),
            "processes": processes,
        }
        self._check_finite(state)
        try:
            save_checkpoint(self.checkpoints, self._iteration, self.policy if publish else None, state)
        except OSError as error:  # a full disk: what was saved before is still there
            self._failures += 1
            tqdm.write(f"the checkpoint after iteration {self._iteration} could not be saved: {error}")
            if self._failures == _FAILURES:
                raise OSError(
                    f"{_FAILURES} checkpoints in a row could not be saved in {self.checkpoints} ({error}); make room, "
                    f"then type the same command with hydra.run.dir={self.folder}: it resumes from the last one"
                ) from error
            return False
        self._failures = 0
        return True

    def _check_finite(self, state: Mapping[str, Any]) -> None:
        """Refuse to save a run that has diverged over one that has not."""
        found = not_finite({"weights": state["weights"], "learner": state["learner"]})
        if found:
            good = next(iter(by_preference(self.checkpoints)), None)
            raise CheckpointError(
                f"the weights after iteration {self._iteration} are not finite ({len(found)} tensors, such as "
                f"{found[0]}): the policy has diverged and is not saved; the last good checkpoint is {good or 'none'}; "
                f"go on from it with a lower learning rate: hydra.run.dir={self.folder} resume=force optim.lr=..."
            )


def trained(policy: VLAPolicy) -> dict[str, torch.Tensor]:
    """Return what training changes: parameters that have a gradient, and all saved buffers."""
    parameters = {name for name, parameter in policy.named_parameters() if parameter.requires_grad}
    fixed = {name for name, _ in policy.named_parameters()} - parameters
    return {name: tensor.detach().cpu() for name, tensor in policy.state_dict().items() if name not in fixed}


def load_trained(policy: VLAPolicy, weights: Mapping[str, torch.Tensor], source: Path) -> None:
    """Restore :func:`trained`.

    Raises:
        CheckpointError: they are those of another policy.
    """
    expected = trained(policy)
    weights = add_dimensions(weights, expected)
    wrong = [name for name in expected.keys() | weights.keys() if _shape(expected, name) != _shape(weights, name)]
    if wrong:
        raise CheckpointError(
            f"{source} has the weights of another policy: {len(wrong)} differ, such as {min(wrong)}; run with the "
            "policy settings of that run, or in a new folder"
        )
    policy.load_state_dict(weights, strict=False)


def _shape(weights: Mapping[str, torch.Tensor], name: str) -> torch.Size | None:
    return weights[name].shape if name in weights else None


def _versions(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [item for key, part in value.items() for item in (key, *_versions(part))]
    if isinstance(value, (list, tuple)):
        return [len(value), *(item for part in value for item in _versions(part))]
    return [value.data_ptr(), value._version] if isinstance(value, torch.Tensor) else [repr(value)]
