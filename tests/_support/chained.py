"""Chains of tasks that are solved after given numbers of actions: numpy alone, every number known by hand."""

import os

import numpy as np

from vla_envs.simulator import Episode, Observation, Outcome, SimulatorSpec, Task

KILL = 0.5  # an action that ends the process


def chained_spec(
    *solved_at: list[tuple[int, ...]], length: int = 3, patience: int = 4, **fields: object
) -> SimulatorSpec:
    """Trial ``t`` of task ``i`` solves its tasks by its actions number ``solved_at[i][t]``, counted from 1.

    An episode is given up after ``patience`` actions without one.
    """
    settings = {"max_episode_steps": length * patience, "chain_length": length, "protocol": "by hand", **fields}
    return SimulatorSpec(
        id="chained",
        entry_point="chained:Chained",
        tasks=tuple(Task(f"chains {number}", "one after the other") for number in range(len(solved_at))),
        trials=len(solved_at[0]),
        initial_states=len(solved_at[0]),
        image_shape=(2, 2),
        state_dim=2,
        action_low=(-1.0,),
        action_high=(1.0,),
        control_frequency=10,
        options={"solved_at": solved_at, "length": length, "patience": patience},
        **settings,
    )


class Chained:
    """``states`` is ``[steps, solved]``; a task that is solved pays 1 and ends the chunk."""

    def __init__(self, spec: SimulatorSpec):
        self.spec = spec

    def reset(self, episode: Episode) -> None:
        self.solved_at = self.spec.options["solved_at"][episode.task_id][episode.trial_id]
        self.steps = self.done = self.since = 0

    def step(self, action: np.ndarray) -> Outcome:
        if action[0] == KILL:
            os._exit(1)
        self.steps += 1
        solved = self.steps in self.solved_at
        self.done, self.since = self.done + solved, 0 if solved else self.since + 1
        complete = self.done == self.spec.options["length"]
        ends = {"ends_chunk": solved, "ends_episode": self.since == self.spec.options["patience"]}
        return Outcome(float(solved), complete, **ends, subtasks=self.done if self.spec.chain_length > 1 else 0)

    def observe(self) -> Observation:
        states = np.array([self.steps, self.done], np.float32)
        return Observation(np.full((2, 2, 3), self.done, np.uint8), states, f"task {self.done}")

    def close(self) -> None: ...
