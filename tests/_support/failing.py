"""What tests have run in worker processes, which import neither torch nor a module of tests."""

import os
import signal
import time

from vla_envs.metaworld.simulator import MetaWorldSimulator


class KillsItself(MetaWorldSimulator):
    """In its seventh action, if the trial is even."""

    def reset(self, episode):
        super().reset(episode)
        self.left = -1 if episode.trial_id % 2 else 7

    def step(self, action):
        self.left -= 1
        if not self.left:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


class SlowToReset(MetaWorldSimulator):
    def reset(self, episode):
        time.sleep(0.8)
        super().reset(episode)


def where_and_what(simulator, item, fail=False):
    if fail:
        raise ValueError("this item cannot be done")
    return os.getpid(), item
