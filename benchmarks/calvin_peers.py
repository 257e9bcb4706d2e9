"""What ``rollouts.py`` compares CALVIN with: both cameras drawn after every action, as calvin_env does."""

import argparse

import numpy as np
from timing import Contender


def frame_per_action(options: argparse.Namespace) -> Contender:
    """One world in this process, which takes every world's turn; the same robot, scene, cameras and oracle."""
    from vla_envs import Episode, make_spec

    simulator = make_spec(options.env, image_size=options.size).make()

    def start() -> None:
        simulator.reset(Episode(0, 0))

    def run(actions: np.ndarray, times: int) -> None:
        for _ in range(times):
            for chunk in actions:
                for action in chunk:
                    simulator.step(action)
                    simulator.observe()

    return Contender("a frame per action", start, run, simulator.close, options.decisions)
