"""A toy simulator that fails on command, and a clean run of the same episodes to compare with. numpy alone."""

import ctypes
import os
import signal
import time
import zlib
from typing import Any

import numpy as np

from vla_envs import Episode, Observation, Outcome, SimulatorSpec, Task

SHAPE, STATES, ACTIONS, CHUNK, HORIZON = (8, 8), 3, 2, 3, 12
ENDLESS = 100_000.0  # seconds

# What a simulator returns instead of what it should: by name, the field and its value.
ANSWERS: dict[str, tuple[str, Any]] = {
    "nan state": ("states", np.array([0.0, np.nan, 0.0], np.float32)),
    "infinite state": ("states", np.array([0.0, 0.0, -np.inf])),
    "too few states": ("states", np.zeros(1, np.float32)),
    "too many states": ("states", np.zeros(STATES + 1, np.float32)),
    "states of text": ("states", ["a", "b", "c"]),
    "float image": ("images", np.full((*SHAPE, 3), 0.5, np.float32)),
    "small image": ("images", np.zeros((4, 4, 3), np.uint8)),
    "grey image": ("images", np.zeros((*SHAPE, 1), np.uint8)),
    "no image": ("images", None),
    "unexpected wrist image": ("wrist_images", np.zeros((1, *SHAPE, 3), np.uint8)),
    "no instruction": ("task_description", None),
    "nan reward": ("reward", float("nan")),
    "infinite reward": ("reward", np.float64("inf")),
    "reward of text": ("reward", "1.0"),
    "no reward": ("reward", None),
    "unknown success": ("success", None),
    "success of two": ("success", np.array([True, False])),
    "outcome is a tuple": ("outcome", None),
    "observation is a dict": ("observation", None),
}
DEATHS = ("exit", "segfault", "abort", "kill")
HANGS = ("stop", "sleep", "hold the interpreter", "ignore signals")


class FaultySimulator:
    """Its state is a sum of the actions. ``options["faults"]`` has, by trial: where, at which step, what, and a path.

    With a path the fault happens once: the process that makes that folder has it.
    """

    def __init__(self, spec: SimulatorSpec):
        self.spec, self._world = spec, World()
        self._fault: tuple[str, int, str, str] | None = None

    def reset(self, episode: Episode) -> None:
        self._fault = self.spec.options["faults"].get(episode.trial_id)
        self._world.reset(episode)
        self._maybe("reset")

    def step(self, action: np.ndarray) -> Outcome:
        outcome = self._world.step(action)
        return self._changed(outcome, self._maybe("step"))

    def observe(self) -> Observation:
        observation = self._world.observe()
        return self._changed(observation, self._maybe("observe"))

    def close(self) -> None:
        self._maybe("close")

    def _maybe(self, where: str) -> str:
        """Fail, or name what is to be returned instead."""
        if self._fault is None or where != self._fault[0] or (where != "close" and self._world.steps != self._fault[1]):
            return ""
        what, path = self._fault[2:]
        if path:
            try:
                os.mkdir(path)
            except FileExistsError:
                return ""
        if what not in ANSWERS:
            _fail(what)
        return what

    @staticmethod
    def _changed(answer: Any, what: str) -> Any:
        if what not in ANSWERS:
            return answer
        name, value = ANSWERS[what]
        if name == "outcome":
            return (answer.reward, answer.success)
        if name == "observation":
            return vars(answer)
        if not hasattr(answer, name):
            raise ValueError(f"{what} is not for {type(answer).__name__}")
        setattr(answer, name, value)
        return answer


def _fail(what: str) -> None:
    if what == "raise":
        raise RuntimeError("on command")
    if what == "raise lines":
        raise RuntimeError("on command. Looked in\n  /nowhere\n  Type: this")
    if what == "leave":
        raise SystemExit("on command")
    if what == "ask":
        import pdb

        pdb.set_trace()
    if what == "exit":
        os._exit(3)
    if what == "leave children":
        for _ in range(2):
            if not os.fork():
                time.sleep(ENDLESS)
        return
    signals = {"segfault": signal.SIGSEGV, "abort": signal.SIGABRT, "kill": signal.SIGKILL, "stop": signal.SIGSTOP}
    if what in signals:
        os.kill(os.getpid(), signals[what])
    if what == "hold the interpreter":
        ctypes.PyDLL(None).sleep(int(ENDLESS))
    if what == "ignore signals":
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    time.sleep(ENDLESS)


class World:
    """What is simulated."""

    def reset(self, episode: Episode) -> None:
        self._state = np.random.default_rng([episode.seed, episode.trial_id]).random(STATES)
        self.steps = 0

    def step(self, action: np.ndarray) -> Outcome:
        self._state = np.sin(3.0 * self._state + float(action.sum()))
        self.steps += 1
        return Outcome(float(self._state[0]), False)

    def observe(self) -> Observation:
        images = (np.arange(np.prod((*SHAPE, 3))).reshape(*SHAPE, 3) * self._state[1] * 100).astype(np.int64)
        return Observation((images % 256).astype(np.uint8), self._state.astype(np.float32), "go")


def describe(faults: dict[int, tuple[str, int, str, str]]) -> SimulatorSpec:
    """Describe a simulator with faults, by trial."""
    bounds = ((-1.0,) * ACTIONS, (1.0,) * ACTIONS)
    entry_point = "tests.storm.faulty:FaultySimulator"
    return SimulatorSpec(
        "storm/faulty", entry_point, (Task("go", "go"),), 1, SHAPE, STATES, *bounds, HORIZON, 10,
        options={"faults": faults},
    )  # fmt: skip


def actions(trial: int, decision: int) -> np.ndarray:
    """The chunk of a decision, float32 ``[C, A]``."""
    return np.random.default_rng([trial, decision]).uniform(-1, 1, (CHUNK, ACTIONS)).astype(np.float32)


def digest(images: np.ndarray, states: np.ndarray, rewards: np.ndarray) -> int:
    """Condense what a decision showed."""
    return zlib.crc32(np.ascontiguousarray(images).tobytes() + states.tobytes() + rewards.tobytes())


def clean_run(trial: int) -> list[int]:
    """Digests of an undisturbed episode: of its first observation, and after each decision."""
    world, digests = World(), []
    world.reset(Episode(0, trial))
    for decision in range(HORIZON // CHUNK + 1):
        rewards = np.zeros(CHUNK, np.float32)
        if decision:
            rewards[:] = [world.step(action).reward for action in actions(trial, decision - 1)]
        seen = world.observe()
        digests.append(digest(seen.images, seen.states, rewards))
    return digests
