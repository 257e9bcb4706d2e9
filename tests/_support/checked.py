"""A toy for ``check_simulator``: right, or with the fault that ``options["fault"]`` names."""

import os
from dataclasses import replace

import numpy as np

from vla_envs import Observation, Outcome, SimulatorSpec, Task

HORIZON = 12
_shared = np.zeros(2)  # of the fault "shared"


def checked_spec(fault="", **changes):
    spec = SimulatorSpec(
        id="own/walk",
        entry_point="checked:CheckedSimulator",
        tasks=(Task("left", "go left"), Task("right", "go right")),
        trials=4,
        image_shape=(8, 8),
        state_dim=2,
        action_low=(-1.0, -1.0),
        action_high=(1.0, 1.0),
        max_episode_steps=HORIZON,
        control_frequency=10,
        options={"fault": fault},
    )
    return replace(spec, **changes)


class CheckedSimulator:
    """A point that moves by its actions."""

    def __init__(self, spec):
        self.spec, self.fault, self.before = spec, spec.options["fault"], 0.0
        if self.fault == "raises in __init__":
            raise KeyError("no such arm")

    def reset(self, episode):
        self.episode, self.steps = episode, 0
        self.point = np.random.default_rng([episode.seed, episode.task_id, episode.trial_id]).random(2)
        if self.fault == "episode before":
            self.point[1] += self.before
        if self.fault == "raises in reset":
            raise ZeroDivisionError("no table")
        if self.fault == "dies in reset":
            os._exit(3)

    def step(self, action):
        self.steps += 1
        self.point += action
        _shared[:] += action
        self.before = 0.25
        if (self.fault, self.steps) in (("raises in step", 7), ("raises at once", 1)):
            raise ZeroDivisionError("fell over")
        reward = self.point[0] + (self.fault == "process" and os.getpid())
        return Outcome(reward, success=False, ends_episode=self.fault == "horizon" and self.steps == HORIZON - 3)

    def observe(self):
        image = np.full((8, 8, 3), int(abs(self.point[0]) * 50) % 256, np.uint8)
        if self.fault == "pixel":
            image[3, 4, 1] = np.random.default_rng().integers(256)
        states = self.point.astype(np.float32)
        if self.fault == "shared":
            states += _shared.astype(np.float32)
        if self.fault == "shape" and self.steps > 5:
            states = states[:1]
        return Observation(image, states, self.spec.tasks[self.episode.task_id].instruction)

    def close(self):
        pass
