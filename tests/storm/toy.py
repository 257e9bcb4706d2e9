"""A simulator of a few additions that fails where a test wants it, for storms: numpy alone, as workers want.

A point has to be brought to the origin. What an action does to it is exact arithmetic, element by element, so that an
episode has the same outcome to the bit whatever runs beside it.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from vla_envs.simulator import Episode, Observation, Outcome, SimulatorSpec, Task

HORIZON, TRIALS = 12, 60
Faults = Mapping[int, tuple[str, int, int]]  # by trial: "raise" or "exit"; at which action, 0 for the reset; how often


def toy_spec(faults: Faults, folder: Path) -> SimulatorSpec:
    """Two tasks whose trials are the same ``TRIALS`` states, some of which fail.

    Args:
        faults: by trial; ``how often`` 0 is every time.
        folder: counts how often each has failed: processes that fail cannot.
    """
    return SimulatorSpec(
        id="toy",
        entry_point="tests.storm.toy:ToySimulator",
        tasks=(Task("left", "go left"), Task("right", "go right")),
        trials=TRIALS // 2,
        initial_states=TRIALS,
        image_shape=(16, 16),
        state_dim=2,
        action_low=(-1.0, -1.0),
        action_high=(1.0, 1.0),
        max_episode_steps=HORIZON,
        control_frequency=10,
        options={"faults": {trial: list(fault) for trial, fault in faults.items()}, "folder": str(folder)},
    )


class ToySimulator:
    """See the module's docstring."""

    def __init__(self, spec: SimulatorSpec):
        self.spec = spec

    def reset(self, episode: Episode) -> None:
        """Begin at the trial's point."""
        self.episode, self.steps = episode, 0
        random = np.random.default_rng([episode.task_id, episode.trial_id, episode.seed])
        self.point = random.integers(-12, 13, 2).astype(np.float32) / 4
        self._fail_if_told()

    def step(self, action: np.ndarray) -> Outcome:
        """Move the point; it pays to be nearer."""
        self.steps += 1
        self._fail_if_told()
        self.point += np.clip(action, -1, 1)
        distance = float(np.abs(self.point).max())
        return Outcome(-distance / 8, success=distance < 0.5)

    def observe(self) -> Observation:
        """Show the point as state, and its place as brightness."""
        image = np.full((16, 16, 3), int(np.clip(128 + 16 * self.point[0], 0, 255)), np.uint8)
        return Observation(image, self.point.copy(), self.spec.tasks[self.episode.task_id].instruction)

    def expert_action(self) -> np.ndarray:
        """Go to the origin."""
        return np.clip(-self.point, -1, 1)

    def close(self) -> None:
        """There is nothing to close."""

    def _fail_if_told(self) -> None:
        fault = self.spec.options["faults"].get(self.episode.trial_id)
        if fault is None or fault[1] != self.steps:
            return
        kind, _, how_often = fault
        if how_often:
            count = Path(self.spec.options["folder"]) / "_".join(map(str, (*_identity(self.episode), self.steps)))
            with open(count, "ab") as file:
                if file.tell() >= how_often:
                    return
                file.write(b".")
        if kind == "exit":
            os._exit(7)
        raise RuntimeError(f"this state cannot be simulated: trial {self.episode.trial_id}, step {self.steps}")


def _identity(episode: Episode) -> tuple[int, ...]:
    return (episode.task_id, episode.trial_id, episode.seed)


def make_toy_env(spec: SimulatorSpec, num_envs: int, num_workers: int, **settings: Any) -> Any:
    """Start toy simulators in worker processes."""
    from vla_envs import make_env  # imports torch, which workers do not want

    return make_env(spec, num_envs, 2, num_workers=num_workers, step_timeout=10.0, **settings)


def straight(outcome: Any) -> Any:
    """Act as the expert does in even decisions, a bit off: element by element, so that no batch changes a bit."""
    import torch

    from vla_common.keys import ACTION, STATES

    states = outcome[STATES]
    outcome[ACTION] = (torch.clamp(-states, -1, 1) * 0.75).unsqueeze(1).expand(-1, 2, -1).contiguous()
    return outcome


def tiny_policy(spec: SimulatorSpec) -> Any:
    """Make the smallest policy that learns."""
    from vla_policies import make_policy

    small = {"chunk_size": 2, "num_bins": 5, "dim": 16, "layers": 1, "heads": 2, "channels": [4, 4, 4], "keypoints": 4}
    return make_policy(spec, family="small", **small, text_buckets=16)
