"""A point that walks a line, by numpy alone: a real simulator in worker processes whose every number is known."""

import numpy as np

from vla_envs.simulator import Episode, Observation, Outcome, SimulatorSpec, Task

TASKS = (Task("right", "go right"), Task("left", "go left"))


def walker_spec(horizon: int = 7, goal: float = 1.5, action_dim: int = 2, **fields: object) -> SimulatorSpec:
    """A walk of ``goal`` to the side that the task says; each action pays the way it went, and is at most 1."""
    return SimulatorSpec(
        id="walker",
        entry_point="walker:Walker",
        tasks=TASKS,
        trials=4,
        image_shape=(4, 4),
        state_dim=3,
        action_low=(-1.0,) * action_dim,
        action_high=(1.0,) * action_dim,
        max_episode_steps=horizon,
        control_frequency=10,
        options={"goal": goal},
        **fields,
    )


class Walker:
    """``states`` begins with ``[position, steps, start]``; where it starts is drawn from the trial and its seed."""

    def __init__(self, spec: SimulatorSpec):
        self.spec = spec

    def reset(self, episode: Episode) -> None:
        self.task = self.spec.task_of(episode)
        self.side = 1.0 if self.task.name == "right" else -1.0
        self.start = self.position = np.random.default_rng([episode.seed, episode.trial_id]).uniform(-0.5, 0.5)
        self.steps = 0

    def step(self, action: np.ndarray) -> Outcome:
        way = float(np.clip(action, -1, 1).mean()) * 0.5
        self.position += way
        self.steps += 1
        return Outcome(reward=way * self.side, success=self.position * self.side >= self.spec.options["goal"])

    def observe(self) -> Observation:
        states = np.resize(np.array([self.position, self.steps, self.start], np.float32), self.spec.state_dim)
        image = np.full((*self.spec.image_shape, 3), 128 + int(30 * self.side), np.uint8)
        image[0, 0] = np.clip(128 + 30 * self.position, 0, 255)
        return Observation(image, states, self.task.instruction)

    def close(self) -> None: ...


class Shoved(Walker):
    """One that starts elsewhere under stress, though never at its goal."""

    def reset(self, episode: Episode) -> None:
        super().reset(episode)
        self.perturbed: list[tuple[str, float, float]] = []

    def perturb(self, kind: str, strength: float, random: np.random.Generator) -> bool:
        drawn = random.uniform(-3, 3)
        self.perturbed.append((kind, strength, drawn))
        if kind == "start":
            self.position += strength * drawn
        return self.position * self.side < self.spec.options["goal"]


class Refusing(Walker):
    """One that cannot begin the first two trials."""

    def reset(self, episode: Episode) -> None:
        super().reset(episode)
        if episode.trial_id < 2:
            raise RuntimeError("no such scene")
