"""Checks of what a simulator returns: nothing wrong gets any further than its own episode."""

import math
import re
from numbers import Real
from typing import Any

import numpy as np

from vla_envs.simulator import Episode, Observation, Outcome, SimulatorSpec, is_whole_number

_PATTERN = re.compile(r"[{<\[$]|\.\.\.")  # an instruction with a place for something
_LARGEST = float(np.finfo(np.float32).max)


class WrongAnswer(ValueError):
    """A simulator has returned what its description does not allow; the message says what, in one line."""


def check_outcome(spec: SimulatorSpec, outcome: Outcome, source: str = "step returned") -> Outcome:
    """Check what a primitive action did, which comes from ``source``; returns plain numbers."""
    try:
        reward, success = outcome.reward, outcome.success
        ends, subtasks = (bool(outcome.ends_chunk), bool(outcome.ends_episode)), outcome.subtasks
    except AttributeError:
        raise WrongAnswer(f"{source} {_kind(outcome)}, must be an Outcome") from None
    reward, success = _plain(reward), _plain(success)
    is_number = isinstance(reward, Real)
    if not is_number or not -_LARGEST <= reward <= _LARGEST:  # nan is neither
        raise WrongAnswer(f"reward is {_kind(reward)}, must be a finite number")
    if not isinstance(success, Real) or success not in (0, 1):
        raise WrongAnswer(f"success is {_kind(success)}, must be True or False")
    if not is_whole_number(subtasks) or not 0 <= subtasks <= spec.chain_length:
        raise WrongAnswer(f"subtasks is {_kind(subtasks)}, must be a whole number from 0 to {spec.chain_length}")
    if success and 1 < spec.chain_length != subtasks:
        raise WrongAnswer(
            f"success after {subtasks} of {spec.chain_length} tasks of a chain, must come with the last one"
        )
    return Outcome(float(reward), bool(success), *ends, int(subtasks))


def _plain(value: Any) -> Any:
    """Return the number in an array or tensor of one; anything else as it is."""
    try:
        return value.item()
    except (AttributeError, ValueError, RuntimeError):
        return value


def check_observation(spec: SimulatorSpec, seen: Observation) -> np.ndarray:
    """Check what a policy is shown, and return its states, float32 ``[S]``."""
    try:
        images, wrist, text, states = seen.images, seen.wrist_images, seen.task_description, seen.states
    except AttributeError:
        raise WrongAnswer(f"observe returned {_kind(seen)}, must be an Observation") from None
    _check_images("images", images, (*spec.image_shape, 3))
    if spec.wrist_image_shape is not None:
        _check_images("wrist_images", wrist, (*spec.wrist_image_shape, 3))
    elif wrist is not None:
        raise WrongAnswer(f"wrist_images are {_kind(wrist)}, must be None: the description has no wrist_image_shape")
    if not isinstance(text, str):
        raise WrongAnswer(f"task_description is {_kind(text)}, must be a text")
    try:
        given = np.asarray(states)
    except (TypeError, ValueError, RuntimeError):
        raise WrongAnswer(f"states are {_kind(states)}, must be {spec.state_dim} numbers") from None
    if given.dtype.kind not in "fiub" or given.shape != (spec.state_dim,):
        raise WrongAnswer(f"states are {_kind(given)}, must be numbers [{spec.state_dim}]")
    with np.errstate(over="ignore"):
        numbers = given.astype(np.float32, copy=False)
    if not math.isfinite(numbers.sum(dtype=np.float64)):  # cheaper than a look at each
        wrong = int(np.flatnonzero(~np.isfinite(numbers))[0])
        raise WrongAnswer(f"states[{wrong}] is {given[wrong]}")
    return numbers


def undeclared_instruction(spec: SimulatorSpec, episode: Episode, text: str) -> str | None:
    """Say in a line that an observation has another instruction than the task of its episode; ``None`` if it has not.

    It is no error: a policy gets what was observed, but what goes by the description misses it. Tasks with a
    sentence per episode cannot be checked, nor patterns and chains whose sentences are not listed.
    """
    task = spec.tasks[episode.task_id]
    if text == task.instruction or text in task.instructions or task.sentence_per_episode:
        return None
    if not task.instructions and (spec.chain_length > 1 or _PATTERN.search(task.instruction)):
        return None
    declared = _kind(task.instruction)
    declared += f" and the {len(task.instructions)} of Task.instructions" if task.instructions else ""
    return (
        f"observe() returned the instruction {_kind(text)}, its task has {declared}; return that of the running "
        "episode, list it in Task.instructions, or set sentence_per_episode=True"
    )


def remark_of(simulator: Any) -> str:
    """Return what a simulator says of the running episode, in one line; empty for nothing."""
    return " ".join(str(getattr(simulator, "remark", "") or "").split())


def _check_images(name: str, images: Any, shape: tuple[int, ...]) -> None:
    if not isinstance(images, np.ndarray) or images.dtype != np.uint8 or images.shape != shape:
        raise WrongAnswer(f"{name} are {_kind(images)}, must be uint8 {list(shape)}")


def _kind(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {list(value.shape)}"
    text = repr(value) if value is None or isinstance(value, (bool, int, float, str)) else type(value).__name__
    return text if len(text) < 60 else f"{text[:56]} ..."
