"""CALVIN whose tasks are solved, and whose simulator fails, on command: the flow of chains without a policy.

Worker processes have it, so that it imports neither torch nor a module of tests.
"""

import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np

from vla_envs import Episode, make_spec
from vla_envs.calvin.simulator import CalvinSimulator

SMALL = {"image_size": 32, "wrist_camera": False}
WILLING = (3, 20, 22, 400)


def commanded(name, **options):
    """The spec of a suite in which an action whose first number is 1 solves the task that is asked for.

    Args:
        name: of the suite.
        **options: ``fails=(trial, step, how, file)`` beside those of the benchmark: in that trial's step the worker is
            killed (``"kill"``) or the simulator raises (``"raise"``), once if there is a file, which says so.
    """
    fails = options.pop("fails", None)
    spec = make_spec(name, **{**SMALL, **options})
    return replace(spec, entry_point="calvin_commands:Commanded", options={**spec.options, "fails": fails})


class Commanded(CalvinSimulator):
    """Real scenes and physics, another oracle."""

    def __init__(self, spec):
        super().__init__(spec)
        self.world.solved = lambda task, before: self._solves

    def reset(self, episode):
        self._trial, self._taken = episode.trial_id, 0
        super().reset(episode)

    def step(self, action):
        trial, step, how, file = self.spec.options["fails"] or (None, 0, "", "")
        self._taken += 1
        if (trial, step) == (self._trial, self._taken) and not (file and Path(file).exists()):
            if file:
                Path(file).touch()
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("on command")
        self._solves = bool(action[0] == 1)
        return super().step(action)


def chunk(length, *solving, envs=1):
    """Actions ``[envs, length, 7]`` of which those named solve a task; the others stand still, hand open."""
    actions = np.zeros((envs, length, 7), np.float32)
    actions[..., 6] = 1
    actions[:, list(solving), 0] = 1
    return actions


class Willing(CalvinSimulator):
    """The real desk, with an oracle that is content at these actions of an episode, counted from 1."""

    def __init__(self, spec):
        super().__init__(spec)
        self.world.solved = lambda task, before: self.taken in WILLING

    def reset(self, episode):
        super().reset(episode)
        self.taken = 0

    def step(self, action):
        self.taken += 1
        return super().step(action)


def actions(number, steps):
    """A walk down to the table."""
    random = np.random.default_rng(number)
    for _ in range(steps):
        action = np.clip(random.normal([0.3, 0.2, -0.6, 0, 0, 0, 0], 1), -1, 1)
        yield action.astype(np.float32)


def trajectory(simulator, episode, steps=40):
    simulator.reset(episode)
    seen = [simulator.observe()]
    found = [np.concatenate(simulator.world.states())]
    for action in actions(episode.trial_id, steps):
        simulator.step(action)
        found.append(np.concatenate(simulator.world.states()))
    seen.append(simulator.observe())
    said = [each.task_description for each in seen]
    return [np.stack(found), *(image for each in seen for image in (each.images, each.wrist_images)), *said]


def trajectory_after(simulator, others):
    """What a worker process runs: an episode after others."""
    for trial in others:
        trajectory(simulator, Episode(trial % 4, trial), steps=15)
    return trajectory(simulator, Episode(3, 5))
