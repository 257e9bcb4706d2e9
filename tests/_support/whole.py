"""A toy that executes a chunk as one motion: its actions add up, and the length of the chunk says how far they go."""

from dataclasses import replace

import numpy as np

from vla_envs import Episode, Observation, Outcome, SimulatorSpec, Task

HORIZON, GOAL = 11, 4.0


def whole_spec(**changes):
    spec = SimulatorSpec(
        id="toy/whole",
        entry_point="whole:WholeSimulator",
        tasks=(Task("far", "go far"),),
        trials=4,
        image_shape=(8, 8),
        state_dim=1,
        action_low=(-1.0,),
        action_high=(1.0,),
        max_episode_steps=HORIZON,
        control_frequency=None,
    )
    return replace(spec, **changes)


class WholeSimulator:
    """A point that moves by the mean of a chunk, times its length squared; it is solved at 4 and stays so.

    Its options make it misbehave: ``returns`` is what ``execute`` returns in place of outcomes, ``gives_up`` the number
    of actions after which the episode is over, ``remarks`` what is said of some trials, ``last_word`` what is said once
    an episode is solved.
    """

    def __init__(self, spec):
        self.spec = spec

    def reset(self, episode: Episode):
        self.x, self.done, self.chunks = 0.1 * episode.trial_id, 0, []
        self.remark = self.spec.options.get("remarks", {}).get(episode.trial_id, "")

    def execute(self, chunk):
        self.chunks.append(len(chunk))
        if "returns" in self.spec.options:
            return self.spec.options["returns"]
        outcomes = []
        for action in chunk:
            if self.x < GOAL:
                self.x += float(action[0]) * len(chunk)
            self.done += 1
            if self.x >= GOAL:
                self.remark = self.spec.options.get("last_word", self.remark)
            outcomes.append(
                Outcome(
                    float(self.x >= GOAL),
                    success=self.x >= GOAL,
                    ends_episode=self.done == self.spec.options.get("gives_up"),
                )
            )
        return outcomes

    def expert_chunk(self, chunk_size):
        return np.full((chunk_size, 1), 0.25)

    def observe(self):
        return Observation(np.full((8, 8, 3), 7, np.uint8), np.array([self.x], np.float32), "go far")

    def close(self):
        pass
