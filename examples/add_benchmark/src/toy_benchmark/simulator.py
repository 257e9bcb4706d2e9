"""The world: numpy alone, one world, four methods, and a scripted expert to clone."""

import zlib

import numpy as np

from vla_envs import Episode, Observation, Outcome, SimulatorSpec

COLOURS = {"red": (220, 40, 40), "blue": (40, 80, 220)}
RADIUS, STRIDE = 0.2, 0.1  # of a disc; of the longest step


class ToySimulator:
    """One world. ``step`` draws nothing: a decision of five actions costs five steps and one picture."""

    def __init__(self, spec: SimulatorSpec):
        self.spec = spec
        height, width = spec.image_shape
        self._grid = np.stack(np.meshgrid(np.linspace(-1, 1, width), np.linspace(-1, 1, height)), axis=-1)

    def reset(self, episode: Episode) -> None:
        """Begin an episode, which fixes state and pixels completely: draw from it, and from nothing else."""
        self._task = self.spec.task_of(episode)
        # The task's name and not its index, so that an episode is the same in "discs" and on its own.
        random = np.random.default_rng([episode.seed, zlib.crc32(self._task.name.encode()), episode.trial_id])
        self._point = np.zeros(2)
        angle = random.uniform(0, 2 * np.pi)
        direction = np.array([np.cos(angle), np.sin(angle)])
        self._discs = {"red": 0.7 * direction, "blue": -0.7 * direction}
        self._wanted = self._discs[self._task.name.removeprefix("go-")]

    def step(self, action: np.ndarray) -> Outcome:
        """One primitive action, float32 ``[2]`` within the bounds of the spec."""
        before = self._distance()
        self._point = np.clip(self._point + STRIDE * np.clip(action, -1, 1), -1, 1)
        success = self._distance() < RADIUS
        closer = (before - self._distance()) / 0.7 if self.spec.options["shaped_reward"] else 0.0
        return Outcome(reward=float(success) + closer, success=success)

    def observe(self) -> Observation:
        """Draw: white paper, two discs and a black point, which hides what is below it."""
        image = np.full((*self.spec.image_shape, 3), 255, np.uint8)
        for colour, place in self._discs.items():
            image[np.linalg.norm(self._grid - place, axis=-1) < RADIUS] = COLOURS[colour]
        image[np.linalg.norm(self._grid - self._point, axis=-1) < 0.08] = 0
        return Observation(image, self._point.astype(np.float32), self._task.instruction)

    def close(self) -> None:
        """Nothing to free."""

    def expert_action(self) -> np.ndarray:
        """For ``recipes/sft.py`` and warm starts alone: what solves the running episode, float32 ``[2]``."""
        towards = (self._wanted - self._point) / STRIDE
        return (towards / max(1.0, np.abs(towards).max())).astype(np.float32)

    def _distance(self) -> float:
        return float(np.linalg.norm(self._wanted - self._point))
