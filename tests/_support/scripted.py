"""A simulator that plays back rewards and is solved after a given number of actions: numpy alone, as workers want."""

import numpy as np

from vla_envs.simulator import Episode, Observation, Outcome, SimulatorSpec, Task


def scripted_spec(rewards: list[list[float]], solved_after: list[int], action_dim: int) -> SimulatorSpec:
    """Trial ``i`` pays ``rewards[i]`` and is solved by its action number ``solved_after[i]``, counted from 1."""
    return SimulatorSpec(
        id="scripted",
        entry_point="scripted:Scripted",
        tasks=(Task("play", "play it back"),),
        trials=len(rewards),
        image_shape=(2, 2),
        state_dim=1,
        action_low=(-1.0,) * action_dim,
        action_high=(1.0,) * action_dim,
        max_episode_steps=len(rewards[0]),
        control_frequency=10,
        options={"rewards": rewards, "solved_after": solved_after},
    )


class Scripted:
    """See the module's docstring."""

    def __init__(self, spec: SimulatorSpec):
        self.spec = spec

    def reset(self, episode: Episode) -> None:
        self.trial, self.steps = episode.trial_id, 0

    def step(self, action: np.ndarray) -> Outcome:
        reward = self.spec.options["rewards"][self.trial][self.steps]
        self.steps += 1
        return Outcome(reward, success=self.steps == self.spec.options["solved_after"][self.trial])

    def observe(self) -> Observation:
        state = np.array([self.steps], np.float32)
        return Observation(np.zeros((2, 2, 3), np.uint8), state, self.spec.tasks[0].instruction)

    def close(self) -> None: ...
