"""Compares vector environments of Gymnasium value by value, and a simulator in which every frame is another."""

from dataclasses import dataclass, replace

import gymnasium
import numpy as np
from scripted import scripted_spec

from vla_envs.simulator import Observation, Outcome, Task

HORIZON = 6


def counting_spec():
    """Two tasks of ten trials: trial ``t`` is solved by action ``t + 2``, if that is within the horizon of 6."""
    tasks = (Task("one", "count to one"), Task("two", "count to two"))
    spec = scripted_spec([[0.1] * HORIZON], [0], action_dim=2)
    return replace(spec, id="counting", entry_point="gym_vector:Counting", tasks=tasks, initial_states=10, options={})


class Counting:
    """The state tells task, trial, step and last action; rewards have no exact float32."""

    def __init__(self, spec):
        self.spec = spec

    def reset(self, episode):
        self.episode, self.steps, self.last = episode, 0, 0.0

    def step(self, action):
        self.steps, self.last = self.steps + 1, float(action[0])
        if self.last > 0.999:
            raise RuntimeError("the simulator failed")
        return Outcome(0.1 * self.steps, self.steps == self.episode.trial_id + 2)

    def observe(self):
        e = self.episode
        states = np.array([e.task_id + 10 * e.trial_id + 1000 * self.steps + self.last], np.float32)
        image = np.full((2, 2, 3), 10 * e.trial_id + self.steps, np.uint8)
        return Observation(image, states, self.spec.tasks[e.task_id].instruction)

    def close(self): ...


@dataclass
class Pair:
    """The same environments by Gymnasium's ``SyncVectorEnv`` and by ours; every call goes to both and is compared."""

    theirs: gymnasium.vector.VectorEnv
    ours: gymnasium.vector.VectorEnv

    def reset(self, **arguments):
        expected = self.theirs.reset(**{name: copied(value) for name, value in arguments.items()})  # it pops the mask
        return assert_same(expected, self.ours.reset(**arguments))

    def step(self, actions):
        return assert_same(self.theirs.step(actions), self.ours.step(actions))

    def close(self):
        self.theirs.close()
        self.ours.close()


def copied(value):
    return dict(value) if isinstance(value, dict) else value


def make_pair(id, num_envs, mode, **options):
    settings = {"vector_kwargs": {"autoreset_mode": mode}, "vectorization_mode": "sync"}
    theirs = gymnasium.make_vec(id, num_envs, **settings, **options)
    ours = gymnasium.make_vec(id, num_envs, num_workers=2, autoreset_mode=mode, **options)
    return Pair(theirs, ours)


def assert_same(expected, found, where="result"):
    """Assert the same types, shapes and bits, all the way down; returns what was found."""
    assert type(expected) is type(found), where
    if isinstance(expected, dict):
        assert expected.keys() == found.keys(), where
        for key, value in expected.items():
            assert_same(value, found[key], f"{where}[{key!r}]")
    elif isinstance(expected, tuple) or (isinstance(expected, np.ndarray) and expected.dtype == object):
        assert len(expected) == len(found), where
        for index, (one, other) in enumerate(zip(expected, found, strict=True)):
            assert_same(one, other, f"{where}[{index}]")
    elif isinstance(expected, np.ndarray):
        assert (expected.dtype, expected.shape) == (found.dtype, found.shape), where
        np.testing.assert_array_equal(expected, found, err_msg=where)
    else:
        assert expected == found, where
    return found
