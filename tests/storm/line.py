"""A point on a line, in a picture of 32 by 32: a benchmark whose simulator costs nothing, for whole toy runs."""

import numpy as np

from vla_envs.registry import Benchmark, BenchmarkSchema, register_benchmark
from vla_envs.simulator import Episode, Observation, Outcome, SimulatorSpec, Task

SCHEMA = BenchmarkSchema((32, 32), states=("x", "steps"), actions=("dx", "dy"), instruction="go right")


def make_spec(suite: str) -> SimulatorSpec:
    return SimulatorSpec(
        id=f"line/{suite}",
        entry_point="tests.storm.line:Line",
        tasks=(Task("right", "go right"), Task("left", "go left")),
        trials=8,
        image_shape=(32, 32),
        state_dim=2,
        action_low=(-1.0,) * 2,
        action_high=(1.0,) * 2,
        max_episode_steps=10,
        control_frequency=10,
    )


class Line:
    """Half a step to the right side, in any of ten actions, is success: random actions reach it now and then."""

    def __init__(self, spec: SimulatorSpec):
        self.spec = spec

    def reset(self, episode: Episode) -> None:
        self.task = self.spec.task_of(episode)
        self.side = 1.0 if self.task.name == "right" else -1.0
        self.position = np.random.default_rng([episode.seed, episode.trial_id]).uniform(-0.5, 0.5)
        self.steps = 0

    def step(self, action: np.ndarray) -> Outcome:
        way = float(np.clip(action, -1, 1).mean()) * 0.3
        self.position += way
        self.steps += 1
        return Outcome(reward=way * self.side, success=bool(self.position * self.side >= 0.6))

    def expert_action(self) -> np.ndarray:
        return np.full(2, self.side, np.float32)

    def observe(self) -> Observation:
        image = np.full((32, 32, 3), 128 + int(60 * self.side), np.uint8)
        column = int(np.clip(16 + 10 * self.position, 0, 31))
        image[:, column] = 255
        return Observation(image, np.array([self.position, self.steps], np.float32), self.task.instruction)

    def close(self) -> None: ...


def register() -> None:
    """Let recipes know ``env.id=line/all``."""
    register_benchmark(Benchmark("line", "Line", SCHEMA, make_spec=make_spec, suites=lambda: ["all"]))
