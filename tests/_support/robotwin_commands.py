"""What tests have RoboTwin do, here and in worker processes, which import neither torch nor a module of tests."""

import hashlib
import os
import signal

import numpy as np

from vla_envs import Episode
from vla_envs.robotwin.simulator import RoboTwinSimulator
from vla_envs.robotwin.spec import TASKS

NUMBERS = {name: number for number, name in enumerate(sorted(TASKS))}


def episode(name, seed):
    return Episode(NUMBERS[name], seed - 10000)


def poses(simulator):
    """Everything that moves: poses of all entities but cameras, positions and speeds of all joints."""
    scene = simulator.world.task.scene
    entities = [entity for entity in scene.entities if not entity.name.endswith("_camera")]
    found = [np.concatenate([entity.pose.p, entity.pose.q]) for entity in entities]
    for articulation in scene.get_all_articulations():
        found += [articulation.get_qpos(), articulation.get_qvel()]
    return np.concatenate(found).astype(np.float32)


def wander(simulator, number=0, length=25):
    """A smooth random chunk that begins where the arms are."""
    steps = np.random.default_rng(number).normal(0, 0.02, (length, 14)).cumsum(0)
    return (simulator.world.states() + steps).astype(np.float32)


def trajectory(simulator, episode, chunks=2):
    """What is seen and where everything is, before, between and after chunks."""
    simulator.reset(episode)
    found = []
    for number in range(chunks + 1):
        seen = simulator.observe()
        found += [poses(simulator), seen.images, seen.wrist_images, seen.states]
        if number < chunks:
            simulator.execute(wander(simulator, number))
    return [simulator.world.instruction, *found]


def digest(found):
    return hashlib.sha256(b"".join(str(part).encode() if isinstance(part, str) else part.tobytes() for part in found))


def digest_after(simulator, others):
    """What a worker process runs: an episode after others."""
    for name in others:
        trajectory(simulator, episode(name, 10001), chunks=1)
    return digest_of(simulator, ("put_bottles_dustbin", 10000))


def digest_of(simulator, named):
    """What a worker process runs: an episode alone."""
    return digest(trajectory(simulator, episode(*named))).hexdigest()


class Dies(RoboTwinSimulator):
    """In mid-chunk of trial 0, once: who makes the folder ``$ROBOTWIN_FAULT`` in one that is there does."""

    def reset(self, episode):
        super().reset(episode)
        self.trial = episode.trial_id

    def execute(self, chunk):
        if self.trial == 0 and _is_asked_for():
            task, check = self.world.task, self.world.task.check_success

            def check_success():
                if task.checks == 5:
                    os.kill(os.getpid(), signal.SIGKILL)
                return check()

            task.check_success = check_success
        return super().execute(chunk)


def _is_asked_for():
    try:
        os.mkdir(os.environ["ROBOTWIN_FAULT"])
    except (KeyError, FileExistsError, FileNotFoundError):
        return False
    return True
